"""A process group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[Any]:
    """A mesh of this process alone, which holds all columns of a split vocabulary."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
