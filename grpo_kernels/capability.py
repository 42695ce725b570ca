"""What can run here; a backend that cannot has a reason. Plain code, without caches, that torch.compile traces."""

from __future__ import annotations

import importlib.util
import os

import torch

from grpo_kernels import _native

# On which devices a backend runs at all; None: on any.
DEVICES: dict[str, set[str] | None] = {
    "cuda": {"cuda"},
    "triton": {"cuda", "xpu"},
    "cpu": {"cpu"},
    "reference": None,
}

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

# Backends whose kernels were compiled for the host, by tests.
_emulated: set[str] = set()


def missing(backend: str) -> str | None:
    """Why the backend cannot run in this process, or None."""
    if backend in _emulated:
        return None
    if backend == "cuda":
        if _native.cuda_error is not None:
            return f"CUDA kernels: {_native.cuda_error}"
        return None if torch.cuda.is_available() else "no CUDA device"
    if backend == "triton":
        if not _TRITON_INSTALLED:
            return "triton is not installed"
        if interpreting() or torch.cuda.is_available() or torch.xpu.is_available():
            return None
        return "no GPU"
    if backend == "cpu" and _native.cpu_error is not None:
        return f"CPU kernels: {_native.cpu_error}"
    return None


def interpreting() -> bool:
    """Triton's own switch for running kernels in Python, on CPU tensors; read by triton when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(backend: str, device_type: str) -> bool:
    devices = DEVICES[backend]
    interpreted = backend == "triton" and device_type == "cpu" and interpreting()
    return devices is None or device_type in devices or interpreted


def enable_emulated_cuda() -> None:
    """For tests without a GPU: the CUDA kernels were compiled for the host and take CPU tensors when asked for."""
    DEVICES["cuda"] = {"cpu"}
    _emulated.add("cuda")
