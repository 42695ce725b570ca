"""token_logprobs against the functions of the installed TRL.

Faults that this is for: a temperature or entropy that TRL takes otherwise; a gradient that is further from float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_within_budget, device_of
from tests.ops.token_logprobs.cases import BACKENDS, FAST, rows_of

utils = pytest.importorskip("trl.trainer.utils")


def rows(backend: str) -> tuple[Tensor, Tensor]:
    batch, device = rows_of((2, 9, 4000) if backend in FAST else (2, 2, 700)), device_of(backend)
    return batch["logits"].float().to(device).requires_grad_(), batch["targets"].to(device)


def of_trl(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = utils.selective_log_softmax(logits, targets, temperature=temperature)
    return logprobs, utils.entropy_from_logits(logits / temperature)


# Both functions, whose results and gradients ours may not be further from float64 than.
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_gradients(backend: str, temperature: float) -> None:
    logits, targets = rows(backend)
    ours = gk.token_logprobs(logits, targets, temperature=temperature, return_entropy=True, backend=backend)
    theirs = of_trl(logits, targets, temperature)
    wide = logits.detach().double().requires_grad_()
    gold = of_trl(wide, targets, temperature)
    for mine, peers, exact in zip(ours[:2], theirs, gold, strict=True):
        assert_within_budget(mine, peers, exact)
        upstream = torch.randn(targets.shape, device=targets.device)
        gradients = [torch.autograd.grad(result, logits, upstream, retain_graph=True)[0] for result in (mine, peers)]
        (by_wide,) = torch.autograd.grad(exact, wide, upstream.double(), retain_graph=True)
        assert_within_budget(*gradients, by_wide)
