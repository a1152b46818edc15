"""What torch must know about torch.ops.fovea besides its kernels, which are in python/csrc: shapes, gradients,
autocast, and how much work a call is. Importing this module loads the library that holds the kernels."""

from __future__ import annotations

import pathlib

import torch
from torch.utils.flop_counter import register_flop_formula

torch.ops.load_library(str(pathlib.Path(__file__).with_name("libfovea_torch.so")))

attention = torch.ops.fovea.attention.default
attention_backward = torch.ops.fovea.attention_backward.default
merge = torch.ops.fovea.merge.default
version = torch.ops.fovea.version.default

# The arguments that both passes of attention share, by their place in the schema.
_Q, _K, _V, _BIAS, _MASK, _KEY_LENGTHS, _ALIBI, _SINK, _CU_Q, _CU_KV, _SEED = range(11)
_TENSORS = 11


# --- shapes -----------------------------------------------------------------------------------------------------


@torch.library.register_fake("fovea::attention")
def _attention_shapes(q, k, v, *rest, **settings):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if q.dim() == 3:  # packed
        total_q, head_q, _ = q.shape
        lse_shape = (head_q, total_q)
    else:
        batch, q_len, head_q, _ = q.shape
        lse_shape = (batch, head_q, q_len)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(lse_shape, dtype=lse_dtype)


@torch.library.register_fake("fovea::attention_backward")
def _attention_backward_shapes(
    dout, dlse, out, lse, want_dbias, want_dsink, q, k, v, bias=None, mask=None, key_lengths=None,
    alibi_slopes=None, sink=None, *rest, **settings
):  # fmt: skip
    def gradient(of, wanted=True):
        return of.new_empty(of.shape) if wanted else q.new_empty((0,), dtype=torch.float32)

    return gradient(q), gradient(k), gradient(v), gradient(bias, want_dbias), gradient(sink, want_dsink)


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


def _no_second_derivative(ctx, *gradients):
    raise NotImplementedError("fovea: attention can be differentiated once, not twice")


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
torch.library.register_autograd("fovea::attention_backward", _no_second_derivative)
torch.library.register_autograd("fovea::merge", _merge_gradients, setup_context=_merge_save)


# --- autocast ---------------------------------------------------------------------------------------------------

_registrations = torch.library.Library("fovea", "IMPL")


def _register_autocast(device_type: str, key: str) -> None:
    """q, k and v take autocast's dtype. What is added to the scores keeps its own: the engines take f32 there."""

    def cast(tensor):
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(device_type))

    def attention_in_autocast(q, k, v, *rest):
        q, k, v = cast(q), cast(k), cast(v)
        with torch.autocast(device_type, enabled=False):
            return attention(q, k, v, *rest)

    _registrations.impl("attention", attention_in_autocast, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# --- work -------------------------------------------------------------------------------------------------------


def _scores(q, k, cu_q, cu_kv) -> int:
    """How many scores there are, masks not counted, as torch counts its own attention."""
    if q.dim() == 4:
        batch, q_len, head_q, _ = q.shape
        return batch * head_q * q_len * k.shape[1]
    return q.shape[1] * int((cu_q.diff().long() * cu_kv.diff().long()).sum())


@register_flop_formula(torch.ops.fovea.attention, get_raw=True)
def _attention_flop(q, k, v, *rest, out_val=None, **settings) -> int:
    tensors = (q, k, v, *rest, *[None] * _TENSORS)
    return 2 * _scores(q, k, tensors[_CU_Q], tensors[_CU_KV]) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.fovea.attention_backward, get_raw=True)
def _attention_backward_flop(dout, dlse, out, lse, want_dbias, want_dsink, q, k, v, *rest, out_val=None, **settings) -> int:
    """Five products: scores again, dweights, dv; dq and dk."""
    tensors = (q, k, v, *rest, *[None] * _TENSORS)
    return 2 * _scores(q, k, tensors[_CU_Q], tensors[_CU_KV]) * (3 * q.shape[-1] + 2 * v.shape[-1])
