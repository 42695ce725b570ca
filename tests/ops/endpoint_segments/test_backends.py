"""The kernels of endpoint_segments against the float64 reference, and what only a kernel can get wrong.

Faults: a tail of a vector, of a thread's 8 tokens, a warp's 256 or a block's 2,048; a segment, a gap or a carry across
a tile; sums whose order moves a cut; a row that is not finite and spoils others; results without tokens; a dtype that
is not widened; an array whose alignment is not checked.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given, settings

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments.registration import SUPPORTS
from tests import emulation
from tests.harness import device_of, examples, needs_cpu_kernels, runnable_backends
from tests.ops.endpoint_segments.cases import (
    F64,
    INF,
    NAN,
    SETTINGS,
    TOKENS,
    batch_of,
    call,
    calls,
    compare,
    config_of,
    packed,
    run,
    to,
)
from tests.ops.promises import Inputs, assert_same_bits
from tests.strategies import laid_out

BACKENDS = runnable_backends(SUPPORTS, F64)
KERNELS = [name for name in BACKENDS if name != "reference"]
on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
in_cuda = pytest.mark.skipif("cuda" not in KERNELS, reason="needs the CUDA kernels, emulated or not")
EVERYTHING = config_of(norm="batch", gamma=0.99, lam=0.95, group_variance_threshold=1.5)
OF_PROMPTS = dataclasses.replace(EVERYTHING, norm="prompt", credit="broadcast")


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@on_kernels
def test_kernels_equal_the_formulas(backend: str, is_packed: bool, dtype: torch.dtype) -> None:
    is_fast = backend == "cpu" or torch.cuda.is_available()
    told = []

    @settings(max_examples=examples(60 if is_fast else 24))
    @example((batch_of(0, 0, 5), EVERYTHING))
    @example((batch_of(0, 4, 0, critic=False), EVERYTHING))
    @example((batch_of(0, 3, 20, empty=2.0, critic=False), EVERYTHING))
    @example((batch_of(5, 600, 3, critic=False, prompts=5), OF_PROMPTS))
    @given(calls() if is_fast else calls(rows=3, width=40))
    def check(drawn: tuple[Inputs, gk.SegmentConfig]) -> None:
        told.append(compare(*drawn, backend, dtype, is_packed))

    check()
    assert sum(told) > 0.75 * len(told)


# (width, config): tails of vectors, threads, warps and blocks; from a mean length of 512 on, blocks have 256 threads
WIDTHS = [7, 8, 9, 31, 33, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049]


@pytest.mark.parametrize("width", WIDTHS)
@on_kernels
def test_rows_of_every_length(backend: str, width: int) -> None:
    """Advantages that drift, so that some segments end within a chunk of 32 tokens and others span several tiles."""
    critic = width % 2 == 0
    batch = batch_of(width, 2, width, "normal" if critic else "drift", gaps=0.004, empty=0.0, critic=critic)
    batch["mask"][0] |= True
    for fields in ({"group_max_size": 40, "rule": "literal"}, {"group_max_size": 5000}):
        tau = 4.0 if "rule" not in fields else 0.2
        config = dataclasses.replace(EVERYTHING, group_variance_threshold=tau, **fields)  # type: ignore[arg-type]
        assert compare(batch, config, backend, F64)
    again = [run(batch, EVERYTHING, backend) for _ in range(3)]  # in the emulator under other schedules
    assert_same_bits(again[1], again[0])
    assert_same_bits(again[2], again[0])


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("lengths", [[0, 1, 300, 601, 5, 8, 0, 299, 32, 257, 3], [1, 0, 2600, 5, 257, 2049]])
@on_kernels
def test_packed_rows_around_a_tile(backend: str, lengths: list[int], dtype: torch.dtype) -> None:
    """Rows of up to several tiles, at every offset from an aligned address; their mean is below 512 or above."""
    place = torch.arange(max(lengths))
    batch = batch_of(0, len(lengths), len(place), critic=False)
    batch["mask"] = (place < torch.tensor(lengths)[:, None]) & (place % 301 != 300)
    assert compare(batch, OF_PROMPTS, backend, dtype, is_packed=True)


@needs_cpu_kernels
@in_cuda
@pytest.mark.parametrize("size", [1, 2, 5, 31, 32, 33, 64, 10**15])
def test_ties_are_cut_as_on_the_cpu(size: int) -> None:
    """Equal advantages make the variances equal but for roundings, which depend on the order of the sums.

    Weights are exactly 1, and squares of advantages have exact sums, so that all else has the same bits on both.
    """
    for width, first in ((300, 45), (2500, 13)):
        rewards = torch.tensor([[0.25], [0.75], [-1.25]], dtype=F64).expand(3, width)
        starts = torch.tensor([[0], [first], [first // 2]])
        mask = (torch.arange(width) >= starts) & (torch.arange(width) % 307 != 306)
        certain = torch.full_like(rewards, -50.0)
        batch = {"rewards": rewards, "logprobs": certain, "old_logprobs": certain, "mask": mask}
        batch |= {"values": torch.zeros_like(rewards), "groups": torch.zeros(3, dtype=torch.int64)}
        for rule in SETTINGS["rule"]:
            for proxy in SETTINGS["proxy"]:
                fields = {"rule": rule, "proxy": proxy, "group_max_size": size, "lam": 0.0, "group_epsilon": 1e-300}
                config = config_of(group_variance_threshold=1.0 + 2**-51 * (size % 2), **fields)
                ids, want = (run(batch, config, backend)["segment_ids"] for backend in ("cuda", "cpu"))
                assert torch.equal(ids, want), (width, rule, proxy, int((ids != want).sum()))


# Numbers that are not finite


@needs_cpu_kernels
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["rewards", "values", "logprobs", "old_logprobs"])
def test_a_row_that_is_not_finite_is_named(name: str, is_packed: bool) -> None:
    """The first one, not the first of its prompt, unless the mask leaves the token out."""
    for value, critic in itertools.product((NAN, INF, -INF), {True, name == "values"}):
        batch = batch_of(3, 4, 5, gaps=-1.0, empty=-1.0, critic=critic)
        batch |= {"groups": torch.zeros(4, dtype=torch.int64), "mask": torch.ones(4, 5, dtype=torch.bool)}
        batch[name][2:, 3] = value
        holes = batch | {"mask": batch["mask"].index_fill(1, torch.tensor(3), False)}
        spoilt, valid = (packed(rows)[0] if is_packed else rows for rows in (batch, holes))
        rule = "^endpoint_segments: rewards, values and log-probs must be finite where the mask is True.* row 2"
        for backend in ("cpu", "reference"):
            with pytest.raises(RuntimeError, match=rule):
                run(spoilt, config_of(), backend)
            assert run(valid, config_of(), backend)["advantages"].isfinite().all()


@in_cuda
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", ["rewards", "values", "logprobs", "old_logprobs"])
def test_a_row_that_is_not_finite_is_left_out_on_a_gpu(name: str, value: float) -> None:
    for width, critic in ((80, True), (2100, name == "values")):
        batch = batch_of(4, 4, width, gaps=0.1, empty=0.0, critic=critic, prompts=2)
        batch["mask"][1] |= torch.arange(width) < width // 2
        at = int(batch["mask"][1].nonzero()[25])
        spoilt = batch | {name: batch[name].clone()}
        spoilt[name][1, at] = value
        shared = name in ("logprobs", "old_logprobs") and not critic  # its rewards are finite
        emptied = batch | {"mask": batch["mask"] & (torch.arange(4) != 1)[:, None]}
        for config in (EVERYTHING, OF_PROMPTS):
            results, without = run(spoilt, config, "cuda"), run(emptied, config, "cuda")
            for row in (0, 2, 3):
                for key, want in without.items():
                    if key != "threshold" and not shared:
                        assert torch.equal(results[key][row], want[row]), (key, row)
                assert results["advantages"][row].isfinite().all()
            counts = batch["mask"][1]
            for key in ("advantages", "returns"):
                own = results[key][1]
                assert own[counts].isnan().all() and not own[~counts].any()
            ids = results["segment_ids"][1]
            assert (ids[~counts] == -1).all() and (ids[counts].diff() >= 0).all()
            assert ids.max() + 1 == results["num_segments"][1] == results["endpoint_mask"][1].sum()


@emulation.only
@pytest.mark.parametrize("width", [64, 1032, 61])
def test_alignment_changes_no_bit(width: int) -> None:
    """One array at a time is misaligned, so that no other one's makes up for a forgotten check."""
    batch = to(batch_of(1, 3, width, empty=0.0), torch.float32)
    expected = call(batch, EVERYTHING, "cuda")
    for name in TOKENS:
        assert_same_bits(call(batch | {name: laid_out(batch[name], "offset")}, EVERYTHING, "cuda"), expected)


