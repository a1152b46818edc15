"""Checkpoints that name a layer's parameters otherwise."""

from __future__ import annotations

from torch import Tensor


def rename(state_dict: dict[str, Tensor], prefix: str, names: dict[str, str]) -> None:
    """What a layer at `prefix` finds under the other name, weight and bias alike, it finds under its own."""
    for other, name in names.items():
        for end in ("", ".weight", ".bias"):
            if f"{prefix}{other}{end}" in state_dict:
                state_dict[f"{prefix}{name}{end}"] = state_dict.pop(f"{prefix}{other}{end}")
