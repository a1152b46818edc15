"""Attention as functions. Tensors are [batch, seq, head, dim], as in fovea's C++ contract (docs/contract.md): note
that torch's scaled_dot_product_attention has [batch, head, seq, dim], for which there is fovea.sdpa."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops
from .eager import run_attention, run_attention_out
from .paged import append_to_pages, check_pages, cut_table, gather_pages
from .settings import Window, op_settings, per_score


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    prefix: int = 0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T, masked and biased) v, in memory that grows with the sequence and not its square.

    Positions are aligned at the end: the last query stands at the last key, so with one query and a long
    cache `causal` hides nothing. A row that sees no key gives zeros.

    Args:
        q: [batch, q_len, head_q, dim_qk], of f32, f16, bf16, or f64 (which the reference engine computes).
        k: [batch, kv_len, head_kv, dim_qk]; head_q is a multiple of head_kv (grouped and multi-query heads).
        v: [batch, kv_len, head_kv, dim_v].
        causal: a query sees no key after its own position.
        window: (left, right): a query sees keys at most that far before and after it; None is unbounded.
        prefix: every query sees the first `prefix` keys, whatever causal and window say.
        bias: added to the scores: broadcastable to [batch, head_q, q_len, kv_len], of q's dtype or f32.
        mask: bool, broadcastable likewise; True takes part.
        key_lengths: [batch] int: keys beyond are not there; a length stands in for kv_len in positions too.
        alibi_slopes: [head_q] or [batch, head_q]; subtracts slope * distance from the scores.
        softcap: c > 0 turns a score x into c * tanh(x / c), before anything is added to it.
        sink: [head_q]: a logit per head that joins the softmax's denominator and carries no value.
        dropout_p: the probability of dropping a weight; seeded by torch's default generator.
        scale: 1 / sqrt(dim_qk) unless given.
        deterministic: the same bits at every call; None: as torch.use_deterministic_algorithms says.
        backend: an engine by name ("cpu", "reference", "portable", "hopper"); None: the best that takes it.
        return_lse: also return lse, [batch, head_q, q_len] f32: the logarithm of the softmax's denominator.

    Returns:
        out [batch, q_len, head_q, dim_v], or (out, lse). Both are differentiable: gradients reach q, k, v, bias
        and sink.
    """
    settings = op_settings(
        q, causal, window, prefix, alibi_slopes, softcap, sink, dropout_p, scale, deterministic, backend
    )
    if bias is not None:
        settings["bias"] = per_score("bias", bias, k.shape[1])
    if mask is not None:
        settings["mask"] = per_score("mask", mask, k.shape[1])
    if key_lengths is not None:
        settings["key_lengths"] = key_lengths.to(torch.int32)
    return run_attention(q, k, v, settings) if return_lse else run_attention_out(q, k, v, settings)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_q_len: int,
    max_kv_len: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    prefix: int = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over sequences of different lengths that are packed one after the other, without padding.

    Args:
        q: [total_q, head_q, dim_qk].
        k: [total_kv, head_kv, dim_qk].
        v: [total_kv, head_kv, dim_v].
        cu_seqlens_q: [batch + 1] int32: sequence b owns the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q.
        cu_seqlens_kv: [batch + 1] int32: likewise of k and v.
        max_q_len: at least the longest sequence of q.
        max_kv_len: at least the longest sequence of k and v.

    The others are those of `attention`, inside each sequence.

    Returns:
        out [total_q, head_q, dim_v], or (out, lse) with lse [head_q, total_q].
    """
    settings = op_settings(
        q, causal, window, prefix, alibi_slopes, softcap, sink, dropout_p, scale, deterministic, backend
    )
    settings.update(
        cu_seqlens_q=cu_seqlens_q.to(torch.int32), cu_seqlens_kv=cu_seqlens_kv.to(torch.int32),
        q_len=max_q_len, kv_len=max_kv_len,
    )  # fmt: skip
    return run_attention(q, k, v, settings) if return_lse else run_attention_out(q, k, v, settings)


def attention_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_lengths: int | Tensor,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One step of decoding: writes new keys and values into the cache, then attends to all that it holds.

    Args:
        q: [batch, q_len, head_q, dim_qk]: the newest positions.
        k_cache: [batch, capacity, head_kv, dim_qk]; written in place where k is given.
        v_cache: [batch, capacity, head_kv, dim_v]; likewise.
        k: [batch, new, head_kv, dim_qk]: appended behind cache_lengths; together with v, or neither.
        v: [batch, new, head_kv, dim_v].
        cache_lengths: keys in the cache before this call: [batch] int, or one number for all.
        block_table: [batch, pages] int: the caches are pages, [page, rows of a page, head_kv, dim], and row r of
            sequence b is row r % rows of page block_table[b, r // rows]. Pages are copied together for each call (all
            that the table names, where cache_lengths is a tensor): hand over no wider a table than is in use.

    The others are those of `attention`. Returns out [batch, q_len, head_q, dim_v], or (out, lse).
    """
    if (k is None) != (v is None):
        raise ValueError("attention_with_kv_cache: k and v must be given together")
    lengths = cache_lengths if k is None else cache_lengths + k.shape[1]
    if block_table is not None:
        call = "attention_with_kv_cache"
        check_pages(call, k_cache, v_cache, block_table, q.shape[0])
        block_table = cut_table(call, block_table, k_cache, lengths)
    if k is not None and v is not None:
        _append(k_cache, v_cache, k, v, cache_lengths, block_table)
    if block_table is not None:
        k_cache, v_cache = gather_pages(k_cache, block_table), gather_pages(v_cache, block_table)
    key_lengths = None
    if isinstance(lengths, Tensor):
        key_lengths = lengths
    else:  # one length for all: what lies beyond is cut off
        k_cache, v_cache = k_cache[:, :lengths], v_cache[:, :lengths]
    return attention(
        q, k_cache, v_cache, causal=causal, window=window, key_lengths=key_lengths, alibi_slopes=alibi_slopes,
        softcap=softcap, sink=sink, scale=scale, backend=backend, return_lse=return_lse,
    )  # fmt: skip


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Joins results over disjoint sets of keys into the result over all of them.

    Args:
        outs: each [batch, q_len, head_q, dim_v], or [total_q, head_q, dim_v] when packed.
        lses: each [batch, head_q, q_len], or [head_q, total_q]: what `return_lse` gave beside it.

    Returns:
        (out, lse), differentiable. A part that saw nothing (lse = -inf) adds nothing; a sink must be counted in
        one part only.
    """
    return ops.merge(list(outs), list(lses))


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lengths: int | Tensor, block_table: Tensor | None
) -> None:
    new = k.shape[1]
    if block_table is None and not isinstance(lengths, Tensor):
        k_cache[:, lengths : lengths + new] = k
        v_cache[:, lengths : lengths + new] = v
        return
    rows = torch.arange(new, device=k.device)
    rows = lengths[:, None] + rows if isinstance(lengths, Tensor) else (lengths + rows).expand(k.shape[0], new)
    if block_table is not None:
        append_to_pages(k_cache, block_table, rows, k)
        append_to_pages(v_cache, block_table, rows, v)
        return
    batch = torch.arange(k.shape[0], device=k.device)[:, None]
    k_cache[batch, rows] = k
    v_cache[batch, rows] = v
