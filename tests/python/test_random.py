"""Random problems: fovea.attention, and the drop-ins for SDPA and flash_attn where they have words for the problem,
beside the plain formula in torch: outputs and gradients under the 2x rule.

5000 problems of ten shards, side by side on one GPU (none waits for another):

    for i in 0 1 2 3 4 5 6 7 8 9; do pytest test_random.py --device cuda --problems 5000 -k shard$i & done; wait
"""

import dataclasses
import random

import pytest
import torch

import fovea
import yardstick
from fovea.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

LENGTHS = [0, 1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, 100]
DIMS = [8, 16, 24, 32, 40, 64, 72, 128]
SHARDS = 10


@dataclasses.dataclass
class Problem:
    seed: int
    dtype: torch.dtype
    q_lens: list  # a length per batch member; all the same unless packed
    kv_lens: list
    head_q: int
    head_kv: int
    dim_qk: int
    dim_v: int
    packed: bool
    options: dict
    inputs: tuple  # of bias, mask, key_lengths, alibi_slopes, sink: those that take part
    layout: str  # how q, k, v lie in memory


def random_problem(seed):
    draw = random.Random(seed)
    packed = draw.random() < 0.25
    batch = draw.choice([1, 1, 2, 3])
    lengths = [draw.choice(LENGTHS) for _ in range(2)]
    q_lens, kv_lens = ([draw.choice(LENGTHS) for _ in range(batch)] if packed else [n] * batch for n in lengths)
    head_kv = draw.choice([1, 1, 2, 3])
    dim = draw.choice(DIMS)
    options = {}
    if draw.random() < 0.5:
        options["causal"] = True
    if draw.random() < 0.3:
        options["window"] = (draw.choice([None, 0, 3, 20]), draw.choice([None, 0, 2, 30]))
    if draw.random() < 0.15:
        options["prefix"] = draw.choice([1, 4, 50])
    if draw.random() < 0.2:
        options["softcap"] = draw.choice([1.0, 20.0])
    if draw.random() < 0.2:
        options["scale"] = draw.choice([0.05, 0.5])
    likely = {"alibi_slopes": 0.2, "sink": 0.2}
    if not packed:
        likely |= {"bias": 0.3, "mask": 0.3, "key_lengths": 0.2}
    return Problem(
        seed=seed,
        dtype=draw.choice([torch.float32, torch.bfloat16, torch.float16]),
        q_lens=q_lens,
        kv_lens=kv_lens,
        head_q=head_kv * draw.choice([1, 1, 2, 4]),
        head_kv=head_kv,
        dim_qk=dim,
        dim_v=draw.choice([dim, dim, draw.choice(DIMS)]),
        packed=packed,
        options=options,
        inputs=tuple(name for name, chance in likely.items() if draw.random() < chance),
        layout=draw.choice(["dense", "heads first", "slice", "last stride 2"]),
    )


def laid_out(tensor, layout):
    """The same numbers, otherwise in memory."""
    if layout == "heads first":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "slice":
        return torch.cat([tensor, tensor, tensor], dim=-2)[..., tensor.shape[-2] : 2 * tensor.shape[-2], :]
    if layout == "last stride 2":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    return tensor


