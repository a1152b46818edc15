"""fovea.compat.flash_attn: the names, arguments and meaning of the package flash_attn."""

import inspect

import pytest
import torch

import yardstick
from fovea.compat import flash_attn as compat

COMMON = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
SIGNATURES = {
    "flash_attn_func": f"q k v {COMMON}",
    "flash_attn_kvpacked_func": f"q kv {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv {COMMON}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {COMMON}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx"
    " cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes"
    " num_splits return_softmax_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(compat, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    assert parameters["window_size"].default == (-1, -1)
    assert parameters["causal"].default is False


def test_all_is_listed():
    assert sorted(compat.__all__) == sorted(SIGNATURES)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def expected(q, k, v, causal=False, window=None, **settings):
    seen = yardstick.visible(q.shape[1], k.shape[1], causal=causal, window=window, device=q.device)
    return yardstick.formula(q, k, v, seen=seen, **settings)


def test_dense(device):
    q, k, v = (torch.randn(2, n, h, 16, device=device) for n, h in ((7, 4), (11, 2), (11, 2)))
    slopes = torch.rand(4, device=device)
    out, lse, weights = compat.flash_attn_func(
        q, k, v, 0.0, 0.3, True, (4, 2), 5.0, slopes, False, return_attn_probs=True
    )
    want_out, want_lse = expected(q, k, v, True, (4, 2), scale=0.3, softcap=5.0, slopes=slopes)
    close(out, want_out)
    close(lse, want_lse)
    assert weights is None
    kv = torch.stack([k, v], 2)
    close(compat.flash_attn_kvpacked_func(q, kv, causal=True), expected(q, k, v, True)[0])
    qkv = torch.randn(2, 7, 3, 4, 16, device=device)
    close(
        compat.flash_attn_qkvpacked_func(qkv, window_size=(3, -1)), expected(*qkv.unbind(2), window=(3, None))[0]
    )


def test_varlen(device):
    lens_q, lens_k = [3, 0, 5], [4, 2, 6]
    q = torch.randn(8, 4, 16, device=device)
    kv = torch.randn(12, 2, 2, 16, device=device)
    starts_q = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 4, 6, 12], dtype=torch.int32, device=device)
    out, lse, _ = compat.flash_attn_varlen_kvpacked_func(
        q, kv, starts_q, starts_k, 5, 6, causal=True, return_attn_probs=True
    )
    want = [expected(a[None], *b[None].unbind(2), causal=True) for a, b in zip(q.split(lens_q), kv.split(lens_k))]
    close(out, torch.cat([w[0][0] for w in want]))
    close(lse, torch.cat([w[1][0] for w in want], 1))
    k, v = kv.unbind(1)
    close(compat.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 5, 6, causal=True), out)
    qkv = torch.randn(12, 3, 4, 16, device=device)
    self_attention = compat.flash_attn_varlen_qkvpacked_func(qkv, starts_k, 6)
    close(self_attention, torch.cat([expected(*p[None].unbind(2))[0][0] for p in qkv.split(lens_k)]))


def test_kvcache(device):
    caches = [torch.randn(2, 12, 2, 16, device=device) for _ in range(2)]
    q, k, v = (torch.randn(2, 3, heads, 16, device=device) for heads in (4, 2, 2))
    before = [c.clone() for c in caches]
    lengths = torch.tensor([2, 9], dtype=torch.int32, device=device)
    out, lse = compat.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
    )
    for b, n in enumerate(lengths.tolist()):
        whole = [torch.cat([c[b : b + 1, :n], new[b : b + 1]], 1) for c, new in zip(before, (k, v))]
        want_out, want_lse = expected(q[b : b + 1], *whole, causal=True)
        close(out[b : b + 1], want_out)
        close(lse[b : b + 1], want_lse)
        assert torch.equal(caches[0][b, n : n + 3], k[b])
    close(compat.flash_attn_with_kvcache(q, *caches), expected(q, *caches)[0])


def test_kvcache_in_pages(device):
    """Beside the plain formula over the rows that the table names; what is in no sequence's pages is NaN."""
    pages, page_rows = 9, 4
    caches = [torch.full((pages, page_rows, 2, 16), float("nan"), device=device) for _ in range(2)]
    table = torch.tensor([[7, 2, -1], [0, 5, 3]], dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=device)
    old = [torch.randn(2, 12, 2, 16, device=device) for _ in range(2)]
    for b, n in enumerate(lengths.tolist()):
        for cache, rows in zip(caches, old):
            for r in range(n):
                cache[table[b, r // page_rows], r % page_rows] = rows[b, r]
    q, k, v = (torch.randn(2, 3, heads, 16, device=device) for heads in (4, 2, 2))
    out, lse = compat.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
    )
    for b, n in enumerate(lengths.tolist()):
        whole = [torch.cat([rows[b : b + 1, :n], new[b : b + 1]], 1) for rows, new in zip(old, (k, v))]
        want_out, want_lse = expected(q[b : b + 1], *whole, causal=True)
        close(out[b : b + 1], want_out)
        close(lse[b : b + 1], want_lse)
        for cache, new in zip(caches, (k, v)):
            for i in range(3):
                assert torch.equal(cache[table[b, (n + i) // page_rows], (n + i) % page_rows], new[b, i])
    unused = [p for p in range(pages) if p not in table.tolist()[0] + table.tolist()[1]]
    assert caches[0][unused].isnan().all()
    full = table[1:]
    rows = [c[full[0].long()].flatten(0, 1)[None] for c in caches]
    close(compat.flash_attn_with_kvcache(q[1:], *caches, block_table=full), expected(q[1:], *rows)[0])


def test_what_is_not_there_is_refused(device):
    q = torch.randn(1, 2, 2, 16, device=device)
    with pytest.raises(NotImplementedError, match="cache_leftpad"):
        compat.flash_attn_with_kvcache(q, q, q, cache_leftpad=torch.zeros(1))
    with pytest.raises(ValueError, match="cache_seqlens"):
        compat.flash_attn_with_kvcache(q, q, q, q, q)
