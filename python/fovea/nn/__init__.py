"""Attention layers as torch.nn.Modules, on fovea's kernels: projections, positions, norms, attention and a KV cache,
forward and backward, in one op each.

    layer = fovea.nn.GroupedQueryAttention(512, num_heads=8, num_kv_heads=2, causal=True, position="rope")
    y = layer(x)                                       # [batch, tokens, 512]

    cache = layer.make_cache(batch=1, max_seq_len=1024)
    with torch.no_grad():
        y = layer(prompt, cache=cache)                 # then token by token, with the same result
"""

from .cache import KVCache
from .ccgqa import CCGQAttention
from .classic import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention, SelfAttention
from .latent import LatentAttention
from .options import LayerOptions

__all__ = [
    "CCGQAttention",
    "GroupedQueryAttention",
    "KVCache",
    "LatentAttention",
    "LayerOptions",
    "MultiHeadAttention",
    "MultiQueryAttention",
    "SelfAttention",
]
