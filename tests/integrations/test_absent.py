"""Adapters whose trainer is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["trl", "verl"])
def test_the_error_says_how_to_install_it(package: str) -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import grpo_kernels.integrations.{package}
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    rule = f'needs the package {package}, which is not installed: pip install "grpo-kernels[{package}]"'
    assert run.stderr.strip().endswith(f"ModuleNotFoundError: grpo_kernels.integrations.{package}: {rule}")