def random_tensors(p, seed, device):
    """Leaves by name: q, k, v and the inputs that take part. Rounded to the problem's dtype, which then is exact."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    batch, q_len, kv_len = len(p.q_lens), p.q_lens[0], p.kv_lens[0]
    rows_q = (sum(p.q_lens),) if p.packed else (batch, q_len)
    rows_kv = (sum(p.kv_lens),) if p.packed else (batch, kv_len)
    t = {
        "q": normal(*rows_q, p.head_q, p.dim_qk).to(p.dtype),
        "k": normal(*rows_kv, p.head_kv, p.dim_qk).to(p.dtype),
        "v": normal(*rows_kv, p.head_kv, p.dim_v).to(p.dtype),
    }
    draw = random.Random(seed)
    scores = [draw.choice([1, batch]), draw.choice([1, p.head_q]), draw.choice([1, q_len]), kv_len]
    if "bias" in p.inputs:
        t["bias"] = normal(*scores).to(draw.choice([p.dtype, torch.float32]))
    if "mask" in p.inputs:
        t["mask"] = normal(*scores) < 0.8
    if "key_lengths" in p.inputs:
        t["key_lengths"] = torch.tensor([draw.randint(0, kv_len) for _ in range(batch)])
    if "alibi_slopes" in p.inputs:
        t["alibi_slopes"] = normal(*draw.choice([(p.head_q,), (batch, p.head_q)])).abs()
    if "sink" in p.inputs:
        t["sink"] = normal(p.head_q)
    return {name: tensor.to(device) for name, tensor in t.items()}


DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


def leaves(tensors, dtype=None):
    out = {}
    for name, t in tensors.items():
        t = t.clone()
        if dtype is not None and name in DIFFERENTIABLE:
            t = t.to(dtype)
        out[name] = t.requires_grad_(name in DIFFERENTIABLE)
    return out


def by_fovea(p, t):
    q, k, v = (laid_out(t[name], p.layout) for name in ("q", "k", "v"))
    rest = {name: t[name] for name in p.inputs}
    if not p.packed:
        return fovea.attention(q, k, v, **p.options, **rest, return_lse=True)
    return fovea.attention_varlen(q, k, v, *sequences(p, q.device), **p.options, **rest, return_lse=True)


def sequences(p, device):
    """Where packed sequences begin, and how long the longest are."""
    starts = [
        torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device)
        for lens in (p.q_lens, p.kv_lens)
    ]
    return *starts, max(p.q_lens), max(p.kv_lens)


def can_be_sdpa(p):
    """It takes one of causal, bias and mask, and aligns positions at the start."""
    terms = [*p.inputs, *(name for name in p.options if name != "scale")]
    square = p.q_lens == p.kv_lens
    return not p.packed and (terms in ([], ["bias"], ["mask"]) or terms == ["causal"] and square)


def by_sdpa(p, t):
    q, k, v = (laid_out(t[name], p.layout).transpose(1, 2) for name in ("q", "k", "v"))
    mask = t.get("bias", t.get("mask"))
    out = fovea.scaled_dot_product_attention(
        q, k, v, mask, is_causal="causal" in p.options, scale=p.options.get("scale"), enable_gqa=True
    )
    return out.transpose(1, 2), None


def can_be_flash_attn(p):
    return {*p.inputs} <= {"alibi_slopes"} and "prefix" not in p.options


def by_flash_attn(p, t):
    q, k, v = (laid_out(t[name], p.layout) for name in ("q", "k", "v"))
    settings = dict(
        causal=p.options.get("causal", False),
        window_size=tuple(-1 if side is None else side for side in p.options.get("window", (None, None))),
        softcap=p.options.get("softcap", 0.0),
        softmax_scale=p.options.get("scale"),
        alibi_slopes=t.get("alibi_slopes"),
        return_attn_probs=True,
    )
    if p.packed:
        return flash_attn_varlen_func(q, k, v, *sequences(p, q.device), **settings)[:2]
    return flash_attn_func(q, k, v, **settings)[:2]


DROP_INS = {by_sdpa: can_be_sdpa, by_flash_attn: can_be_flash_attn}


def by_formula(p, t):
    """The contract written out: one batch member at a time, keys cut to their length."""
    masks = {name: p.options[name] for name in ("causal", "window", "prefix") if name in p.options}
    numbers = {name: p.options[name] for name in ("softcap", "scale") if name in p.options}
    outs, lses = [], []
    q_row = kv_row = 0
    for b, (q_len, kv_len) in enumerate(zip(p.q_lens, p.kv_lens)):
        if p.packed:
            q = t["q"][q_row : q_row + q_len][None]
            k, v = (t[name][kv_row : kv_row + kv_len][None] for name in ("k", "v"))
            q_row, kv_row = q_row + q_len, kv_row + kv_len
        else:
            if "key_lengths" in t:
                kv_len = int(t["key_lengths"][b])
            q, k, v = t["q"][b : b + 1], t["k"][b : b + 1, :kv_len], t["v"][b : b + 1, :kv_len]
        seen = yardstick.visible(q_len, kv_len, **masks, device=q.device)

        def member(name):
            return t[name][min(b, len(t[name]) - 1)][None, ..., :kv_len] if name in t else None

        if "mask" in t:
            seen = seen & member("mask")
        slopes = t.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[b]
        out, lse = yardstick.formula(
            q, k, v, seen=seen, bias=member("bias"), slopes=slopes, sink=t.get("sink"), **numbers
        )
        outs.append(out[0] if p.packed else out)
        lses.append(lse[0] if p.packed else lse)
    return torch.cat(outs), torch.cat(lses, dim=1 if p.packed else 0)


def results(run, p, tensors, douts, dtype=None):
    """out, lse and the gradients by name, of a run over fresh leaves."""
    t = leaves(tensors, dtype)
    out, lse = run(p, t)
    out.backward(douts.to(out.dtype))
    grads = {f"d{name}": t[name].grad for name in DIFFERENTIABLE if name in t}
    lse = None if lse is None else lse.detach()
    return out.detach(), lse, {name: g if g is not None else 0 * t[name[1:]] for name, g in grads.items()}


def plain_again(p, name, attempts, device):
    """The plain formula's errors for other numbers: one draw of a small problem may be lucky."""
    errors = []
    for seed in range(attempts):
        tensors = random_tensors(p, 1_000_003 * (seed + 1) + p.seed, device)
        shape = (*tensors["q"].shape[:-1], p.dim_v)
        douts = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype).to(device)
        exact = results(by_formula, p, tensors, douts, torch.float64)
        plain = results(by_formula, p, tensors, douts, p.dtype)
        pick = (lambda r: r[0]) if name == "out" else (lambda r: r[2][name])
        errors.append(yardstick.error(pick(plain).to(pick(exact).device), pick(exact)))
    return max(errors)


