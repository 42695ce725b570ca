"""Tests of sampling with vLLM, for an environment of their own (`make test-engine`). Without vLLM they are ignored."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

import grpo_kernels as gk

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]
if HAS_VLLM:
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Fails without the CPU kernels, as most tests would pass with the reference in their place."""
    assert (state := gk.available_kernels()["cpu"]) == "ok", state


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Leaves memory as it is, as vLLM expects of its caches."""
    torch.utils.deterministic.fill_uninitialized_memory = False


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
