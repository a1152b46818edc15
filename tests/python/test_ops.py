"""torch.ops.fovea as torch sees it: schemas, shapes, gradients."""

import functools

import pytest
import torch

import fovea  # noqa: F401  (registers the ops)

attention = torch.ops.fovea.attention.default
attention_backward = torch.ops.fovea.attention_backward.default
merge = torch.ops.fovea.merge.default

BATCH, Q_LEN, KV_LEN, HEAD_Q, HEAD_KV, DIM_QK, DIM_V = 2, 5, 7, 4, 2, 8, 6


def tensor(*shape, device, dtype=torch.float64, grad=False):
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


def dense(device, dtype=torch.float64, grad=False):
    make = functools.partial(tensor, device=device, dtype=dtype, grad=grad)
    return (
        make(BATCH, Q_LEN, HEAD_Q, DIM_QK),
        make(BATCH, KV_LEN, HEAD_KV, DIM_QK),
        make(BATCH, KV_LEN, HEAD_KV, DIM_V),
    )


def packed(device, dtype=torch.float64, grad=False):
    make = functools.partial(tensor, device=device, dtype=dtype, grad=grad)
    qkv = make(6, HEAD_Q, DIM_QK), make(9, HEAD_KV, DIM_QK), make(9, HEAD_KV, DIM_V)
    starts = dict(
        cu_seqlens_q=torch.tensor([0, 2, 2, 6], dtype=torch.int32, device=device),
        cu_seqlens_kv=torch.tensor([0, 3, 5, 9], dtype=torch.int32, device=device),
        q_len=4,
        kv_len=4,
    )
    return qkv, starts


def features(device, grad=False):
    """Settings by name, each a function of the device: every optional input of the op once."""
    make = functools.partial(tensor, device=device, grad=grad)
    return {
        "plain": {},
        "causal": dict(right=0),
        "window with prefix": dict(left=2, right=1, prefix=1),
        "bias": dict(bias=make(1, HEAD_Q, Q_LEN, KV_LEN)),
        "bias of one row": dict(bias=make(BATCH, 1, 1, KV_LEN)),
        "mask": dict(mask=torch.rand(BATCH, 1, Q_LEN, KV_LEN, device=device) < 0.7),
        "key_lengths": dict(key_lengths=torch.tensor([0, 6], dtype=torch.int32, device=device), right=0),
        "alibi": dict(alibi_slopes=tensor(HEAD_Q, device=device).abs()),
        "sink": dict(sink=make(HEAD_Q)),
        "softcap": dict(softcap=1.5, scale=0.7),
        "dropout": dict(dropout=0.3, dropout_seed=torch.tensor([11, 5])),
        "deterministic": dict(deterministic=True),
    }


FEATURES = list(features("cpu"))


# f64 has the reference engine alone, which runs on the CPU.
def only_where_f64_is(device):
    if device != "cpu":
        pytest.skip("f64 is computed on the CPU")


@pytest.mark.parametrize("feature", FEATURES)
def test_opcheck_attention(device, feature):
    dtype = torch.float64 if device == "cpu" else torch.float32
    settings = {
        name: value.to(dtype).detach().requires_grad_(name in ("bias", "sink"))
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64
        else value
        for name, value in features(device)[feature].items()
    }
    torch.library.opcheck(attention, dense(device, dtype, grad=True), settings)


def test_opcheck_attention_heads_first(device):
    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in dense(device, torch.float32))
    torch.library.opcheck(attention, (q, k, v), dict(heads_first=True, right=0))


def test_heads_first_is_the_same_transposed(device):
    q, k, v = dense(device, torch.float32)
    out, lse = attention(q, k, v)
    swapped, same_lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), heads_first=True)
    assert torch.equal(swapped.transpose(1, 2), out) and torch.equal(lse, same_lse)
    with pytest.raises(RuntimeError, match="heads_first is true, must be false in the packed layout"):
        qkv, starts = packed(device, torch.float32)
        attention(*qkv, **starts, heads_first=True)


