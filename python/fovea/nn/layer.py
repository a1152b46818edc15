"""What the layers share: options as the op reads them, dtypes, masks, caches, the call itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..eager import can_be_looked_at
from ..layer_ops import LayerInputs, check_options, run_layer, run_layer_cached
from ..ops import in_autocast
from ..settings import draw_seed, tf32_is_allowed
from .cache import KVCache
from .options import LayerOptions

_DTYPES = {
    torch.float32: " dtype=f32",
    torch.float16: " dtype=f16",
    torch.bfloat16: " dtype=bf16",
    torch.float64: " dtype=f64",
}
_INT32 = torch.iinfo(torch.int32)
_NORMS = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}


class AttentionLayer(nn.Module):
    """The base of fovea's layers. A subclass makes its parameters, lists them in the op's order, and says what its
    cache holds. Its submodules hold parameters only: the op reads those, their forward is not called."""

    o_proj: nn.Linear

    def __init__(self, kind: str, sizes: dict[str, Any], options: LayerOptions) -> None:
        super().__init__()
        unknown = options.keys() - LayerOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__}: {min(unknown)} is not an option of this layer")
        named: dict[str, Any] = {**sizes, **options}
        if callable(named.get("position")):
            raise TypeError(f"{type(self).__name__}: position is a function, must be 'none', 'rope' or 'alibi' here")
        if named.get("backend") == "auto":
            named["backend"] = None
        self._dropout: float = named.pop("dropout", 0.0)
        self.max_seq_len: int = named.pop("max_seq_len", 0)
        self.batch_first: bool = named.pop("batch_first", True)
        self._factory = {name: named.pop(name, None) for name in ("device", "dtype")}
        words = (f"{name}={_text(value)}" for name, value in named.items() if value is not None)
        # What the op reads. Words are made here, not in calls: a compiled graph takes strings as they are, but may
        # have made symbols of the numbers in them.
        self._line = " ".join([kind, *words])
        self._dropout_word = f" dropout={self._dropout}" if self._dropout else ""
        check_options(self._line + self._dropout_word)

    @property
    def dropout(self) -> float:
        return self._dropout

    # --- parameters ---------------------------------------------------------------------------------------------

    def _linear(self, width: int, to: int, bias: bool = False) -> nn.Linear:
        return nn.Linear(width, to, bias=bias, **self._factory)

    def _make_qk_norm(self, head_dim: int, options: LayerOptions) -> None:
        norm, eps = _NORMS.get(options.get("qk_norm", "none")), options.get("norm_eps", 1e-6)
        self.q_norm = norm(head_dim, eps=eps, **self._factory) if norm else None
        self.k_norm = norm(head_dim, eps=eps, **self._factory) if norm else None

    def _qk_norm_weights(self) -> list[Tensor]:
        return [weight for norm in (self.q_norm, self.k_norm) if norm is not None for weight in norm.parameters()]

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, biases 0, norms 1."""
        for name, part in self.named_children():
            if name == "position":
                continue  # a user's
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
            elif isinstance(part, (nn.RMSNorm, nn.LayerNorm)):
                part.reset_parameters()

    def _weights(self) -> list[Tensor]:
        """In the order of the layer's weights in fovea/layers.h, without those that its options leave out."""
        raise NotImplementedError

    # --- caches -------------------------------------------------------------------------------------------------

    def _cache_shapes(self, batch: int, max_seq_len: int) -> dict[str, tuple[int, ...]]:
        """By name, in the order of LayerCache in fovea/layer_plan.h."""
        raise NotImplementedError

    def make_cache(
        self,
        batch: int,
        max_seq_len: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache with room for max_seq_len tokens of each of `batch` sequences.

        Args:
            batch: how many sequences go on side by side.
            max_seq_len: the layer's own unless given.
            dtype: that of the calls: the parameters' unless given.
            device: the parameters' unless given.
        """
        room = self.max_seq_len if max_seq_len is None else max_seq_len
        if room < 1:
            raise ValueError(f"make_cache: max_seq_len is {room}, must be at least 1")
        like = self.o_proj.weight
        tensors = {
            name: torch.zeros(shape, dtype=dtype or like.dtype, device=device or like.device)
            for name, shape in self._cache_shapes(batch, room).items()
        }
        return KVCache(tensors, room)

    # --- calls --------------------------------------------------------------------------------------------------

    def _call(self, inputs: LayerInputs, cache: KVCache | None) -> Tensor:
        """A call as its caller wrote it: masks and positions in the forms that callers use, the batch not first."""
        query, key, value = inputs[:3]
        if not self.batch_first:
            query, key, value = (_batch_first(t) for t in (query, key, value))
        positions, key_positions = _positions(inputs.position_ids), _positions(inputs.key_position_ids)
        inputs = LayerInputs(query, key, value, _score_mask(inputs.mask), positions, key_positions)
        if cache is not None and inputs.mask is not None:
            inputs = inputs._replace(mask=self._mask_of_room(inputs.mask, cache, _added(inputs)))
        out = self._run(inputs, cache)
        return out if self.batch_first else out.transpose(0, 1)

    def _run(self, inputs: LayerInputs, cache: KVCache | None) -> Tensor:
        weights = self._weights()
        device_type = "cuda" if inputs.query.is_cuda else "cpu"
        if torch.is_autocast_enabled(device_type):
            query, key, value = in_autocast(device_type, *inputs[:3])
            inputs = inputs._replace(query=query, key=key, value=value)
            weights = list(in_autocast(device_type, *weights))
        dtype = inputs.query.dtype
        if dtype not in _DTYPES:
            raise TypeError(f"{type(self).__name__}: the input's dtype is {dtype}, must be a float type")
        line = self._line + _DTYPES[dtype]
        if inputs.query.is_cuda and dtype == torch.float32 and tf32_is_allowed():
            line += " tf32=1"
        if torch.are_deterministic_algorithms_enabled():
            line += " deterministic=1"
        if cache is not None:
            kept = list(cache.tensors.values())
            out = run_layer_cached(inputs, weights, line + cache.room_word, kept, cache.length)
            cache.length += _added(inputs)
            return out
        if self._dropout and self.training:
            return run_layer(inputs, weights, draw_seed(), line + self._dropout_word)
        return run_layer(inputs, weights, None, line)

    def _mask_of_room(self, mask: Tensor, cache: KVCache, added: int) -> Tensor:
        """A mask of the keys so far as one of all that the cache has room for."""
        length = cache.length + added
        if mask.shape[-1] == cache.max_seq_len:
            return mask
        if mask.shape[-1] != length:
            raise ValueError(
                f"{type(self).__name__}: mask has {mask.shape[-1]} keys, must have {length}, as the cache after this "
                f"call, or {cache.max_seq_len}, its room"
            )
        return nn.functional.pad(mask, (0, cache.max_seq_len - length))

    def extra_repr(self) -> str:
        return ", ".join((self._line + self._dropout_word).split()[1:])


class OneInputLayer(AttentionLayer):
    """A layer that attends to its own input."""

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """
        Args:
            x: [batch, tokens, embed_dim].
            key: x or nothing, as value: layer(x, x, x) is layer(x), and any other tensor is refused.
            value: x or nothing.
            mask: bool, True takes part: [batch, keys] (padding), [batch, tokens, keys], or
                [batch or 1, head or 1, tokens or 1, keys]. With a cache keys are all that it holds after this call.
            position_ids: [batch or 1, tokens] int, for RoPE; unless given counted on from the cache.
            cache: of make_cache; the tokens are added to it.

        Returns:
            [batch, tokens, embed_dim].
        """
        # A call that was written for MultiHeadAttention, layer(x, x, x), means layer(x).
        for name, other in (("key", key), ("value", value)):
            if other is not None and other is not x:
                raise ValueError(
                    f"{type(self).__name__}: {name} is not x, which this layer attends to; a mask goes by its name"
                )
        return self._call(LayerInputs(x, mask=mask, position_ids=position_ids), cache)


def _added(inputs: LayerInputs) -> int:
    """Tokens that a call adds to a cache."""
    query, key, value = inputs[:3]
    return (key if key is not None else query if value is None else value).shape[1]


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _batch_first(tensor: Any) -> Any:
    """[tokens, batch, width] as [batch, tokens, width]."""
    return tensor if tensor is None else tensor.transpose(0, 1)


def _score_mask(mask: Tensor | None) -> Tensor | None:
    """[batch, keys], or [batch|1, head|1, q_len|1, keys]."""
    if mask is None:
        return None
    if mask.dtype.is_floating_point:
        raise TypeError(
            f"fovea.nn: mask.dtype is {mask.dtype}, must be bool (True takes part) or an integer (not 0)"
        )
    if mask.dim() not in (2, 3, 4):
        raise ValueError(
            f"fovea.nn: mask.shape is {list(mask.shape)}, must be [batch, keys], [batch, tokens, keys] or "
            "[batch or 1, head or 1, tokens or 1, keys]"
        )
    if mask.dtype != torch.bool:
        mask = mask != 0
    return mask[:, None] if mask.dim() == 3 else mask


def _positions(ids: Tensor | None) -> Tensor | None:
    """[batch|1, tokens] int32."""
    if ids is None:
        return None
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise TypeError(f"fovea.nn: position_ids.dtype is {ids.dtype}, must be an integer")
    if ids.dtype != torch.int32:
        if torch.iinfo(ids.dtype).max > _INT32.max and ids.numel() > 0 and can_be_looked_at(ids):
            ends = (ids if ids.dtype == torch.int64 else ids.double()).aminmax()
            wrong = [int(end) for end in ends if not _INT32.min <= end <= _INT32.max]
            if wrong:
                raise ValueError(f"fovea.nn: a position of position_ids is {wrong[-1]}, must fit in 32 bits")
        ids = ids.to(torch.int32)
    return ids[None] if ids.dim() == 1 else ids
