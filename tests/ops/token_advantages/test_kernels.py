"""token_advantages on every backend against temporal differences in float64: settings, layouts, dtypes, edges."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.token_advantages.registration import FORWARD
from tests.harness import INDUCTOR, assert_within_budget, cpu_threads, device_of, examples, needs_cpu_kernels
from tests.ops.token_advantages.batches import BACKENDS, F32, F64, FAST, INF, NAN, Batch, batch_of, expected

on_backends = pytest.mark.parametrize("backend", BACKENDS)
DISCOUNTS = ((1.0, 1.0), (0.97, 0.9), (0.9, 1.0), (1.0, 0.8), (1.0, 0.0), (0.0, 1.0))


def assert_expected(batch: Batch, config: gk.TokenAdvantageConfig | str, backend: str, dtype: torch.dtype) -> None:
    """Checks float32 results up to their rounding, and float64 ones up to that of sums over a thousand tokens."""
    got = batch.run(config, backend, dtype)
    for name, gold in zip(got._fields, expected(batch, config), strict=True):
        value = getattr(got, name).cpu()
        assert value.dtype == dtype
        if dtype == F32:
            assert_within_budget(value, gold.float(), gold, name)
        else:
            largest = float(gold.abs().max()) if gold.numel() else 0.0
            torch.testing.assert_close(value, gold, rtol=0, atol=1e-12 * largest)


def assert_same(a: gk.TokenAdvantages, b: gk.TokenAdvantages) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# Values


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("turns", [False, True], ids=["tokens", "turns"])
@pytest.mark.parametrize("estimator", gk.TokenAdvantageConfig.names())
@on_backends
def test_every_estimator_on_random_batches(backend: str, estimator: str, turns: bool, dtype: torch.dtype) -> None:
    def check(seed: int, rows: int, width: int, discounts: tuple[float, float], gaps: float, packed: bool) -> None:
        has_values = estimator == "gae"
        batch = batch_of(seed, rows, width, values=has_values, turns=turns, gaps=gaps).with_garbage()
        gamma, lam = discounts
        config = gk.TokenAdvantageConfig(estimator, gamma=gamma, lam=lam if has_values else None)
        assert_expected(batch.packed() if packed else batch, config, backend, dtype)

    fast = backend in FAST
    sizes = (st.integers(0, 1000), st.integers(1, 9 if fast else 4), st.integers(1, 40 if fast else 20))
    more = (st.sampled_from(DISCOUNTS), st.sampled_from((0.0, 0.3, 0.9)), st.booleans())
    settings(max_examples=examples(30) if fast else 5)(given(*sizes, *more)(check))()


@pytest.mark.parametrize("whiten", ["none", "tokens"])
@pytest.mark.parametrize("turns", [False, True], ids=["tokens", "turns"])
@pytest.mark.parametrize("width", [31, 257, 1023, 2500, 9001])
@on_backends
def test_long_rows(backend: str, width: int, turns: bool, whiten: str) -> None:
    batch = batch_of(3, 3, min(width, 1100) if backend == "triton" else width, turns=turns, gaps=0.3).with_garbage()
    config = gk.TokenAdvantageConfig(gamma=0.999, lam=0.95, whiten=whiten)
    assert_expected(batch, config, backend, F32)
    assert_expected(batch.packed(), config, backend, F64)


@on_backends
def test_many_rows(backend: str) -> None:
    batch = batch_of(5, 1500 if backend in FAST else 40, 9)
    assert_expected(batch, gk.TokenAdvantageConfig(gamma=0.99, lam=0.95), backend, F32)
    assert_expected(batch.packed(), gk.TokenAdvantageConfig(gamma=0.99, lam=0.95), backend, F32)


@pytest.mark.skipif("triton" not in BACKENDS, reason="not runnable")
def test_the_moments_of_more_rows_than_a_program_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_kernels.ops.token_advantages.triton._RECORDS_AT_ONCE", 4)
    assert_expected(batch_of(5, 9, 9), gk.TokenAdvantageConfig(gamma=0.99, lam=0.95), "triton", F32)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@on_backends
def test_half_precision_gives_float32(backend: str, half: torch.dtype) -> None:
    batch = batch_of(1, 4, 9)
    assert batch.values is not None
    rounded = dataclasses.replace(batch, rewards=batch.rewards.to(half).double(), values=batch.values.to(half).double())
    got, wanted = rounded.run("gae", backend, half), rounded.run("gae", backend, F32)
    assert got.advantages.dtype == F32
    assert_same(got, wanted)


@pytest.mark.parametrize("estimator", gk.TokenAdvantageConfig.names())
@pytest.mark.parametrize("layout", ["padded", "packed", "turns"])
@on_backends
def test_a_reward_at_a_token_that_does_not_count_belongs_to_the_token_before(
    backend: str, layout: str, estimator: str
) -> None:
    """The reward of a rejected token, or of a tool's output, is the outcome of what was said before it."""
    rewards = torch.tensor([[5.0, 1.0, 2.0, 4.0, 0.5, 8.0], [3.0, 0.0, 0.0, 0.0, 1.0, NAN]], dtype=F64)
    counts = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    moved = torch.tensor([[0.0, 7.0, 0.0, 0.0, 8.5, 0.0], [3.0, 0.0, 1.0, 0.0, 0.0, 0.0]], dtype=F64)
    values = torch.rand(2, 6, dtype=F64) if estimator == "gae" else None
    turns = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 2]]) if layout == "turns" else None

    def run(rewards: Tensor, carry: bool) -> gk.TokenAdvantages:
        lam = 0.7 if estimator == "gae" else None
        config = gk.TokenAdvantageConfig(estimator, gamma=0.9, lam=lam, whiten="none", carry_rewards=carry)
        if layout != "packed":
            return Batch(rewards, values, counts, turns).run(config, backend)
        bounds = torch.tensor([0, 6, 12])
        flat = [None if x is None else x.flatten() for x in (rewards, values, counts)]
        return Batch(*flat, cu_seqlens=bounds).run(config, backend)

    for got, wanted in zip(run(rewards, True), run(moved, False), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)
    left_out = run(torch.where(counts, rewards, 0), False)
    assert_same(run(rewards, False), left_out)
    assert not torch.equal(run(rewards, True).returns, left_out.returns)


