"""Small calls of sampling_correction for tools/kernel_cases.py: padded rows of several lengths, packed rows, M2PO."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import grpo_kernels as gk

REJECTIONS = (("token_k1", -0.3, 0.2), ("token_binary_kl", None, 0.05), ("seq_mean_k3", None, 0.02))
CONFIGS = (
    gk.CorrectionConfig(weights="token", weight_max=1.2, rejections=REJECTIONS),
    gk.CorrectionConfig(weights="sequence", outside="mask", weight_min=0.5, weight_max=2.0, m2_threshold=0.01),
)


def corrections(backend: str, put: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    for config in CONFIGS:
        for rows, width in ((3, 5), (2, 300)):
            old = -torch.rand(rows, width)
            sampling = old + 0.1 * torch.randn(rows, width)
            mask = torch.rand(rows, width) > 0.2
            yield from one_call(put(old), put(sampling), put(mask), None, config, backend)
    old = -torch.rand(60)
    sampling, bounds = old + 0.1 * torch.randn(60), torch.tensor([0, 7, 7, 50])
    yield from one_call(put(old), put(sampling), None, put(bounds), CONFIGS[0], backend)


def one_call(
    old: Tensor,
    sampling: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    config: gk.CorrectionConfig,
    backend: str,
) -> Iterator[Tensor]:
    result = gk.sampling_correction(old, sampling, mask=mask, cu_seqlens=cu_seqlens, config=config, backend=backend)
    yield result.weights
    yield result.mask
    yield torch.stack([result.metrics[name].float() for name in ("tokens", "kept_tokens", "dropped_rows")])
