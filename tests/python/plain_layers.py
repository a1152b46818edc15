"""The layers of fovea.nn in plain torch, step by step, from the modules' own parameters: what their ops are held
against. CCGQA is held against its published numbers instead (test_nn_ccgqa.py)."""

import math

import torch
import torch.nn.functional as F


def rotate(t, positions, base=10000.0, style="half", fraction=1.0):
    """t [batch, tokens, head, dim], positions [batch or 1, tokens]."""
    n = int(t.shape[3] * fraction)
    frequency = base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
    angle = positions.double()[..., None, None] * frequency  # [batch, tokens, 1, n / 2]
    cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    turning, still = t[..., :n], t[..., n:]
    if style == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    else:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([turned, still], -1)


def alibi_slopes(heads):
    """2^(-8 / n), its powers; between two powers of two every other one of the next."""
    n = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return torch.tensor(slopes + [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)], dtype=torch.float64)


def attend(q, k, v, scale=None, *, causal=False, window=0, alibi=False, mask=None):
    """q, k, v [batch, tokens, head, dim]; heads of k and v are shared. Returns [batch, tokens, head * dim]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    behind = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    if alibi:
        scores = scores - alibi_slopes(q.shape[1])[:, None, None] * behind.abs()
    seen = torch.ones_like(behind, dtype=torch.bool)
    if causal:
        seen &= behind >= 0
    if window:
        seen &= behind.abs() < window
    if mask is not None:
        seen = seen & (mask[:, None, None, :] if mask.dim() == 2 else mask)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    weights = weights.masked_fill(~seen, 0.0)  # a row that sees nothing
    return (weights @ v).transpose(1, 2).flatten(2)


def classic(layer, query, key=None, value=None, *, mask=None, position="none", causal=False, window=0, rope=None):
    """MultiHeadAttention where there are three projections, otherwise the fused layers."""
    dim, heads, kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
    if hasattr(layer, "q_proj"):
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = layer.q_proj(query), layer.k_proj(key), layer.v_proj(value)
    else:
        q, k, v = layer.qkv_proj(query).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
    if position == "rope":
        ends = torch.arange(k.shape[1])[None]
        q, k = rotate(q, ends[:, k.shape[1] - q.shape[1] :], **(rope or {})), rotate(k, ends, **(rope or {}))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    out = attend(q, k, v, causal=causal, window=window, alibi=position == "alibi", mask=mask)
    return layer.o_proj(out)


def latent(layer, x, *, mask=None, position="none", causal=False):
    heads, rope_dim = layer.num_heads, layer.rope_dim
    deepseek = layer.q_latent_norm is not None
    positions = torch.arange(x.shape[1])[None]
    c_q, c_kv = layer.q_down(x), layer.kv_down(x)
    c, shared = c_kv.split([layer.kv_latent, rope_dim], -1)
    if deepseek:
        c_q, c = layer.q_latent_norm(c_q), layer.kv_latent_norm(c)
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in (layer.q_up(c_q), layer.k_up(c), layer.v_up(c)))
    if deepseek:
        still, turning = q.split([layer.nope_dim, rope_dim], -1)
        q = torch.cat([still, rotate(turning, positions, style="interleaved")], -1)
        shared = rotate(shared[:, :, None], positions, style="interleaved")
        k = torch.cat([k, shared.expand(-1, -1, heads, -1)], -1)
    elif position == "rope":
        q, k = rotate(q, positions), rotate(k, positions)
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    return F.linear(attend(q, k, v, causal=causal, mask=mask), layer.o_proj.weight)
