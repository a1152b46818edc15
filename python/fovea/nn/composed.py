"""A layer step by step, in torch's ops and fovea.attention: the way of layers whose positions a user's module sets,
which stands between steps that the library does in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..functional import attention
from ..layer_ops import LayerInputs, refuse_gradient
from .cache import KVCache

if TYPE_CHECKING:
    from .classic import ClassicLayer


def run_composed(layer: ClassicLayer, inputs: LayerInputs, cache: KVCache | None) -> Tensor:
    """The output [batch, q_len, embed_dim] of a layer with a position of its own."""
    q, k, v = (t.unflatten(-1, (-1, layer.head_dim)) for t in layer._project(inputs))
    past = 0 if cache is None else cache.length
    new = k.shape[1]
    q_ids, k_ids = _ids(inputs, past, q.shape[1], k.shape[1], q.device)
    q, k = layer.position(q, k, q_ids, k_ids)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if cache is not None:
        refuse_gradient((q, k, v, *layer.o_proj.parameters()))
        k, v = cache._with_more(k, v)
    mask = None if inputs.mask is None else _mask_of(inputs.mask, q, k, cache)
    reach = layer.sliding_window - 1 if layer.sliding_window else None
    out = attention(
        q, k, v, causal=layer.causal, window=(reach, reach), mask=mask, scale=layer.softmax_scale,
        dropout_p=layer.dropout if layer.training and cache is None else 0.0, backend=layer.backend,
    )  # fmt: skip
    if cache is not None:
        cache.length += new  # a call that was refused has added nothing
    return layer.o_proj(cast(Tensor, out).flatten(2))


def _mask_of(mask: Tensor, q: Tensor, k: Tensor, cache: KVCache | None) -> Tensor:
    """Refuses what the layers' op does, which broadcasts neither keys nor the batch of a padding mask."""
    batch, keys = q.shape[0], k.shape[1]
    if cache is not None:
        mask = mask[..., :keys]  # it is of all that the cache has room for
    if mask.shape[-1] != keys:
        raise RuntimeError(f"fovea: forward: mask.keys is {mask.shape[-1]}, must equal layer.keys = {keys}")
    if mask.dim() == 2:
        if mask.shape[0] != batch:
            raise RuntimeError(f"fovea: forward: mask.batch is {mask.shape[0]}, must equal layer.batch = {batch}")
        mask = mask[:, None, None]
    return mask


def _ids(inputs: LayerInputs, past: int, q_len: int, kv_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of queries and keys, [batch or 1, tokens]: those given, or aligned at the last key."""
    end = past + kv_len
    k_ids = torch.arange(past, end, device=device)[None]
    aligned = torch.arange(end - q_len, end, device=device)[None]
    q_ids = aligned if inputs.position_ids is None else inputs.position_ids
    if inputs.key_position_ids is not None:
        k_ids = inputs.key_position_ids
    elif q_len == kv_len:
        k_ids = q_ids
    return q_ids, k_ids