@emulation.only
@pytest.mark.parametrize("norm", SETTINGS["norm"])
@pytest.mark.parametrize("critic", [True, False])
def test_launches(critic: bool, norm: str) -> None:
    # without a critic, returns and baselines are computed first; without a norm, no moments are merged
    batch, config = batch_of(1, 6, 70, critic=critic), config_of(norm=norm)
    count = emulation.launches(lambda: call(batch, config, "cuda"))
    assert count == 5 + 2 * (not critic) - (norm == "none")


# Arguments


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16], ids=str)
@on_backends
def test_other_forms_of_arguments_change_nothing(backend: str, dtype: torch.dtype) -> None:
    """Tokens of mixed dtypes follow the rewards."""
    device, wide = device_of(backend), F64 if dtype == F64 else torch.float32
    batch = batch_of(4, 6, 12) | {"groups": torch.arange(6) // 2}
    batch = {name: value.to(device) for name, value in batch.items()}
    dtypes = {"rewards": dtype, "logprobs": torch.float32, "old_logprobs": torch.bfloat16, "values": torch.float16}
    mixed = batch | {name: batch[name].to(narrow) for name, narrow in dtypes.items()}
    expected = call(to(mixed, wide), OF_PROMPTS, backend)
    assert expected["advantages"].dtype == wide
    assert {result.device.type for result in expected.values()} == {device.type}
    numbers = batch["mask"] * torch.tensor(256, dtype=torch.int16, device=device)
    for change in ({}, {"mask": batch["mask"].double()}, {"mask": numbers}, {"groups": 2}):
        assert_same_bits(call(mixed | change, OF_PROMPTS, backend), expected)
    full = mixed | {"mask": torch.ones_like(batch["mask"])}
    assert_same_bits(call(full | {"mask": None}, OF_PROMPTS, backend), call(full, OF_PROMPTS, backend))


@on_backends
def test_the_threshold_that_is_used_is_a_result(backend: str) -> None:
    batch = {name: value.to(device_of(backend)) for name, value in batch_of(9, 4, 20).items()}
    config = gk.SegmentConfig(norm="none", group_variance_threshold=1.5)
    adapting = gk.SegmentThreshold({"group_variance_threshold": 9.0})
    adapting.load_state_dict({"value": 3.0})
    for option, used in ((None, 1.5), (2, 2.0), (0.7, 0.7), (adapting, 3.0)):
        results = call(batch, config, backend, threshold=option)
        assert results["threshold"].shape == () and results["threshold"].item() == used
        assert_same_bits(results, call(batch, dataclasses.replace(config, group_variance_threshold=used), backend))
    tokens = {name: value for name, value in batch.items() if name != "groups"}
    for options, fields in (({}, {}), ({"config": {"group_max_size": 8}}, {"group_max_size": 8})):
        result = gk.endpoint_segments(**tokens, **options, backend=backend)  # type: ignore[arg-type]
        assert_same_bits(result._asdict(), call(batch, gk.SegmentConfig(**fields), backend))
