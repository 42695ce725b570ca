"""Random batches of log-probs by a trainer and a sampler."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.harness import device_of

NAN = float("nan")
DEVICE = device_of("reference")


class Batch(NamedTuple):
    """Float64 values that are exact in float32."""

    old: Tensor
    sampling: Tensor
    mask: Tensor

    def to(self, dtype: torch.dtype, device: torch.device, poison: bool = True) -> Batch:
        """The batch on a device; `poison` puts NaN and infinities into the slots that take no part."""
        old, sampling = self.old, self.sampling
        if poison:
            old, sampling = torch.where(self.mask, old, NAN), torch.where(self.mask, sampling, float("inf"))
        return Batch(old.to(device, dtype), sampling.to(device, dtype), self.mask.to(device))


def make_batch(
    seed: int = 0, rows: int = 7, width: int = 23, spread: float = 0.1, far: float = 0.0, holes: bool = True
) -> Batch:
    """Log ratios around 0 by `spread` and less, those of half the rows with a share `far` beyond 20; row 2 is empty."""
    random = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(rows, width, generator=random)

    old = -2 * uniform() - 0.01
    sampling = (
        old + spread * torch.linspace(0.2, 1, rows)[:, None] * torch.randn(rows, width, generator=random)
    ).clamp(max=-1e-3)
    for values in (old, sampling):
        values[rows // 2 :][(uniform() < far)[rows // 2 :]] = -27.0
    mask = uniform() < (0.8 if holes else 2)
    mask[2:3] = False
    return Batch(old.double(), sampling.double(), mask)
