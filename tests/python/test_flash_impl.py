"""torch.nn.attention.activate_flash_attention_impl("fovea"): whose kernels a program's calls of SDPA run on."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.profiler import profile

import fovea  # noqa: F401  (makes itself known to torch)


@pytest.fixture
def fovea_is_active():
    activate_flash_attention_impl("fovea")
    assert current_flash_attention_impl() == "fovea"
    yield
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def qkv(device, dtype=torch.float32, dim=16, grad=True):
    return [torch.randn(2, 4, n, dim, device=device, dtype=dtype, requires_grad=grad) for n in (7, 9, 9)]


# The ops of torch's own whose kernels are fovea's.
RECORDED = {
    "cpu": "aten::_scaled_dot_product_fused_attention_overrideable",
    "cuda": "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def ran_on_fovea(device, run) -> bool:
    ops = {"fovea::attention", "fovea::attention_no_grad", RECORDED[device]}
    with profile() as found:
        run()
    return any(event.name in ops for event in found.events())


CALLS = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones_like(q[0, 0, :, :9]) > 0),
    "bias": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q[..., :9] * 2),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "of rank 3": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
}


def with_gradients(run, tensors):
    out = run(*tensors)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.parametrize("name", CALLS)
def test_same_results_on_fovea(device, name, fovea_is_active):
    tensors = qkv(device)
    assert ran_on_fovea(device, lambda: CALLS[name](*tensors))
    found = with_gradients(CALLS[name], tensors)
    restore_flash_attention_impl()
    assert not ran_on_fovea(device, lambda: CALLS[name](*tensors))
    for mine, torchs in zip(found, with_gradients(CALLS[name], tensors)):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient(device, mode, fovea_is_active):
    with mode():
        tensors = qkv(device, grad=False)
        assert ran_on_fovea(device, lambda: CALLS["causal"](*tensors))


def test_autocast(device, fovea_is_active):
    def run():
        with torch.autocast(device, dtype=torch.bfloat16):
            assert CALLS["causal"](*qkv(device)).dtype == torch.bfloat16

    assert ran_on_fovea(device, run)


def test_in_a_graph(device, fovea_is_active):
    torch.compiler.reset()
    tensors = qkv(device)
    compiled = torch.compile(CALLS["causal"], fullgraph=True, dynamic=True, backend="aot_eager")
    assert ran_on_fovea(device, lambda: compiled(*tensors))
    for a, b in zip(with_gradients(compiled, tensors), with_gradients(CALLS["causal"], tensors)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_model_that_knows_nothing_of_it(device, fovea_is_active):
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    x = torch.randn(2, 5, 32, device=device)
    assert ran_on_fovea(device, lambda: layer(x, x, x, need_weights=False))


def test_what_it_does_not_take_is_torchs(device, fovea_is_active):
    for tensors in (qkv(device, torch.float64), qkv(device, dim=320)):
        assert not ran_on_fovea(device, lambda: CALLS["plain"](*tensors))
    with sdpa_kernel(SDPBackend.MATH):
        assert not ran_on_fovea(device, lambda: CALLS["plain"](*qkv(device)))


def test_is_known_but_not_active_by_itself(device):
    assert "fovea" in list_flash_attention_impls() and current_flash_attention_impl() is None
    assert not ran_on_fovea(device, lambda: CALLS["plain"](*qkv(device)))
