"""fovea.nn: every layer against plain torch, by finite differences, and token by token against all at once."""

import copy
import pickle

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fovea.nn as fnn
from fovea import layer_ops
from layer_cases import BUILD, CAUSAL, EMBED, make, tokens
from plain_layers import classic, latent

# What the plain formula must be told besides the parameters.
PLAIN = {
    "multi head": (classic, {}),
    "multi head, rope, rmsnorm": (classic, dict(position="rope", causal=True)),
    "self": (classic, dict(position="rope", causal=True)),
    "self, alibi, window": (classic, dict(position="alibi", window=3)),
    "grouped": (classic, dict(causal=True)),
    "grouped, interleaved rope, layernorm": (
        classic,
        dict(position="rope", causal=True, rope=dict(style="interleaved", fraction=0.5, base=500.0)),
    ),
    "multi query": (classic, dict(position="alibi", causal=True)),
    "latent": (latent, dict(causal=True)),
    "latent, rope, rmsnorm": (latent, dict(position="rope", causal=True)),
    "latent, deepseek": (latent, dict(causal=True)),
}


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def gradients_of(layer, out, *inputs):
    """Of a sum that weighs every element differently."""
    weight = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), [*inputs, *layer.parameters()])


def test_every_layer_is_compared():
    assert PLAIN.keys() == {name for name in BUILD if not name.startswith("ccgqa")}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_same_as_plain_torch(name, masked):
    layer = make(name, torch.float64)
    x = tokens(layer, dtype=torch.float64).requires_grad_()
    formula, settings = PLAIN[name]
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1], [1] * 7], dtype=torch.bool) if masked else None
    out, plain = layer(x, mask=mask), formula(layer, x, mask=mask, **settings)
    same(out, plain)
    for mine, theirs in zip(gradients_of(layer, out, x), gradients_of(layer, plain, x)):
        same(mine, theirs)


def test_cross_attention():
    layer = fnn.MultiHeadAttention(EMBED, 4, kdim=10, vdim=12, position="rope", dtype=torch.float64)
    query, key, value = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((3, EMBED), (6, 10), (6, 12)))
    inputs = [t.requires_grad_() for t in (query, key, value)]
    mask = torch.rand(2, 1, 3, 6) < 0.7
    out, plain = layer(*inputs, mask=mask), classic(layer, *inputs, mask=mask, position="rope")
    same(out, plain)
    for mine, theirs in zip(gradients_of(layer, out, *inputs), gradients_of(layer, plain, *inputs)):
        same(mine, theirs)


@pytest.mark.parametrize("given", ["q", "qq", "qqq", "qk", "qkk", "qqv", "q-v", "qkq"])
def test_a_tensor_may_stand_in_for_others(given):
    """Each of query, key and value is the query, another tensor, or not given; each tensor has one gradient."""
    layer = fnn.MultiHeadAttention(EMBED, 4, dtype=torch.float64)
    tensors = {name: tokens(layer, dtype=torch.float64).requires_grad_() for name in "qkv"}
    tensors["-"] = None
    inputs = [tensors[name] for name in given]
    out, plain = layer(*inputs), classic(layer, *inputs)
    same(out, plain)
    distinct = [tensors[name] for name in sorted(set(given) - {"-"})]
    for mine, theirs in zip(gradients_of(layer, out, *distinct), gradients_of(layer, plain, *distinct)):
        same(mine, theirs)


@pytest.mark.parametrize("name", BUILD)
def test_no_tokens(name):
    layer = make(name)
    for batch, length in ((0, 3), (1, 0), (3, 0)):
        x = tokens(layer, batch, length).requires_grad_()
        out = layer(x)
        out.sum().backward()
        assert out.shape == x.shape
        with torch.no_grad():
            assert layer(x, cache=layer.make_cache(batch, 4)).shape == x.shape


def test_no_keys():
    layer = make("multi head")
    out = layer(torch.randn(2, 3, EMBED), torch.randn(2, 0, EMBED))
    same(out, layer.o_proj.bias.expand(2, 3, EMBED))


def test_convolutions_of_other_strides():
    layer = make("ccgqa, hydra")
    x = tokens(layer)
    out = layer(x)
    for conv in (layer.q_conv.conv1, layer.q_conv.conv2):
        conv.weight = torch.nn.Parameter(conv.weight.detach().transpose(0, 1).contiguous().transpose(0, 1))
    assert torch.equal(layer(x), out)


@pytest.mark.parametrize("name", BUILD)
def test_gradcheck(name):
    layer = make(name, torch.float64)
    x = tokens(layer, batch=1, length=4, dtype=torch.float64).requires_grad_()
    names = [n for n, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (x,))

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("frozen", ["weights", "input"])
@pytest.mark.parametrize("name", BUILD)
def test_gradients_that_nobody_wants_change_no_other(name, frozen):
    layer = make(name, torch.float64)
    x = tokens(layer, dtype=torch.float64).requires_grad_()
    layer(x).square().sum().backward()
    expected = [t.grad for t in (x, *layer.parameters())]
    part = copy.deepcopy(layer).requires_grad_(frozen != "weights")
    part.zero_grad()
    y = x.detach().clone().requires_grad_(frozen != "input")
    part(y).square().sum().backward()
    for t, want in zip((y, *part.parameters()), expected):
        assert t.grad is None if not t.requires_grad else torch.equal(t.grad, want)


