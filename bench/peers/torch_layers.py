"""Whole layers in plain PyTorch: Linear, scaled_dot_product_attention and what stands between them.

A layer is a function of x [batch, len, embed] and its weights, a dictionary by the names and in the
shapes of fovea's layers (include/fovea/layers.h). All are causal.
"""

import dataclasses
import math

import torch
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Sizes:
    heads: int
    heads_kv: int
    dim: int

    @property
    def q(self):
        return self.heads * self.dim

    @property
    def kv(self):
        return self.heads_kv * self.dim


class Rope:
    """Turns the first channels of heads [batch, head, len, dim] by their position.

    Pairs of channels, i and i + half or 2 i and 2 i + 1, turn together; the table has the sine of a pair's first
    channel negative, so that a pair turned is x cos + swapped(x) sin.
    """

    def __init__(self, length, dim, like, interleaved=False, fraction=1.0, base=10000.0):
        self.turning = int(dim * fraction) // 2 * 2
        self.interleaved = interleaved
        pair = torch.arange(self.turning // 2, dtype=torch.float64, device=like.device)
        position = torch.arange(length, dtype=torch.float64, device=like.device)
        angle = torch.outer(position, base ** (-2 * pair / self.turning))
        both = torch.stack if interleaved else torch.cat
        self.cos = both((angle.cos(), angle.cos()), dim=-1).flatten(1).to(like.dtype)
        self.sin = both((-angle.sin(), angle.sin()), dim=-1).flatten(1).to(like.dtype)

    def __call__(self, x):
        if self.turning == x.shape[-1]:
            return self.turn(x)
        turning, rest = x.split((self.turning, x.shape[-1] - self.turning), dim=-1)
        return torch.cat((self.turn(turning), rest), dim=-1)

    def turn(self, x):
        if not self.interleaved:
            return torch.addcmul(x * self.cos, x.roll(self.turning // 2, dims=-1), self.sin)
        # Neighbours are taken apart instead: swapping them in place is slow on a CPU.
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos[:, 1::2], self.sin[:, 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def no_rope(x):
    return x


def split_heads(x, dim):
    """[batch, len, heads * dim] -> [batch, heads, len, dim]"""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def attend(q, k, v):
    """Heads of [batch, heads, len, dim] -> [batch, len, heads * dim]."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


def fused_layer(x, w, sizes, rope):
    """Self-, grouped-query and multi-query attention: one projection to q, k and v."""
    qk, v = F.linear(x, w["qkv"]).split((sizes.q + sizes.kv, sizes.kv), dim=-1)
    q, k = rope(split_heads(qk, sizes.dim)).split((sizes.heads, sizes.heads_kv), dim=1)
    return F.linear(attend(q, k, split_heads(v, sizes.dim)), w["out"])


def multi_head_layer(x, w, sizes, rope):
    q, k, v = (split_heads(F.linear(x, w[name]), sizes.dim) for name in ("q", "k", "v"))
    return F.linear(attend(rope(q), rope(k), v), w["out"])


def latent_layer(x, w, sizes, rope):
    q = F.linear(F.linear(x, w["q_down"]), w["q_up"])
    latent = F.linear(x, w["kv_down"])
    k, v = F.linear(latent, w["k_up"]), F.linear(latent, w["v_up"])
    q, k, v = (split_heads(t, sizes.dim) for t in (q, k, v))
    return F.linear(attend(rope(q), rope(k), v), w["out"])


def one_token_later(x):
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def causal_conv(x, weight, groups):
    """x [batch, len, channels]; the last tap of the weight is the current token."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, groups=groups).transpose(1, 2)


def ccgqa_hydra_layer(x, w, sizes, rope):
    q0, k0, v_now, v_next = F.linear(x, w["qkv"]).split(
        (sizes.q, sizes.kv, sizes.kv // 2, sizes.kv - sizes.kv // 2), dim=-1)
    v = torch.cat((v_now, one_token_later(v_next)), dim=-1)
    q = causal_conv(causal_conv(q0, w["q_conv1"], sizes.heads), w["q_conv2"], 1)
    k = causal_conv(causal_conv(k0, w["k_conv1"], sizes.heads_kv), w["k_conv2"], 1)
    q, k, v, q0, k0 = (split_heads(t, sizes.dim) for t in (q, k, v, q0, k0))
    if sizes.heads == sizes.heads_kv:
        mean = (q0 + k0) / 2
        q, k = q + mean, k + mean
    else:
        q, k = (torch.add(q, k0.mean(dim=1, keepdim=True), alpha=0.5),
                torch.add(k, q0.mean(dim=1, keepdim=True), alpha=0.5))
    q = F.normalize(q, dim=-1)
    k = F.normalize(k, dim=-1) * w["temperature"]
    return F.linear(attend(rope(q), rope(k), v), w["out"])


def ccgqa_zaya_layer(x, w, sizes, rope):
    qk0, v_now, v_next = F.linear(x, w["qkv"]).split(
        (sizes.q + sizes.kv, sizes.kv // 2, sizes.kv - sizes.kv // 2), dim=-1)
    v = split_heads(torch.cat((v_now, one_token_later(v_next)), dim=-1), sizes.dim)
    channel, head = w["channel_conv"], w["head_conv"]
    # Zeros come once, before both convolutions: a bias of the first reaches what the second sees of them.
    qk = F.pad(qk0.transpose(1, 2), (channel.shape[-1] + head.shape[-1] - 2, 0))
    qk = F.conv1d(qk, channel, w.get("channel_conv_bias"), groups=sizes.q + sizes.kv)
    qk = F.conv1d(qk, head, w.get("head_conv_bias"), groups=sizes.heads + sizes.heads_kv)
    q, k = (split_heads(t, sizes.dim) for t in qk.transpose(1, 2).split((sizes.q, sizes.kv), dim=-1))
    q0, k0 = (split_heads(t, sizes.dim) for t in qk0.split((sizes.q, sizes.kv), dim=-1))
    mean = (q0.unflatten(1, (sizes.heads_kv, -1)) + k0.unsqueeze(2)) / 2  # [batch, KV head, its heads, len, dim]
    q, k = q + mean.flatten(1, 2), k + mean.mean(dim=2)
    q = F.normalize(q, dim=-1) * math.sqrt(sizes.dim)
    k = F.normalize(k, dim=-1) * math.sqrt(sizes.dim) * w["temperature"].exp().view(-1, 1, 1)
    return F.linear(attend(rope(q), rope(k), v), w["out"])
