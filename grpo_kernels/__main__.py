"""python -m grpo_kernels: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import torch

import grpo_kernels
from grpo_kernels import backends


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    print(f"grpo-kernels {grpo_kernels.__version__}")
    print(f"python       {platform.python_version()} on {platform.platform()}")
    print(f"torch        {torch.__version__} (CUDA {torch.version.cuda or 'none'})")
    for package in ("triton", "numpy", "transformers", "trl", "verl"):
        print(f"{package:12} {_version(package)}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            print(f"gpu {index}        {torch.cuda.get_device_name(index)} (sm_{major}{minor})")
            print(f"  {'cuda':10} {grpo_kernels.available_kernels(index)['cuda']}")
    print("kernels")
    for name, state in grpo_kernels.available_kernels().items():
        print(f"  {name:10} {state}")
    for name, facts in backends.build_facts().items():
        print(f"build of the {name} kernels")
        for key, value in facts.items():
            print(f"  {key:18} {value or '-'}")


if __name__ == "__main__":
    about = "Print the versions, GPUs and kernels of this machine."
    argparse.ArgumentParser("python -m grpo_kernels", description=about).parse_args()
    main()
