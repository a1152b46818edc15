"""fovea under torch.compile and torch.export: one graph, dynamic shapes, the same numbers as in eager mode."""

import io

import pytest
import torch

import fovea

CASES = {
    "plain": lambda d: {},
    "causal window": lambda d: dict(causal=True, window=(5, None)),
    "bias": lambda d: dict(bias=torch.randn(1, 4, 1, 1, device=d)),
    "mask": lambda d: dict(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=d)),
    "alibi and sink": lambda d: dict(alibi_slopes=torch.rand(4, device=d), sink=torch.randn(4, device=d)),
    "softcap": lambda d: dict(softcap=2.0, scale=0.3),
    "key lengths": lambda d: dict(key_lengths=torch.tensor([3, 9], device=d)),
    "deterministic": lambda d: dict(deterministic=True),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


def qkv(device, q_len, kv_len=None, dtype=torch.float32):
    kv_len = kv_len or q_len
    shapes = [(2, q_len, 4, 16), (2, kv_len, 2, 16), (2, kv_len, 2, 16)]
    return [torch.randn(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


def with_gradients(run, tensors):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = run(*tensors)
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in tensors)]


def assert_same(compiled, eager):
    for c, e in zip(compiled, eager):
        torch.testing.assert_close(c, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_one_graph_for_all_lengths(device, case):
    settings = CASES[case](device)

    def run(q, k, v):
        return fovea.attention(q * 2, k, v, **settings) + 1

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (13, 17, 30):  # no other size is 13 or 20: equal ones would be taken for the same
        tensors = qkv(device, length, length + 7)
        with torch.compiler.set_stance("default" if length == 13 else "fail_on_recompile"):
            result = with_gradients(compiled, tensors)
        assert_same(result, with_gradients(run, tensors))


def test_lse_in_a_graph(device):
    def run(q, k, v):
        out, lse = fovea.attention(q, k, v, return_lse=True)
        return out * lse.transpose(1, 2)[..., None]

    tensors = qkv(device, 11)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, tensors), with_gradients(run, tensors))


def test_dropout_in_a_graph(device):
    compiled = torch.compile(
        lambda q, k, v: fovea.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    tensors = qkv(device, 16)
    torch.manual_seed(1)
    first = with_gradients(compiled, tensors)
    second = with_gradients(compiled, tensors)
    torch.manual_seed(1)
    again = with_gradients(compiled, tensors)
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_varlen_in_a_graph(device):
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)

    def run(q, k, v):
        return fovea.attention_varlen(q, k, v, starts, starts, 7, 7, causal=True)

    tensors = [torch.randn(12, heads, 16, device=device).requires_grad_() for heads in (4, 2, 2)]
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same(with_gradients(compiled, tensors), with_gradients(run, tensors))


def test_sdpa_and_merge_in_a_graph(device):
    def run(q, k, v):
        halves = [
            fovea.attention(q, k[:, rows], v[:, rows], return_lse=True) for rows in (slice(0, 4), slice(4, 9))
        ]
        both, _ = fovea.merge(*zip(*halves))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return both.transpose(1, 2) + fovea.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    tensors = qkv(device, 9)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(with_gradients(compiled, tensors), with_gradients(run, tensors))


def test_kv_cache_in_a_graph(device):
    def step(q, k_cache, v_cache, k, v, lengths):
        return fovea.attention_with_kv_cache(q, k_cache, v_cache, k, v, cache_lengths=lengths)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    caches = [torch.randn(2, 10, 2, 16, device=device) for _ in range(2)]
    new = [torch.randn(2, 1, heads, 16, device=device) for heads in (4, 2, 2)]
    lengths = torch.tensor([0, 7], device=device)
    mine, theirs = [c.clone() for c in caches], [c.clone() for c in caches]
    with torch.no_grad():
        assert_same([compiled(new[0], *mine, *new[1:], lengths)], [step(new[0], *theirs, *new[1:], lengths)])
    assert_same(mine, theirs)


def test_inductor(device):
    """The whole compiler once: q is produced, and out consumed, by generated code."""

    def run(q, k, v):
        return fovea.attention(torch.sin(q), k, v, causal=True).relu()

    tensors = qkv(device, 13, dtype=torch.float32)
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    assert_same(with_gradients(compiled, tensors), with_gradients(run, tensors))


def test_autocast_in_a_graph(device):
    def run(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return fovea.attention(q, k, v, causal=True)

    tensors = qkv(device, 13)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    result, eager = with_gradients(compiled, tensors), with_gradients(run, tensors)
    assert result[0].dtype == eager[0].dtype == torch.bfloat16
    for c, e in zip(result, eager):
        torch.testing.assert_close(c, e, rtol=1e-2, atol=1e-2)


class Block(torch.nn.Module):
    def forward(self, q, k, v):
        return fovea.attention(q, k, v, causal=True, softcap=3.0)


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict):
    tensors = [t.detach() for t in qkv(device, 8)]
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(Block(), tuple(tensors), dynamic_shapes=({1: length},) * 3, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    others = [t.detach() for t in qkv(device, 33)]
    assert_same([loaded(*others)], [Block()(*others)])
    assert "fovea.attention" in str(program.graph)
