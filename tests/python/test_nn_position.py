"""fovea.nn with a position module of the caller's, and position_ids."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fovea.nn as fnn
from layer_cases import EMBED, make, tokens
from plain_layers import rotate


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


class Turn(torch.nn.Module):
    """RoPE as a caller would write it, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, q, k, q_positions, k_positions):
        return self.gain * rotate(q, q_positions), rotate(k, k_positions)


POSITIONED = {
    "multi head": lambda p, **o: fnn.MultiHeadAttention(EMBED, 4, position=p, qk_norm="rmsnorm", causal=True, **o),
    "grouped": lambda p, **o: fnn.GroupedQueryAttention(EMBED, 4, 2, position=p, sliding_window=3, **o),
}


@pytest.mark.parametrize("name", POSITIONED)
def test_a_position_of_the_callers(name):
    """That does what RoPE does: the same results as the layer's own, also with padding, positions and a cache."""
    layer = POSITIONED[name](Turn(), dtype=torch.float64)
    own = POSITIONED[name]("rope", dtype=torch.float64)
    own.load_state_dict(layer.state_dict(), strict=False)
    x = tokens(layer, dtype=torch.float64).requires_grad_()
    mask, ids = torch.rand(2, 7) < 0.7, torch.randint(20, (2, 7))
    same(layer(x), own(x))
    same(layer(x, mask=mask, position_ids=ids), own(x, mask=mask, position_ids=ids))
    layer(x).square().sum().backward()
    assert layer.position.gain.grad != 0
    own(x).square().sum().backward()
    for parameter, p in own.named_parameters():
        same(layer.get_parameter(parameter).grad, p.grad)
    caches = [each.make_cache(2, 9) for each in (layer, own)]
    with torch.no_grad():
        for part, seen in zip(x.split([3, 1, 3], dim=1), (3, 4, 7)):
            same(*(l(part, mask=mask[:, :seen], cache=c) for l, c in zip((layer, own), caches)))
        with pytest.raises(RuntimeError, match="10 tokens are too many, there is room for 9"):
            layer(x[:, :3], cache=caches[0])
    with pytest.raises(RuntimeError, match="has no gradient"):
        layer(x[:, :1], cache=caches[0])


@pytest.mark.parametrize("position", ["rope", lambda q, k, q_positions, k_positions: (q, k)])
def test_a_position_of_the_callers_changes_nothing_else(position):
    """What a call refuses, adds to a cache, records and drops."""
    layer = fnn.SelfAttention(EMBED, 2, causal=True, dropout=0.5, position=position)
    x, cache = tokens(layer), layer.make_cache(2, 9)
    for mask in (torch.ones(2, 9), torch.ones(2, 1), torch.ones(3, 7)):
        with pytest.raises(RuntimeError, match="mask.(keys|batch) is"):
            layer(x, mask=mask.bool())
    with torch.no_grad():
        first = layer(x[:, :2], cache=cache)
        assert torch.equal(first, layer(x[:, :2], cache=layer.make_cache(2, 9)))  # nothing is dropped
        kept = {name: tensor[:, :2].clone() for name, tensor in cache.tensors.items()}
        with pytest.raises(RuntimeError, match="batch is"):
            layer(x[:1, :1], cache=cache)
        with pytest.raises(RuntimeError, match="mask.batch is 3"):
            layer(x[:, :1], mask=torch.ones(3, 3, dtype=torch.bool), cache=cache)
    layer.requires_grad_(False).o_proj.requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no gradient"):
        layer(x[:, :1], cache=cache)
    assert cache.length == 2
    assert all(torch.equal(tensor[:, :2], kept[name]) for name, tensor in cache.tensors.items())


def test_positions_of_more_queries_than_keys():
    seen = []

    def position(q, k, q_positions, k_positions):
        seen.extend([q_positions.tolist(), k_positions.tolist()])
        return q, k

    fnn.MultiHeadAttention(EMBED, 2, position=position)(torch.randn(2, 5, EMBED), torch.randn(2, 3, EMBED))
    assert seen == [[[-2, -1, 0, 1, 2]], [[0, 1, 2]]]


def test_a_cache_takes_no_other_sizes():
    layer = fnn.MultiHeadAttention(EMBED, 2, position=lambda q, k, q_positions, k_positions: (q, k[:, :, :heads]))
    query, cache, heads = torch.randn(2, 3, EMBED), layer.make_cache(2, 9), 2
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="v.kv_len is 1, must be 3"):
            layer(query, query, torch.randn(2, 1, EMBED), cache=cache)
        heads = 1
        with pytest.raises(RuntimeError, match="k.head_kv is 1, must be 2"):
            layer(query, cache=cache)
        assert not any(tensor.any() for tensor in cache.tensors.values())
        k = torch.randn(2, 4, 2, EMBED // 2)
        assert all(torch.equal(tensor, k) for tensor in cache.append(k, k))
    assert cache.length == 4


def test_positions_that_nobody_can_look_at():
    layer = make("self").requires_grad_(False)
    x, ids = tokens(layer), torch.arange(7)[None] + 3
    out = layer(x, position_ids=ids)
    assert torch.equal(make_fx(lambda t, i: layer(t, position_ids=i))(x, ids)(x, ids), out)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x), position_ids=mode.from_tensor(ids)).shape == x.shape
    for ids in (torch.tensor([2**40] * 7, dtype=torch.uint64), torch.full((7,), -(2**31) - 1)):
        with pytest.raises(ValueError, match="must fit in 32 bits"):
            layer(x, position_ids=ids)
