"""Options that the layers of classic attention and latent attention have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import TypedDict


class LayerOptions(TypedDict, total=False):
    """What can be given to a layer by name besides its sizes.

    head_dim: channels of a head; embed_dim / num_heads unless given.
    dropout: the probability of dropping an attention weight, while training.
    causal: a token sees none after itself.
    sliding_window: n > 0: a token sees those up to n - 1 positions away, itself included.
    position: "none", "rope" or "alibi"; in the classic layers also a module or function of the caller's, which turns
        q [batch, q_len, head_q, dim] and k [batch, kv_len, head_kv, dim] with their positions [batch or 1, tokens]:
        q, k = position(q, k, q_positions, k_positions). Such a layer runs in several ops.
    rope_base: 10000. Pair i of n / 2 turns by position * rope_base^(-2 i / n).
    rope_style: "half" (channel i turns with i + n / 2) or "interleaved" (2 i with 2 i + 1).
    rope_fraction: of a head's channels, the first ones; 1.
    qk_norm: "none", "rmsnorm" or "layernorm", of each head's q and k, after their position.
    norm_eps: 1e-6.
    softmax_scale: 1 / sqrt(head_dim) unless given.
    max_seq_len: tokens that a cache has room for unless make_cache is told.
    batch_first: True: tensors are [batch, tokens, width]; False: [tokens, batch, width].
    backend: an engine by name; "auto", or none given: the best that takes the problem.
    device, dtype: of the parameters, as in torch's layers.
    """

    head_dim: int | None
    dropout: float
    causal: bool
    sliding_window: int
    position: str | Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rope_base: float
    rope_style: str
    rope_fraction: float
    qk_norm: str
    norm_eps: float
    softmax_scale: float | None
    max_seq_len: int
    batch_first: bool
    backend: str | None
    device: torch.device | str | None
    dtype: torch.dtype | None
