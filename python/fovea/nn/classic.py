"""Attention with a key and a value of its own per token: multi-head, self, grouped-query and multi-query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from ..layer_ops import LayerInputs
from .cache import KVCache
from .composed import run_composed
from .layer import AttentionLayer, OneInputLayer
from .options import LayerOptions


class ClassicLayer(AttentionLayer):
    """Heads of one size, which keys and values may have fewer of."""

    def __init__(
        self, kind: str, embed_dim: int, num_heads: int, num_kv_heads: int, sizes: dict, options: LayerOptions
    ) -> None:
        position = options.get("position", "none")
        if callable(position):
            options = {**options, "position": "none"}
        super().__init__(kind, dict(embed_dim=embed_dim, num_heads=num_heads, **sizes), options)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = options.get("head_dim") or embed_dim // num_heads
        self.position: Any = position if callable(position) else None
        self.causal, self.sliding_window = options.get("causal", False), options.get("sliding_window", 0)
        self.softmax_scale, self.backend = options.get("softmax_scale"), options.get("backend")
        if self.backend == "auto":
            self.backend = None

    def _project(self, inputs: LayerInputs) -> Sequence[Tensor]:
        """q, k and v, each [batch, tokens, heads * head_dim]."""
        raise NotImplementedError

    def _run(self, inputs: LayerInputs, cache: KVCache | None) -> Tensor:
        return super()._run(inputs, cache) if self.position is None else run_composed(self, inputs, cache)

    def _weights_of(self, *projections: nn.Linear) -> list[Tensor]:
        weights = [p.weight for p in projections]
        biases = [p.bias for p in projections if p.bias is not None]
        return weights + biases + self._qk_norm_weights()

    def _cache_shapes(self, batch: int, max_seq_len: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("k", "v"), (batch, max_seq_len, self.num_kv_heads, self.head_dim))


class MultiHeadAttention(ClassicLayer):
    """Multi-head attention of a query to a key and a value that may be other tensors (cross attention).

    Args:
        embed_dim: width of query and output.
        num_heads: heads of q, k and v.
        kdim: width of key; embed_dim unless given.
        vdim: width of value; embed_dim unless given.
        bias: whether the projections add one.
        options: those of fovea.nn.LayerOptions.

    Parameters: q_proj [W, embed_dim], k_proj [W, kdim], v_proj [W, vdim] and o_proj [embed_dim, W] with
    W = num_heads * head_dim; q_norm and k_norm [head_dim] with qk_norm.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        sizes = dict(kdim=kdim, vdim=vdim, bias=bias)
        super().__init__("multi_head", embed_dim, num_heads, num_heads, sizes, options)
        width = num_heads * self.head_dim
        self.q_proj = self._linear(embed_dim, width, bias)
        self.k_proj = self._linear(kdim or embed_dim, width, bias)
        self.v_proj = self._linear(vdim or embed_dim, width, bias)
        self.o_proj = self._linear(width, embed_dim, bias)
        self._make_qk_norm(self.head_dim, options)
        self.reset_parameters()

    def _project(self, inputs: LayerInputs) -> Sequence[Tensor]:
        key = inputs.query if inputs.key is None else inputs.key
        value = key if inputs.value is None else inputs.value
        return self.q_proj(inputs.query), self.k_proj(key), self.v_proj(value)

    def _weights(self) -> list[Tensor]:
        return self._weights_of(self.q_proj, self.k_proj, self.v_proj, self.o_proj)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        key_position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """
        Args:
            query: [batch, q_len, embed_dim].
            key: [batch, kv_len, kdim]; query unless given.
            value: [batch, kv_len, vdim]; key unless given.
            mask: bool, True takes part: [batch, kv_len] (padding), [batch, q_len, kv_len], or
                [batch or 1, head or 1, q_len or 1, kv_len]. With a cache kv_len is all that it holds after this call.
            position_ids: [batch or 1, q_len] int, for RoPE; unless given the last query stands at the last key.
            key_position_ids: [batch or 1, kv_len] int.
            cache: of make_cache; the tokens of key and value are added to it.

        Returns:
            [batch, q_len, embed_dim].
        """
        # One tensor twice is told as one: then there is one gradient.
        if value is (query if key is None else key):
            value = None
        if key is query:
            key = None
        return self._call(LayerInputs(query, key, value, mask, position_ids, key_position_ids), cache)


class GroupedQueryAttention(OneInputLayer, ClassicLayer):
    """Self-attention whose query heads share num_kv_heads heads of keys and values.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads.
        num_kv_heads: KV heads; num_heads is a multiple of it.
        bias: whether the projections add one.
        options: those of fovea.nn.LayerOptions.

    Parameters: qkv_proj [(num_heads + 2 * num_kv_heads) * head_dim, embed_dim], its rows in the order q, k, v;
    o_proj [embed_dim, num_heads * head_dim]; q_norm and k_norm [head_dim] with qk_norm.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        sizes = dict(num_kv_heads=num_kv_heads, bias=bias)
        super().__init__("grouped_query", embed_dim, num_heads, num_kv_heads, sizes, options)
        self.qkv_proj = self._linear(embed_dim, (num_heads + 2 * num_kv_heads) * self.head_dim, bias)
        self.o_proj = self._linear(num_heads * self.head_dim, embed_dim, bias)
        self._make_qk_norm(self.head_dim, options)
        self.reset_parameters()

    def _project(self, inputs: LayerInputs) -> Sequence[Tensor]:
        kv_width = self.num_kv_heads * self.head_dim
        return self.qkv_proj(inputs.query).split([self.num_heads * self.head_dim, kv_width, kv_width], -1)

    def _weights(self) -> list[Tensor]:
        return self._weights_of(self.qkv_proj, self.o_proj)


class SelfAttention(GroupedQueryAttention):
    """Self-attention with one projection of q, k and v: as many KV heads as query heads.

    Args:
        embed_dim: width of input and output.
        num_heads: heads.
        bias: whether the projections add one.
        options: those of fovea.nn.LayerOptions.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, bias: bool = True, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(embed_dim, num_heads, num_heads, bias=bias, **options)


class MultiQueryAttention(GroupedQueryAttention):
    """Self-attention whose query heads share one head of keys and values.

    Args:
        embed_dim: width of input and output.
        num_heads: query heads.
        bias: whether the projections add one.
        options: those of fovea.nn.LayerOptions.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, bias: bool = True, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(embed_dim, num_heads, 1, bias=bias, **options)
