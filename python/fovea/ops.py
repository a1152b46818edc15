"""What torch must know about torch.ops.fovea besides its kernels, which are in python/csrc: shapes, gradients,
autocast, and how much work a call is. Importing this module loads the library that holds the kernels."""

from __future__ import annotations

import math
import pathlib

import torch
from torch.utils.flop_counter import register_flop_formula

torch.ops.load_library(str(pathlib.Path(__file__).with_name("libfovea_torch.so")))

attention = torch.ops.fovea.attention.default
attention_no_grad = torch.ops.fovea.attention_no_grad.default
attention_backward = torch.ops.fovea.attention_backward.default
merge = torch.ops.fovea.merge.default
version = torch.ops.fovea.version.default


def _names(op) -> list:
    return [argument.name for argument in op._schema.arguments]


def _find_recorded(name: str, taken: str, taken_back: str, given_back: int):
    """An op of torch's that fovea has kernels for (csrc/recorded.cc) and torch a gradient in C++, as it is called in the
    least time. None where a later torch has changed what it takes."""
    forward, backward = (getattr(torch.ops.aten, n, None) for n in (name, name + "_backward"))
    if forward is None or backward is None:
        return None
    same = _names(forward.default) == taken.split() and _names(backward.default) == taken_back.split()
    if not same or len(forward.default._schema.returns) != given_back:
        return None
    return getattr(torch, name, forward.default._op)  # a function of torch's own takes half the time of an op


recorded_on_cpu = _find_recorded(
    "_scaled_dot_product_fused_attention_overrideable",
    "query key value attn_bias dropout_p is_causal return_debug_mask scale",
    "grad_out query key value attn_bias grad_input_mask out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal philox_seed philox_offset scale",
    9,
)
recorded_on_gpu = _find_recorded(
    "_scaled_dot_product_flash_attention_for_cpu",
    "query key value dropout_p is_causal attn_mask scale",
    "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
    2,
)
_FORWARD, _BACKWARD = _names(attention), _names(attention_backward)
_TENSORS = _FORWARD.index("dropout_seed") + 1  # tensors come first, then numbers
_BIAS, _ALIBI, _SINK = (_FORWARD.index(name) for name in ("bias", "alibi_slopes", "sink"))


# --- shapes -----------------------------------------------------------------------------------------------------


def _named(names, args, settings) -> dict:
    """A call's arguments by name. torch passes what was given in either way, and leaves defaults out."""
    return {**dict(zip(names, args)), **settings}


def _empty(like, shape, heads_first):
    """Dense as [batch, seq, head, dim], whichever way torch is shown it."""
    if not heads_first:
        return like.new_empty(shape)
    batch, head, length, dim = shape
    return like.new_empty((batch, length, head, dim)).transpose(1, 2)


@torch.library.register_fake("fovea::attention")
def _attention_shapes(q, k, v, *rest, **settings):
    heads_first = _named(_FORWARD[3:], rest, settings).get("heads_first", False)
    if q.dim() == 3:  # packed
        total_q, head_q, _ = q.shape
        lse_shape = (head_q, total_q)
    elif heads_first:
        lse_shape = q.shape[:3]
    else:
        batch, q_len, head_q, _ = q.shape
        lse_shape = (batch, head_q, q_len)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _empty(q, (*q.shape[:-1], v.shape[-1]), heads_first)
    return out, q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.register_fake("fovea::attention_no_grad")
def _attention_no_grad_shapes(*args, **settings):
    return _attention_shapes(*args, **settings)[0]


@torch.library.register_fake("fovea::attention_backward")
def _attention_backward_shapes(*args, **settings):
    given = _named(_BACKWARD, args, settings)

    def gradient(name, wanted):
        return (
            given[name].new_empty(given[name].shape) if wanted else given["q"].new_empty((0,), dtype=torch.float32)
        )

    heads_first = given.get("heads_first", False)
    return (
        *(_empty(given[name], given[name].shape, heads_first) for name in ("q", "k", "v")),
        gradient("bias", given["want_dbias"]),
        gradient("sink", given["want_dsink"]),
    )


@torch.library.register_fake("fovea::merge")
def _merge_shapes(outs, lses):
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


# --- gradients --------------------------------------------------------------------------------------------------


def _attention_save(ctx, inputs, output):
    ctx.save_for_backward(*output, *inputs[:_TENSORS])
    ctx.settings = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)  # an lse that nobody used costs nothing


