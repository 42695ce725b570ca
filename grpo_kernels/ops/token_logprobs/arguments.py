"""Checks of the arguments of token_logprobs, of which the LM head's ops share some."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import LogitRows, Scaling


def check_logits(op: str, logits: Tensor, targets: Tensor) -> None:
    checks.tensor(op, "logits", logits, checks.FLOATS)
    checks.tensor(op, "targets", targets, checks.INTEGERS)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must have shape [..., V] with V > 0, got {list(logits.shape)}")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op}: targets must have shape {list(logits.shape[:-1])}, one for each row of the logits, "
            f"got {list(targets.shape)}"
        )
    checks.same_device(op, "targets", targets, logits.device)


def check_targets(op: str, targets: Tensor, columns: int, backend: str) -> None:
    """Checks target values on the CPU, where looking at data costs no wait. A GPU's kernels give NaN for such a row."""
    if targets.device.type != "cpu" or backend not in ("cpu", "reference") or torch.compiler.is_compiling():
        return
    is_wrong = ((targets < 0) | (targets >= columns)) & (targets != IGNORED)
    if bool(is_wrong.any()):
        row = int(is_wrong.int().argmax())
        raise RuntimeError(
            f"{op}: targets must be in [0, {columns}) or {IGNORED}, got {int(targets.reshape(-1)[row])} in row {row}"
        )


def rows_of(logits: Tensor, targets: Tensor, scaling: Scaling) -> LogitRows:
    """Views logits [..., V], or a slice such as logits[:, :-1], as [A, B, V] with contiguous columns."""
    rows = logits
    if logits.dim() < 3:
        rows = logits[None] if logits.dim() == 2 else logits[None, None]
    rows = rows if rows.dim() == 3 else rows.flatten(0, -3)
    if rows.stride(-1) != 1 and rows.shape[-1] != 1:
        # contiguous() returns a tensor without elements as it is, whatever its strides
        rows = rows.clone(memory_format=torch.contiguous_format)
    shape = rows.shape[:2]
    row_temperature = scaling.row_temperature
    return LogitRows(
        rows,
        targets.long().reshape(shape).contiguous(),
        None if row_temperature is None else row_temperature.reshape(shape).contiguous(),
        *scaling[1:],
    )


def check_scaling(
    op: str,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    targets: Tensor,
    dtype: torch.dtype,
) -> Scaling:
    row_temperature, number = None, 1.0
    if isinstance(temperature, Tensor):
        row_temperature = _row_temperature(op, temperature, targets, dtype)
    else:
        number = _positive(op, "temperature", temperature)
    cap = None if softcap is None else _positive(op, "softcap", softcap)
    return Scaling(row_temperature, number, cap, _positive(op, "logit_scale", logit_scale))


def _row_temperature(op: str, temperature: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    checks.tensor(op, "temperature", temperature, checks.FLOATS)
    checks.same_device(op, "temperature", temperature, targets.device)
    checks.constant(op, "temperature", temperature)
    shape = targets.shape
    full = temperature
    if full.dim() == 1 and full.shape == shape[:1]:
        full = full.reshape(-1, *(1 for _ in shape[1:]))
    fits = full.dim() == len(shape) and all(a in (1, b) for a, b in zip(full.shape, shape, strict=True))
    if not fits:
        raise ValueError(
            f"{op}: temperature must have the shape of the targets, {list(shape)}, or one element for each of the "
            f"first dimension, got {list(temperature.shape)}"
        )
    return full.to(torch.promote_types(dtype, torch.float32)).expand(shape)


def _positive(op: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__} {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: {name} must be positive and finite, got {value}")
    return float(value)


def check_overwritable(op: str, argument: str, logits: Tensor) -> None:
    """Refuses logits that cannot be overwritten with their gradient, which `argument` asks for."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: {argument} must be False under torch.compile, got True; "
            "a compiled graph cannot know that its input is overwritten"
        )
    if logits.numel() == 0:
        return
    if any(owner is not None and owner.requires_grad and owner.is_leaf for owner in (logits, logits._base)):
        raise ValueError(
            f"{op}: {argument} must be False for logits that are a leaf or a view of one, got True; "
            "their values would be lost and their gradient would share their memory"
        )
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(logits.stride(), logits.shape, strict=True) if n > 1):
        if stride < extent:
            raise ValueError(
                f"{op}: logits must not overlap themselves in memory with {argument}=True, "
                f"got strides {list(logits.stride())}"
            )
        extent = stride * (size - 1) + extent
