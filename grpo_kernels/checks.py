"""Checks of arguments, with one wording: "<op>: <argument> must be <rule>, got <value>".

They look at types, shapes, dtypes and devices only, never at data, so that nothing waits for a GPU and torch.compile
can trace them.
"""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(op: str, name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if type(value).__name__ == "DTensor":  # by its name: importing the class takes a second
        raise TypeError(f"{op}: {name} must be a tensor of this rank, got DTensor; use to_local() or full_tensor()")
    if value.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be of dtype {dtype_names(dtypes)}, got {value.dtype}")
    return value


def same_device(op: str, name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like the first argument, got {value.device}")


def per_row(op: str, name: str, value: object, dtypes: tuple[torch.dtype, ...], like: Tensor) -> Tensor:
    """A tensor with one element for each row of `like`, on its device."""
    checked = tensor(op, name, value, dtypes)
    if checked.shape != like.shape[:1]:
        raise ValueError(
            f"{op}: {name} must have shape [{like.shape[0]}], one element per row, got {list(checked.shape)}"
        )
    if checked.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} like the first argument, got {checked.device}")
    return checked