def test_opcheck_attention_packed(device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    qkv, starts = packed(device, dtype, grad=True)
    torch.library.opcheck(attention, qkv, starts)


@pytest.mark.parametrize("want", [False, True])
def test_opcheck_attention_backward(device, want):
    q, k, v = dense(device, torch.float32)
    settings = dict(
        bias=tensor(1, HEAD_Q, Q_LEN, KV_LEN, device=device, dtype=torch.float32),
        sink=tensor(HEAD_Q, device=device, dtype=torch.float32),
    )
    out, lse = attention(q, k, v, **settings)
    dlse = torch.randn_like(lse) if want else None
    torch.library.opcheck(
        attention_backward, (torch.randn_like(out), dlse, out, lse, want, want, q, k, v), settings
    )


def test_opcheck_merge(device):
    outs = [tensor(2, 3, 4, 5, device=device, dtype=torch.float32, grad=True) for _ in range(3)]
    lses = [tensor(2, 4, 3, device=device, dtype=torch.float32, grad=True) for _ in range(3)]
    torch.library.opcheck(merge, (outs, lses))


def check_gradients(run, inputs):
    torch.autograd.gradcheck(run, [t for t in inputs if t is not None], fast_mode=False)


@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck_attention(device, feature):
    only_where_f64_is(device)
    settings = features(device, grad=True)[feature]
    grads = {name: t for name, t in settings.items() if isinstance(t, torch.Tensor) and t.requires_grad}

    def run(q, k, v, *rest):
        return attention(q, k, v, **{**settings, **dict(zip(grads, rest))})  # (out, lse): both have gradients

    # A row without a key has lse = -inf, which finite differences cannot take.
    out_only = (lambda *t: run(*t)[0]) if feature == "key_lengths" else run
    check_gradients(out_only, [*dense(device, grad=True), *grads.values()])


def test_gradcheck_attention_packed(device):
    only_where_f64_is(device)
    qkv, starts = packed(device, grad=True)
    check_gradients(lambda q, k, v: attention(q, k, v, right=0, **starts)[0], qkv)


def test_gradcheck_merge(device):
    only_where_f64_is(device)
    outs = [tensor(1, 3, 2, 4, device=device, grad=True) for _ in range(3)]
    lses = [tensor(1, 2, 3, device=device, grad=True) for _ in range(3)]
    check_gradients(lambda *t: merge(list(t[:3]), list(t[3:])), [*outs, *lses])


def test_gradient_of_merge_ignores_parts_that_saw_nothing(device):
    outs = [torch.full((1, 2, 1, 3), float("nan"), device=device), torch.ones(1, 2, 1, 3, device=device)]
    lses = [torch.full((1, 1, 2), -float("inf"), device=device), torch.zeros(1, 1, 2, device=device)]
    for t in (*outs, *lses):
        t.requires_grad_()
    out, lse = merge(outs, lses)
    (out.sum() + lse.sum()).backward()
    assert torch.equal(outs[0].grad, torch.zeros_like(outs[0]))
    assert torch.equal(lses[0].grad, torch.zeros_like(lses[0]))
    assert torch.equal(outs[1].grad, torch.ones_like(outs[1]))


def test_second_derivative_is_refused(device):
    q, k, v = dense(device, torch.float32, grad=True)
    out, _ = attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        dq.sum().backward()


def test_slopes_with_gradient_are_refused(device):
    q, k, v = dense(device, torch.float32, grad=True)
    slopes = torch.ones(HEAD_Q, device=device, requires_grad=True)
    out, _ = attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="alibi_slopes has no gradient"):
        out.sum().backward()


def test_flops(device):
    q, k, v = dense(device, torch.float32, grad=True)
    scores = BATCH * HEAD_Q * Q_LEN * KV_LEN
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        out, _ = attention(q, k, v)
    assert forward.get_total_flops() == 2 * scores * (DIM_QK + DIM_V)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * scores * (3 * DIM_QK + 2 * DIM_V)
    qkv, starts = packed(device, torch.float32)
    with FlopCounterMode(display=False) as forward:
        attention(*qkv, **starts)
    assert forward.get_total_flops() == 2 * HEAD_Q * (2 * 3 + 0 * 2 + 4 * 4) * (DIM_QK + DIM_V)