@pytest.mark.parametrize("name", BUILD)
def test_backward_twice(name):
    layer = make(name)
    out = layer(tokens(layer))
    first = torch.autograd.grad(out.sum(), list(layer.parameters()), retain_graph=True)
    second = torch.autograd.grad(out.sum(), list(layer.parameters()))  # which spends what was saved
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [3, 1, 2, 1]])
@pytest.mark.parametrize("name", CAUSAL)
def test_decode_is_prefill(name, chunks):
    """Bit for bit, except where absorbed latents are another order of sums."""
    layer = make(name, torch.float64)
    x = tokens(layer, dtype=torch.float64)
    cache = layer.make_cache(2, 9)
    with torch.no_grad():
        whole = layer(x)
        for _ in range(2):
            steps = torch.cat([layer(part, cache=cache) for part in x.split(chunks, dim=1)], 1)
            assert cache.length == 7
            if name in ("latent", "latent, deepseek"):
                same(steps, whole)
            else:
                assert torch.equal(steps, whole)
            cache.reset()


# Keys that are made again from cached latents stand where they lie, so the layer takes no positions there.
@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "latent, rope, rmsnorm"])
def test_left_padded_decode(name):
    """Padding in front of a sequence is zeros whose keys are masked: what follows does not notice it."""
    layer = make(name, torch.float64)
    x = tokens(layer, batch=1, length=4, dtype=torch.float64)
    padded = torch.cat([torch.zeros(1, 2, layer.embed_dim, dtype=torch.float64), x], 1)
    mask, ids = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.arange(6) - 2
    cache = layer.make_cache(1, 8)
    with torch.no_grad():
        expected = layer(x)
        same(layer(padded, mask=mask, position_ids=ids)[:, 2:], expected)
        steps = [
            layer(padded[:, i : i + 1], mask=mask[:, : i + 1], position_ids=ids[i : i + 1], cache=cache)
            for i in range(6)
        ]
    same(torch.cat(steps[2:], 1), expected)


def test_cache_of_beams():
    layer = make("ccgqa, hydra")
    x = tokens(layer, batch=3)
    cache, order = layer.make_cache(3, 8), torch.tensor([2, 0, 0])
    with torch.no_grad():
        layer(x[:, :4], cache=cache)
        cache.reorder(order)
        step = layer(x[:, 4:5], cache=cache)
        whole = layer(torch.cat([x[order, :4], x[:, 4:5]], 1))
    torch.testing.assert_close(step[:, 0], whole[:, -1])
    assert repr(cache).startswith("KVCache(5 of 8 tokens: k [3, 8, 2, 8]")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BUILD)
def test_half_types(name, dtype):
    layer = make(name)
    x = tokens(layer)
    expected = layer(x)
    half = copy.deepcopy(layer).to(dtype)
    out = half(x.to(dtype))
    assert out.dtype == dtype
    room = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), expected, rtol=room, atol=room * expected.abs().max().item())
    out.sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in half.parameters())


@pytest.mark.parametrize("name", ["multi head", "self", "latent", "ccgqa, zaya"])
def test_sequence_first(name):
    layer = make(name)
    other = BUILD[name](batch_first=False)
    other.load_state_dict(layer.state_dict())
    x = tokens(layer)
    assert torch.equal(other(x.transpose(0, 1)).transpose(0, 1), layer(x))


def test_dropout_is_drawn_from_torchs_generator_while_training():
    layer = make("self", dropout=0.5)
    x = tokens(layer)
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)
    plain = make("self").eval()
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))