# Edges


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)], ids=str)
@on_backends
def test_no_tokens(backend: str, shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape, device=device_of(backend))
    got = gk.token_advantages(nothing, nothing, backend=backend)
    assert got.advantages.shape == got.returns.shape == shape
    turns = torch.zeros(shape, dtype=torch.int64, device=nothing.device)
    gk.token_advantages(nothing, turns=turns, config="reinforce", backend=backend)


@pytest.mark.parametrize("rows", [0, 1, 3])
@on_backends
def test_packed_tokens_behind_the_last_row_are_zero(backend: str, rows: int) -> None:
    device = device_of(backend)
    tokens, bounds = torch.full((5,), NAN, device=device), torch.zeros(rows + 1, dtype=torch.int32, device=device)
    got = gk.token_advantages(tokens, tokens, cu_seqlens=bounds, backend=backend)
    assert not got.advantages.any() and not got.returns.any()


@on_backends
def test_nothing_counts(backend: str) -> None:
    batch = batch_of(1, 3, 7, turns=True)
    assert batch.mask is not None
    batch = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)).with_garbage()
    got = batch.run("gae", backend)
    assert not got.advantages.any() and not got.returns.any()


@pytest.mark.parametrize("reward", [0.7, 1000.1, -3.0])
@on_backends
def test_equal_returns_are_whitened_to_exact_zeros(backend: str, reward: float) -> None:
    rewards = torch.zeros(8, 33, dtype=F64)
    rewards[:, -1] = reward
    got = Batch(rewards, None, None).run("reinforce_plus_plus", backend, F32)
    assert not got.advantages.any() and (got.returns == torch.tensor(reward).float()).all()


@on_backends
def test_one_token_is_whitened_to_zero(backend: str) -> None:
    assert not Batch(torch.ones(1, 1), torch.zeros(1, 1), None).run("gae", backend).advantages.any()


@pytest.mark.parametrize("turns", [False, True], ids=["tokens", "turns"])
@pytest.mark.parametrize("at", [0, 40, -1])
@on_backends
def test_a_row_with_a_nan_reward_is_not_scored(backend: str, at: int, turns: bool) -> None:
    batch = batch_of(2, 4, 70, turns=turns, gaps=0.0)
    others = dataclasses.replace(batch, mask=batch.mask.clone())
    batch.rewards[0, at] = NAN
    others.mask[0] = False
    if turns:
        batch.turns[0, at] = 3 if at != -1 else 100
    config = gk.TokenAdvantageConfig(gamma=0.9, lam=0.8)
    got, wanted = batch.run(config, backend), others.run(config, backend)
    assert not got.advantages[0].any() and got.advantages[2:].any()
    assert_within_budget(got.advantages, wanted.advantages, wanted.advantages.cpu())
    assert_expected(batch, config, backend, F32)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@on_backends
