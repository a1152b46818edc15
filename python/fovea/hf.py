"""fovea as an attention implementation of Hugging Face transformers:

import fovea.hf
fovea.hf.register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fovea")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .eager import run_attention_out
from .settings import op_settings, per_score


def register(name: str = "fovea") -> None:
    """Makes `attn_implementation=name` known to transformers, which must be installed."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    # Its masks are bool, True takes part, and None where position alone decides: what fovea takes too.
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [batch, head_q, q_len, dim], key and value likewise, attention_mask bool or
    float, s_aux a sink per head. A window is part of the mask. Returns ([batch, q_len, head_q, dim], None)."""
    if cache is not None:
        raise NotImplementedError("fovea: paged caches are not supported")
    q_len = query.shape[2]
    causal = q_len > 1 and attention_mask is None
    if causal:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and key.shape[2] != q_len:
        # A cache that was allocated but not filled: transformers aligns at the start, nobody sees what follows.
        key, value = key[:, :, :q_len], value[:, :, :q_len]
    bias = position_bias
    if bias is not None:
        bias = bias[..., : key.shape[2]]
    settings = op_settings(query, causal, softcap=softcap or 0.0, sink=s_aux, dropout_p=dropout, scale=scaling)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            settings["mask"] = per_score("mask", attention_mask, key.shape[2])
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    if bias is not None:
        settings["bias"] = per_score("bias", bias, key.shape[2])
    settings["heads_first"] = True
    return run_attention_out(query, key, value, settings).transpose(1, 2), None
