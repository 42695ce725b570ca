"""Description of the machine of a result, without names of hosts or users."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

import grpo_kernels as gk

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "verl",
    "liger-kernel",
    "cut-cross-entropy",
    "scikit-learn",
    "scipy",
    "fastcluster",
    "numpy",
)
ROOT = Path(__file__).parent.parent


def describe() -> dict[str, object]:
    facts: dict[str, object] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "grpo_kernels": gk.__version__,
        "kernels": gk.available_kernels(),
        "commit": output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["capability"] = torch.cuda.get_device_capability()
        facts["cuda"] = torch.version.cuda
        facts["driver"] = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return facts


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def output(*command: str) -> str | None:
    """Output of a command, or None if there is no such program, it fails or it prints nothing."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None