def check_lse(p, lse, exact):
    """As far from the exact one as f32 may be."""
    assert torch.equal(lse.isneginf(), exact.isneginf())
    seen = ~exact.isneginf()
    if not seen.any():
        return
    tolerance = yardstick.LSE_TOLERANCE[p.dtype] * max(exact[seen].abs().max().item(), 1.0)
    assert (lse[seen].double() - exact[seen]).abs().max().item() <= tolerance


def check(p, device):
    tensors = random_tensors(p, p.seed, device)
    shape = (*tensors["q"].shape[:-1], p.dim_v)
    douts = torch.randn(*shape, generator=torch.Generator().manual_seed(p.seed)).to(p.dtype).to(device)
    exact_out, exact_lse, exact_grads = results(by_formula, p, tensors, douts, torch.float64)
    plain_out, _, plain_grads = results(by_formula, p, tensors, douts, p.dtype)
    seen = ~exact_lse.isneginf()
    largest = exact_lse[seen].abs().max().item() if seen.any() else 1.0
    errors = {"out": yardstick.error(plain_out, exact_out)}
    errors |= {name: yardstick.error(plain_grads[name], exact_grads[name]) for name in exact_grads}
    for by in (by_fovea, *(by for by, can_be in DROP_INS.items() if can_be(p))):
        out, lse, grads = results(by, p, tensors, douts)
        if by is by_fovea:
            ours = {"out": out, "lse": lse, **grads}
        elif device == "cpu":  # where every sum has one order: the same bits
            theirs = {"out": out, "lse": lse, **grads}
            assert all(x is None or torch.equal(x, ours[name]) for name, x in theirs.items()), by.__name__
        if lse is not None:
            check_lse(p, lse, exact_lse)
        compared = {"out": (out, exact_out, 0.0)}
        compared |= {name: (grads[name], exact_grads[name], largest) for name in grads}
        for name, (result, exact, largest_lse) in compared.items():
            over = yardstick.excess(result, errors[name], exact, largest_lse)
            if over > 0:
                errors[name] = max(errors[name], plain_again(p, name, 16, device))
                over = yardstick.excess(result, errors[name], exact, largest_lse)
            assert over <= 0, f"{name} of {by.__name__} is {over:g} over its bound"


def test_there_are_problems_for_each():
    drawn = [random_problem(seed) for seed in range(1000)]
    assert sum(map(can_be_sdpa, drawn)) > 80 and sum(map(can_be_flash_attn, drawn)) > 150


@pytest.mark.parametrize("shard", range(SHARDS), ids=lambda shard: f"shard{shard}")
def test_random_problems(device, problems, shard):
    for seed in range(shard, problems, SHARDS):
        p = random_problem(seed)
        try:
            check(p, device)
        except Exception as fault:
            raise AssertionError(f"seed {seed}: {fault}\n{p}") from fault
