"""sampling_correction against the installed verl: its default weights of rows, and weights of tokens with two
rejections; both with all metrics.

Lower bound on bytes per token: 4 each for both log-probs, 1 for the mask, 5 written: 14.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Make, Provider, Same, Sweep, sized

OP, ROWS, WIDTH, LONG = "sampling_correction", sized(256), 2048, 16_384
FIELDS = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.5_2.0,0.01",
}
DEFAULTS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
M2PO = gk.CorrectionConfig(m2_threshold=0.005)


class Batch:
    def __init__(self, rows: int, width: int, device: torch.device, seed: int) -> None:
        options: Any = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        self.old = -torch.rand(rows, width, **options)
        noise = 4 / width**0.5 * torch.randn(rows, width, **options)  # a product around 1 in any length
        self.sampling = (self.old + noise).clamp(max=-1e-3)
        lengths = torch.randint(width // 2, width + 1, (rows, 1), **options)
        self.mask = torch.arange(width, device=device) < lengths
        self.weights = self.mask.float()  # verl multiplies by it


def of(rows: int = ROWS, width: int = WIDTH) -> Make:
    return lambda device, seed: Batch(rows, width, device, seed)


def ours(fields: dict[str, Any]) -> Call:
    config = gk.CorrectionConfig.verl(**fields)

    def call(b: Batch) -> tuple[Tensor, Tensor]:
        result = gk.sampling_correction(b.old, b.sampling, mask=b.mask, config=config)
        result.metrics.verl()
        return result.weights, result.mask.float()

    return call


def m2po(b: Batch) -> tuple[Tensor, Tensor]:
    result = gk.sampling_correction(b.old, b.sampling, mask=b.mask, config=M2PO)
    return result.weights, result.mask.float()


def measured(b: Batch) -> tuple[Tensor, Tensor]:
    result = gk.sampling_correction(b.old, b.sampling, mask=b.mask)
    return result.weights, result.mask.float()


def verl(fields: dict[str, Any]) -> Provider:
    def call(b: Batch) -> tuple[Tensor, Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from verl.trainer.ppo import rollout_corr_helper
        correct = rollout_corr_helper.compute_rollout_correction_and_rejection_mask
        weights, mask, _ = correct(b.old, b.sampling, b.weights, **fields)
        return weights.batch["rollout_is_weights"] * mask, mask

    return Provider("verl", call, package="verl")


CASES = [
    Case(
        OP,
        "verl's defaults",
        "256 responses of up to 16,384 tokens",
        Floor(bytes=14 * ROWS * LONG),
        of(width=LONG),
        ours(DEFAULTS),
        (verl(DEFAULTS),),
        (Bar("ratio at least", 1, "verl"), Bar("memory below", 2, "verl")),
        # our weights are one a row; of sums of up to 16,384 log ratios in float32
        same=lambda got, ours: Same(rtol=1e-4)(got, (ours[0] * ours[1], ours[1])),
        pairs=5,
        returned=lambda b: 8 * b.old.numel(),
    ),
    Case(
        OP,
        "token weights and two rejections",
        "256 responses of up to 2,048 tokens",
        Floor(bytes=14 * ROWS * WIDTH),
        of(),
        ours(FIELDS),
        (verl(FIELDS),),
        (Bar("ratio at least", 1, "verl"),),
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
        ours(FIELDS),
        Floor(bytes=14),
        fit_from=2**18,
    )
]
