"""fovea: exact attention for PyTorch, on CPUs and NVIDIA GPUs.

    import fovea
    out = fovea.attention(q, k, v, causal=True)        # [batch, seq, head, dim]

or, with one changed line, in a model that calls torch's own:

    from fovea import scaled_dot_product_attention     # [batch, head, seq, dim], torch's semantics

Layers are in fovea.nn.
"""

from . import flash_impl as _flash_impl  # noqa: F401  (makes itself known to torch, and changes nothing yet)
from . import nn
from . import ops as _ops  # registers torch.ops.fovea
from .functional import attention, attention_varlen, attention_with_kv_cache, merge
from .sdpa import scaled_dot_product_attention

__version__: str = _ops.version()

__all__ = [
    "attention",
    "attention_varlen",
    "attention_with_kv_cache",
    "merge",
    "nn",
    "scaled_dot_product_attention",
]
