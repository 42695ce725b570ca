"""Fixtures. Models have a few thousand weights, so a second thread would only wait and occupy a core."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

REQUIRED = ("transformers", "datasets", "pydantic", "scipy", "matplotlib")  # by the extra trainer
if any(importlib.util.find_spec(name) is None for name in REQUIRED):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_shared_runs() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """After a test that set another number."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks take longer than the steps of small models."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
