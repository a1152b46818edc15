"""fovea.nn as a citizen of torch: its ops, autocast, checkpointing, distributed training."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fovea.layer_ops as layer_ops
import fovea.nn as fnn
from layer_cases import BUILD, CAUSAL, assert_same, gradients, make, tokens


def call_of(name, *, grad=True, masked=False):
    """The arguments that every layer op has."""
    layer = make(name).requires_grad_(grad)
    # A length at which no saved tensor is rounded up: opcheck compares every byte, also those that nobody wrote.
    x = tokens(layer, length=8).requires_grad_(grad)
    mask = torch.rand(2, 8) < 0.7 if masked else None
    return layer, (x, None, None, mask, None, None, layer._weights(), None, layer._line + " dtype=f32")


def room(call):
    return torch.ops.fovea.layer_saved_bytes(call[-1], -1, *call[0].shape[:2], layer_ops._AS_QUERY)


@pytest.mark.parametrize("name", BUILD)
def test_opcheck_layer(name):
    _, call = call_of(name, masked=True)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if name not in ("ccgqa, hydra", "ccgqa, zaya"):  # they leave columns of saved rows unwritten
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fovea.layer.default, (*call, room(call)), test_utils=checks)


def test_opcheck_layer_without_gradient():
    _, call = call_of("grouped", grad=False)
    torch.library.opcheck(torch.ops.fovea.layer.default, (*call, 0))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("name", ["multi head", "ccgqa, zaya"])
def test_opcheck_layer_backward(name, wanted):
    layer, call = call_of(name, grad=False)
    out, saved = torch.ops.fovea.layer(*call, room(call))
    wants = [True, False, False, *([wanted] * len(layer._weights()))]
    torch.library.opcheck(torch.ops.fovea.layer_backward.default, (torch.randn_like(out), saved, *call, wants))


@pytest.mark.parametrize("name", ["multi head", "self", "latent, deepseek", "ccgqa, hydra"])
def test_saved_is_spent_only_by_who_says_so(name):
    layer, call = call_of(name, grad=False)
    out, saved = torch.ops.fovea.layer(*call, room(call))
    before, dout = saved.clone(), torch.randn_like(out)
    wants = [True, False, False, *([True] * len(layer._weights()))]
    first = torch.ops.fovea.layer_backward(dout, saved, *call, wants)
    assert torch.equal(saved, before)
    second = torch.ops.fovea.layer_backward(dout, saved, *call, wants, True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("name", ["self", "latent, deepseek", "ccgqa, hydra"])
def test_opcheck_layer_cached(name):
    layer, call = call_of(name, grad=False)
    cache = layer.make_cache(2, 16)
    line = call[-1] + " max_seq_len=16"
    torch.library.opcheck(
        torch.ops.fovea.layer_cached.default, (*call[:-1], line, list(cache.tensors.values()), 3)
    )


def test_ops_refuse():
    layer, call = call_of("grouped", grad=False)
    with pytest.raises(RuntimeError, match="there are 3 weights, must be 4"):
        torch.ops.fovea.layer(*call[:6], call[6][:3], *call[7:], 0)
    with pytest.raises(RuntimeError, match="saved.bytes is 64, must be at least"):
        torch.ops.fovea.layer(*call, 64)
    with pytest.raises(RuntimeError, match="a setting is colour, must be one that the layer has"):
        torch.ops.fovea.layer(*call[:-1], call[-1] + " colour=3", 0)
    with pytest.raises(RuntimeError, match="kind is linear, must be multi_head"):
        torch.ops.fovea.layer(*call[:-1], "linear embed_dim=3", 0)
    with pytest.raises(RuntimeError, match="num_heads is four, must be a whole number"):
        torch.ops.fovea.layer(*call[:-1], "grouped_query num_heads=four", 0)
    with pytest.raises(RuntimeError, match="dropout_seed must be"):
        torch.ops.fovea.layer(*call[:-1], call[-1] + " dropout=0.5", 0)
    with pytest.raises(RuntimeError, match="wanted has 1 elements, must have 7"):
        out, saved = torch.ops.fovea.layer(*call, room(call))
        torch.ops.fovea.layer_backward(out, saved, *call, [True])
    with pytest.raises(RuntimeError, match="there are 1 tensors of a cache, must be 2"):
        cache = list(layer.make_cache(2, 16).tensors.values())
        torch.ops.fovea.layer_cached(*call[:-1], call[-1] + " max_seq_len=16", cache[:1], 0)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (2, 64), (5, 129)])
@pytest.mark.parametrize("name", BUILD)
def test_room_for_saved_is_close_above_what_is_needed(name, sizes):
    layer = make(name)
    x = tokens(layer, *sizes)
    line = layer._line + " dtype=f32"
    needed = torch.ops.fovea.layer_saved_bytes(line, -1, *sizes, layer_ops._AS_QUERY)
    assert needed <= layer_ops._room_for_saved(line, layer_ops.LayerInputs(x)) <= needed + 1024


@pytest.mark.parametrize("name", BUILD)
def test_autocast(name):
    layer = make(name)
    x = tokens(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
    half = make(name).bfloat16()
    half.load_state_dict(layer.state_dict())
    assert torch.equal(out, half(x.bfloat16()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    """The layer is run again in the backward pass, with the same weights dropped."""
    layer = make("grouped", dropout=0.5)
    x = tokens(layer)

    def again(x):
        return checkpoint(layer, x, use_reentrant=reentrant)

    torch.manual_seed(2)
    found = gradients(again, layer, x)
    torch.manual_seed(2)
    assert_same(found, gradients(layer, layer, x), room=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_gradient_no_memory(name):
    """Without a backward pass nothing is kept for one."""
    layer = make(name)
    x = tokens(layer)
    assert layer(x).grad_fn is not None
    with torch.no_grad():
        assert layer(x).grad_fn is None
    assert layer.requires_grad_(False)(x).grad_fn is None


def test_derivatives_that_there_are_none_of():
    layer = make("self")
    x = tokens(layer).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        dx.sum().backward()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        layer(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))


def test_meta_device():
    layer = fnn.CCGQAttention(512, 8, 2, device="meta")
    assert layer(torch.empty(4, 100, 512, device="meta")).shape == (4, 100, 512)


DISTRIBUTED = """
import sys
import torch, torch.distributed as dist
from layer_cases import make, tokens
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

def gradients(wrap, part):
    torch.manual_seed(0)
    model = torch.nn.Sequential(make("grouped"), make("multi query"), make("latent, deepseek"))
    x = tokens(model[0], batch=4)
    model = wrap(model)
    model(x[2 * rank : 2 * rank + 2] if part else x).square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]

def sharded(model):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

expected = gradients(lambda m: m, part=False)
for wrap in (torch.nn.parallel.DistributedDataParallel, sharded):
    for a, b in zip(gradients(wrap, part=True), expected, strict=True):
        torch.testing.assert_close(a, b)
dist.destroy_process_group()
"""


def test_ddp_and_fsdp(tmp_path):
    """Two processes with half of the batch each have the gradients of one with all of it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DISTRIBUTED, str(rank), str(tmp_path / "store")],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
