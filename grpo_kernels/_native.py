"""Loads the compiled modules and remembers why one is missing.

The schemas of the ops they implement are defined in Python (grpo_kernels/ops), so a missing module leaves ops that are
defined but not implemented there, and a reason to show.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def _load(name: str) -> tuple[ModuleType | None, str | None]:
    try:
        return importlib.import_module(f"grpo_kernels.{name}"), None
    except ModuleNotFoundError:
        return None, "not built; reinstall with GRPO_KERNELS_BUILD=cpu or cuda"
    except ImportError as error:  # built, but it does not fit this torch or this system
        return None, f"built, but cannot be loaded: {error}"


cpu_module, cpu_error = _load("_C")
cuda_module: ModuleType | None = None
cuda_error: str | None = "this torch is not a CUDA build"
if torch.version.cuda:
    cuda_module, cuda_error = _load("_C_cuda")


def build_facts() -> dict[str, dict[str, str]]:
    modules = {"cpu": cpu_module, "cuda": cuda_module}
    return {name: module.build_facts() for name, module in modules.items() if module is not None}
