"""A layer step by step, in torch's ops and fovea.attention: the way of layers whose positions a user's module sets,
which stands between steps that the library does in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..functional import attention
from ..layer_ops import LayerInputs
from .cache import KVCache

if TYPE_CHECKING:
    from .classic import ClassicLayer


def run_composed(layer: ClassicLayer, inputs: LayerInputs, cache: KVCache | None) -> Tensor:
    """The output [batch, q_len, embed_dim] of a layer with a position of its own."""
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)) for t in layer._project(inputs))
    past = 0 if cache is None else cache.length
    q_ids, k_ids = _ids(inputs, past, q.shape[1], k.shape[1], q.device)
    q, k = layer.position(q, k, q_ids, k_ids)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if cache is not None:
        if torch.is_grad_enabled() and k.requires_grad:
            raise RuntimeError("fovea.nn: a call with a cache has no gradient; make it under torch.no_grad()")
        k, v = cache.append(k, v)
    mask = inputs.mask
    if mask is not None:
        mask = mask[:, None, None] if mask.dim() == 2 else mask
        mask = mask[..., : k.shape[1]]
    reach = layer.sliding_window - 1 if layer.sliding_window else None
    out = attention(
        q, k, v, causal=layer.causal, window=(reach, reach), mask=mask, scale=layer.softmax_scale,
        dropout_p=layer.dropout if layer.training else 0.0, backend=layer.backend,
    )  # fmt: skip
    return layer.o_proj(cast(Tensor, out).flatten(2))


def _ids(inputs: LayerInputs, past: int, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of queries and keys, [batch or 1, tokens]: those given, or aligned at the last key."""
    k_ids = torch.arange(past, past + kv_len, device=device)[None]
    q_ids = k_ids[:, kv_len - q_len :] if inputs.position_ids is None else inputs.position_ids
    if inputs.key_position_ids is not None:
        k_ids = inputs.key_position_ids
    elif q_len == kv_len:
        k_ids = q_ids
    return q_ids, k_ids
