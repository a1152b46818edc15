"""The short way from Python to the attention op in eager mode.

torch.library's autograd is a Python kernel that every call goes through, with or without gradients, and whose cost
grows with the square of the number of arguments. What it does is done here directly, or by torch's own autograd in
C++ where a call is one that torch has a gradient for; tracing, and those who call torch.ops.fovea themselves, take
the registered way, with the same results."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import ops
from .settings import tf32_is_allowed

_are_functorch_transforms_active = torch._C._are_functorch_transforms_active
_get_deterministic_algorithms = torch._C._get_deterministic_algorithms
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_get_autocast_dtype, _is_autocast_enabled = torch.get_autocast_dtype, torch.is_autocast_enabled
_FLOAT32 = torch.float32
_on_cpu, _on_gpu = ops.recorded_on_cpu, ops.recorded_on_gpu
below_autograd = torch._C._AutoDispatchBelowAutograd


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments), without the 3 us in which torch looks for what only functorch needs."""
    if _are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def can_be_looked_at(tensor: Tensor) -> bool:
    """Whether a call may ask for a tensor's values: it holds some, and asking waits for no GPU and breaks no graph."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not torch.compiler.is_compiling()
        and not _len_torch_dispatch_stack()
        and not _are_functorch_transforms_active()
    )


def below_autograd_unless_recorded() -> contextlib.AbstractContextManager:
    """For a backward pass. One that is itself recorded (create_graph=True) takes the registered way, which refuses a
    second derivative when it is asked for: without a record it would silently be zero."""
    return contextlib.nullcontext() if torch.is_grad_enabled() else below_autograd()


def run_attention(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) of torch.ops.fovea.attention(q, k, v, **settings)."""
    return _run(q, k, v, settings, True)


def run_attention_out(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> Tensor:
    """out alone. That lse is not shown to autograd saves more than a microsecond. Not by run_plain: views of q, k, v and
    out, and their nodes, take longer than the Function below (H200: 46 and 36 us)."""
    return _run(q, k, v, settings, False)


def run_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor | None:
    """Attention of [batch, head, seq, dim] that is masked by nothing but causality, if torch's own autograd can record
    it: then no Python runs behind this call, neither in it nor in its backward pass. None where it cannot: tensors
    must be of torch itself, seen by no mode and no transform, and no setting of the process may change the result.

    In the middle of a training step, where the caches hold other things, each of these questions takes several times
    what it takes in a loop of nothing but calls: hence so few of them, and names without dots."""
    on_gpu, dtype = q.is_cuda, q.dtype
    if (
        not type(q) is type(k) is type(v) is Tensor
        or not (on_gpu or q.is_cpu)
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
        or _get_deterministic_algorithms()
        or (_on_gpu if on_gpu else _on_cpu) is None
        or (dtype is _FLOAT32 and on_gpu and tf32_is_allowed())
    ):
        return None
    if _is_any_autocast_enabled():
        # Projections made most of them in autocast's dtype: then it is one question, and each that names a device is dear.
        device_type = "cuda" if on_gpu else "cpu"
        wanted = dtype is k.dtype is v.dtype is _get_autocast_dtype(device_type)
        if not wanted and _is_autocast_enabled(device_type):
            q, k, v = ops.in_autocast(device_type, q, k, v)
    # Whether gradients are enabled is not asked: this op is right without them too, and few ask for it so. torch refuses
    # forward mode: the other op would not.
    if q.requires_grad or k.requires_grad or v.requires_grad or forward_ad._current_level >= 0:
        if scale is None:  # what is passed by name takes longer
            return (_on_gpu(q, k, v, 0.0, causal) if on_gpu else _on_cpu(q, k, v, None, 0.0, causal))[0]
        if on_gpu:
            return _on_gpu(q, k, v, 0.0, causal, scale=scale)[0]
        return _on_cpu(q, k, v, None, 0.0, causal, scale=scale)[0]
    settings: dict[str, Any] = {} if scale is None else {"scale": scale}
    if causal:
        settings["right"] = 0
    return ops.attention_no_grad(q, k, v, heads_first=True, **settings)


def _run(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any], with_lse: bool) -> Any:
    if torch.compiler.is_compiling():
        both = ops.attention(q, k, v, **settings)
    elif torch.is_autocast_enabled(device_type := "cuda" if q.is_cuda else "cpu"):
        q, k, v = ops.in_autocast(device_type, q, k, v)
        torch.set_autocast_enabled(device_type, False)
        try:
            return _run(q, k, v, settings, with_lse)
        finally:
            torch.set_autocast_enabled(device_type, True)
    elif torch.is_grad_enabled() and _needs_gradient(q, k, v, settings) or forward_ad._current_level >= 0:
        # There is no forward mode: the Function says so, where the op alone would give a derivative of zero.
        return apply(
            _Attention, q, k, v, settings.pop("bias", None), settings.pop("sink", None), settings, with_lse
        )
    elif not with_lse:
        return ops.attention_no_grad(q, k, v, **settings)
    else:
        with below_autograd():
            both = ops.attention(q, k, v, **settings)
    return both if with_lse else both[0]


def _needs_gradient(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    bias, sink = settings.get("bias"), settings.get("sink")
    return (bias is not None and bias.requires_grad) or (sink is not None and sink.requires_grad)


def _with(bias: Tensor | None, sink: Tensor | None, settings: dict[str, Any]) -> dict[str, Any]:
    if bias is not None:
        settings = {**settings, "bias": bias}
    if sink is not None:
        settings = {**settings, "sink": sink}
    return settings


class _Attention(torch.autograd.Function):
    # In the old style: with a setup_context apart, torch inspects the signature at every call, for about 10 us.
    @staticmethod
    def forward(ctx, q, k, v, bias, sink, settings, with_lse):
        with below_autograd():
            out, lse = ops.attention(q, k, v, **_with(bias, sink, settings))
        ctx.save_for_backward(q, k, v, bias, sink, out, lse)
        ctx.settings = settings
        if not with_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        q, k, v, bias, sink, out, lse = ctx.saved_tensors
        want_dbias, want_dsink = ctx.needs_input_grad[3:5]
        if dout is None:
            dout = torch.zeros_like(out)
        with below_autograd_unless_recorded():
            dq, dk, dv, dbias, dsink = ops.attention_backward(
                dout, dlse, out, lse, want_dbias, want_dsink, q, k, v, **_with(bias, sink, ctx.settings)
            )
        return dq, dk, dv, dbias if want_dbias else None, dsink if want_dsink else None, None, None
