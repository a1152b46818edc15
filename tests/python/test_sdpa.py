"""fovea.scaled_dot_product_attention beside torch's own."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fovea


def tensors(device, *shapes, dtype=torch.float32):
    return [torch.randn(*shape, device=device, dtype=dtype) for shape in shapes]


def torch_formula(*args, **settings):
    """torch's function by its plain formula: its kernels on a GPU take not every mask, and round on their own."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **settings)


def both(query, key, value, attn_mask=None, **settings):
    """out and gradients, of fovea and of torch."""
    results = []
    for function in (fovea.scaled_dot_product_attention, torch_formula):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        mask = attn_mask
        if mask is not None and mask.is_floating_point():
            mask = mask.clone().requires_grad_()
        out = function(*leaves, attn_mask=mask, **settings)
        out.square().sum().backward()
        grads = [t.grad for t in leaves] + ([mask.grad] if mask is not None and mask.requires_grad else [])
        results.append([out.detach(), *grads])
    return results


def assert_same(mine, theirs, tolerance=2e-5):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("q_len, kv_len", list(itertools.product([1, 5, 33], repeat=2)))
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(device, q_len, kv_len, is_causal):
    """Causal is aligned at the start, for more keys than queries and for fewer."""
    qkv = tensors(device, (2, 3, q_len, 16), (2, 3, kv_len, 16), (2, 3, kv_len, 8))
    assert_same(*both(*qkv, is_causal=is_causal))


@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9), (7, 9), (3, 7, 9), (9,), (7, 1)])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks(device, shape, boolean):
    qkv = tensors(device, (2, 3, 7, 16), (2, 3, 9, 16), (2, 3, 9, 16))
    mask = torch.randn(*shape, device=device)
    if boolean:
        mask = mask < 0.7
    if len(shape) == 1:  # torch takes no vector
        mask = mask.expand(7, 9)
    assert_same(*both(*qkv, attn_mask=mask))


def test_row_that_sees_nothing(device):
    query, key, value = tensors(device, (1, 1, 3, 8), (1, 1, 4, 8), (1, 1, 4, 8))
    mask = torch.ones(3, 4, dtype=torch.bool, device=device)
    mask[1] = False
    out = fovea.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(out[0, 0, 1], torch.zeros(8, device=device))
    assert out.isfinite().all()


def test_grouped_heads(device):
    qkv = tensors(device, (2, 8, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16))
    assert_same(*both(*qkv, enable_gqa=True, is_causal=True))
    with pytest.raises(RuntimeError):
        fovea.scaled_dot_product_attention(*qkv)


def test_scale_and_broadcast_keys(device):
    qkv = tensors(device, (4, 2, 6, 16), (1, 2, 6, 16), (1, 2, 6, 16))
    assert_same(*both(*qkv, scale=0.1))


@pytest.mark.parametrize("leading", [(), (3,), (2, 2, 3)])
def test_other_ranks(device, leading):
    qkv = tensors(device, (*leading, 5, 16), (*leading, 6, 16), (*leading, 6, 16))
    mask = torch.randn(*leading, 5, 6, device=device)
    assert_same(*both(*qkv, is_causal=True))
    assert_same(*both(*qkv, attn_mask=mask))


def test_dropout_keeps_the_mean(device):
    query, key, value = tensors(device, (1, 1, 4, 8), (1, 1, 512, 8), (1, 1, 512, 8))
    whole = fovea.scaled_dot_product_attention(query, key, value + 1)
    draws = [fovea.scaled_dot_product_attention(query, key, value + 1, dropout_p=0.5) for _ in range(200)]
    assert (torch.stack(draws).mean(0) - whole).abs().max() < 0.1
    assert not torch.equal(draws[0], draws[1])


def test_mask_and_causal_together_are_refused(device):
    (q,) = tensors(device, (1, 1, 4, 8))
    with pytest.raises(ValueError, match="is_causal"):
        fovea.scaled_dot_product_attention(q, q, q, torch.ones(4, 4, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(device, dtype):
    qkv = tensors(device, (2, 3, 20, 64), (2, 3, 20, 64), (2, 3, 20, 64), dtype=dtype)
    assert_same(*both(*qkv, is_causal=True), tolerance=5e-2)


# --- calls that go by torch's own autograd ------------------------------------------------------------------------


def test_plain_calls_are_recorded_by_torch(device):
    """Their bits are those of the registered op, with gradients and without."""
    qkv = tensors(device, (2, 4, 7, 16), (2, 2, 7, 16), (2, 2, 7, 8))
    dout = torch.randn(2, 4, 7, 8, device=device)
    results = []
    for plain in (True, False):
        leaves = [t.clone().requires_grad_() for t in qkv]
        if plain:
            out = fovea.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3, enable_gqa=True)
            by = "FusedAttentionOverrideable" if device == "cpu" else "FlashAttentionForCpu"
            assert type(out.grad_fn).__name__ == f"ScaledDotProduct{by}Backward0"
        else:
            out, _ = torch.ops.fovea.attention(*leaves, right=0, scale=0.3, heads_first=True)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    with torch.no_grad():
        silent = fovea.scaled_dot_product_attention(*qkv, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.equal(silent, results[0][0])
    assert_same(*results, tolerance=0 if device == "cpu" else 1e-5)  # a GPU's backward pass adds in any order


def test_gradient_of_one_input_alone(device):
    q, k, v = tensors(device, (1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16))
    for i in range(3):
        found = []
        for function in (fovea.scaled_dot_product_attention, torch_formula):
            leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate((q, k, v))]
            found.append(torch.autograd.grad(function(*leaves).square().sum(), leaves[i]))
        assert_same(*found)


def test_derivatives_that_are_not_there_are_refused(device):
    q, k, v = tensors(device, (1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
        fovea.scaled_dot_product_attention(forward_ad.make_dual(q, q), k, v)
    q.requires_grad_()
    (dq,) = torch.autograd.grad(fovea.scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        dq.sum().backward()


def test_modes_see_fovea(device):
    """What counts or fakes ops is shown those that it knows."""
    q = torch.randn(2, 3, 5, 16, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as count:
        fovea.scaled_dot_product_attention(q, q, q).sum().backward()
    assert count.get_total_flops() == 7 * 2 * (2 * 3 * 5 * 5) * 16
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        fovea.scaled_dot_product_attention(q, q, q)
    assert count.get_total_flops() == 2 * 2 * (2 * 3 * 5 * 5) * 16
    assert fovea.scaled_dot_product_attention(*[torch.empty(2, 3, 5, 16, device="meta")] * 3).shape == q.shape


def test_autocast(device):
    q, k, v = (t.requires_grad_() for t in tensors(device, (1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16)))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = fovea.scaled_dot_product_attention(q, k.bfloat16(), v)
        with torch.no_grad():
            assert fovea.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and q.grad.dtype == torch.float32


def test_inside_a_model(device):
    """The one changed line: torch's attention replaced under a transformer layer, which trains as before."""
    losses, calls = [], []
    original = F.scaled_dot_product_attention

    def by_fovea(*args, **settings):
        calls.append(1)
        return fovea.scaled_dot_product_attention(*args, **settings)

    for function in (original, by_fovea):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(device)
        optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
        data = torch.randn(4, 10, 32, device=device)
        F.scaled_dot_product_attention = function
        try:
            history = []
            for _ in range(10):
                loss = (layer(data) - data.flip(1)).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                history.append(loss.item())
        finally:
            F.scaled_dot_product_attention = original
        losses.append(history)
    assert len(calls) == 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
