"""The kernels of policy_loss against the float64 reference.

Faults that this is for: a formula that one kernel has otherwise; a tail of a vector, warp, task or block of the
reduction; a kernel for plain inputs that is taken for others; a segment or row whose sums meet those of another; an
overflow that becomes NaN; a normalizer that is read as another unit; a gradient of halves that is rounded twice; a
backward pass that changes what the graph keeps.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SCALE, Scaled
from tests import emulation
from tests.harness import cpu_threads, device_of, examples, needs_cpu_kernels
from tests.ops.policy_loss import cases
from tests.ops.policy_loss.cases import BACKENDS, F32, F64, INF, KERNELS, NAN, assert_like_reference, op_of, packed
from tests.ops.promises import Inputs, assert_same_bits, run

on_backends = pytest.mark.parametrize("backend", BACKENDS)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
only_on_host = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a failed assertion on the device ends the process's use of it"
)


# Rows of more than one task of 1,024 tokens, many rows, and many warps.
LARGE = ((3, 1500), (70, 2), (1100, 2))


@pytest.mark.pairs
@pytest.mark.parametrize(("loss", "ratio"), cases.KINDS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@on_kernels
def test_any_settings(backend: str, dtype: torch.dtype, loss: str, ratio: str) -> None:
    # in float32 the error of few tokens, or of few rows, may be one of luck, in the reference as well
    sizes = (*cases.SIZES, *LARGE) if dtype == F64 else ((12, 33), (8, 150), (6, 1100))

    @settings(max_examples=examples(30))
    @given(cases.cases(loss, ratio, sizes=sizes))
    def check(case: tuple[gk.LossConfig, Inputs]) -> None:
        assert_like_reference(case[1], case[0], backend, dtype)

    check()


# Losses with plain inputs have kernels of their own: on the CPU of vectors of a task of 4,096 tokens, in CUDA of four
# tokens at a time of a task of 1,024. By name: the config, and whether advantages are those of rows.
PLAIN: dict[str, tuple[gk.LossConfig, bool]] = {
    "clip": (gk.LossConfig(dual_clip=3.0), False),
    "clip with a KL": (gk.LossConfig(kl="k3", kl_coef=0.1, aggregation="seq-mean-token-mean"), True),
    "weighted clip": (gk.LossConfig(), True),
    "cispo": (gk.LossConfig("cispo", clip_high=0.3), False),
    "gspo": (gk.LossConfig(ratio="sequence", clip_low=0.01, clip_high=0.02), True),
    "gspo with a KL": (gk.LossConfig(ratio="sequence", clip_low=0.01, clip_high=0.02, kl="k3", kl_coef=0.1), True),
}


def plain(name: str, rows: int, width: int, mask: str) -> Inputs:
    config, by_row = PLAIN[name]
    names = ["ref_logprobs"] if config.kl != "none" else []
    names += ["is_weights"] if name == "weighted clip" else []
    batch = cases.padded(width, rows, width, optional=(*names, "token_advantages"))
    of_tokens = batch.pop("token_advantages")
    batch |= {} if by_row else {"advantages": of_tokens}
    if mask == "padding":
        batch["mask"] = torch.arange(width) < torch.randint(width + 1, (rows, 1))
    if mask == "none":
        del batch["mask"]
        return batch
    is_out = ~batch["mask"]
    return {k: v.masked_fill(is_out, NAN) if v.dim() == 2 and k != "mask" else v for k, v in batch.items()}


@pytest.mark.pairs
@pytest.mark.parametrize("offset", [0, 1])  # of the arrays from an aligned address
@pytest.mark.parametrize("mask", ["none", "holes", "padding"])
@pytest.mark.parametrize("width", [1, 3, 4, 31, 64, 127, 1023, 1025, 4100])
@pytest.mark.parametrize("name", PLAIN)
@on_kernels
def test_plain_inputs(backend: str, name: str, width: int, mask: str, offset: int) -> None:
    if backend == "cuda" and width == 4100 and not torch.cuda.is_available():
        pytest.skip("the emulator is slow")
    rows = max(2, min(3, 4000 // width))
    batch = plain(name, rows, width, mask)

    def shifted(value: Tensor) -> Tensor:
        return torch.empty(offset + value.numel(), dtype=value.dtype)[offset:].view(value.shape).copy_(value)

    batch = {key: shifted(value.to(F32) if value.is_floating_point() else value) for key, value in batch.items()}
    wide = {key: value.to(F64) if value.dtype == F32 else value for key, value in batch.items()}
    assert_like_reference(wide, PLAIN[name][0], backend, F64)
    assert_like_reference(wide, PLAIN[name][0], backend, F32, sums=backend == "cuda")  # whose sums are in float32


def long_segments(is_packed: bool) -> Inputs:
    """Segments of whole rows, of half a row and of one token, with masked tokens inside them and at the ends.

    A CUDA block takes up to 1,024 tokens of a row at a time, and a warp that counts them 128.
    """
    place = torch.arange(2500)
    whole, half = 0 * place, place // 1250
    rows = {
        "a gap longer than a block": (whole, (place < 300) | (place >= 1900)),
        "no tokens": (place, place < 0),
        "padding on both sides": (half, (place >= 1100) & (place < 1400)),
        "single tokens": (place, place % 7 > 0),
        "half a row": (half, place % 3 == 0),
        "a gap at the end of a block": (place // 2, (place < 1023) | (place > 1025)),
    }
    batch = cases.padded(5, len(rows), len(place), size=0.02)
    batch["segments"], batch["mask"] = (torch.stack(values) for values in zip(*rows.values(), strict=True))
    return packed(batch, [2500, 0, 1399, 129, 1025, 2200]) if is_packed else batch


@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
@pytest.mark.parametrize("is_packed", [False, True])
@on_kernels
def test_segments_longer_than_a_block(backend: str, ratio: str, is_packed: bool) -> None:
    assert_like_reference(long_segments(is_packed), gk.LossConfig(ratio=ratio), backend, F64)


# Extremes


RATIOS = ("token", "sequence", "segment", "segment_mean")
LOSSES = [*itertools.product(("clip", "sapo", "cispo"), RATIOS), ("geo_mean", "token")]


@pytest.mark.parametrize(("loss", "ratio"), LOSSES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@on_backends
def test_a_ratio_beyond_the_largest_number_stops_there(backend: str, dtype: torch.dtype, loss: str, ratio: str) -> None:
    """Clipped terms stay clipped, terms without advantage 0; also where the old policy could not sample the token."""
    batch = {
        "logprobs": torch.full((2, 3), -0.5, dtype=F64),
        "old_logprobs": torch.full((2, 3), -3000.0, dtype=F64),
        "advantages": torch.tensor([1.0, 0.0], dtype=F64),
    }
    batch |= {"segments": torch.zeros(2, 3, dtype=torch.int32)} if ratio.startswith("segment") else {}
    aggregation = "seq-mean-token-sum" if loss == "geo_mean" else "seq-mean-token-mean"
    op = op_of(gk.LossConfig(loss=loss, ratio=ratio, aggregation=aggregation))
    for sign in (1, -1):
        batch["advantages"] = sign * batch["advantages"]
        finite = run(op, batch, backend, dtype)
        first, second = finite["d_logprobs"]
        assert finite["loss"].isfinite() and not second.any()
        if sign == 1:
            assert (first < 0).all() if loss == "cispo" else not first.any()
        infinite = batch["old_logprobs"].index_fill(1, torch.tensor([1, 2]), -INF)
        infinite[1] = -3000.0
        got = run(op, batch | {"old_logprobs": infinite}, backend, dtype)
        assert torch.equal(got["loss"], finite["loss"]) and torch.equal(got["d_logprobs"], finite["d_logprobs"])


@pytest.mark.parametrize("name", ["advantages", "is_weights"])
@pytest.mark.parametrize("loss", ["clip", "sapo", "cispo", "reinforce", "vespo"])
@on_backends
def test_nothing_comes_of_a_token_outside_of_the_policy_mask(backend: str, loss: str, name: str) -> None:
    batch = cases.padded(2, 3, 40, optional=("policy_mask", "is_weights"))
    batch["advantages"] = batch["advantages"].reshape(3, -1).expand(3, 40).clone()
    op, kept = op_of(gk.LossConfig(loss=loss)), batch["policy_mask"]
    if loss == "vespo" and name == "is_weights":
        pytest.skip("the weight of a row is that of all its tokens")
    clean = run(op, batch, backend, F64)
    for value in (NAN, INF):
        inputs = batch | {name: torch.where(kept, batch[name], value)}
        spoilt = run(op, inputs, backend, F64)
        assert torch.equal(spoilt["loss"], clean["loss"])
        assert torch.equal(spoilt["d_logprobs"], clean["d_logprobs"])
        metrics = run(op, inputs, "reference", F64)["metrics"]
        torch.testing.assert_close(spoilt["metrics"], metrics, rtol=1e-12, atol=0, equal_nan=True)
    assert (kept & batch["mask"]).any() and (~kept & batch["mask"]).any()


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@on_backends
def test_a_kl_that_is_only_measured_changes_nothing(backend: str, kl: str) -> None:
    batch = cases.padded(1, 3, 4)
    ref = batch["logprobs"].index_fill(1, torch.tensor([1]), 1e4)
    got = run(op_of(gk.LossConfig(kl=kl)), batch | {"ref_logprobs": ref}, backend, F64)
    want = run(op_of(gk.LossConfig()), batch, backend, F64)
    assert torch.equal(got["loss"], want["loss"]) and torch.equal(got["d_logprobs"], want["d_logprobs"])
    assert float(got["metrics"][cases.METRICS.index("kl_sum")].abs()) > 1


@on_kernels
def test_an_infinite_token_spoils_its_own_segment_only(backend: str) -> None:
    batch = cases.padded(5, 3, 300, optional=("segments",))
    op, segments = op_of(gk.LossConfig(ratio="segment_mean")), batch["segments"][0]
    clean = run(op, batch, backend, F32)["d_logprobs"]
    at = int((batch["mask"][0] & (segments >= 0)).nonzero()[100])
    batch["old_logprobs"][0, at] = -INF
    spoilt = run(op, batch, backend, F32)["d_logprobs"]
    is_other = segments != segments[at]
    assert torch.equal(spoilt[0, is_other], clean[0, is_other]) and torch.equal(spoilt[1:], clean[1:])
    assert not torch.equal(spoilt, clean)


@only_on_host
@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
@on_backends
def test_segments_that_do_not_ascend_are_refused(backend: str, ratio: str) -> None:
    batch = cases.padded(5, 3, 70, optional=("segments",))
    batch["segments"] = torch.arange(70).div(7, rounding_mode="floor").repeat(3, 1)
    op = op_of(gk.LossConfig(ratio=ratio))
    want = run(op, batch, backend, F32)
    # one descends, one reaches the row's length, and one ascends in its low 32 bits
    for wrong in (torch.arange(70).flip(0), torch.arange(70) // 7 + 61, torch.arange(70) // 7 + 2**32):
        segments = batch["segments"].clone()
        segments[2] = wrong
        with pytest.raises(RuntimeError, match="policy_loss: segments must ascend from 0 along each row"):
            run(op, batch | {"segments": segments}, backend, F32)
    got = run(op, batch | {"segments": torch.where(batch["mask"], batch["segments"], 1000)}, backend, F32)
    assert torch.equal(got["d_logprobs"], want["d_logprobs"])


@on_backends
def test_tokens_of_negative_segments_take_no_part(backend: str) -> None:
    batch = cases.padded(5, 3, 70, optional=("segments",))
    batch["segments"] = torch.arange(70).div(7, rounding_mode="floor").repeat(3, 1)
    op = op_of(gk.LossConfig(ratio="segment"))
    want = run(op, batch, backend, F32)
    mask = batch.pop("mask")
    for negative in (-1, -(2**31) - 1, torch.iinfo(torch.int64).min):
        got = run(op, batch | {"segments": torch.where(mask, batch["segments"], negative)}, backend, F32)
        assert torch.equal(got["d_logprobs"], want["d_logprobs"])


@needs_cpu_kernels
def test_an_error_of_one_of_several_threads_keeps_its_text() -> None:
    segments = torch.arange(70).repeat(64, 1)
    segments[[5, 60]] = segments[[5, 60]].flip(1)
    logprobs = -torch.rand(64, 70)
    config = gk.LossConfig(ratio="segment")
    rule = "^policy_loss: segments must ascend from 0 along each row, got 68 after 69 in row 5$"
    with cpu_threads(4), pytest.raises(RuntimeError, match=rule):
        gk.policy_loss(logprobs, logprobs, torch.ones(64), segments=segments, config=config, backend="cpu")


# Arguments that are the same


@on_backends
def test_all_but_log_probs_may_come_from_inference_mode(backend: str) -> None:
    """Old log-probs, masks and advantages are often made in it, and autograd saves none of its tensors."""
    optional = ("policy_mask", "ref_logprobs", "is_weights", "weights")
    batch = {name: value.to(device_of(backend)) for name, value in cases.padded(1, 4, 9, optional=optional).items()}
    config = gk.LossConfig(kl="k3", kl_coef=0.1)

    def gradient(batch: Inputs) -> Tensor:
        leaf = batch["logprobs"].clone().requires_grad_()
        loss = gk.policy_loss(**batch | {"logprobs": leaf}, config=config, backend=backend).loss
        return torch.autograd.grad(loss, leaf)[0]

    with torch.inference_mode():
        scored = {name: value.clone() for name, value in batch.items()}
    assert torch.equal(gradient(scored | {"logprobs": batch["logprobs"]}), gradient(batch))


@pytest.mark.parametrize("unit", ["tokens", "rows", "segments"])
@on_backends
def test_a_normalizer_is_named_or_a_number_of_tokens(backend: str, unit: str) -> None:
    by_row = {"rows": "seq-mean-token-mean"}.get(unit, "token-mean")
    op = op_of(gk.LossConfig(ratio="segment" if unit == "segments" else "token", aggregation=by_row))
    batch = cases.padded(1, 4, 9, optional=("segments",))

    def result(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            value = value.to(device_of(backend))
        return run(op, batch | {"normalizer": value}, backend, F64)["d_logprobs"]

    for value in (7, 0.25):  # a count per rank can be below 1
        want = result({unit: value})
        assert torch.equal(result({unit: torch.tensor(value, device=device_of(backend))}), want)
        assert not torch.equal(want, result({unit: 2 * value}))
        for alone in (value, torch.tensor(value), torch.tensor([value])):
            if unit == "tokens":
                assert torch.equal(result(alone), want)
            else:
                with pytest.raises(ValueError, match=f"normalizer must be a dict with {unit!r} for aggregation="):
                    result(alone)
    nothing = {unit: torch.tensor(0, device=device_of(backend))}
    assert torch.equal(result(nothing), result({unit: 1}))


# The backward pass


@pytest.mark.parametrize("value", [1.0, 2.0])
@on_kernels
def test_a_second_derivative_by_the_upstream_gradient_alone(backend: str, value: float) -> None:
    leaf = (-torch.rand(3, 5, device=device_of(backend))).requires_grad_()
    loss = gk.policy_loss(leaf, leaf.detach() - 0.1, torch.ones_like(leaf[:, 0]), backend=backend).loss
    factor = torch.tensor(value, device=leaf.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss * factor, leaf, create_graph=True)
    (by_factor,) = torch.autograd.grad(gradient.sum(), factor)
    torch.testing.assert_close(by_factor * value, gradient.sum().detach())


@pytest.mark.pairs
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1024, 5003])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [name for name in KERNELS if name in SCALE.supports])
def test_a_gradient_is_scaled_in_its_memory(backend: str, dtype: torch.dtype, count: int, offset: int) -> None:
    """Every number is multiplied once, in the wide dtype, and none beside them."""
    before = torch.randn(count + 8, dtype=F64).to(device_of(backend), dtype)
    wide = torch.promote_types(dtype, F32)
    for factor in (1.0, -0.3, 0.0, NAN):
        memory, expected = before.clone(), before.clone()
        part = slice(offset, offset + count)
        SCALE(backend, Scaled(memory[part], torch.tensor(factor, dtype=wide, device=memory.device)))
        expected[part] = (expected[part].to(wide) * factor).to(dtype)
        torch.testing.assert_close(memory, expected, rtol=0, atol=0, equal_nan=True)


# The CUDA kernels alone

LAUNCHED = {
    "clip": gk.LossConfig(),
    "gspo": gk.LossConfig(ratio="sequence"),
    "segments": gk.LossConfig(ratio="segment_mean"),
    "geo_mean": gk.LossConfig("geo_mean", aggregation="token-sum"),
    "vespo": gk.LossConfig("vespo"),
}


@emulation.only
@pytest.mark.parametrize("rows", [5, 1100])
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_loss_is_one_launch_and_a_reduction_and_counting_a_third(name: str, rows: int) -> None:
    config = LAUNCHED[name]
    batch = cases.padded(1, rows, 70 if rows == 5 else 2, optional=("segments",) * (name == "segments"))
    known = {"tokens": 40.0, "rows": 5.0, "segments": 9.0}
    for normalizer, launches in ((known, 2), (None, 2 if config.aggregation == "token-sum" else 3)):
        call = functools.partial(cases.call, batch | {"normalizer": normalizer}, "cuda", config)
        assert emulation.launches(call) == launches


@emulation.only
@pytest.mark.parametrize("name", LAUNCHED)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    batch = cases.padded(1, 5, 70, optional=("segments",) * (name == "segments"))
    results = []
    for seed in range(4):
        emulation.set_schedule(seed)
        results.append(run(op_of(LAUNCHED[name]), batch, "cuda", F32))
    for other in results[1:]:
        assert_same_bits(other, results[0])
