"""One small layer of each kind and option, by name: what the tests of fovea.nn run over, and how they compare runs."""

import torch

import fovea.nn as fnn

EMBED = 24
INTERLEAVED = dict(rope_style="interleaved", rope_fraction=0.5, rope_base=500.0)
BUILD = {
    "multi head": lambda **o: fnn.MultiHeadAttention(EMBED, 4, **o),
    "multi head, rope, rmsnorm": lambda **o: fnn.MultiHeadAttention(
        EMBED, 4, bias=False, position="rope", qk_norm="rmsnorm", causal=True, **o
    ),
    "self": lambda **o: fnn.SelfAttention(EMBED, 4, causal=True, position="rope", **o),
    "self, alibi, window": lambda **o: fnn.SelfAttention(EMBED, 6, position="alibi", sliding_window=3, **o),
    "grouped": lambda **o: fnn.GroupedQueryAttention(EMBED, 4, 2, head_dim=8, causal=True, **o),
    "grouped, interleaved rope, layernorm": lambda **o: fnn.GroupedQueryAttention(
        EMBED, 4, 2, head_dim=8, causal=True, position="rope", qk_norm="layernorm", **INTERLEAVED, **o
    ),
    "multi query": lambda **o: fnn.MultiQueryAttention(EMBED, 4, bias=False, causal=True, position="alibi", **o),
    "latent": lambda **o: fnn.LatentAttention(EMBED, 4, causal=True, latent_dim=8, **o),
    "latent, rope, rmsnorm": lambda **o: fnn.LatentAttention(
        EMBED, 4, causal=True, position="rope", qk_norm="rmsnorm", **o
    ),
    "latent, deepseek": lambda **o: fnn.LatentAttention.deepseek(
        EMBED, 4, q_latent=12, kv_latent=8, nope_dim=6, rope_dim=4, v_dim=5, **o
    ),
    "ccgqa, hydra": lambda **o: fnn.CCGQAttention.hydra(64, 4, 2, compression=2, **o),
    "ccgqa, zaya": lambda **o: fnn.CCGQAttention.zaya(EMBED, 4, 2, 8, **o),
    "ccgqa, bare": lambda **o: fnn.CCGQAttention(
        64, 4, 4, compression=2, convs=False, qk_mean=False, qk_norm=False, rope=False, value_shift=False, **o
    ),
}
CAUSAL = [name for name in BUILD if name not in ("multi head", "self, alibi, window")]


def make(name, dtype=torch.float32, device="cpu", **options):
    """The layer, its norms and temperatures moved off their initial values so that they matter."""
    layer = BUILD[name](dtype=dtype, device=device, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def tokens(layer, batch=2, length=7, dtype=torch.float32, device="cpu"):
    return torch.randn(batch, length, layer.embed_dim, dtype=dtype, device=device)


def gradients(run, layer, x):
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    out = run(x)
    out.float().square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def assert_same(some, others, room=1e-5):
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a, b, rtol=room, atol=room)
