"""fovea.nn under torch.compile and torch.export: one graph, dynamic shapes, the same numbers as in eager mode."""

import pytest
import torch

import fovea.nn as fnn
from layer_cases import BUILD, assert_same, gradients, make, tokens


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


@pytest.mark.parametrize("name", BUILD)
def test_one_graph_for_all_lengths(name):
    layer = make(name)

    def run(x):
        return layer(x * 2) + 1

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (13, 17, 30):
        x = tokens(layer, length=length)
        with torch.compiler.set_stance("default" if length == 13 else "fail_on_recompile"):
            found = gradients(compiled, layer, x)
        assert_same(found, gradients(run, layer, x))


def test_cross_attention_in_a_graph():
    layer = fnn.MultiHeadAttention(24, 4, kdim=10, vdim=10, dropout=0.3)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    query, key = torch.randn(2, 5, 24), torch.randn(2, 9, 10)
    mask = torch.rand(2, 9) < 0.7
    results = []
    for run in (compiled, layer):
        torch.manual_seed(5)
        layer.zero_grad()
        run(query, key, mask=mask).sum().backward()
        results.append([p.grad.clone() for p in layer.parameters()])
    assert_same(*results)


def test_inductor():
    layer = make("grouped")
    compiled = torch.compile(lambda x: layer(torch.sin(x)).relu(), fullgraph=True)
    x = tokens(layer)
    assert_same(gradients(compiled, layer, x), gradients(lambda x: layer(torch.sin(x)).relu(), layer, x))


@pytest.mark.parametrize("name", ["self", "latent, deepseek", "ccgqa, zaya"])
def test_decode_in_a_graph(name):
    layer = make(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = tokens(layer)
    cache = layer.make_cache(2, 8)
    with torch.no_grad():
        whole = layer(x)
        steps = [compiled(x[:, :4], cache=cache)]
        steps += [compiled(x[:, i : i + 1], cache=cache) for i in range(4, 7)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)
    assert cache.length == 7


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    layer = make("ccgqa, hydra").eval().requires_grad_(False)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(layer, (tokens(layer),), dynamic_shapes=({1: length},), strict=strict)
    x = tokens(layer, length=19)
    assert_same([program.module()(x)], [layer(x)])


def test_autocast_in_a_graph():
    layer = make("latent")

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = tokens(layer)
    assert_same(gradients(compiled, layer, x), gradients(run, layer, x), room=2e-2)
