"""The sum of squared probabilities that every op from logits or hidden states can measure, beside its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding, device_of
from tests.ops.linear_head.heads import BACKENDS, EXACT, F32, F64, OVER_SUPPORT, assert_close

ROWS, TOKENS, WIDTH, COLUMNS = 3, 7, 8, 31
SOFTCAP, TEMPERATURE = 5.0, 0.7
BANNED = torch.tensor([3, 4])


def draw() -> dict[str, Tensor]:
    """Logits of many sizes, also nearly certain ones, and a target that is ignored."""
    torch.manual_seed(0)
    targets = torch.randint(5, COLUMNS, (ROWS, TOKENS))
    targets[1, 2] = -100
    return {
        "hidden": torch.randn(ROWS, TOKENS, WIDTH, dtype=F64) * torch.logspace(-1, 1, TOKENS, dtype=F64)[:, None],
        "weight": torch.randn(COLUMNS, WIDTH, dtype=F64),
        "targets": targets,
        "advantages": torch.randn(ROWS, dtype=F64),
        "ids": torch.stack([5 + torch.randperm(COLUMNS - 5)[:4] for _ in range(ROWS * TOKENS)]).view(ROWS, TOKENS, 4),
        "teacher_logprobs": torch.randn(ROWS, TOKENS, 4, dtype=F64).log_softmax(-1) - 0.1,
    }


def kept(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """All ids from the fifth on, of every token."""
    count = ROWS * TOKENS
    ids = torch.arange(5, COLUMNS, device=inputs["targets"].device)
    return ids.repeat(count), torch.arange(0, len(ids) * count + 1, len(ids), device=ids.device)


def definition(inputs: dict[str, Tensor], first: int = 0) -> Tensor:
    z = SOFTCAP * torch.tanh(inputs["hidden"] @ inputs["weight"].T / SOFTCAP) / TEMPERATURE
    z[..., BANNED] = -torch.inf
    z[..., :first] = -torch.inf
    squares = z.softmax(-1).square().sum(-1)
    return torch.where(inputs["targets"] == -100, 0, squares)


def from_logits(i: dict[str, Tensor], **options: Any) -> Tensor | None:
    logits = (i["hidden"] @ i["weight"].T).index_fill(-1, BANNED.to(i["hidden"].device), -torch.inf)
    return gk.token_logprobs(logits, i["targets"], softcap=SOFTCAP, **options).sum_pi_squared


def from_hidden_states(i: dict[str, Tensor], **options: Any) -> Tensor | None:
    return gk.linear_logprobs(i["hidden"], head_of(i), i["targets"], chunk_size=5, **options).sum_pi_squared


def over_support(i: dict[str, Tensor], **options: Any) -> Tensor | None:
    head = gk.LMHead(i["weight"], softcap=SOFTCAP)
    return gk.linear_logprobs(i["hidden"], head, i["targets"], support=kept(i), **options).sum_pi_squared


def with_a_loss(i: dict[str, Tensor], **options: Any) -> Tensor | None:
    result = gk.linear_policy_loss(i["hidden"], head_of(i), i["targets"], None, i["advantages"], **options)
    torch.autograd.grad(result.loss, i["weight"])
    assert result.metrics.entropy is None
    return result.metrics.sum_pi_squared


def in_low_memory(i: dict[str, Tensor], **options: Any) -> Tensor | None:
    return with_a_loss(i, memory="low", **options)


def beside_a_teacher(i: dict[str, Tensor], **options: Any) -> Tensor | None:
    return with_a_loss(i, teacher=gk.Teacher(i["ids"], i["teacher_logprobs"]), chunk_size=5, **options)


def head_of(i: dict[str, Tensor]) -> gk.LMHead:
    return gk.LMHead(i["weight"], softcap=SOFTCAP, banned=BANNED.to(i["weight"].device))


OVER_VOCABULARY = (from_logits, from_hidden_states, with_a_loss, in_low_memory, beside_a_teacher)
CASES = [
    *((measure, backend) for measure in OVER_VOCABULARY for backend in BACKENDS),
    *((over_support, backend) for backend in OVER_SUPPORT),
]


@pytest.mark.parametrize(("measure", "backend"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_it_is_the_definition(measure: Callable[..., Tensor | None], backend: str) -> None:
    inputs = draw()
    dtype = F64 if backend in EXACT else F32
    given = {
        name: value.to(device_of(backend), dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
    }
    given["weight"].requires_grad_()
    got = measure(given, temperature=TEMPERATURE, return_sum_pi_squared=True, backend=backend)
    assert got is not None and got.dtype == dtype and not got.requires_grad
    rounded = {name: value.detach().cpu().to(inputs[name].dtype) for name, value in given.items()}

    def defined() -> Tensor:
        return definition(rounded, 5 if measure is over_support else 0)

    if dtype == F64:
        assert_close({"squares": got}, {"squares": defined()})
    else:
        assert_close_to_rounding(got.cpu(), defined(), defined, F64)
    assert measure(given, temperature=TEMPERATURE, backend=backend) is None
