"""The ops of the layers, which fovea.nn calls: what torch must know about them (shapes, gradients), and the short way
to them in eager mode, as fovea.eager is for attention."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from . import ops
from .eager import apply, below_autograd, below_autograd_unless_recorded

layer = torch.ops.fovea.layer.default
layer_backward = torch.ops.fovea.layer_backward.default
layer_cached = torch.ops.fovea.layer_cached.default
_layer_saved_bytes = torch.ops.fovea.layer_saved_bytes.default


class LayerInputs(NamedTuple):
    """What a layer is called with, in the op's order; fovea/layer_plan.h has the shapes."""

    query: Tensor
    key: Tensor | None = None
    value: Tensor | None = None
    mask: Tensor | None = None
    position_ids: Tensor | None = None
    key_position_ids: Tensor | None = None


def run_layer(inputs: LayerInputs, weights: list[Tensor], dropout_seed: Tensor | None, options: str) -> Tensor:
    """The output of torch.ops.fovea.layer, [batch, q_len, embed_dim] as query."""
    training = _needs_gradient(inputs, weights)
    saved_bytes = _room_for_saved(options, inputs) if training else 0
    if torch.compiler.is_compiling():
        return layer(*inputs, weights, dropout_seed, options, saved_bytes)[0]
    if training or forward_ad._current_level >= 0:
        # There is no forward mode: the Function says so, where the op alone would give a derivative of zero.
        return apply(_Layer, options, saved_bytes, dropout_seed, *inputs, *weights)
    with below_autograd():
        return layer(*inputs, weights, dropout_seed, options, saved_bytes)[0]


def run_layer_cached(
    inputs: LayerInputs, weights: list[Tensor], options: str, cache: list[Tensor], length: int
) -> Tensor:
    """The output of torch.ops.fovea.layer_cached, which writes its tokens into the cache's tensors."""
    refuse_gradient((*inputs, *weights))
    if torch.compiler.is_compiling():
        return layer_cached(*inputs, weights, None, options, cache, length)
    with below_autograd():
        return layer_cached(*inputs, weights, None, options, cache, length)


