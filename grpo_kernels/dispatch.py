"""Which backend computes a call: an explicit choice is obeyed or refused with the reason, else the first that can."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch

from grpo_kernels import capability
from grpo_kernels.checks import dtype_names

BACKENDS = ("cuda", "triton", "cpu", "reference")

# Automatic order. Interpreted Triton runs on the CPU too, but only when it is asked for by name.
_PREFERENCE = {"cpu": ("cpu", "reference")}
_PREFERENCE_GPU = ("cuda", "triton", "reference")

Supports = Mapping[str, tuple[torch.dtype, ...]]
Limits = Mapping[str, str]
_NO_LIMITS: Limits = {}


def _checked(name: str | None, where: str) -> str | None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{where} must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


# A plain global and not a ContextVar, so that torch.compile can trace its use and guards on it.
_forced: str | None = _checked(os.environ.get("GRPO_KERNELS_BACKEND") or None, "GRPO_KERNELS_BACKEND")


def refusal(
    backend: str,
    device_type: str,
    dtype: torch.dtype,
    supports: Supports,
    device_index: int | None = None,
    limits: Limits = _NO_LIMITS,
) -> str | None:
    """Why this backend cannot take such a tensor, or None. `limits` says of backends why they cannot take this call."""
    if backend not in supports:
        return "it is not implemented for this op"
    if not capability.runs_on(backend, device_type):
        return f"it does not run on {device_type} tensors"
    if dtype not in supports[backend]:
        return f"it takes {dtype_names(supports[backend])}, not {dtype_names((dtype,))}"
    return limits.get(backend) or capability.missing(backend, device_index)


def select(
    op: str,
    requested: str | None,
    device_type: str,
    dtype: torch.dtype,
    supports: Supports,
    device_index: int | None = None,
    limits: Limits = _NO_LIMITS,
) -> str:
    choice = requested or _forced
    candidates = _PREFERENCE.get(device_type, _PREFERENCE_GPU)
    if choice is not None:
        _checked(choice, f"{op}: backend")
        reason = refusal(choice, device_type, dtype, supports, device_index, limits)
        if reason is None:
            return choice
        others = [
            name for name in candidates if refusal(name, device_type, dtype, supports, device_index, limits) is None
        ]
        way_out = f"; use backend={others[0]!r} or leave it out" if others else ""
        raise RuntimeError(f"{op}: backend {choice!r} cannot run here: {reason}{way_out}")
    for name in candidates:
        if refusal(name, device_type, dtype, supports, device_index, limits) is None:
            return name
    raise RuntimeError(f"{op}: no backend takes {dtype} tensors on {device_type}")


def available_backends(device_index: int | None = None) -> dict[str, str]:
    """Each backend with "ok" or the reason why it cannot run here, on this GPU (default: the current one)."""
    return {name: capability.missing(name, device_index) or "ok" for name in BACKENDS}


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Every call inside the block that does not name a backend uses this one, or is refused."""
    global _forced
    _checked(name, "use_backend: name")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