def test_a_long_row_with_a_nan_reward_is_not_scored(backend: str, place: float) -> None:
    """Each row is worked on in several chunks, of which one sees the NaN."""
    batch = batch_of(2, 2, 1100, gaps=0.0)
    batch.rewards[0, int(place * 1099)] = NAN
    assert_expected(batch, gk.TokenAdvantageConfig(gamma=0.9, lam=0.8), backend, F32)


@on_backends
def test_an_infinite_reward_shows(backend: str) -> None:
    batch = batch_of(2, 4, 20, gaps=0.0)
    batch.rewards[0, 10] = INF
    got = batch.run(gk.TokenAdvantageConfig(whiten="none"), backend).advantages
    assert got[0, :11].isinf().all() and got[0, 11:].isfinite().all() and got[2:].isfinite().all()
    assert batch.run("gae", backend).advantages[0].isnan().any()


# Invariance


@on_backends
def test_repeats_bit_by_bit(backend: str) -> None:
    batch = batch_of(7, 5, 700 if backend in FAST else 150, turns=True)
    assert_same(batch.run("gae", backend, F32), batch.run("gae", backend, F32))


@needs_cpu_kernels
@pytest.mark.parametrize("turns", [False, True], ids=["tokens", "turns"])
def test_the_number_of_threads_changes_nothing(turns: bool) -> None:
    batch = batch_of(7, 50, 70, turns=turns)
    with cpu_threads(1):
        wanted = batch.run("gae", "cpu", F32)
    with cpu_threads(4):
        assert_same(batch.run("gae", "cpu", F32), wanted)


@on_backends
def test_a_row_does_not_continue_the_turn_that_ends_the_row_before(backend: str) -> None:
    batch = batch_of(3, 4, 20, turns=True)
    one_turn = dataclasses.replace(batch, turns=torch.zeros_like(batch.turns))
    assert_expected(one_turn, gk.TokenAdvantageConfig(gamma=0.9, lam=0.7), backend, F32)
    assert_expected(one_turn.packed(), gk.TokenAdvantageConfig(gamma=0.9, lam=0.7), backend, F32)


@on_backends
def test_rows_do_not_depend_on_each_other_without_whitening(backend: str) -> None:
    batch = batch_of(3, 6, 50, turns=True)
    config = gk.TokenAdvantageConfig(whiten="none", gamma=0.9, lam=0.7)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    parts = {name: getattr(batch, name)[order] for name in ("rewards", "values", "mask", "turns")}
    wanted = gk.TokenAdvantages(*(x[order.to(x.device)] for x in batch.run(config, backend, F32)))
    assert_same(Batch(**parts).run(config, backend, F32), wanted)


@on_backends
def test_layout_changes_nothing(backend: str) -> None:
    device = device_of(backend)
    tokens = torch.randn(2, 9, 5, device=device)
    strided = gk.token_advantages(tokens[0].T, tokens[1].T, backend=backend)
    assert_same(strided, gk.token_advantages(tokens[0].T.clone(), tokens[1].T.clone(), backend=backend))


# torch


@pytest.mark.parametrize("turns", [False, True], ids=["tokens", "turns"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@on_backends
def test_opcheck(backend: str, packed: bool, turns: bool) -> None:
    batch = batch_of(1, 3, 9, turns=turns)
    if packed:
        batch = batch.packed()
    config = gk.TokenAdvantageConfig.of("gae")
    numbers = None if batch.turns is None else batch.turns.int()
    tensors: list[Tensor | None] = [batch.rewards, batch.values, batch.mask, batch.cu_seqlens, numbers]
    tensors = [None if x is None else x.to(device_of(backend)) for x in tensors]
    torch.library.opcheck(FORWARD[backend], (*tensors, config.modes, config.coefficients))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None) -> None:
    torch.compiler.reset()
    batch = batch_of(1, 4, 12, turns=True)
    device = device_of(backend or "cuda")

    def call(rewards: Tensor, values: Tensor, mask: Tensor, turns: Tensor) -> gk.TokenAdvantages:
        return gk.token_advantages(rewards * 2, values, mask=mask, turns=turns, backend=backend)

    tokens = [x.to(device) for x in (batch.rewards, batch.values, batch.mask, batch.turns) if x is not None]
    compiled = torch.compile(call, fullgraph=True, backend=INDUCTOR)
    assert_same(compiled(*tokens), call(*tokens))


@on_backends
def test_results_have_no_gradient(backend: str) -> None:
    tokens = torch.randn(2, 5, device=device_of(backend), requires_grad=True)
    assert not any(result.requires_grad for result in gk.token_advantages(tokens, tokens, backend=backend))