def refuse_gradient(tensors: Iterable[Tensor | None]) -> None:
    """Of a call with a cache."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError("fovea.nn: a call with a cache has no gradient; make it under torch.no_grad()")


def check_options(options: str) -> None:
    """Raises what a call with these options would, whatever its sizes."""
    _layer_saved_bytes(options, -1, 1, 1, _AS_QUERY)


def _needs_gradient(inputs: LayerInputs, weights: list[Tensor]) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (*inputs[:3], *weights))


# --- memory between the passes ----------------------------------------------------------------------------------

# The library rounds each tensor that it saves up to this; it saves fewer than 16.
_ALIGNMENT, _MOST_SAVED = 64, 16
_AS_QUERY = -1  # fovea/layer_plan.h: as many keys as queries


def _room_for_saved(options: str, inputs: LayerInputs) -> int:
    """At least the bytes that a backward pass needs. The sizes of a graph may be symbols: then by a formula of them."""
    query, key = inputs.query, inputs.value if inputs.key is None else inputs.key
    kv_len = _AS_QUERY if key is None else key.shape[1]
    sizes = (query.shape[0], query.shape[1], kv_len)
    if not torch.compiler.is_compiling() and all(isinstance(size, int) for size in sizes):
        return max(_saved_bytes(options, query.get_device(), *sizes), 1)  # 0 would mean that there is no backward
    fixed, per_query, per_key = _saved_bytes_per(options, query.get_device(), key is not None)
    of_keys = 0 if key is None else per_key * kv_len
    return query.shape[0] * (fixed + per_query * query.shape[1] + of_keys) + _ALIGNMENT * _MOST_SAVED


_saved_bytes = functools.lru_cache(maxsize=1024)(_layer_saved_bytes)


@torch.compiler.assume_constant_result
def _saved_bytes_per(options: str, device: int, cross: bool) -> tuple[int, int, int]:
    """What a sequence of the batch needs: at all, per query, and per key where keys are tokens of their own."""
    return _measure_saved_bytes(options, device, cross)


@functools.cache
def _measure_saved_bytes(options: str, device: int, cross: bool) -> tuple[int, int, int]:
    # So that nothing is rounded up; and so few tokens save all that a backward pass can want, of which more may save less.
    batch = _ALIGNMENT

    def at(q_len: int, kv_len: int) -> int:
        return _layer_saved_bytes(options, device, batch, q_len, kv_len if cross else _AS_QUERY) // batch

    per_query = at(2, 1) - at(1, 1)
    per_key = at(1, 2) - at(1, 1)
    return at(1, 1) - per_query - per_key, per_query, per_key


# --- shapes -----------------------------------------------------------------------------------------------------


@torch.library.register_fake("fovea::layer")
def _layer_shapes(query, *rest):
    saved_bytes = rest[-1]
    return query.new_empty(query.shape), query.new_empty((saved_bytes,), dtype=torch.uint8)


@torch.library.register_fake("fovea::layer_backward")
def _layer_backward_shapes(
    dout, saved, query, key, value, mask, position_ids, key_position_ids, weights, seed, options, wanted, spends=False
):
    return [
        query.new_empty((0,)) if t is None or not want else t.new_empty(t.shape)
        for t, want in zip((query, key, value, *weights), wanted)
    ]


@torch.library.register_fake("fovea::layer_cached")
def _layer_cached_shapes(query, *rest):
    return query.new_empty(query.shape)


# --- gradients --------------------------------------------------------------------------------------------------

_INPUTS = len(LayerInputs._fields)
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def _keep(ctx, saved, seed, inputs, weights, options):
    ctx.save_for_backward(saved, seed, *inputs, *weights)
    ctx.options = options


def _gradients(ctx, dout, wanted: list[bool], spends: bool = False) -> tuple[list, list]:
    """Of the inputs and of the weights; None where not wanted. wanted: of query, key, value and the weights."""
    saved, seed, *tensors = ctx.saved_tensors
    inputs, weights = tensors[:_INPUTS], tensors[_INPUTS:]
    found = layer_backward(dout, saved, *inputs, weights, seed, ctx.options, wanted, spends)
    given = [gradient if want else None for gradient, want in zip(found, wanted)]
    return given[:3] + [None] * (_INPUTS - 3), given[3:]


class _Layer(torch.autograd.Function):
    # In the old style, as in fovea.eager.
    @staticmethod
    def forward(ctx, options, saved_bytes, seed, *tensors):
        inputs, weights = tensors[:_INPUTS], tensors[_INPUTS:]
        with below_autograd():
            out, saved = layer(*inputs, weights, seed, options, saved_bytes)
        _keep(ctx, saved, seed, inputs, weights, options)
        return out

    @staticmethod
    def backward(ctx, dout):
        needs = ctx.needs_input_grad[3:]
        spends = not _keeps_graph()  # with a graph that stays, for another backward pass, so does what was saved
        with below_autograd_unless_recorded():
            dinputs, dweights = _gradients(ctx, dout, [*needs[:3], *needs[_INPUTS:]], spends)
        return None, None, None, *dinputs, *dweights


def _save(ctx, inputs, output):
    *inputs, weights, seed, options, _ = inputs
    _keep(ctx, output[1], seed, inputs, weights, options)


def _registered_gradients(ctx, dout, _):
    needs = ctx.needs_input_grad
    dinputs, dweights = _gradients(ctx, dout, [*needs[:3], *needs[_INPUTS]])
    return *dinputs, dweights, None, None, None


torch.library.register_autograd("fovea::layer", _registered_gradients, setup_context=_save)
torch.library.register_autograd("fovea::layer_backward", ops.no_second_derivative)


# --- work -------------------------------------------------------------------------------------------------------

# Of each kind of layer, which of its weights has heads * dim_qk and heads * dim_v channels, and in which dimension.
_CHANNELS = {
    "multi_head": ((0, 0), (3, 1)),
    "grouped_query": ((1, 1), (1, 1)),
    "latent": ((1, 0), (5, 1)),
    "ccgqa": ((1, 1), (1, 1)),
}


def _products(query, key, value, weights, options: str, keys: int | None = None) -> tuple[int, int, int]:
    """Multiplications and additions of the projections and convolutions, of q k^T, and of the weights' sum of v,
    masks not counted. Arguments are shapes; keys: how many are attended to, where they are not this call's."""
    kind = options.split(maxsplit=1)[0]
    batch, q_len, _ = query
    others = value if key is None else key
    kv_len = q_len if others is None else others[1]
    linear = 0
    for i, shape in enumerate(weights):
        if len(shape) > 1:  # not a bias, a norm, a temperature
            rows = kv_len if kind == "multi_head" and i in (1, 2) else q_len
            linear += 2 * batch * rows * math.prod(shape)
    qk_channels, v_channels = (weights[i][dim] for i, dim in _CHANNELS[kind])
    pairs = 2 * batch * q_len * (keys or kv_len)
    return linear, pairs * qk_channels, pairs * v_channels


@register_flop_formula(torch.ops.fovea.layer)
def _layer_flop(query, key, value, mask, ids, key_ids, weights, seed, options, *rest, **kwargs) -> int:
    return sum(_products(query, key, value, weights, options))


@register_flop_formula(torch.ops.fovea.layer_cached)
def _layer_cached_flop(
    query, key, value, mask, ids, key_ids, weights, seed, options, cache, length, *rest, **kwargs
) -> int:
    others = query if key is None and value is None else value if key is None else key
    return sum(_products(query, key, value, weights, options, length + others[1]))


@register_flop_formula(torch.ops.fovea.layer_backward)
def _layer_backward_flop(
    dout, saved, query, key, value, mask, ids, key_ids, weights, seed, options, *rest, **kwargs
) -> int:
    """All gradients: two products for each projection; scores again, dq and dk; dweights and dv."""
    linear, scores, sums = _products(query, key, value, weights, options)
    return 2 * linear + 3 * scores + 2 * sums
