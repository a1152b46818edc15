"""Latent attention: keys and values are made from a narrow latent, which is all that a cache holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from .layer import OneInputLayer
from .names import rename
from .options import LayerOptions

# Of DeepSeek's models, as they are published.
_DEEPSEEK_NAMES = {
    "q_a_proj": "q_down",
    "q_a_layernorm": "q_latent_norm",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_latent_norm",
}


class LatentAttention(OneInputLayer):
    """Attention through latents, in the simple form or, by `LatentAttention.deepseek`, DeepSeek's.

    simple:    q = Wuq Wdq x           c = Wdkv x                      k_h = Wuk,h c              v_h = Wuv,h c
    deepseek:  q = Wuq norm(Wdq x)     (c, r) = Wdkv x, c = norm(c)    k_h = (Wuk,h c, rope(r))   v_h = Wuv,h c

    Args:
        embed_dim: width of input and output, E.
        num_heads: heads, H.
        latent_dim: of both latents; max(16, embed_dim / 8) unless given.
        q_latent: latent_dim unless given.
        kv_latent: latent_dim unless given.
        form: "simple", or "deepseek", whose heads have nope_dim channels that do not turn, rope_dim that do, and
            v_dim of values; its position is "rope", and it has neither head_dim nor qk_norm.
        nope_dim: form "deepseek" only, as rope_dim and v_dim.
        rope_dim: channels of keys that all heads share.
        v_dim: channels of a head's values.
        decode: how a call with a cache works: "expanded" makes all keys and values again, "absorbed" works on the
            latents themselves, "auto" takes what is less work.
        options: those of fovea.nn.LayerOptions.

    Parameters, with n = nope_dim + rope_dim (simple: n = nope_dim = v_dim = head_dim, rope_dim = 0): q_down
    [q_latent, E], q_up [H * n, q_latent], kv_down [kv_latent + rope_dim, E], k_up [H * nope_dim, kv_latent], v_up
    [H * v_dim, kv_latent], o_proj [E, H * v_dim]; q_latent_norm and kv_latent_norm of form "deepseek", q_norm and
    k_norm with qk_norm. A state dict may also have the names of DeepSeek's models (q_a_proj, ..., kv_b_proj).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        latent_dim: int | None = None,
        q_latent: int | None = None,
        kv_latent: int | None = None,
        form: str = "simple",
        nope_dim: int = 128,
        rope_dim: int = 64,
        v_dim: int = 128,
        decode: str = "auto",
        **options: Unpack[LayerOptions],
    ) -> None:
        latent_dim = latent_dim or max(16, embed_dim // 8)
        q_latent, kv_latent = q_latent or latent_dim, kv_latent or latent_dim
        sizes: dict[str, Any] = dict(
            embed_dim=embed_dim,
            num_heads=num_heads,
            form=form,
            q_latent=q_latent,
            kv_latent=kv_latent,
            decode=decode,
        )
        if form == "deepseek":
            options.setdefault("position", "rope")
            sizes.update(nope_dim=nope_dim, rope_dim=rope_dim, v_dim=v_dim)
        else:
            rope_dim = 0
            nope_dim = v_dim = options.get("head_dim") or embed_dim // max(num_heads, 1)
        super().__init__("latent", sizes, options)
        self.embed_dim, self.num_heads, self.q_latent, self.kv_latent = embed_dim, num_heads, q_latent, kv_latent
        self.nope_dim, self.rope_dim, self.v_dim = nope_dim, rope_dim, v_dim
        self.q_down = self._linear(embed_dim, q_latent)
        self.q_up = self._linear(q_latent, num_heads * (nope_dim + rope_dim))
        self.kv_down = self._linear(embed_dim, kv_latent + rope_dim)
        self.k_up = self._linear(kv_latent, num_heads * nope_dim)
        self.v_up = self._linear(kv_latent, num_heads * v_dim)
        self.o_proj = self._linear(num_heads * v_dim, embed_dim)
        self.q_latent_norm = self.kv_latent_norm = None
        if form == "deepseek":
            eps = options.get("norm_eps", 1e-6)
            self.q_latent_norm = nn.RMSNorm(q_latent, eps=eps, **self._factory)
            self.kv_latent_norm = nn.RMSNorm(kv_latent, eps=eps, **self._factory)
        self._make_qk_norm(nope_dim, options)
        self.reset_parameters()

    @classmethod
    def deepseek(
        cls,
        embed_dim: int = 7168,
        num_heads: int = 128,
        *,
        q_latent: int = 1536,
        kv_latent: int = 512,
        nope_dim: int = 128,
        rope_dim: int = 64,
        v_dim: int = 128,
        decode: str = "auto",
        **options: Unpack[LayerOptions],
    ) -> LatentAttention:
        """DeepSeek's form, with the sizes of DeepSeek V3 unless given: causal, interleaved RoPE."""
        options.setdefault("causal", True)
        options.setdefault("rope_style", "interleaved")
        return cls(
            embed_dim, num_heads, form="deepseek", q_latent=q_latent, kv_latent=kv_latent, nope_dim=nope_dim,
            rope_dim=rope_dim, v_dim=v_dim, decode=decode, **options,
        )  # fmt: skip

    def _weights(self) -> list[Tensor]:
        projections = (self.q_down, self.q_up, self.kv_down, self.k_up, self.v_up, self.o_proj)
        latent_norms = [norm.weight for norm in (self.q_latent_norm, self.kv_latent_norm) if norm is not None]
        return [p.weight for p in projections] + latent_norms + self._qk_norm_weights()

    def _cache_shapes(self, batch: int, max_seq_len: int) -> dict[str, tuple[int, ...]]:
        return {"k": (batch, max_seq_len, 1, self.kv_latent + self.rope_dim)}

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        rename(state_dict, prefix, _DEEPSEEK_NAMES)
        both = state_dict.pop(f"{prefix}kv_b_proj.weight", None)
        if both is not None:  # each head's rows of k_up, then its rows of v_up
            k_up, v_up = both.unflatten(0, (self.num_heads, -1)).split([self.nope_dim, self.v_dim], 1)
            state_dict[f"{prefix}k_up.weight"] = k_up.flatten(0, 1)
            state_dict[f"{prefix}v_up.weight"] = v_up.flatten(0, 1)
        super()._load_from_state_dict(state_dict, prefix, *rest)
