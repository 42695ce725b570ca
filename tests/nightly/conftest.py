"""Marks every test here nightly, and gives each random choices of a seed that it prints."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

SEED = os.environ.get("SEED") or str(int.from_bytes(os.urandom(3), "big"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("nightly")


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Repeated by SEED=... in the environment, but for moments, which depend on the load of the machine."""
    print(f"SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")
