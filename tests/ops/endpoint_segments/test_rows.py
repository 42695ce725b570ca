"""Dependence of the rows of endpoint_segments on other rows, padding and masked tokens."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.endpoint_segments.batches import (
    F64,
    FAST,
    NAN,
    NORMS,
    TIE,
    Batch,
    batch_of,
    config_of,
    cuts_of,
    on_backends,
    plan,
    rules,
    width_for,
)


def picked(result: gk.EndpointSegments, rows: Any) -> gk.EndpointSegments:
    fields: dict[str, Any] = {name: getattr(result, name)[rows] for name in result._fields[:5]}
    return result._replace(**fields)


def assert_close(got: gk.EndpointSegments, wanted: gk.EndpointSegments) -> None:
    for field in ("segment_ids", "endpoint_mask", "num_segments"):
        assert torch.equal(getattr(got, field), getattr(wanted, field)), field
    for field in ("advantages", "returns"):
        torch.testing.assert_close(getattr(got, field), getattr(wanted, field), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_shuffling_the_rows_permutes_the_result(backend: str, with_values: bool, norm: str) -> None:
    for seed in range(5 if backend in FAST else 1):
        batch = batch_of(seed, 7, width_for(backend, 40), values=with_values)
        assert batch.gold(config_of(norm=norm)).margin > TIE
        order = torch.randperm(7)
        whole, shuffled = (part.run(config_of(norm=norm), backend) for part in (batch, batch.rows(order)))
        assert_close(shuffled, picked(whole, order.to(whole.advantages.device)))


def mirrored(batch: Batch) -> Batch:
    """Each row and its negative, so that any subset of these pairs has the same mean square of the advantages."""
    assert batch.values is not None
    both = batch.map(lambda x: x.repeat_interleave(2, 0))
    sign = torch.tensor([1.0, -1.0], dtype=F64).repeat(len(batch.mask))[:, None]
    assert both.values is not None
    groups = batch.groups.repeat_interleave(2)
    return dataclasses.replace(both, rewards=both.rewards * sign, values=both.values * sign, groups=groups)


@rules
@on_backends
def test_rows_do_not_see_each_other_but_for_the_scale(backend: str, rule: str) -> None:
    """Copies of one row with different weights and signs share one scale, however the batch is split."""
    one = batch_of(0, 1, width_for(backend, 60), gaps=0.1, empty=0.0)
    batch = mirrored(one.rows(torch.zeros(3, dtype=torch.int64)))
    random = torch.Generator().manual_seed(1)
    logprobs = torch.rand(batch.rewards.shape, generator=random, dtype=F64).log()
    batch = dataclasses.replace(batch, logprobs=logprobs, old_logprobs=logprobs)
    config = config_of(rule=rule, lam=0.5)
    assert batch.gold(config).margin > TIE
    whole = batch.run(config, backend)
    assert len({tuple(row) for row in whole.segment_ids.tolist()}) > 2
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(0, 6, 5)):
        part = batch.rows(torch.arange(6)[rows]).run(config, backend)
        assert_close(part, picked(whole, rows))


@on_backends
def test_scale_is_the_root_mean_square_of_all_tokens_of_the_batch(backend: str) -> None:
    """The scale shows only beside group_epsilon: with advantages 1 and 2, (Q a)^2 - tau P^2 lies on either side."""
    eps = 1e-2
    for loud in (1.0, 8.0, 15.0):
        rewards = torch.tensor([[1.0, 2.0, NAN], [loud, loud, NAN]], dtype=F64)
        scale = float((rewards[:, :2] ** 2).mean().sqrt())
        for surplus in (0.8, 1.25):
            tau = (4.0 - surplus * eps * scale**2) / 2.25
            batch = plan(rewards, mask=~rewards.isnan())
            lengths = cuts_of(batch, backend, group_variance_threshold=tau, group_epsilon=eps)
            assert lengths[0] == ([1, 1] if surplus > 1 else [2]), (loud, tau)
    assert cuts_of(plan([[1.0, 2.0]]), backend, group_variance_threshold=1.77, group_epsilon=1e-6) == [[1, 1]]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_padding_changes_nothing(backend: str, with_values: bool, norm: str) -> None:
    """Padding is added on both sides of each row, and as entire rows."""
    for seed in range(5 if backend in FAST else 1):
        batch = batch_of(seed, 5, width_for(backend, 40), values=with_values)
        wanted = batch.run(config_of(norm=norm), backend)

        def padded(x: Tensor) -> Tensor:
            filler = False if x.dtype == torch.bool else NAN
            return torch.nn.functional.pad(x, (3, 4, 0, 2), value=filler)

        more = dataclasses.replace(batch.map(padded), groups=torch.cat((batch.groups, batch.groups[:2])))
        got = more.run(config_of(norm=norm), backend)
        assert not got.advantages[5:].any() and (got.segment_ids[5:] == -1).all()
        inner: dict[str, Any] = {name: getattr(got, name)[:5, 3:-4] for name in got._fields[:4]}
        assert_close(got._replace(**inner, num_segments=got.num_segments[:5]), wanted)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_packed_equals_padded(backend: str, with_values: bool, norm: str) -> None:
    for seed in range(8 if backend in FAST else 1):
        batch = batch_of(seed, 5, width_for(backend, 40), values=with_values, gaps=0.1 * (seed % 3))
        wanted, packed = batch.run(config_of(norm=norm), backend), batch.packed(behind=5)
        got = packed.run(config_of(norm=norm), backend)
        assert packed.cu_seqlens is not None
        assert torch.equal(got.num_segments, wanted.num_segments)
        bounds = packed.cu_seqlens.tolist()
        covered = torch.zeros(len(packed.mask), dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            covered[start:end] = True
            for field in ("advantages", "returns", "endpoint_mask", "segment_ids"):
                one, other = getattr(got, field)[start:end], getattr(wanted, field)[row, : end - start]
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
        outside = ~covered.to(got.advantages.device)
        assert outside.sum() >= 5 and (got.segment_ids[outside] == -1).all() and not got.returns[outside].any()
        assert not got.advantages[outside].any() and not got.endpoint_mask[outside].any()


@on_backends
def test_what_masked_tokens_hold_changes_nothing(backend: str) -> None:
    for with_values in (True, False):
        batch = batch_of(7, 6, width_for(backend, 40), values=with_values, gaps=0.3)
        for norm in NORMS:
            config = config_of(norm=norm)
            assert_close(batch.with_garbage().run(config, backend), batch.run(config, backend))
