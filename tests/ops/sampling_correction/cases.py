"""Batches of log-probs by a trainer and a sampler: one strategy, and the promises of sampling_correction."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

import grpo_kernels as gk
from grpo_kernels.ops.sampling_correction.config import STATISTICS, WEIGHT_LEVELS
from tests.harness import device_of
from tests.ops.promises import Inputs, Op, Results, Same

NAN, INF = float("nan"), float("inf")
DEVICE = device_of("reference")
REJECTIONS = (("token_k1", -0.15, 0.1), ("seq_mean_k3", None, 0.006), ("seq_max_binary_kl", None, 0.2))
OF_TOKENS = gk.CorrectionConfig(weights="token", weight_max=1.1, rejections=REJECTIONS)
OF_ROWS = gk.CorrectionConfig(weights="sequence", weight_min=0.8, outside="mask", rejections=(("seq_sum_k1", -1, 0.1),))
OF_BATCH = gk.CorrectionConfig(weights="geometric", weight_max=1.0, batch_normalize=True, m2_threshold=0.005)


class Batch(NamedTuple):
    """Float64 values that are exact in float32."""

    old: Tensor
    sampling: Tensor
    mask: Tensor

    def to(self, dtype: torch.dtype, device: torch.device = DEVICE) -> Batch:
        """The batch on a device, with NaN and infinities in the slots that take no part."""
        old, sampling = torch.where(self.mask, self.old, NAN), torch.where(self.mask, self.sampling, INF)
        return Batch(old.to(device, dtype), sampling.to(device, dtype), self.mask.to(device))


def make_batch(
    seed: int = 0, rows: int = 7, width: int = 23, spread: float = 0.1, far: float = 0.0, holes: bool = True
) -> Batch:
    """Log ratios around 0 by `spread` and less, those of half the rows with a share `far` beyond 20; row 2 is empty."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(rows, width, generator=generator)

    old = -2 * uniform() - 0.01
    sampling = (
        old + spread * torch.linspace(0.2, 1, rows)[:, None] * torch.randn(rows, width, generator=generator)
    ).clamp(max=-1e-3)
    for values in (old, sampling):
        values[rows // 2 :][(uniform() < far)[rows // 2 :]] = -27.0
    mask = uniform() < (0.8 if holes else 2)
    mask[2:3] = False
    return Batch(old.double(), sampling.double(), mask)


def correct(batch: Batch, config: gk.CorrectionConfig | None = None) -> gk.SamplingCorrection:
    moved = batch.to(torch.float64)
    return gk.sampling_correction(moved.old, moved.sampling, mask=moved.mask, config=config)


def by_token(got: gk.SamplingCorrection, cu_seqlens: Tensor | None = None) -> Tensor:
    """One weight for each token, 0 where the mask is False."""
    weights = got.weights
    if cu_seqlens is not None and weights.dim() == 2:
        spread = weights[:, 0].repeat_interleave(cu_seqlens.diff())
        weights = pad(spread, (0, len(got.mask) - len(spread)))
    return torch.where(got.mask, weights, 0)


# A seed makes better batches than many draws, which hypothesis repeats: 50 examples had 4 with geometric weights.


def a_config(seed: int) -> gk.CorrectionConfig:
    choose = random.Random(seed)
    weights = choose.choice(WEIGHT_LEVELS)
    fields: dict[str, Any] = {"weights": weights, "log_ratio_bound": choose.choice([20.0, None, 0.1])}
    if weights != "none":
        fields |= {
            "weight_min": choose.choice([None, 0.93]),
            "weight_max": choose.choice([None, 1.07]),
            "outside": choose.choice(["truncate", "mask"]),
            "batch_normalize": choose.random() < 0.3,
        }
    scale = {"k1": 0.1, "k2": 0.01, "k3": 0.01, "binary_kl": 0.02}
    rejections = []
    for statistic in choose.sample(STATISTICS, choose.choice([0, 1, 2, 5])):
        high = next(size for name, size in scale.items() if statistic.endswith(name)) * choose.choice([0.5, 1, 2, 10])
        high *= 5 if "sum" in statistic else 1
        low = -high * 1.1 if statistic.endswith("k1") and choose.random() < 0.7 else None
        rejections.append((statistic, low, high))
    threshold = choose.choice([None, 0.004])
    return gk.CorrectionConfig(**fields, rejections=tuple(rejections), m2_threshold=threshold)


def a_call(seed: int) -> tuple[Inputs, gk.CorrectionConfig]:
    """Padded or packed tokens with holes, empty rows, tokens without a score and far ones; and a config."""
    choose = random.Random(seed)
    rows, width = choose.choice([(3, 5), (4, 17), (5, 33), (9, 64), (2, 200), (1, 1), (3, 0)])
    batch = make_batch(seed, rows, width, far=choose.choice([0, 0, 0.05]))
    unscored = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < choose.choice([0, 0.1])
    inputs = {"old_logprobs": batch.old, "sampling_logprobs": batch.sampling.masked_fill(unscored, NAN)}
    if choose.random() < 0.8:
        inputs["mask"] = batch.mask
    if choose.random() < 0.3:
        inputs = {name: value.reshape(-1) for name, value in inputs.items()}
        cuts = sorted(choose.randrange(rows * width + 1) for _ in range(rows))
        if "mask" in inputs:
            inputs["mask"] = inputs["mask"] & (torch.arange(rows * width) < cuts[-1])
        else:
            cuts[-1] = rows * width
        inputs["cu_seqlens"] = torch.tensor([0, *cuts])
    return inputs, a_config(seed)


calls = st.integers(0, 2**31).map(a_call)


# Promises


def draw() -> Inputs:
    batch = make_batch(int(torch.randint(1000, ())), rows=6, width=12)
    batch.sampling[0, 3] = batch.sampling[4, 1:3] = NAN  # not scored
    return {"old_logprobs": batch.old, "sampling_logprobs": batch.sampling, "mask": batch.mask}


def draw_packed() -> Inputs:
    cuts = torch.randint(72, (6,)).sort().values
    inputs = {name: value.flatten() for name, value in draw().items()}
    inputs["mask"] &= torch.arange(72) < cuts[-1]
    return inputs | {"cu_seqlens": pad(cuts, (1, 0))}


def described(config: gk.CorrectionConfig) -> Op:
    parted = not config.batch_normalize and config.m2_threshold is None

    def call(inputs: Inputs, backend: str | None) -> Results:
        weights, mask, metrics = gk.sampling_correction(**inputs, config=config, backend=backend)
        return {"weights": weights, "mask": mask, "metrics": metrics.tensor}

    def in_parts(inputs: Inputs) -> Same:
        """Two micro-batches, whose metrics merge."""

        def joined(results: list[Results]) -> Results:
            one = gk.sampling_correction(inputs["old_logprobs"], inputs["sampling_logprobs"], config=config).metrics
            whole = {name: torch.cat([part[name] for part in results]) for name in ("weights", "mask")}
            return whole | {"metrics": one.merged(torch.stack([part["metrics"] for part in results])).tensor}

        return Same([{name: value[i : i + 3] for name, value in inputs.items()} for i in (0, 3)], joined)

    def ignored(inputs: Inputs) -> dict[str, Tensor]:
        slots = ~inputs["mask"]
        if "cu_seqlens" in inputs:
            slots = slots | (torch.arange(len(slots)) >= inputs["cu_seqlens"][-1])
        return dict.fromkeys(("old_logprobs", "sampling_logprobs"), slots)

    rewrites = {"parts": in_parts} if parted else {}
    supports = {"reference": (torch.float32, torch.float64)}
    return Op(draw, call, supports, (), ignored, rewrites)


def draw_rollouts() -> Inputs:
    return draw_packed() | {"rollouts": torch.randint(0, 3, (6,))}


OPS = {
    "sampling_correction of rollouts": dataclasses.replace(described(OF_ROWS), draw=draw_rollouts, rewrites={}),
    "sampling_correction of packed rows": dataclasses.replace(described(OF_ROWS), draw=draw_packed, rewrites={}),
    "sampling_correction of tokens": described(OF_TOKENS),
    "sampling_correction of rows": described(OF_ROWS),
    "sampling_correction of a batch": described(OF_BATCH),
}
