"""endpoint_segments on every backend against float64 formulas: every setting, layout and dtype, and empty batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.harness import cpu_threads, device_of, needs_cpu_kernels, quick
from tests.ops.endpoint_segments.batches import (
    BACKENDS,
    CREDITS,
    F64,
    FAST,
    INF,
    KERNELS,
    NAN,
    NORMS,
    PROXIES,
    REWARDS,
    RULES,
    TIE,
    Batch,
    assert_gold,
    assert_same,
    batch_of,
    batches,
    config_of,
)
from tests.strategies import laid_out

DISCOUNTS = ((1.0, 1.0), (0.97, 0.9), (0.9, 1.0), (1.0, 0.8), (1.0, 0.0), (0.0, 1.0))
SIZES = (1, 2, 3, 16, 1000)
TAUS = (1e-3, 0.5, 1.0, 1.7, 6.0, 1e6)
VARIANTS = [(rule, proxy, credit, norm) for rule in RULES for proxy in PROXIES for credit in CREDITS for norm in NORMS]
variants = pytest.mark.parametrize(("rule", "proxy", "credit", "norm"), VARIANTS)


def for_all(backend: str, check: Callable[..., None], *more: st.SearchStrategy[Any], examples: int = 8) -> None:
    """Runs the check on random batches; fast backends get more and larger ones."""
    fast = backend in FAST
    batch = batches() if fast else batches(max_rows=3, max_width=20)
    settings(max_examples=examples if fast else 2)(given(batch, *more)(check))()


# Values


@variants
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_setting_on_random_batches(backend: str, rule: str, proxy: str, credit: str, norm: str) -> None:
    ties = []

    def check(batch: Batch, discounts: tuple[float, float], size: int, tau: float, eps: float, packed: bool) -> None:
        gamma, lam = discounts
        config = config_of(
            rule=rule,
            proxy=proxy,
            credit=credit,
            norm=norm,
            gamma=gamma,
            lam=lam,
            group_max_size=size,
            group_variance_threshold=tau,
            group_epsilon=eps,
        )
        given_ = batch.with_garbage().packed(behind=5) if packed else batch.with_garbage()
        gold = given_.gold(config)
        ties.append(gold.margin < TIE)
        if not ties[-1]:
            assert_gold(given_.run(config, backend), gold, f"{config}")

    numbers = (DISCOUNTS, SIZES, TAUS, (1e-6, 0.1))
    for_all(backend, check, *map(st.sampled_from, numbers), st.booleans())
    assert sum(ties) <= len(ties) / 4


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_size_and_threshold(backend: str, size: int, tau: float) -> None:
    """Covers both rules and both proxies; the grid is not thinned."""
    kinds = REWARDS[:2] if backend in FAST else REWARDS[:1]
    for seed, kind in enumerate(kinds):
        batch = batch_of(seed, 2, 40 if backend in FAST else 12, rewards=kind)
        for rule, proxy in ((rule, proxy) for rule in RULES for proxy in PROXIES):
            config = config_of(rule=rule, proxy=proxy, group_max_size=size, group_variance_threshold=tau, gamma=0.99)
            gold = batch.gold(config)
            assert gold.margin > TIE
            assert_gold(batch.run(config, backend), gold, f"{kind} {rule} {proxy}")


@pytest.mark.parametrize("discounts", DISCOUNTS, ids=str)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_discount_with_and_without_values(
    backend: str, with_values: bool, discounts: tuple[float, float]
) -> None:
    for seed in range(3 if backend in FAST else 1):
        batch = batch_of(seed, 6, 30 if backend in FAST else 12, values=with_values, gaps=0.3)
        for norm in NORMS:
            config = config_of(gamma=discounts[0], lam=discounts[1], norm=norm)
            gold = batch.gold(config)
            assert gold.margin > TIE
            assert_gold(batch.run(config, backend), gold)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_rows(backend: str) -> None:
    batch = batch_of(3, 2, 1000 if backend in FAST else 150, rewards="terminal", gaps=0.01, empty=0.0)
    for size in (16, 4000):
        config = config_of(gamma=0.999, lam=0.95, group_max_size=size)
        gold = batch.gold(config)
        assert gold.margin > TIE
        assert_gold(batch.run(config, backend), gold)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows(backend: str, rule: str) -> None:
    batch = batch_of(5, 300 if backend in FAST else 40, 9, gaps=0.2, values=False, prompts=5)
    config = config_of(rule=rule, norm="prompt", credit="broadcast")
    gold = batch.gold(config)
    assert gold.margin > TIE
    assert_gold(batch.run(config, backend), gold)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs_that_are_far_apart(backend: str) -> None:
    """Weights from 1e-9 to 1e9, at a threshold without ties."""
    for seed in range(10 if backend in FAST else 1):
        batch = batch_of(seed, 2, 40 if backend in FAST else 12, wild=True)
        far = torch.where(torch.arange(batch.mask.shape[1]) % 9 == 4, 1e30, 0.0)
        batch = dataclasses.replace(batch, old_logprobs=batch.old_logprobs - far)
        for rule in RULES:
            config = config_of(rule=rule, group_variance_threshold=1.3)
            gold = batch.gold(config)
            assert gold.margin > TIE
            assert_gold(batch.run(config, backend), gold)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_were_certain_weigh_nothing(backend: str) -> None:
    batch = batch_of(1, 3, 30, gaps=0.0, empty=0.0)
    certain = batch.logprobs.masked_fill(torch.arange(30) % 3 == 1, 0.0)
    batch = dataclasses.replace(batch, logprobs=certain)
    for rule in RULES:
        config = config_of(rule=rule)
        gold = batch.gold(config)
        assert gold.margin > TIE
        got = batch.run(config, backend)
        assert_gold(got, gold)
        # rounding can lift a log-prob above 0, but must not make a weight negative
        rounded = dataclasses.replace(batch, logprobs=torch.where(batch.logprobs == 0, 1e-3, batch.logprobs))
        assert_same(rounded.run(config, backend), got)


# Few tokens


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (4, 0)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, norm: str, shape: tuple[int, int]) -> None:
    for with_values in (True, False):
        batch = batch_of(0, *shape, values=with_values)
        got = batch.run(config_of(norm=norm), backend)
        assert got.advantages.shape == got.segment_ids.shape == shape
        assert got.num_segments.tolist() == [0] * shape[0] and got.num_segments.dtype == torch.int32


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_packed_tokens(backend: str, norm: str) -> None:
    for rows, tokens in ((0, 0), (3, 0), (0, 4), (3, 4)):
        subset = torch.full((tokens,), NAN, dtype=F64)
        bounds = torch.zeros(rows + 1, dtype=torch.int64)  # all tokens follow the last row
        counted = torch.ones(tokens, dtype=torch.bool)
        for values in (subset, None):
            batch = Batch(subset, subset, subset, counted, values, torch.arange(rows), bounds)
            got = batch.run(config_of(norm=norm), backend)
            assert got.num_segments.tolist() == [0] * rows and got.segment_ids.tolist() == [-1] * tokens
            assert not got.advantages.any() and not got.returns.any() and not got.endpoint_mask.any()


@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_token_masked(backend: str, norm: str, with_values: bool) -> None:
    batch = batch_of(0, 4, 6, values=with_values)
    batch = dataclasses.replace(batch, mask=torch.zeros_like(batch.mask)).with_garbage()
    got = batch.run(config_of(norm=norm), backend)
    assert not got.advantages.any() and not got.returns.any() and not got.endpoint_mask.any()
    assert (got.segment_ids == -1).all() and got.num_segments.tolist() == [0] * 4


@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token(backend: str, credit: str) -> None:
    one = torch.tensor([[0.75]], dtype=F64)
    batch = Batch(one, -one, -one, one > 0, one / 3, torch.zeros(1, dtype=torch.int64))
    got = batch.run(config_of(credit=credit), backend)
    assert got.advantages.tolist() == [[0.5]] and got.returns.tolist() == [[0.75]]
    assert got.endpoint_mask.tolist() == [[True]] and got.segment_ids.tolist() == [[0]]
    assert got.num_segments.tolist() == [1]
    for norm in ("batch", "prompt"):
        assert batch.run(config_of(credit=credit, norm=norm), backend).advantages.tolist() == [[0.0]]


@pytest.mark.parametrize("norm", ["batch", "prompt"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_advantages_are_normalised_to_zero(backend: str, norm: str) -> None:
    """In binary, the mean of three values of 0.1 is not exactly 0.1."""
    for value in (0.1, 1e6 + 0.1):
        rewards = torch.full((3, 1), value, dtype=F64)
        batch = Batch(
            rewards, -torch.ones(3, 1), -torch.ones(3, 1), rewards > 0, 0 * rewards, torch.zeros(3, dtype=torch.int64)
        )
        batch = dataclasses.replace(batch, groups=torch.tensor([4, 4, 4])).to(F64)
        got = batch.run(config_of(norm=norm), backend)
        assert got.advantages.tolist() == [[0.0]] * 3 and got.endpoint_mask.all()
        assert got.returns.tolist() == rewards.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_mask_counts_every_token(backend: str) -> None:
    batch = batch_of(2, 3, 20, gaps=0.0, empty=0.0)
    batch = dataclasses.replace(batch, mask=torch.ones_like(batch.mask))
    config = config_of(norm="batch")
    assert_same(batch.run(config, backend, mask=None), batch.run(config, backend))


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_inputs_are_widened(backend: str, norm: str, dtype: torch.dtype) -> None:
    """Results equal a float64 computation on the narrow values, rounded once to float32."""

    def check(batch: Batch, tau: float, packed: bool) -> None:
        narrow = batch.with_garbage().to(dtype)
        narrow = narrow.packed(behind=1) if packed else narrow
        config = config_of(norm=norm, gamma=0.95, lam=0.9, group_variance_threshold=tau)
        gold = narrow.gold(config)
        if gold.margin > TIE:
            got = narrow.run(config, backend)
            assert got.advantages.dtype == got.returns.dtype == torch.float32
            assert_gold(got, gold)

    for_all(backend, check, st.sampled_from(TAUS), st.booleans())


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes_follow_the_rewards(backend: str, dtype: torch.dtype) -> None:
    batch = batch_of(4, 5, 30)
    assert batch.values is not None
    mixed = dataclasses.replace(
        batch, rewards=batch.rewards.to(dtype), logprobs=batch.logprobs.float(), values=batch.values.half()
    )
    wide = F64 if dtype == F64 else torch.float32
    got = mixed.run(config_of(), backend)
    assert got.advantages.dtype == got.returns.dtype == wide
    assert_same(got, mixed.to(wide).run(config_of(), backend))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_of_numbers_counts_what_is_not_zero(backend: str, dtype: torch.dtype) -> None:
    batch = batch_of(4, 5, 30, gaps=0.3).with_garbage()
    numbers = batch.mask.to(dtype) * (3 if dtype == torch.uint8 else -1)
    assert_same(batch.run(config_of(), backend, mask=numbers), batch.run(config_of(), backend))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_integers_equal_int64(backend: str, dtype: torch.dtype) -> None:
    batch = batch_of(4, 6, 12, values=False)
    ids = torch.tensor([3, 0, 100, 3, 100, 0])
    config = config_of(norm="prompt")
    assert_same(batch.run(config, backend, groups=ids.to(dtype)), batch.run(config, backend, groups=ids))
    packed = batch.packed(behind=2)
    assert packed.cu_seqlens is not None
    narrow = packed.run(config, backend, cu_seqlens=packed.cu_seqlens.int())
    assert_same(narrow, packed.run(config, backend))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_int_groups_equal_ids(backend: str, size: int) -> None:
    config = config_of(norm="prompt", gamma=0.9)
    for with_values in (True, False):
        batch = batch_of(8, 6, 12, values=with_values)
        ids = torch.arange(6) // size
        expected = batch.run(config, backend, groups=ids)
        assert_same(batch.run(config, backend, groups=size), expected)
        names = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**32, 5])
        assert_same(batch.run(config, backend, groups=names[ids]), expected)


# Layouts


@pytest.mark.parametrize("layout", ["every_other", "column"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_every_argument_change_nothing(backend: str, packed: bool, layout: str) -> None:
    batch = batch_of(6, 5, 21, gaps=0.2)
    batch = batch.packed(behind=3) if packed else batch
    config = config_of(norm="prompt")
    expected = batch.run(config, backend)
    strided = batch.map(lambda x: laid_out(x, layout))
    assert not strided.rewards.is_contiguous()
    bounds = None if batch.cu_seqlens is None else laid_out(batch.cu_seqlens, "every_other")
    assert_same(strided.run(config, backend, groups=laid_out(batch.groups, layout), cu_seqlens=bounds), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_arguments_are_what_they_look_like(backend: str) -> None:
    one = batch_of(6, 1, 21, gaps=0.2, empty=0.0)
    spread = one.map(lambda x: x.expand(4, -1))
    spread = dataclasses.replace(spread, groups=one.groups.expand(4))
    copied = spread.map(lambda x: x.contiguous())
    for norm in NORMS:
        got = spread.run(config_of(norm=norm), backend)
        assert_same(got, copied.run(config_of(norm=norm), backend))
        assert got.num_segments.tolist() == [int(got.segment_ids.max()) + 1] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_stay_as_they_are_and_calls_agree_to_the_bit(backend: str) -> None:
    batch = batch_of(9, 6, 40, values=False).with_garbage()
    before = batch.map(lambda x: x.clone())
    first = batch.run(config_of(norm="batch"), backend)
    assert_same(batch.run(config_of(norm="batch"), backend), first)
    for name in ("rewards", "logprobs", "old_logprobs", "mask"):
        torch.testing.assert_close(getattr(batch, name), getattr(before, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", quick(KERNELS, "cpu", "cuda"))
def test_values_past_the_mask_do_not_matter_to_the_bit(backend: str) -> None:
    for with_values in (True, False):
        batch = batch_of(9, 6, 40, values=with_values, gaps=0.3)
        for norm in NORMS:
            config = config_of(norm=norm)
            assert_same(batch.with_garbage().run(config, backend), batch.run(config, backend))


@needs_cpu_kernels
def test_number_of_threads_changes_no_bit() -> None:
    batch = batch_of(2, 300, 200, values=False, gaps=0.02, prompts=5)
    for norm in NORMS:
        results = []
        for threads in (1, 2, 5):
            with cpu_threads(threads):
                results.append(batch.run(config_of(norm=norm, gamma=0.99), "cpu"))
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_result_names_the_threshold(backend: str) -> None:
    batch = batch_of(9, 2, 5)
    for given_, used in ((None, 1.5), (2, 2.0), (0.7, 0.7), (gk.SegmentThreshold(config_of()), 1.0)):
        got = batch.run(config_of(group_variance_threshold=1.5), backend, threshold=given_)
        assert got.threshold.shape == () and got.threshold.dtype == F64
        assert got.threshold.item() == used
        assert got.advantages.device.type == got.threshold.device.type == device_of(backend).type


@pytest.mark.parametrize("backend", BACKENDS)
def test_threshold_in_place_of_the_config_is_used(backend: str) -> None:
    batch = batch_of(11, 4, 40, empty=0.0)
    for tau in (0.5, 3.0):
        got = batch.run(config_of(), backend, threshold=tau)
        assert_gold(got, batch.gold(config_of(), tau))
        adapting = gk.SegmentThreshold(config_of(group_variance_threshold=tau))
        assert_same(batch.run(config_of(), backend, threshold=adapting), got)
        assert_same(batch.run(config_of(group_variance_threshold=tau), backend), got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_config_of_a_trainers_group_params(backend: str) -> None:
    params = {
        "group_variance_threshold": 2.0,
        "group_max_size": 8,
        "group_epsilon": 1e-6,
        "adaptive_threshold": False,
        "threshold_lr": 0.02,
        "min_threshold": 0.2,
        "max_threshold": 8.0,
    }
    batch = batch_of(9, 5, 40)
    tokens = [x.to(device_of(backend)) for x in (batch.rewards, batch.logprobs, batch.old_logprobs)]
    options: dict[str, Tensor | str | None] = {"mask": batch.mask, "values": batch.values}
    options = {k: v.to(tokens[0].device) if isinstance(v, Tensor) else v for k, v in options.items()}
    got = gk.endpoint_segments(*tokens, **options, backend=backend, config=params)  # type: ignore[arg-type]
    assert_same(got, batch.run(gk.SegmentConfig(**params), backend))  # type: ignore[arg-type]
    default = gk.endpoint_segments(*tokens, **options, backend=backend)  # type: ignore[arg-type]
    assert_same(default, batch.run(gk.SegmentConfig(), backend))
    assert INF not in default.advantages and (default.num_segments != got.num_segments).any()
