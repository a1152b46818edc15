"""From the arguments of fovea's functions to those of the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
_LARGEST_SEED = torch.iinfo(torch.int64).max


def op_settings(
    q: Tensor,
    causal: bool,
    window: Window | None = None,
    prefix: int = 0,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """The op's arguments that are not its defaults: every argument that is passed costs time at each call."""
    settings: dict[str, Any] = {}
    if window is not None:
        left, right = window
        if left is not None:
            settings["left"] = left
        if right is not None:
            settings["right"] = right
    if causal:
        settings["right"] = 0
    if prefix:
        settings["prefix"] = prefix
    if alibi_slopes is not None:
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("attention: alibi_slopes has no gradient; detach it")
        settings["alibi_slopes"] = _wide(alibi_slopes, q)
    if softcap:
        settings["softcap"] = softcap
    if sink is not None:
        settings["sink"] = _wide(sink, q)
    if dropout_p:
        settings["dropout_seed"] = draw_seed()
        settings["dropout"] = dropout_p
    if scale is not None:
        settings["scale"] = scale
    if torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic:
        settings["deterministic"] = True
    if q.is_cuda and q.dtype == torch.float32 and tf32_is_allowed():
        settings["tf32"] = True
    if backend is not None:
        settings["backend"] = backend
    return settings


def draw_seed() -> Tensor:
    """[2] int64 of torch's default generator. On the CPU even for a GPU's tensors: engines take the seed as a number,
    so no call waits for a GPU."""
    return torch.randint(_LARGEST_SEED, (2,), dtype=torch.int64, device="cpu")


@torch.compiler.assume_constant_result  # Dynamo takes no torch function that returns a string
def tf32_is_allowed() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def per_score(name: str, tensor: Tensor, kv_len: int) -> Tensor:
    """[batch or 1, head_q or 1, q_len or 1, kv_len]: what the engines broadcast, without a copy where they can."""
    if (tensor.dtype == torch.bool) != (name == "mask"):
        takes = "bool" if name == "mask" else "a float type; a bool tensor is a mask"
        raise TypeError(f"attention: {name}.dtype is {tensor.dtype}, must be {takes}")
    if tensor.dim() < 4:
        tensor = tensor[(None,) * (4 - tensor.dim())]
    if tensor.shape[-1] != kv_len:
        tensor = tensor.expand(-1, -1, -1, kv_len)
    return tensor


def _wide(per_head: Tensor, q: Tensor) -> Tensor:
    return per_head.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
