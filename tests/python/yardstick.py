"""The plain formula of attention in torch, and the rule that results are held against (docs/numerics.md)."""

import torch

FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
LSE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def visible(q_len, kv_len, *, causal=False, window=None, prefix=0, device="cpu"):
    """[q_len, kv_len] bool: what fovea.attention shows of the keys by position alone."""
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None, :]
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    return seen | (key < prefix)


def formula(q, k, v, *, seen, bias=None, slopes=None, softcap=0.0, sink=None, scale=None):
    """(out, lse) of one batch in q's dtype, every intermediate rounded to it. seen: broadcastable bool mask.

    q [batch, q_len, head_q, dim_qk], k, v likewise with head_kv; out as q, lse [batch, head_q, q_len].
    """
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q_len, kv_len = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if slopes is not None:
        position = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len
        distance = (position - torch.arange(kv_len, device=q.device)).abs()
        scores = scores - (slopes.to(torch.float64).view(-1, slopes.shape[-1], 1, 1) * distance).to(dtype)
    scores = scores.masked_fill(~seen, -float("inf"))
    if sink is not None:
        column = sink.to(dtype).view(1, -1, 1, 1).expand(q.shape[0], -1, q_len, 1)
        scores = torch.cat([scores, column], dim=3)
    lse = torch.logsumexp(scores, dim=3)
    empty = scores.isneginf().all(dim=3, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    if dtype == torch.float64:
        out = torch.softmax(scores, dim=3).masked_fill(empty, 0.0)[..., :kv_len] @ v
    else:
        out = _PlainSoftmax.apply(scores, v, empty)
    return out.transpose(1, 2), lse


class _PlainSoftmax(torch.autograd.Function):
    """softmax(scores) v with the contract's backward pass. torch's own is exact where a row sees one key, by luck of
    its order of sums: no yardstick for those who take the differences that the contract writes."""

    @staticmethod
    def forward(ctx, scores, v, empty):
        weights = torch.softmax(scores, dim=3).masked_fill(empty, 0.0)
        out = weights[..., : v.shape[2]] @ v
        ctx.save_for_backward(weights, v, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        weights, v, out = ctx.saved_tensors
        kv_len = v.shape[2]
        delta = (dout * out).sum(3, keepdim=True)
        dweights = torch.zeros_like(weights)  # a sink's column has no value
        dweights[..., :kv_len] = dout @ v.transpose(2, 3)
        return weights * (dweights - delta), weights[..., :kv_len].transpose(2, 3) @ dout, None


def excess(result, plain_error, exact, largest_lse=0.0):
    """How far a result is beyond its bound; at most 0 passes. exact is float64; gradients hang on lse, which f32
    holds: largest_lse gives them room."""
    if exact.numel() == 0:
        return 0.0
    largest = exact.abs().max().item()
    room = FLOOR[result.dtype] + torch.finfo(result.dtype).eps * largest + 2.0**-22 * largest_lse * largest
    return error(result, exact) - (2 * plain_error + room)


def error(result, exact):
    assert result.shape == exact.shape
    assert result.isfinite().all()
    return (result.double() - exact).abs().max().item() if exact.numel() else 0.0
