"""What only a GPU can show: streams, CUDA graphs, and calls that wait for nothing."""

import copy

import pytest
import torch

import fovea
import fovea.nn
from fovea import layer_ops
from layer_cases import BUILD, CAUSAL, EMBED, assert_same, gradients, make, tokens


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


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", BUILD)
def test_layers_in_the_deterministic_mode_of_torch(name, deterministic):
    layer = on_gpu(make(name)).bfloat16()
    x = tokens(layer, 4, 300, torch.bfloat16, "cuda")
    first = gradients(layer, layer, x)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(layer, layer, x), first))


@pytest.mark.parametrize("name", CAUSAL)
def test_weights_gradients_do_not_hang_on_how_a_batch_lies(name, deterministic):
    """They are sums over all rows, of which those of each member are not rounded by themselves."""
    layer = on_gpu(make(name)).bfloat16()
    x = tokens(layer, 64, 9, torch.bfloat16, "cuda")
    plain = gradients(layer, layer, x)
    for lies in (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), lambda t: torch.cat([t, t], 1)[:, :9]):
        found = gradients(lambda t, lies=lies: layer(lies(t)), layer, x)
        assert all(torch.equal(a, b) for a, b in zip(found, plain))


@pytest.mark.parametrize("name", CAUSAL)
def test_gradient_of_a_sum_over_tokens(name):
    """Its rows lie over each other."""

    def gradient(layer, x):
        x.requires_grad_()
        return torch.autograd.grad(layer(x).sum(dim=1).square().sum(), x)

    layer = make(name)
    other, x = on_gpu(layer), tokens(layer)
    assert_same([t.cpu() for t in gradient(other, x.cuda())], gradient(layer, x), room=1e-3)


def test_one_query_for_all_of_a_batch():
    layer = make("multi head")
    other, x, query = on_gpu(layer), tokens(layer), torch.randn(1, 1, EMBED)
    out = other(query.cuda().expand(len(x), 1, EMBED), x.cuda())
    assert_same([out.cpu()], [layer(query.expand(len(x), 1, EMBED), x)], room=1e-4)


@pytest.mark.parametrize("name", BUILD)
def test_no_tokens(name):
    layer = on_gpu(make(name))
    for batch, length in ((0, 3), (1, 0), (3, 0)):
        x = tokens(layer, batch, length, device="cuda").requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert out.shape == x.grad.shape == x.shape
        assert all(not p.grad.any() for p in layer.parameters() if p.grad is not None)


def test_no_keys():
    layer = on_gpu(make("multi head"))
    query = torch.randn(2, 3, EMBED, device="cuda", requires_grad=True)
    out = layer(query, torch.randn(2, 0, EMBED, device="cuda"))
    assert torch.equal(out, layer.o_proj.bias.expand(2, 3, EMBED))
    out.sum().backward()
    assert not query.grad.any() and not layer.k_proj.weight.grad.any()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("compression", [1, 4])
@pytest.mark.parametrize("width, heads", [(512, 8), (4096, 32), (12288, 96)])
def test_room_for_what_is_saved_while_sizes_are_symbols(width, heads, compression, dtype):
    on_gpu(make("ccgqa, hydra"))
    layer = fovea.nn.CCGQAttention(width, heads, heads // 4, compression=compression, device="meta")
    line = f"{layer._line} dtype={dtype}"
    fixed, per_token, _ = layer_ops._measure_saved_bytes(line, 0, False)
    for batch, length in [(1, 1), (1, 5), (3, 1), (7, 33), (64, 2), (1, 255), (2, 128), (3, 700), (2, 5000)]:
        room = batch * (fixed + per_token * length) + layer_ops._ALIGNMENT * layer_ops._MOST_SAVED
        assert room >= layer_ops._saved_bytes(line, 0, batch, length, layer_ops._AS_QUERY)


def test_a_cache_that_would_be_copied_is_refused():
    layer = on_gpu(make("grouped"))
    cache = layer.make_cache(2, 9)
    for name, tensor in cache.tensors.items():
        cache.tensors[name] = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="the last stride of a cache's tensor is .*, must be 1"):
        layer(tokens(layer, device="cuda"), cache=cache)
