"""Gives every test random choices of a seed that it prints. `pytest --nightly` runs this folder."""

from __future__ import annotations

import os
import random

import pytest

import grpo_kernels as gk

SEED = os.environ.get("SEED") or str(int.from_bytes(os.urandom(3), "big"))


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Repeated by SEED=... in the environment, but for moments, which depend on the load of the machine."""
    print(f"SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Fails without the CPU kernels, as the tests would pass with the reference in their place."""
    assert (state := gk.available_kernels()["cpu"]) == "ok", state
