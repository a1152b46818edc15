"""torch.nn.functional.scaled_dot_product_attention by fovea's engines: the same arguments, shapes and meaning."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling  # a mode that traces is seen by run_plain

from .eager import run_attention_out, run_plain
from .settings import op_settings, per_score


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
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
    plain = attn_mask is None and not dropout_p and not is_dynamo_compiling()
    if plain and (shape := query.shape) == key.shape and len(shape) == 4:  # most calls, shortly
        out = run_plain(query, key, value, is_causal, scale)
        if out is not None:
            return out
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention: attn_mask must not be given together with is_causal")
    if query.dim() != 4:
        return _of_other_rank(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    batch, head_q, q_len, _ = query.shape
    batch_kv, head_kv, kv_len, _ = key.shape
    if batch_kv != batch:
        key, value = (t.expand(batch, -1, -1, -1) for t in (key, value))
    if head_kv != head_q and not enable_gqa:
        key, value = (t.expand(-1, head_q, -1, -1) for t in (key, value))  # fails where it is not 1
    window = None
    if is_causal and kv_len != q_len:
        # Aligned at the start, nobody sees a key beyond the last query; then the ends are aligned too, unless
        # there are fewer keys than queries: the ends being apart, query i stands that much further back.
        key, value = key[:, :, :q_len], value[:, :, :q_len]
        kv_len = key.shape[2]
        window, is_causal = (None, q_len - kv_len), False
    if plain and window is None:
        out = run_plain(query, key, value, is_causal, scale)
        if out is not None:
            return out
    settings = op_settings(query, is_causal, window, dropout_p=dropout_p, scale=scale)
    if attn_mask is not None:
        name = "bias" if attn_mask.dtype.is_floating_point else "mask"
        settings[name] = per_score(name, attn_mask, kv_len)
    settings["heads_first"] = True
    return run_attention_out(query, key, value, settings)


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
