"""linear_logprobs, with and without a support: sizes of the kernels, tokens that are certain, and values that are none.

Faults that this is for: a tail of a chunk, block or vector; digits of nearly certain tokens that get lost; NaN that
reaches another token, or the gradient of one that a later mask leaves out.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import needs_cpu_kernels
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import assert_within_budgets, certain, digits_of, problem
from tests.ops.linear_head.heads import BACKENDS, BF16, EXACT, F32, KERNELS, NAN, OVER_SUPPORT

on_kernels = pytest.mark.parametrize("backend", KERNELS)
on_backends = pytest.mark.parametrize("backend", BACKENDS)
over_support = pytest.mark.parametrize("backend", OVER_SUPPORT)


def test_log_probs_in_numbers() -> None:
    """The example of the page on supports: the logits are [3, 2, 1, 0] and [0, 1, 5, 1]."""
    hidden, weight = torch.eye(2), torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 5.0, 1.0]]).T
    targets, support = torch.tensor([1, 2]), (torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))

    def logprobs(head: gk.LMHead | Tensor, **options: object) -> list[float]:
        got = gk.linear_logprobs(hidden, head, targets, backend="reference", **options)  # type: ignore[arg-type]
        return [round(number, 4) for number in got.logprobs.tolist()]

    assert logprobs(weight) == [-1.4402, -0.0425]
    assert logprobs(weight, support=support) == [-1.3133, 0.0]  # log sigmoid(-1), and a certain token
    # without ids 0 and 3: log sigmoid(1) and log sigmoid(4)
    assert logprobs(gk.LMHead(weight, banned=torch.tensor([3, 0]))) == [-0.3133, -0.0181]
    assert logprobs(gk.LMHead(weight, logit_scale=0.5), temperature=0.5) == [-1.4402, -0.0425]


# Sizes


@on_backends
def test_certain_tokens_are_exact_zeros(backend: str) -> None:
    """Log-probs of one id, where there is no other or all others are banned, and those of ignored tokens."""
    plain, of_four = problem("logprobs"), problem("logprobs", "lora", columns=4)
    for case in (
        problem("logprobs", "bias", columns=1),
        of_four.but(banned=torch.arange(3), targets=torch.full((4, 7), 3)),
        plain.but(targets=torch.full((4, 7), heads.IGNORED)),
        plain.but(positions=torch.zeros(0).long()),
    ):
        assert not any(value.any() for value in case.run(backend, F32).values())


@pytest.mark.parametrize(("tokens", "columns", "width"), [(3, 7, 300), (5, 300, 257), (5, 33, 256)], ids=str)
@over_support
def test_sizes_of_a_support(backend: str, tokens: int, columns: int, width: int) -> None:
    """Around the blocks of hidden states, ids and columns."""
    sizes = [(columns, 8, 9, 1)[i % 4] for i in range(tokens)]
    options = {"shape": (tokens,), "columns": columns, "hidden_width": width, "sizes": sizes}
    for dtype in (F32, BF16):
        assert_within_budgets(backend, dtype, [problem("logprobs", "bias", "ignored", "support", **options)])


@pytest.mark.parametrize("chunk_size", [None, 257])
@needs_cpu_kernels
def test_a_vocabulary_of_a_model(chunk_size: int | None) -> None:
    """In chunks of the default size, of which the last is not whole."""
    options = {"shape": (300,), "columns": 1203, "hidden_width": 32, "chunk_size": chunk_size}
    case = problem("logprobs", "bias", "ignored", **options)
    case.inputs["weight"] /= 4
    for dtype in (F32, BF16):
        assert_within_budgets("cpu", dtype, [case])


# Values


@pytest.mark.pairs
@pytest.mark.parametrize("offset", [0.0, 40.0])
@on_kernels
def test_nearly_certain_tokens_keep_their_digits(backend: str, offset: float) -> None:
    case = certain(2, offset)
    got = case.run(backend, F32)
    for name, gold in digits_of(case).items():
        torch.testing.assert_close(got[name].double(), gold, rtol=1e-5, atol=0)


@pytest.mark.parametrize("number", [NAN, float("inf")])
@on_backends
def test_a_token_that_a_later_mask_leaves_out_may_hold_anything(backend: str, number: float) -> None:
    case = problem("logprobs", "zeros")
    is_out = (case.inputs["by_logprobs"] == 0) & (case.inputs["by_entropy"] == 0)
    case.inputs["hidden"][is_out] = number
    outside = case.run(backend, F32)
    assert is_out.any() and all(outside[f"d_{leaf}"].isfinite().all() for leaf in case.op.leaves)
    case.inputs["by_logprobs"][is_out] = 1.0
    inside = case.run(backend, F32)
    assert not any(inside[f"d_{leaf}"].isfinite().all() for leaf in case.op.leaves)


@on_backends
def test_a_nan_or_a_wrong_target_on_a_gpu_stays_in_its_token(backend: str) -> None:
    """On a CPU a target that is no column is an error."""
    for target in (0, -1, 31)[: 1 if backend in EXACT else None]:
        case = problem("logprobs", "bias", shape=(9,))
        case.inputs["targets"][4] = target
        if target == 0:
            case.inputs["hidden"][4, 1] = NAN
        got = case._replace(frozen=("weight", "bias")).run(backend, F32)
        for name in ("logprobs", "entropy", "d_hidden"):
            assert got[name][4].isnan().all() and got[name][torch.arange(9) != 4].isfinite().all(), name


@on_kernels
def test_the_caller_may_overwrite_log_probs(backend: str) -> None:
    hidden, weight = torch.randn(6, 5), torch.randn(9, 5, requires_grad=True)
    targets, mask = torch.arange(6), torch.tensor([True, False, False, True, False, False])

    def gradient(in_place: bool) -> Tensor:
        logprobs, _, squares = gk.linear_logprobs(hidden, weight, targets, return_sum_pi_squared=True, backend=backend)
        assert squares is not None
        squares.zero_()
        masked = logprobs.masked_fill_(mask, 0) if in_place else logprobs.masked_fill(mask, 0)
        return torch.autograd.grad(masked.sum(), weight)[0]

    assert torch.equal(gradient(True), gradient(False))