def _attention_gradients(ctx, dout, dlse):
    needs = ctx.needs_input_grad  # of the arguments that were given: defaults at the end are left out
    wants = {i for i in (_BIAS, _ALIBI, _SINK) if i < len(needs) and needs[i]}
    if _ALIBI in wants:
        raise NotImplementedError("fovea: alibi_slopes has no gradient; detach it")
    out, lse, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dbias, dsink = attention_backward(
        dout, dlse, out, lse, _BIAS in wants, _SINK in wants, *tensors, *ctx.settings
    )
    gradients = [dq, dk, dv] + [None] * (len(needs) - 3)
    if _BIAS in wants:
        gradients[_BIAS] = dbias
    if _SINK in wants:
        gradients[_SINK] = dsink
    return tuple(gradients)


def no_second_derivative(ctx, *gradients):
    raise NotImplementedError("fovea: what it computes can be differentiated once, not twice")


def _merge_save(ctx, inputs, output):
    outs, lses = inputs
    ctx.parts = len(outs)
    ctx.save_for_backward(*output, *outs, *lses)


def _merge_gradients(ctx, dout, dlse):
    """A part's weight is exp(lse_n - lse): its share of the softmax denominator."""
    out, lse, *parts = ctx.saved_tensors
    outs, lses = parts[: ctx.parts], parts[ctx.parts :]
    wide = lse.dtype
    douts, dlses = [], []
    for out_n, lse_n in zip(outs, lses):
        weight = torch.where(lse_n.isneginf(), 0, (lse_n - lse).exp())  # [batch, head, row]
        rows = weight.transpose(-1, -2).unsqueeze(-1)  # [batch, row, head, 1]
        douts.append((rows * dout.to(wide)).to(out.dtype))
        along = ((out_n.to(wide) - out.to(wide)) * dout.to(wide)).sum(-1).transpose(-1, -2)
        # Not weight * along: what a part that saw nothing holds in out_n may be anything.
        dlses.append(torch.where(weight == 0, 0, weight * (along + dlse)))
    return douts, dlses


torch.library.register_autograd("fovea::attention", _attention_gradients, setup_context=_attention_save)
torch.library.register_autograd("fovea::attention_backward", no_second_derivative)
torch.library.register_autograd("fovea::merge", _merge_gradients, setup_context=_merge_save)


_registrations = torch.library.Library("fovea", "IMPL")
for _key in ("AutogradCPU", "AutogradCUDA"):
    _registrations.impl("attention_no_grad", torch.library.fallthrough_kernel, _key)


# --- autocast ---------------------------------------------------------------------------------------------------


def in_autocast(device_type: str, *tensors):
    """Tensors in autocast's dtype. As in torch float64 stays what it is, and so does what is not given."""
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t is None or t.dtype in (dtype, torch.float64) else t.to(dtype) for t in tensors)


def _register_autocast(device_type: str, key: str) -> None:
    """q, k and v take autocast's dtype. What is added to the scores keeps its own: the engines take f32 there."""

    def attention_in_autocast(q, k, v, *rest):
        q, k, v = in_autocast(device_type, q, k, v)
        with torch.autocast(device_type, enabled=False):
            return attention(q, k, v, *rest)

    _registrations.impl("attention", attention_in_autocast, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# --- work -------------------------------------------------------------------------------------------------------


def _scores(given: dict) -> int:
    """How many scores there are, masks not counted, as torch counts its own attention."""
    q, k = given["q"], given["k"]
    if q.dim() == 3:
        lengths = (given[name].diff().long() for name in ("cu_seqlens_q", "cu_seqlens_kv"))
        return q.shape[1] * int(math.prod(lengths).sum())
    kv_len = k.shape[2] if given.get("heads_first", False) else k.shape[1]
    return math.prod(q.shape[:3]) * kv_len


@register_flop_formula([torch.ops.fovea.attention, torch.ops.fovea.attention_no_grad], get_raw=True)
def _attention_flop(*args, out_val=None, **settings) -> int:
    given = _named(_FORWARD, args, settings)
    return 2 * _scores(given) * (given["q"].shape[-1] + given["v"].shape[-1])


@register_flop_formula(torch.ops.fovea.attention_backward, get_raw=True)
def _attention_backward_flop(*args, out_val=None, **settings) -> int:
    """Five products: scores again, dq and dk; dweights and dv."""
    given = _named(_BACKWARD, args, settings)
    return 2 * _scores(given) * (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1])
