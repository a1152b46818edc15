"""The functional API: caches, merging, dropout, autocast, and what it says about wrong arguments."""

import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fovea
import yardstick


def qkv(device, q_len=9, kv_len=9, head_q=4, head_kv=2, dim=16, batch=2, dtype=torch.float32, grad=False):
    shapes = [(batch, q_len, head_q, dim), (batch, kv_len, head_kv, dim), (batch, kv_len, head_kv, dim)]
    return [torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad) for shape in shapes]


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- the same result by every way --------------------------------------------------------------------------------


def test_eager_shortcut_is_the_registered_op(device):
    """fovea.attention goes past torch.library's autograd; results and gradients are bit for bit those of the op."""
    bias, sink = torch.randn(1, 4, 9, 9, device=device), torch.randn(4, device=device)
    results = []
    for by_op in (False, True):
        torch.manual_seed(0)
        leaves = [*qkv(device, grad=True), bias.clone().requires_grad_(), sink.clone().requires_grad_()]
        q, k, v, b, s = leaves
        if by_op:
            out, lse = torch.ops.fovea.attention(q, k, v, bias=b, sink=s, right=0, deterministic=True)
        else:
            out, lse = fovea.attention(q, k, v, bias=b, sink=s, causal=True, deterministic=True, return_lse=True)
        (out.square().sum() + lse.sum()).backward()
        results.append([out, lse, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_lse_alone_has_a_gradient(device):
    q, k, v = qkv(device, grad=True)
    _, lse = fovea.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    p, r = q.detach().requires_grad_(), k.detach().requires_grad_()
    _, plain = yardstick.formula(p, r, v.detach(), seen=torch.ones((), dtype=torch.bool, device=device))
    plain.sum().backward()
    close(q.grad, p.grad)
    close(k.grad, r.grad)
    assert torch.equal(v.grad, torch.zeros_like(v))


@pytest.mark.parametrize("name, shape", [("bias", (1, 4, 9, 9)), ("sink", (4,))])
def test_gradient_of_one_input_alone(device, name, shape):
    q, k, v = qkv(device)
    leaf = torch.randn(*shape, device=device, requires_grad=True)
    fovea.attention(q, k, v, **{name: leaf}).square().sum().backward()
    other = leaf.detach().requires_grad_()
    out, _ = yardstick.formula(
        *(t.double() for t in (q, k, v)), seen=torch.ones((), dtype=torch.bool, device=device), **{name: other}
    )
    out.square().sum().backward()
    close(leaf.grad, other.grad)


def test_second_derivative_is_refused(device):
    q, k, v = qkv(device)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(fovea.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        (q + dq).sum().backward()


def test_forward_mode_is_refused(device):
    q, k, v = qkv(device)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward AD|jvp"):
        fovea.attention(forward_ad.make_dual(q, q), k, v)
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: fovea.attention(x, k, v), (q,), (q,))


def test_checkpointing_drops_the_same_again(device):
    results = []
    for run in (lambda f, q: checkpoint(f, q, use_reentrant=False), lambda f, q: f(q)):
        torch.manual_seed(0)
        q, k, v = qkv(device, grad=True)
        run(lambda x: fovea.attention(x, k, v, dropout_p=0.3), q).square().sum().backward()
        results.append(q.grad)
    assert torch.equal(*results)


def test_no_graph_without_gradients(device):
    q, k, v = qkv(device)
    assert not fovea.attention(q, k, v).requires_grad
    with torch.no_grad():
        assert not fovea.attention(q.requires_grad_(), k, v).requires_grad


def test_backend_by_name(device):
    q, k, v = qkv(device, dtype=torch.float32)
    name = "cpu" if device == "cpu" else "portable"
    close(fovea.attention(q, k, v, backend=name), fovea.attention(q, k, v))
    with pytest.raises(RuntimeError, match="no backend is called|nosuch"):
        fovea.attention(q, k, v, backend="nosuch")


@pytest.mark.parametrize("empty", ["batch", "q_len", "kv_len"])
def test_nothing_to_do(device, empty):
    q, k, v = qkv(device, **{empty: 0}, grad=True)
    out, lse = fovea.attention(q, k, v, return_lse=True)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()
    for t in (q, k, v):
        assert torch.equal(t.grad, torch.zeros_like(t))


# --- cache, merge ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", ["number", "tensor"])
def test_decoding_step_by_step_is_one_causal_call(device, lengths):
    q, k, v = qkv(device, 7, 7)
    caches = [torch.full((2, 10, 2, 16), float("nan"), device=device) for _ in range(2)]
    outs = []
    for begin, end in [(0, 3), (3, 4), (4, 7)]:  # a prompt, a token, a few
        n = torch.full((2,), begin, device=device) if lengths == "tensor" else begin
        rows = slice(begin, end)
        outs.append(fovea.attention_with_kv_cache(q[:, rows], *caches, k[:, rows], v[:, rows], cache_lengths=n))
    close(torch.cat(outs, 1), fovea.attention(q, k, v, causal=True))
    assert torch.equal(caches[0][:, :7], k) and caches[0][:, 7:].isnan().all()


def test_cache_lengths_differ_between_members(device):
    q, k, v = qkv(device, 1, 8)
    lengths = torch.tensor([3, 8], device=device)
    out = fovea.attention_with_kv_cache(q, k, v, cache_lengths=lengths)
    close(out[:1], fovea.attention(q[:1], k[:1, :3], v[:1, :3]))
    close(out[1:], fovea.attention(q[1:], k[1:], v[1:]))


@pytest.mark.parametrize("lengths", ["number", "tensor"])
def test_cache_in_pages_is_the_dense_cache(device, lengths):
    """Bit for bit, while both grow; pages lie in any order and are one sequence's each."""
    page_rows, pages_each = 4, 3
    table = torch.randperm(2 * pages_each + 1, device=device)[: 2 * pages_each].view(2, pages_each)
    shapes = [(2, pages_each * page_rows, 2, 16), (2 * pages_each + 1, page_rows, 2, 16)]
    dense, paged = ([torch.full(shape, float("nan"), device=device) for _ in range(2)] for shape in shapes)
    q, k, v = qkv(device, 11, 11)
    for begin, end in [(0, 5), (5, 6), (6, 11)]:
        n = torch.full((2,), begin, device=device) if lengths == "tensor" else begin
        rows = slice(begin, end)
        new = k[:, rows], v[:, rows]
        out = fovea.attention_with_kv_cache(q[:, rows], *paged, *new, cache_lengths=n, block_table=table)
        assert torch.equal(out, fovea.attention_with_kv_cache(q[:, rows], *dense, *new, cache_lengths=n))
    assert torch.equal(paged[0][table].flatten(1, 2)[:, :11], dense[0][:, :11])


def test_pages_that_do_not_fit_are_refused(device):
    q, k, v = qkv(device, 1, 1)
    caches = [torch.zeros(5, 4, 2, 16, device=device) for _ in range(2)]
    table = torch.tensor([[0, 1], [2, 3]], device=device)

    def run(caches=caches, table=table, n=7):
        return fovea.attention_with_kv_cache(q, *caches, k, v, cache_lengths=n, block_table=table)

    run()
    for wrong, match in [
        (dict(table=table.float()), "block_table.dtype is torch.float32"),
        (dict(table=table[:1]), r"block_table.shape is \(1, 2\), must be \[2, pages\]"),
        (dict(n=8), "block_table names 2 pages of 4 rows, must hold 9 rows"),
        (dict(caches=[caches[0][0], caches[1]]), "k_cache.rank is 3"),
        (dict(caches=[caches[0], caches[1][:, :3]]), "v_cache has 5 pages of 3 rows"),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            run(**wrong)
    if device == "cpu":
        with pytest.raises(ValueError, match="block_table names page 5, must be in 0..4"):
            run(table=table + 2)


def test_merge_of_parts_is_the_whole(device):
    q, k, v = qkv(device, kv_len=12, grad=True)
    cuts = [(0, 5), (5, 6), (6, 12)]
    parts = [fovea.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in cuts]
    out, lse = fovea.merge(*zip(*parts))
    out.square().sum().backward()
    merged = [out, lse, q.grad, k.grad, v.grad]
    q.grad = k.grad = v.grad = None
    out, lse = fovea.attention(q, k, v, return_lse=True)
    out.square().sum().backward()
    for a, b in zip(merged, [out, lse, q.grad, k.grad, v.grad]):
        close(a, b)


# --- dropout, autocast, determinism ------------------------------------------------------------------------------


def test_dropout_drops_what_it_says(device):
    q, k, _ = qkv(device, 64, 64)
    eye = torch.eye(64, device=device)[None, :, None].expand(2, 64, 2, 64)  # out is then the matrix of weights
    weights = fovea.attention(q, k, eye)
    dropped = fovea.attention(q, k, eye, dropout_p=0.25)
    kept = dropped != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    close(dropped[kept], (weights / 0.75)[kept])


def test_dropout_follows_the_generator(device):
    q, k, v = qkv(device)
    torch.manual_seed(5)
    first, second = fovea.attention(q, k, v, dropout_p=0.5), fovea.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, fovea.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_dropout_in_backward_drops_the_same(device):
    q, k, v = qkv(device, grad=True)
    torch.manual_seed(5)
    out = fovea.attention(q, k, v, dropout_p=0.5)
    out.sum().backward()
    torch.manual_seed(5)
    eye = torch.eye(9, device=device)[None, :, None].expand(2, 9, 2, 9)
    weights = fovea.attention(q.detach(), k.detach(), eye, dropout_p=0.5)  # [batch, row, head_q, key]
    dv = weights.sum(1).view(2, 2, 2, 9).sum(2)  # over rows, then over the heads of a group: [batch, head_kv, key]
    close(v.grad, dv.transpose(1, 2)[..., None].expand_as(v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    q, k, v = qkv(device, grad=True)
    bias = torch.randn(9, 9, device=device)
    with torch.autocast(device, dtype=dtype):
        out = fovea.attention(q, k, v, bias=bias)
    out.float().sum().backward()
    assert out.dtype == dtype and q.grad.dtype == torch.float32
    assert torch.equal(out, fovea.attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias))


def test_autocast_leaves_f64_alone(device):
    if device != "cpu":
        pytest.skip("f64 is computed on the CPU")
    q, k, v = qkv(device, dtype=torch.float64)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert fovea.attention(q, k, v).dtype == torch.float64


def test_deterministic_mode_of_torch(device):
    seen = []
    original = fovea.eager.ops.attention_no_grad

    def spy(*args, **settings):
        seen.append(settings.get("deterministic", False))
        return original(*args, **settings)

    q, k, v = qkv(device)
    fovea.eager.ops.attention_no_grad = spy
    try:
        fovea.attention(q, k, v)
        torch.use_deterministic_algorithms(True)
        fovea.attention(q, k, v)
        fovea.attention(q, k, v, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
        fovea.eager.ops.attention_no_grad = original
    assert seen == [False, True, False]


def test_threads_of_torch(device):
    """A result does not depend on how many threads torch allows, and none hangs."""
    q, k, v = qkv(device, 40, 40)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(fovea.attention(q, k, v))
    torch.set_num_threads(before)
    close(results[0], results[1])
    close(results[0], results[2])


# --- wrong arguments ---------------------------------------------------------------------------------------------

WRONG = {
    "k.dim_qk is 8, must equal": lambda q, k, v: fovea.attention(q, k[..., :8], v),
    "head_q is 4, must be a multiple of head_kv = 3": lambda q, k, v: fovea.attention(
        q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1)
    ),
    "v.kv_len is 4, must equal": lambda q, k, v: fovea.attention(q, k, v[:, :4]),
    "q.rank is 3, must be 4": lambda q, k, v: fovea.attention(q[0], k, v),
    "q.rank is 5, must be in 1..4": lambda q, k, v: fovea.attention(q[None], k, v),
    "k.dtype is bf16, must be f32": lambda q, k, v: fovea.attention(q, k.bfloat16(), v),
    "q.dtype is Long, must be": lambda q, k, v: fovea.attention(q.long(), k, v),
    "bias.dtype is torch.bool, must be a float type": lambda q, k, v: fovea.attention(
        q, k, v, bias=torch.ones(9, 9, dtype=torch.bool, device=q.device)
    ),
    "mask.dtype is torch.float32, must be bool": lambda q, k, v: fovea.attention(
        q, k, v, mask=torch.ones(9, 9, device=q.device)
    ),
    "bias.q_len is 5": lambda q, k, v: fovea.attention(q, k, v, bias=torch.ones(5, 9, device=q.device)),
    "dropout is 1.5, must be in": lambda q, k, v: fovea.attention(q, k, v, dropout_p=1.5),
    "softcap is -1, must be": lambda q, k, v: fovea.attention(q, k, v, softcap=-1.0),
    "mask.left is -7, must be": lambda q, k, v: fovea.attention(q, k, v, window=(-7, 0)),
    "k and v must be given together": lambda q, k, v: fovea.attention_with_kv_cache(q, k, v, k, cache_lengths=0),
    "as many of each": lambda q, k, v: fovea.merge([q], []),
    "alibi_slopes has no gradient": lambda q, k, v: fovea.attention(
        q, k, v, alibi_slopes=torch.ones(4, device=q.device, requires_grad=True)
    ),
    "dropout_seed must be": lambda q, k, v: torch.ops.fovea.attention(q, k, v, dropout=0.5),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_said(device, message):
    with pytest.raises(
        (RuntimeError, ValueError, TypeError), match=message.replace("(", r"\(").replace("[", r"\[")
    ):
        WRONG[message](*qkv(device))


@pytest.mark.parametrize("wrong", ["q.rank", "q.dtype", "k.dim", "backend"])
def test_a_refusal_keeps_no_tensor(device, wrong):
    """All that a call was given is let go of again when it is refused."""
    q, k, v = qkv(device)
    with pytest.raises(RuntimeError):
        if wrong == "q.rank":
            torch.ops.fovea.attention(q[None], k, v)
        elif wrong == "q.dtype":
            torch.ops.fovea.attention(q.long(), k, v)
        elif wrong == "k.dim":
            torch.ops.fovea.attention(q, k[..., :8], v)
        else:
            torch.ops.fovea.attention(q, k, v, backend="nosuch")
    alive = weakref.ref(v)
    del v
    assert alive() is None


def test_wrong_sequences_are_said_on_the_cpu():
    q = torch.randn(5, 2, 8)
    falling = torch.tensor([0, 4, 3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens_q"):
        fovea.attention_varlen(q, q, q, falling, falling, 4, 4)
    with pytest.raises(RuntimeError, match="key_lengths"):
        fovea.attention(q[None], q[None], q[None], key_lengths=torch.tensor([6]))
