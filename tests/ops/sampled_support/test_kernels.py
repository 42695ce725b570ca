"""Log-probs over a support on every backend, against dense logits with -inf outside of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.sampled_support.registration import IMPLEMENTED
from tests.harness import assert_within_budget, device_of, runnable_backends
from tests.ops.sampled_support.batches import (
    BACKENDS,
    F64,
    FACTORS,
    HEAD,
    assert_close,
    batch,
    is_certain,
    kept_mask,
    oracle,
    run,
    softmax_of,
    upstream_of,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDE = runnable_backends(IMPLEMENTED, F64)


def rounded(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Values that are exact in a narrower dtype."""
    return {k: v.to(dtype).double() if isinstance(v, Tensor) and k in HEAD else v for k, v in given.items()}


# Values and gradients


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("backend", WIDE)
def test_float64_is_the_softmax_of_masked_logits(backend: str, factors: dict[str, Any]) -> None:
    temperature = torch.rand(12, dtype=F64) + 0.5
    for options in (factors, factors | {"temperature": temperature}):
        assert_close(run(batch(), backend, **options), oracle(batch(), **options))


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loses_no_more_than_torch_does(backend: str, dtype: torch.dtype, factors: dict[str, Any]) -> None:
    given = rounded(batch(hidden=37), dtype)
    got, working, gold = (
        run(given, backend, dtype, **factors),
        oracle(given, dtype, **factors),
        oracle(given, **factors),
    )
    for what in gold:
        assert_within_budget(got[what], working[what], gold[what], what)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_support_is_no_support(backend: str) -> None:
    given = batch(4, dtype=torch.float32)
    rows, columns = 4, len(given["weight"])
    given["support"] = torch.arange(columns).repeat(rows), torch.arange(rows + 1) * columns
    got = run(given, backend, torch.float32)
    given.pop("support")
    # the same sums in another order: 31 terms of float32 around 10
    assert_close(got, run(given, "reference", torch.float32), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_ids_does_not_matter(backend: str) -> None:
    given = batch()
    token_ids, offsets = given["support"]
    rows = torch.repeat_interleave(torch.arange(12), offsets.diff())
    by_id = torch.sort(rows * 31 + token_ids).values % 31
    assert_close(
        run(given, backend, torch.float32),
        run(given | {"support": (by_id, offsets)}, backend, torch.float32),
        rtol=2e-5,
        atol=2e-5,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_that_keep_the_same_ids(backend: str) -> None:
    """As frequent tokens do: their entries take several steps of the sum over rows."""
    given = rounded(batch(40, columns=9), torch.float32)
    given["targets"] = torch.arange(40) % 3
    given["support"] = torch.arange(3).repeat(40), 3 * torch.arange(41)
    got, working, gold = run(given, backend, torch.float32), oracle(given, torch.float32), oracle(given)
    for what in gold:
        assert_within_budget(got[what], working[what], gold[what], what)


# Rows without work


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_only_id_of_a_row_is_certain(backend: str) -> None:
    given = batch(dtype=torch.float32)
    certain = is_certain(given)
    given["hidden"][certain] = float("nan")  # not even read
    got = run(given, backend, torch.float32)
    for name in ("logprobs", "entropy", "by hidden"):
        assert not got[name].cpu()[certain].any(), name
    others = run(batch(dtype=torch.float32), backend, torch.float32)
    assert all(torch.equal(got[name], others[name]) for name in others)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_are_not_read(backend: str) -> None:
    given = batch(dtype=torch.float32)
    ignored = given["targets"] == -100
    given["hidden"][ignored] = float("nan")
    got, expected = run(given, backend, torch.float32), run(batch(dtype=torch.float32), backend, torch.float32)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not got["logprobs"].cpu()[ignored].any() and not got["by hidden"].cpu()[ignored].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_the_weight_outside_of_all_supports_are_not_read(backend: str) -> None:
    given = batch(columns=500, dtype=torch.float32)
    given["support"] = first_ids(given, 9)
    mask = kept_mask(given, 12, 500)
    unused = ~mask.any(0)
    expected = run(given, backend, torch.float32)
    assert not expected["by weight"].cpu()[unused].any() and not expected["by bias"].cpu()[unused].any()
    for name in ("weight", "bias"):
        given[name][unused] = float("nan")
    got = run(given, backend, torch.float32)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def first_ids(given: dict[str, Any], size: int) -> tuple[Tensor, Tensor]:
    """Supports of `size` neighbouring ids, with the target as the first."""
    rows = len(given["targets"])
    ids = (given["targets"].clamp(min=0)[:, None] + torch.arange(size)) % len(given["weight"])
    return ids.flatten(), torch.arange(rows + 1) * size


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_rows(backend: str, shape: tuple[int, ...]) -> None:
    given = batch(dtype=torch.float32) | {
        "hidden": torch.zeros(*shape, 6),
        "targets": torch.zeros(shape, dtype=torch.int64),
        "support": (torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
    }
    got = run(given, backend, torch.float32)
    assert got["logprobs"].shape == shape and not got["by weight"].any() and not got["by bias"].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_ignored_without_any_id(backend: str) -> None:
    given = batch(3, dtype=torch.float32)
    given["targets"] = torch.full((3,), -100)
    given["support"] = torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    assert not any(value.any() for value in run(given, backend, torch.float32).values())


# Arguments


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_calls_give_the_same_bits(backend: str) -> None:
    given = batch(40, hidden=33, columns=50)
    first, second = (run(given, backend, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_integers(backend: str, dtype: torch.dtype) -> None:
    given = batch()
    narrow = tuple(part.to(dtype) for part in given["support"])
    got, expected = run(given | {"support": narrow}, backend, torch.float32), run(given, backend, torch.float32)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("frozen", HEAD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_input_gets_no_gradient(backend: str, frozen: str) -> None:
    got, expected = run(batch(), backend, torch.float32, frozen), run(batch(), backend, torch.float32)
    assert expected.keys() - got.keys() == {f"by {frozen}"}
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_wider_than_a_block(backend: str) -> None:
    given = batch(rows=3, hidden=300, columns=7, dtype=torch.float32)
    got, working, gold = run(given, backend, torch.float32), oracle(given, torch.float32), oracle(given)
    for name, value in gold.items():
        assert_within_budget(got[name].cpu(), working[name].cpu(), value, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_with_strides(backend: str) -> None:
    given = batch(dtype=torch.float32)
    wide = {name: torch.randn(len(given[name]), 12).add_(7) for name in ("hidden", "weight")}
    strided = {name: value[:, ::2].copy_(given[name]) for name, value in wide.items()}
    got, expected = run(given | strided, backend, torch.float32), run(given, backend, torch.float32)
    assert_close(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["integers", "mask"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_positions(backend: str, kind: str) -> None:
    given = batch(dtype=torch.float32)
    places = torch.tensor([7, 0, 5])
    positions = places if kind == "integers" else torch.zeros(12, dtype=torch.bool).index_fill(0, places, True)
    device = device_of(backend)
    whole = run(given, backend, torch.float32)["logprobs"]
    arguments = {k: tuple(p.to(device) for p in v) if k == "support" else v.to(device) for k, v in given.items()}
    got = gk.linear_logprobs(**arguments, positions=positions.to(device), backend=backend).logprobs
    if kind == "integers":
        assert torch.equal(got.cpu(), whole.cpu()[places])
    else:
        assert torch.equal(got.cpu(), torch.where(positions, whole.cpu(), 0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_of_sequences(backend: str) -> None:
    given = batch(dtype=torch.float32)
    got = run(given, backend, torch.float32)
    shaped = given | {"hidden": given["hidden"].view(3, 4, 6), "targets": given["targets"].view(3, 4)}
    folded = run(shaped, backend, torch.float32)
    assert folded["logprobs"].shape == (3, 4)
    assert all(torch.equal(folded[name].flatten(), got[name].flatten()) for name in got)


# token_logprobs


def run_logits(given: dict[str, Any], logits: Tensor, backend: str, **options: Any) -> dict[str, Tensor]:
    device = device_of(backend)
    leaf = logits.detach().to(device).requires_grad_()
    support = tuple(part.to(device) for part in given["support"])
    options = {k: v.to(device, logits.dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    targets = given["targets"].to(device).view(logits.shape[:-1])
    result = gk.token_logprobs(leaf, targets, support=support, return_entropy=True, backend=backend, **options)
    by_logprob, by_entropy = upstream_of(result.logprobs.shape).to(result.logprobs)
    (result.logprobs * by_logprob + result.entropy * by_entropy).sum().backward()
    return {"logprobs": result.logprobs.detach(), "entropy": result.entropy.detach(), "by logits": leaf.grad}


def oracle_of_logits(given: dict[str, Any], logits: Tensor, **options: Any) -> dict[str, Tensor]:
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = softmax_of(leaf.to(torch.promote_types(logits.dtype, torch.float32)), given | options)
    by_logprob, by_entropy = upstream_of(logprobs.shape).to(logprobs)
    (logprobs * by_logprob + entropy * by_entropy).sum().backward()
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "by logits": leaf.grad}


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("dtype", [F64, *DTYPES], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_from_logits(backend: str, dtype: torch.dtype, factors: dict[str, Any]) -> None:
    if dtype not in IMPLEMENTED[backend]:
        pytest.skip("float64 is for the CPU")
    given = batch()
    logits = (4 * torch.randn(12, 31, dtype=F64) + 25).to(dtype)
    got, working = run_logits(given, logits, backend, **factors), oracle_of_logits(given, logits, **factors)
    gold = oracle_of_logits(given, logits.double(), **factors)
    for name in gold:
        assert_within_budget(got[name], working[name], gold[name], name)
    assert not got["by logits"].cpu()[~kept_mask(given, 12, 31)].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_from_a_slice_of_logits(backend: str) -> None:
    given = batch()
    logits = torch.randn(3, 5, 31)
    got = run_logits(given, logits[:, :-1], backend)
    expected = run_logits(given, logits[:, :-1].contiguous(), backend)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_are_not_kept_may_hold_anything(backend: str) -> None:
    given = batch()
    logits = torch.randn(12, 31)
    given["targets"][0] = -100  # a row that is not read, although it keeps all ids
    outside = ~kept_mask(given, 12, 31) | is_certain(given)[:, None] | (given["targets"] == -100)[:, None]
    spoiled = logits.masked_fill(outside, float("nan"))
    got, expected = run_logits(given, spoiled, backend), run_logits(given, logits, backend)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
