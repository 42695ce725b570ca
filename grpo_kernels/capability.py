"""Reasons why a backend cannot run here. Plain code that torch.compile traces."""

from __future__ import annotations

import functools
import importlib.util
import os
import re

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


def missing(backend: str, device_index: int | None = None) -> str | None:
    """Why the backend cannot run in this process, on this GPU (default: the current one), or None."""
    if backend in _emulated:
        return None
    if backend == "cuda":
        if _native.cuda_error is not None:
            return f"CUDA kernels: {_native.cuda_error}"
        if device_index is None:  # else there is a tensor on it
            if not torch.cuda.is_available():
                return "no CUDA device"
            device_index = torch.cuda.current_device()
        return cuda_refusal(device_index)
    if backend == "triton":
        if not _TRITON_INSTALLED:
            return "triton is not installed"
        if interpreting() or torch.cuda.is_available() or torch.xpu.is_available():
            return None
        return "no GPU"
    if backend == "cpu" and _native.cpu_error is not None:
        return f"CPU kernels: {_native.cpu_error}"
    return None


def cuda_refusal(device_index: int) -> str | None:
    """Why this GPU or its driver cannot run the CUDA kernels as they were built, or None."""
    return _cuda_refusal(device_index)


# Says to torch.compile that the result is a constant, as torch.compiler.assume_constant_result does, which imports a
# second's worth of modules. An eager call then costs a look into the cache.
cuda_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _cuda_refusal(device_index: int) -> str | None:
    assert _native.cuda_module is not None
    facts, driver = _native.cuda_module.build_facts(), _native.cuda_module.driver_version()
    if driver // 1000 < int(facts["cuda"].partition(".")[0]):
        newest = f"{driver // 1000}.{driver % 1000 // 10}"
        return f"the kernels were built with CUDA {facts['cuda']}, the driver runs CUDA {newest} and older; update it"
    architectures = facts["cuda_architectures"]
    major, minor = torch.cuda.get_device_capability(device_index)
    if runs_machine_code(architectures, major, minor):
        return None
    built_for = ", ".join(f"sm_{number}" for number in re.findall(r"\d+[af]?", architectures))
    here = f"sm_{major}{minor}"
    rebuild = f"CMAKE_ARGS=-DGRPO_CUDA_ARCHITECTURES={major}{minor}"
    return f"the CUDA kernels are built for {built_for}, not for {here} of cuda:{device_index}; rebuild with {rebuild}"


def runs_machine_code(architectures: str, major: int, minor: int) -> bool:
    """Whether a GPU of compute capability `major`.`minor` runs code for CMake's list of CUDA architectures.

    Machine code runs on its own minor version and later ones of the same major version, PTX on everything later.
    "80-real" is machine code, "80-virtual" PTX, "80" both; code for "90a" runs on 9.0 alone, and for "100f" on 10.x.
    """
    for entry in architectures.split(";"):
        found = re.fullmatch(r"(\d+)(\d)([af]?)(?:-(real|virtual))?", entry)
        if found is None:  # "native" and the like: whoever builds that way knows the GPU
            return True
        built, feature, kind = (int(found[1]), int(found[2])), found[3], found[4]
        same_major = built[0] == major and (built[1] == minor if feature == "a" else built[1] <= minor)
        if (kind != "virtual" or feature) and same_major:
            return True
        if kind != "real" and not feature and built <= (major, minor):
            return True
    return False


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
