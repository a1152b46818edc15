"""fovea in torch's registry of flash attention implementations: with one line, all of a program's calls of
torch.nn.functional.scaled_dot_product_attention run on fovea, those of other people's models too.

    import fovea
    torch.nn.attention.activate_flash_attention_impl("fovea")
    ...
    torch.nn.attention.restore_flash_attention_impl()
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from .sdpa import scaled_dot_product_attention

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_DIM = 256
_torchs_own = torch.ops.aten.scaled_dot_product_attention.default


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether a call runs on fovea. The others are torch's, as are all where flash attention is switched off
    (torch.nn.attention.sdpa_kernel)."""
    return (
        query.dtype in _DTYPES
        and query.shape[-1] <= _LARGEST_DIM
        and value.shape[-1] <= _LARGEST_DIM
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _kernel(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    if takes(query, value):
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _torchs_own._op_dk(
        torch._C.DispatchKey.CompositeImplicitAutograd, query, key, value, attn_mask, dropout_p, is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


class _Activation:
    """torch's op is replaced as long as this lives and is not removed."""

    def __init__(self) -> None:
        # The op itself, not its flash kernels: torch gives those only what its own flash attention takes.
        self._library = torch.library.Library("aten", "IMPL")
        for key in ("CPU", "AutogradCPU", "CUDA", "AutogradCUDA"):
            self._library.impl("scaled_dot_product_attention", _kernel, key)

    def remove(self) -> None:
        self._library._destroy()


register_flash_attention_impl("fovea", register_fn=_Activation)
