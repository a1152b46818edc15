"""CCGQA: attention in a compressed space, q and k mixed along the sequence by two short causal convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .cache import KVCache
from .layer import OneInputLayer
from .names import rename
from .options import LayerOptions

# Names of the same weights elsewhere: rows of qkv_proj that were apart, and others.
_ROWS_OF_QKV = (("q_down", "k_down", "v_down", "v_shift_down"), ("linear_q", "linear_k", "val_proj1", "val_proj2"))
_OTHER_NAMES = {
    "q_conv1": "q_conv.conv1",
    "q_conv2": "q_conv.conv2",
    "k_conv1": "k_conv.conv1",
    "k_conv2": "k_conv.conv2",
    "conv_qk.0": "qk_conv.conv1",
    "conv_qk.1": "qk_conv.conv2",
    "temp": "key_temperature",
}


class _Convolutions(nn.Module):
    """Two convolutions, one after the other."""

    def __init__(self, conv1: nn.Conv1d, conv2: nn.Conv1d) -> None:
        super().__init__()
        self.conv1 = conv1
        self.conv2 = conv2


class CCGQAttention(OneInputLayer):
    """Compressed convolutional grouped-query attention. `CCGQAttention(512, 8, 2)` and `CCGQAttention.hydra` are the
    one published definition, `CCGQAttention.zaya` is the other; docs/layers.md says what they compute.

    Args:
        embed_dim: width of input and output, E.
        num_heads: query heads.
        num_kv_heads: KV heads; num_heads is a multiple of it.
        compression: heads have embed_dim / compression / num_heads channels, where head_dim is not given.
        head_dim: channels of a head, d. L = num_heads * d, KV = num_kv_heads * d.
        convs: whether there are convolutions.
        conv: "heads_then_all" or "channels_then_heads": what each of the two mixes.
        conv_taps: tokens that each of the two spans.
        conv_bias: with conv "channels_then_heads": whether they add one.
        qk_mean: whether q and k are coupled by means of what they were before the convolutions.
        coupling: of "all_heads", or of each "group".
        qk_norm: whether each head of q and k is normalised, keys times key_temperature.
        sqrt_dim_norm: to the length sqrt(d), not 1.
        temperature: "shared" by all heads, "per_head", or "per_head_exp", its exponential.
        rope: whether q and k turn; rope_base, rope_style, rope_fraction are those of fovea.nn.LayerOptions.
        value_shift: whether half of a token's values are those of the token before it.
        output_scale: of what o_proj gives.

    The others are those of fovea.nn.LayerOptions.

    Parameters: qkv_proj [L + 2 KV, E], its rows in the order q, k, values, values of the token before; o_proj [E, L];
    q_conv.conv1 [L, d, taps], q_conv.conv2 [L, L, taps], k_conv likewise of KV, or qk_conv.conv1 [L + KV, 1, taps]
    and qk_conv.conv2 [L + KV, d, taps]; key_temperature [1] or [num_kv_heads]. A state dict may also hold q_down,
    k_down, v_down, v_shift_down (or linear_q, linear_k, val_proj1, val_proj2) apart, and q_conv1, q_conv2, k_conv1,
    k_conv2, conv_qk.0, conv_qk.1, temp.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        compression: int = 4,
        head_dim: int | None = None,
        convs: bool = True,
        conv: str = "heads_then_all",
        conv_taps: tuple[int, int] = (3, 3),
        conv_bias: bool = False,
        qk_mean: bool = True,
        coupling: str = "all_heads",
        qk_norm: bool = True,
        sqrt_dim_norm: bool = False,
        temperature: str = "shared",
        rope: bool = True,
        rope_base: float = 10000.0,
        rope_style: str = "interleaved",
        rope_fraction: float = 1.0,
        value_shift: bool = True,
        causal: bool = True,
        sliding_window: int = 0,
        softmax_scale: float | None = None,
        output_scale: float = 1.0,
        max_seq_len: int = 0,
        batch_first: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("compression", compression), ("num_heads", num_heads)):
            if value < 1:
                raise ValueError(f"CCGQAttention: {name} is {value}, must be at least 1")
        if len(conv_taps) != 2:
            raise ValueError(f"CCGQAttention: conv_taps is {tuple(conv_taps)}, must be two numbers")
        if head_dim is None:
            if embed_dim % (compression * num_heads) != 0:
                raise ValueError(
                    f"CCGQAttention: embed_dim is {embed_dim}, must be a multiple of compression * num_heads = "
                    f"{compression * num_heads}"
                )
            head_dim = embed_dim // compression // num_heads
        sizes = dict(
            embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, convs=convs,
            conv=conv, conv_taps_1=conv_taps[0], conv_taps_2=conv_taps[1], conv_bias=conv_bias, qk_mean=qk_mean,
            coupling=coupling, qk_norm=qk_norm, sqrt_dim_norm=sqrt_dim_norm, temperature=temperature, rope=rope,
            value_shift=value_shift, output_scale=output_scale,
        )  # fmt: skip
        options = LayerOptions(
            rope_base=rope_base, rope_style=rope_style, rope_fraction=rope_fraction, causal=causal,
            sliding_window=sliding_window, softmax_scale=softmax_scale, max_seq_len=max_seq_len,
            batch_first=batch_first, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        super().__init__("ccgqa", sizes, options)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.value_shift = head_dim, value_shift
        self._reach = sum(conv_taps) - 2 if convs else 0
        q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.qkv_proj = self._linear(embed_dim, q_width + 2 * kv_width)
        self.o_proj = self._linear(q_width, embed_dim)
        self.q_conv = self.k_conv = self.qk_conv = None
        if convs and conv == "heads_then_all":
            self.q_conv = self._convolutions(q_width, (num_heads, 1), conv_taps, False)
            self.k_conv = self._convolutions(kv_width, (num_kv_heads, 1), conv_taps, False)
        elif convs:
            width = q_width + kv_width
            self.qk_conv = self._convolutions(width, (width, num_heads + num_kv_heads), conv_taps, conv_bias)
        self.key_temperature = None
        if qk_norm:
            first = {"shared": math.sqrt(head_dim), "per_head": 1.0, "per_head_exp": 0.0}
            self._first_temperature = first[temperature]
            count = 1 if temperature == "shared" else num_kv_heads
            self.key_temperature = nn.Parameter(torch.empty(count, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def hydra(
        cls, embed_dim: int, num_heads: int, num_kv_heads: int, compression: int = 4, **options: Any
    ) -> CCGQAttention:
        """Heads of embed_dim / compression / num_heads channels; convolutions within a head, then over all heads."""
        return cls(embed_dim, num_heads, num_kv_heads, compression=compression, **options)

    @classmethod
    def zaya(
        cls, embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int, **options: Any
    ) -> CCGQAttention:
        """The paper's (arXiv 2510.04476): convolutions of a channel, then within a head, both with biases; coupling by
        group; a temperature per KV head; RoPE, half style, on half of the channels."""
        preset = dict(
            conv="channels_then_heads", conv_taps=(2, 2), conv_bias=True, coupling="group", sqrt_dim_norm=True,
            temperature="per_head_exp", rope_style="half", rope_fraction=0.5,
        )  # fmt: skip
        return cls(embed_dim, num_heads, num_kv_heads, head_dim=head_dim, **{**preset, **options})

    def _convolutions(
        self, width: int, groups: tuple[int, int], taps: tuple[int, int], bias: bool
    ) -> _Convolutions:
        return _Convolutions(
            *(nn.Conv1d(width, width, taps[i], groups=groups[i], bias=bias, **self._factory) for i in (0, 1))
        )

    def reset_parameters(self) -> None:
        """U(+-1 / sqrt(fan in)), and temperatures that change nothing of the usual attention."""
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Conv1d)):
                part.reset_parameters()
        if self.key_temperature is not None:
            nn.init.constant_(self.key_temperature, self._first_temperature)

    def _weights(self) -> list[Tensor]:
        weights = [self.qkv_proj.weight, self.o_proj.weight]
        for pair in (self.q_conv, self.k_conv, self.qk_conv):
            if pair is not None:
                weights += [pair.conv1.weight, pair.conv2.weight]
        if self.qk_conv is not None:
            weights += [b for b in (self.qk_conv.conv1.bias, self.qk_conv.conv2.bias) if b is not None]
        if self.key_temperature is not None:
            weights.append(self.key_temperature)
        return weights

    def _cache_shapes(self, batch: int, max_seq_len: int) -> dict[str, tuple[int, ...]]:
        kv_width = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("k", "v"), (batch, max_seq_len, self.num_kv_heads, self.head_dim)
        )
        if self._reach:
            shapes["conv"] = (batch, self._reach, self.num_heads * self.head_dim + kv_width)
        if self.value_shift:
            shapes["shift"] = (batch, 1, kv_width // 2)
        return shapes

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_padding: Tensor | None = None,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """
        Args:
            x: [batch, tokens, embed_dim]. Left padding is zeros in x whose keys key_padding leaves out.
            key: x or nothing, as value: layer(x, x, x) is layer(x), and any other tensor is refused.
            value: x or nothing.
            key_padding: [batch, keys] bool or int: 1 is a token, 0 is padding. A row that sees no key gives 0.
            mask: instead of it, bool, True takes part: [batch, tokens, keys], or
                [batch or 1, head or 1, tokens or 1, keys]. With a cache keys are all that it holds after this call.
            position_ids: [batch or 1, tokens] int; unless given counted on from the cache.
            cache: of make_cache; the tokens are added to it.

        Returns:
            [batch, tokens, embed_dim].
        """
        if key_padding is not None:
            if mask is not None:
                raise ValueError("CCGQAttention: mask must not be given together with key_padding")
            mask = key_padding
        return super().forward(x, key, value, mask=mask, position_ids=position_ids, cache=cache)

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        rename(state_dict, prefix, _OTHER_NAMES)
        for names in _ROWS_OF_QKV:
            keys = [f"{prefix}{name}.weight" for name in names]
            rows = [state_dict.pop(key) for key in keys if key in state_dict]
            if rows:
                state_dict[f"{prefix}qkv_proj.weight"] = torch.cat(rows)
        super()._load_from_state_dict(state_dict, prefix, *rest)
