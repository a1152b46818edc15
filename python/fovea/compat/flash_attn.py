"""The functions of the package flash_attn, by name, arguments, defaults and results:

    from fovea.compat.flash_attn import flash_attn_func        # instead of: from flash_attn import ...

What they compute is the contract of fovea.attention, also where flash_attn itself stops: f32, and on a CPU. A row that
sees no key has lse = -inf (flash_attn says +inf). What is asked for and not there (rotary embeddings, page tables
of packed sequences) raises NotImplementedError."""

from __future__ import annotations

from torch import Tensor

from .. import functional

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q [batch, q_len, head_q, dim], k and v [batch, kv_len, head_kv, dim]; a window side of -1 is unbounded.

    With return_attn_probs: (out, lse [batch, head_q, q_len], None). There is no matrix of weights to return.
    """
    result = functional.attention(
        q, k, v, causal=causal, window=_window(window_size), alibi_slopes=alibi_slopes, softcap=softcap,
        dropout_p=dropout_p, scale=softmax_scale, deterministic=deterministic or None, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result  # type: ignore[return-value]


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As flash_attn_func, with k and v in one: kv [batch, kv_len, 2, head_kv, dim]."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As flash_attn_func, with all in one: qkv [batch, seq, 3, head, dim]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """q [total_q, head_q, dim], k and v [total_kv, head_kv, dim]; with return_attn_probs lse is [head_q, total_q]."""
    _refuse("flash_attn_varlen_func", block_table=block_table)
    result = functional.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
        window=_window(window_size), alibi_slopes=alibi_slopes, softcap=softcap, dropout_p=dropout_p,
        scale=softmax_scale, deterministic=deterministic or None, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result  # type: ignore[return-value]


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As flash_attn_varlen_func, with k and v in one: kv [total_kv, 2, head_kv, dim]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """As flash_attn_varlen_func, with all in one: qkv [total, 3, head, dim]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [batch, q_len, head_q, dim]; k_cache and v_cache [batch, capacity, head_kv, dim], into which k and v
    [batch, new, head_kv, dim] are written behind cache_seqlens. With a block_table [batch, pages] the caches are
    [page, rows of a page, head_kv, dim]: see fovea.attention_with_kv_cache for what that costs. num_splits is
    fovea's to choose."""
    _refuse(
        "flash_attn_with_kvcache", rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )  # fmt: skip
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("flash_attn_with_kvcache: cache_seqlens must be given where k is")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    return functional.attention_with_kv_cache(
        q, k_cache, v_cache, k, v, cache_lengths=cache_seqlens, block_table=block_table, causal=causal,
        window=_window(window_size), alibi_slopes=alibi_slopes, softcap=softcap, scale=softmax_scale,
        return_lse=return_softmax_lse,
    )  # fmt: skip


def _window(window_size: tuple[int, int]) -> functional.Window | None:
    left, right = (None if side < 0 else side for side in window_size)
    return None if left is None and right is None else (left, right)


def _refuse(function: str, **arguments: Tensor | None) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{function}: {name} is given, which fovea does not take")
