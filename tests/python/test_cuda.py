"""What only a GPU can show: streams, CUDA graphs, and calls that wait for nothing."""

import copy

import pytest
import torch

import fovea
from layer_cases import BUILD, CAUSAL, assert_same, gradients, make, tokens


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


def on_gpu(layer):
    """A copy, where the library's layers run on GPUs."""
    other = copy.deepcopy(layer).cuda()
    try:
        other(tokens(layer, device="cuda"))
    except RuntimeError as refusal:
        if "device is cuda, takes cpu" in str(refusal):
            pytest.skip(str(refusal))
        raise
    return other


@pytest.mark.parametrize("name", BUILD)
def test_layer_as_on_the_cpu(name):
    layer = make(name)
    other, x = on_gpu(layer), tokens(layer)
    found = gradients(other, other, x.cuda())
    assert all(t.is_cuda for t in found)
    assert_same([t.cpu() for t in found], gradients(layer, layer, x), room=1e-4)


@pytest.mark.parametrize("name", CAUSAL)
def test_decode_as_on_the_cpu(name):
    layer = make(name)
    other, x = on_gpu(layer), tokens(layer)
    cache = other.make_cache(2, 9)
    with torch.no_grad():
        steps = torch.cat([other(part.cuda(), cache=cache) for part in x.split([4, 1, 2], dim=1)], 1)
        assert_same([steps.cpu()], [layer(x)], room=1e-4)


def test_tf32_of_layers():
    layer = on_gpu(make("self"))
    x = tokens(layer, device="cuda")
    exact = layer(x)
    torch.set_float32_matmul_precision("high")
    try:
        rounded = layer(x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not torch.equal(rounded, exact)
    assert_same([rounded], [exact], room=1e-2)
