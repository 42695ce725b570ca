"""Fixtures. Models have a few thousand weights, so a second thread would only wait and occupy a core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
