"""torch.nn.functional.scaled_dot_product_attention by fovea's engines: the same arguments, shapes and meaning."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from .functional import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A drop-in for torch's function of the same name.

    Args:
        query: [..., head_q, q_len, dim_qk], or [..., q_len, dim_qk].
        key: [..., head_kv, kv_len, dim_qk].
        value: [..., head_kv, kv_len, dim_v].
        attn_mask: broadcastable to [..., head_q, q_len, kv_len]: bool (True takes part), or a float that is added
            to the scores. Not together with is_causal.
        dropout_p: the probability of dropping a weight, always applied: pass 0 when evaluating.
        is_causal: query i sees keys 0 to i: aligned at the start, unlike fovea.attention.
        scale: 1 / sqrt(dim_qk) unless given.
        enable_gqa: head_q may be a multiple of head_kv.

    Returns:
        [..., head_q, q_len, dim_v]. A row that sees no key gives zeros.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention: attn_mask must not be given together with is_causal")
    if query.dim() != 4:
        return _of_other_rank(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    batch, head_q, q_len, _ = query.shape
    if key.shape[0] != batch or value.shape[0] != batch:
        key, value = (t.expand(batch, -1, -1, -1) for t in (key, value))
    if not enable_gqa and (key.shape[1] != head_q or value.shape[1] != head_q):
        key, value = (t.expand(-1, head_q, -1, -1) for t in (key, value))  # fails where it is not 1
    window = None
    if is_causal and key.shape[2] != q_len:
        # Aligned at the start, nobody sees a key beyond the last query; then the ends are aligned too, unless
        # there are fewer keys than queries: the ends being apart, query i stands that much further back.
        key, value = key[:, :, :q_len], value[:, :, :q_len]
        window, is_causal = (None, q_len - key.shape[2]), False
    bias = mask = None
    if attn_mask is not None:
        if attn_mask.dtype.is_floating_point:
            bias = attn_mask
        else:
            mask = attn_mask
    out = attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=is_causal, window=window,
        bias=bias, mask=mask, dropout_p=dropout_p, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2)


def _of_other_rank(query, key, value, attn_mask, *settings) -> Tensor:
    """Dimensions that are missing in front are 1; leading ones beyond the batch are folded into it."""
    if query.dim() < 2:
        raise ValueError(f"scaled_dot_product_attention: query has {query.dim()} dimensions, must have at least 2")
    if query.dim() < 4:
        missing = 4 - query.dim()
        query, key, value = (t[(None,) * missing] for t in (query, key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask, *settings)[(0,) * missing]
    leading = query.shape[:-3]

    def folded(t):
        return t.expand(*leading, *t.shape[-3:]).flatten(0, -4)

    if attn_mask is not None and attn_mask.dim() > 4:
        attn_mask = folded(attn_mask)
    out = scaled_dot_product_attention(folded(query), folded(key), folded(value), attn_mask, *settings)
    return out.unflatten(0, leading)
