"""What only a GPU can show: streams, CUDA graphs, and calls that wait for nothing."""

import pytest
import torch

import fovea


@pytest.fixture(autouse=True)
def _needs_a_gpu(device):
    if device == "cpu":
        pytest.skip("needs --device cuda")


def qkv(length=64, dtype=torch.bfloat16):
    return [torch.randn(2, length, heads, 64, device="cuda", dtype=dtype) for heads in (4, 2, 2)]


def test_runs_on_the_current_stream():
    q, k, v = qkv()
    expected = fovea.attention(q, k, v, causal=True)
    late = [torch.zeros_like(t) for t in (q, k, v)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # a call on any other stream would read zeros meanwhile
        for to, t in zip(late, (q, k, v)):
            to.copy_(t)
        out = fovea.attention(*late, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_waits_for_nothing():
    tensors = [t.requires_grad_() for t in qkv()]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = fovea.attention(*tensors, causal=True, dropout_p=0.1)
        out.backward(torch.ones_like(out))
        lengths = torch.full((2,), 5, device="cuda", dtype=torch.int32)
        fovea.attention(*tensors, key_lengths=lengths)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("backward", [False, True])
def test_replayed_from_a_graph(backward):
    def run(q, k, v):
        out = fovea.attention(q, k, v, causal=True)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))] if backward else [out]

    held = [t.requires_grad_(backward) for t in qkv()]
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        run(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(*held)
    others = qkv()
    with torch.no_grad():
        for to, t in zip(held, others):
            to.copy_(t)
    graph.replay()
    for replayed, direct in zip(results, run(*(t.requires_grad_(backward) for t in others))):
        torch.testing.assert_close(replayed, direct, rtol=1e-2, atol=1e-2)


def test_tensors_on_two_devices_are_refused():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="k.device is"):
        fovea.attention(q, k.cpu(), v)