@pytest.mark.parametrize("name", BUILD)
def test_deterministic_mode_of_torch(name, monkeypatch):
    layer, seen, original = make(name), [], layer_ops.layer
    x = tokens(layer)
    monkeypatch.setattr(layer_ops, "layer", lambda *given: seen.append(given[8].split()) or original(*given))
    out = layer(x)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(layer(x), out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ["deterministic=1" in words for words in seen] == [False, True]


@pytest.mark.parametrize("name", [n for n in BUILD if not n.startswith("multi head")])
def test_call_as_multi_head(name):
    layer = make(name)
    x = tokens(layer)
    assert torch.equal(layer(x, x, x), layer(x))
    with pytest.raises(ValueError, match="key is not x"):
        layer(x, x.clone())
    with pytest.raises(TypeError):
        layer(x, x, x, torch.ones(2, 7, dtype=torch.bool))  # a mask goes by its name


@pytest.mark.parametrize("name", PLAIN)
def test_flops(name):
    """As torch counts those of the plain formula; the backward pass makes the scores again."""
    layer = make(name, torch.float64)
    x = tokens(layer, dtype=torch.float64).requires_grad_()
    formula, settings = PLAIN[name]
    counts = []
    for run in (layer, lambda x: formula(layer, x, **settings)):
        with FlopCounterMode(display=False) as forward:
            out = run(x)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts.append((forward.get_total_flops(), backward.get_total_flops()))
    (mine, mine_backward), (plain, plain_backward) = counts
    width = layer.q_up.out_features if "latent" in name else layer.num_heads * layer.head_dim
    scores = 2 * 2 * 7 * 7 * width
    assert (mine, mine_backward) == (plain, plain_backward + scores)
    with torch.no_grad(), FlopCounterMode(display=False) as cached:
        layer(x, cache=layer.make_cache(2, 9))
    assert cached.get_total_flops() == mine


@pytest.mark.parametrize("name", BUILD)
def test_copies(name):
    layer = make(name)
    x = tokens(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
    fresh = BUILD[name]()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    fresh.reset_parameters()
    assert not torch.equal(fresh(x), layer(x))


def test_initial_weights():
    layer = fnn.GroupedQueryAttention(64, 4, 2, qk_norm="layernorm")
    bound = (6 / (64 + 128)) ** 0.5  # Xavier's, of 64 channels to 128
    assert 0.9 * bound < layer.qkv_proj.weight.abs().max() <= bound
    assert not layer.qkv_proj.bias.any() and not layer.k_norm.bias.any() and (layer.q_norm.weight == 1).all()


REFUSALS = {
    "head_dim": (
        lambda: fnn.SelfAttention(30, 4),
        RuntimeError,
        "embed_dim is 30, must be a multiple of num_heads",
    ),
    "position": (
        lambda: fnn.SelfAttention(32, 4, position="rop"),
        RuntimeError,
        "position is rop, must be none or",
    ),
    "option": (lambda: fnn.SelfAttention(32, 4, casual=True), TypeError, "casual is not an option"),
    "kv heads": (
        lambda: fnn.GroupedQueryAttention(32, 4, 3),
        RuntimeError,
        "must be a multiple of num_kv_heads = 3",
    ),
    "deepseek": (lambda: fnn.LatentAttention.deepseek(32, 4, qk_norm="rmsnorm"), RuntimeError, "qk_norm is 1"),
    "width": (lambda: fnn.CCGQAttention(30, 4, 2), ValueError, "must be a multiple of compression"),
    "no heads": (lambda: fnn.CCGQAttention(64, 0, 2), ValueError, "num_heads is 0, must be at least 1"),
    "no compression": (lambda: fnn.CCGQAttention(64, 4, 2, compression=0), ValueError, "compression is 0"),
    "taps": (lambda: fnn.CCGQAttention(64, 4, 2, conv_taps=(2, 2, 2)), ValueError, "must be two numbers"),
    "function": (lambda: fnn.LatentAttention(64, 4, position=max), TypeError, "position is a function"),
    "no latent heads": (lambda: fnn.LatentAttention(64, 0), RuntimeError, "num_heads is 0, must be at least 1"),
    "no room": (lambda: fnn.SelfAttention(32, 4).make_cache(1), ValueError, "max_seq_len is 0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_options_are_refused_when_a_layer_is_made(name):
    make_it, error, text = REFUSALS[name]
    with pytest.raises(error, match=text):
        make_it()


def test_calls_are_refused():
    layer = make("self")
    x = tokens(layer)
    with pytest.raises(TypeError, match="mask.dtype is torch.float32"):
        layer(x, mask=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="mask.shape is .7., must be"):
        layer(x, mask=torch.ones(7, dtype=torch.bool))
    with pytest.raises(TypeError, match="position_ids.dtype is torch.float32, must be an integer"):
        layer(x, position_ids=torch.linspace(0, 1, 7))
    with pytest.raises(ValueError, match="position of position_ids is 4294967298, must fit in 32 bits"):
        layer(x, position_ids=torch.arange(7) + 2**32 - 4)
    with pytest.raises(RuntimeError, match="weights.qkv.dtype is f32, must be bf16"):
        layer(x.bfloat16())
    with pytest.raises(TypeError, match="dtype is torch.int64"):
        layer(x.long())
    cache = layer.make_cache(2, 8)
    with pytest.raises(RuntimeError, match="has no gradient; make it under torch.no_grad"):
        layer(x, cache=cache)
    with torch.no_grad():
        layer(x, cache=cache)
        with pytest.raises(RuntimeError, match="cache.length is 7, must be in 0..1"):
            layer(x, cache=cache)
        with pytest.raises(ValueError, match="mask has 3 keys, must have 8"):
            layer(x[:, :1], mask=torch.ones(2, 3, dtype=torch.bool), cache=cache)
        assert cache.length == 7  # a call that was refused added nothing
