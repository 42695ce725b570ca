"""sampling_correction against the installed verl: truncated token weights, two rejections and all metrics.

Lower bound on bytes per token: 4 each for both log-probs, 1 for the mask, 5 written: 14.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Case, Floor, Make, Provider, Same, Sweep

OP, ROWS, WIDTH = "sampling_correction", 256, 2048
FIELDS = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.5_2.0,0.01",
}
CONFIG = gk.CorrectionConfig.verl(**FIELDS)
M2PO = gk.CorrectionConfig(m2_threshold=0.005)


class Batch:
    def __init__(self, rows: int, width: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        old = -torch.rand(rows, width, generator=generator)
        self.old = old.to(device)
        self.sampling = (old + 0.1 * torch.randn(rows, width, generator=generator)).clamp(max=-1e-3).to(device)
        lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator)
        self.mask = (torch.arange(width) < lengths).to(device)
        self.weights = self.mask.float()  # verl multiplies by it


def of(rows: int = ROWS) -> Make:
    return lambda device, seed: Batch(rows, WIDTH, device, seed)


def ours(b: Batch) -> tuple[Tensor, Tensor]:
    result = gk.sampling_correction(b.old, b.sampling, mask=b.mask, config=CONFIG)
    return result.weights, result.mask.float()


def m2po(b: Batch) -> tuple[Tensor, Tensor]:
    result = gk.sampling_correction(b.old, b.sampling, mask=b.mask, config=M2PO)
    return result.weights, result.mask.float()


def measured(b: Batch) -> tuple[Tensor, Tensor]:
    result = gk.sampling_correction(b.old, b.sampling, mask=b.mask)
    return result.weights, result.mask.float()


def verl(b: Batch) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo import rollout_corr_helper
    weights, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        b.old, b.sampling, b.weights, **FIELDS
    )
    return weights.batch["rollout_is_weights"] * mask, mask


CASES = [
    Case(
        OP,
        "token weights and two rejections",
        "256 responses of up to 2,048 tokens",
        Floor(bytes=14 * ROWS * WIDTH),
        of(),
        ours,
        (Provider("verl", verl, package="verl"),),
        same=Same(rtol=1e-5),
    ),
    # the choice of the largest square, in its own passes over the tokens
    Case(
        OP,
        "M2PO",
        "256 responses of up to 2,048 tokens, one thread",
        Floor(bytes=14 * ROWS * WIDTH),
        of(),
        m2po,
        (Provider("metrics alone", measured, agrees=False),),
        devices=("cpu",),
        pairs=40,
        one_thread=True,
    ),
]
SWEEPS = [
    Sweep(
        OP,
        "token weights and two rejections",
        "tokens",
        tuple(2**e for e in range(8, 25, 2)),
        lambda device, size: Batch(max(1, size // WIDTH), min(size, WIDTH), device, 0),
        ours,
        Floor(bytes=14),
        fit_from=2**18,
    )
]
