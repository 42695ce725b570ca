"""The CUDA kernel that computes a row's gradient while it has the row: against the two ops, rows that do not fit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.logits_policy_loss import registration as op
from tests import emulation
from tests.harness import assert_within_budget
from tests.ops.logits_policy_loss.batches import (
    CONFIGS,
    F64,
    assert_same,
    batch,
    cast,
    composed,
    logits_for,
    random_batch,
    run,
)
from tests.ops.policy_loss.test_kernels import random_config

pytestmark = emulation.only
TOKEN_LEVEL = [name for name, config in CONFIGS.items() if not config.couples_tokens and name != "quantile"]


@pytest.fixture(params=[227, 5], ids=["whole rows", "64 pieces"])
def shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kilobytes of shared memory of a block: for whole rows, or for their first 64 pieces of 16 bytes."""
    with emulation.shared_memory(request.param):
        yield


def halves(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments with bfloat16 logits and float32 numbers, and the same values in float64."""
    exact = cast(arguments, torch.float32)
    exact = cast(exact | {"logits": exact["logits"].bfloat16()}, F64)
    return cast(exact, torch.float32) | {"logits": exact["logits"].bfloat16()}, exact


def launched(arguments: dict[str, Any], **options: Any) -> set[str]:
    return emulation.launched(lambda: run(arguments, "cuda", **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_one_kernel_serves_losses_of_single_tokens(name: str) -> None:
    arguments, _ = halves(batch(name))
    kernels = launched(arguments, config=CONFIGS[name])
    one_pass = name in TOKEN_LEVEL
    assert ("logits_policy_loss.rows_kernel" in kernels) == one_pass
    assert ("token_logprobs.backward_kernel" in kernels) != one_pass
    assert "token_logprobs.backward_kernel" in launched(cast(arguments, torch.float32), config=CONFIGS[name])


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("vocabulary", [31, 512, 513, 700, 4200])
@pytest.mark.parametrize("name", ["clip", "entropy"])
def test_rows_of_any_length(name: str, vocabulary: int) -> None:
    """Rows of every alignment, of one warp's pieces or of more than all threads take at once."""
    arguments, exact = halves(batch(name, rows=2, vocabulary=vocabulary))
    for options in ({}, {"softcap": 4.0}):
        got = run(arguments, "cuda", config=CONFIGS[name], **options)
        working = run(arguments, "reference", config=CONFIGS[name], **options)
        gold = composed(exact, config=CONFIGS[name], **options)
        for what in ("loss", "gradient"):
            assert_within_budget(got[what], working[what], gold[what], what)
        assert_same(run(arguments, "cuda", config=CONFIGS[name], inplace=True, **options), got)


@pytest.mark.parametrize("seed", range(3))
def test_any_settings_give_the_gradient_of_the_two_ops(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Their terms may be rounded differently, and so may a last digit of bfloat16."""
    choose = random.Random(seed)
    cases = 0
    while cases < 12:
        config = random_config(choose)
        if config.couples_tokens or config.top_entropy_quantile < 1:
            continue
        arguments, _ = halves(random_batch(choose, config) | {"segments": None})
        options = {"config": config, "return_entropy": choose.random() < 0.5}
        got = run(arguments, "cuda", **options)
        with monkeypatch.context() as patch:
            apply = op.apply
            patch.setattr(op, "apply", lambda *args, of=apply: of(*args[:3], args[3]._replace(one_pass=False), args[4]))
            expected = run(arguments, "cuda", **options)
        assert_same({k: got[k] for k in ("loss", "metrics")}, {k: expected[k] for k in ("loss", "metrics")})
        largest = float(expected["gradient"].abs().nan_to_num().max()) if expected["gradient"].numel() else 0
        torch.testing.assert_close(
            got["gradient"].float(), expected["gradient"].float(), rtol=2**-7, atol=1e-5 * largest, equal_nan=True
        )
        cases += 1


@pytest.mark.parametrize("name", ["clip", "local entropy"])
def test_same_bits_under_every_schedule(name: str) -> None:
    arguments, _ = halves(batch(name, vocabulary=700))
    results = []
    for seed in range(5):
        emulation.set_schedule(seed)
        results.append(run(arguments, "cuda", config=CONFIGS[name]))
    for result in results[1:]:
        assert_same(result, results[0])


def test_a_slice_whose_gradient_is_aligned_differently() -> None:
    arguments, _ = halves(batch("grpo", rows=2, vocabulary=300))
    arguments["old_logprobs"] = None
    whole, targets = arguments.pop("logits"), arguments.pop("targets").clamp(max=294)
    results: list[Tensor] = []
    for shift in range(4):
        leaf = whole.clone().requires_grad_()
        part = leaf[..., shift : shift + 295]
        gk.logits_policy_loss(part, targets, **arguments, backend="cuda").loss.backward()
        copy = part.detach().clone().requires_grad_()
        gk.logits_policy_loss(copy, targets, **arguments, backend="cuda").loss.backward()
        results.append(leaf.grad[..., shift : shift + 295])
        assert torch.equal(results[-1], copy.grad) and results[-1].any()


def test_a_target_that_is_no_column_gives_nan() -> None:
    logits = logits_for(torch.full((1, 3), -1.0, dtype=F64), torch.zeros(1, 3).long()).bfloat16().requires_grad_()
    targets = torch.tensor([[0, 9, -1]])
    result = gk.logits_policy_loss(logits, targets, torch.full((1, 3), -1.0), torch.ones(1), backend="cuda")
    result.loss.backward()
    assert result.loss.isnan() and logits.grad.isnan().any(-1).tolist() == [[False, True, True]]


@pytest.mark.slow
def test_more_rows_than_blocks() -> None:
    """A grid has at most 2^12 blocks, so some blocks process two rows."""
    tokens, vocabulary = 2**12 + 150, 40
    logits = torch.randn(1, tokens, vocabulary).bfloat16()
    targets = torch.randint(vocabulary, (1, tokens))
    targets[0, ::3] = -100
    arguments = {"logits": logits, "targets": targets, "old_logprobs": None, "advantages": torch.ones(1)}
    got, expected = (run(arguments, backend) for backend in ("cuda", "cpu"))
    torch.testing.assert_close(got["gradient"].float(), expected["gradient"].float(), rtol=2**-7, atol=1e-7)
    assert got["gradient"][0, -2].any()
