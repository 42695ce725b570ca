"""logits_policy_loss on every backend against the loss of torch's log-softmax in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.logits_policy_loss.registration import SUPPORTS
from grpo_kernels.ops.policy_loss.config import METRICS
from tests.harness import assert_within_budget, logprob_error, reach, runnable_backends
from tests.ops.logits_policy_loss.batches import (
    BACKENDS,
    CONFIGS,
    F64,
    KERNELS,
    assert_close,
    assert_same,
    batch,
    cast,
    composed,
    random_batch,
    run,
)
from tests.ops.policy_loss.test_kernels import random_config

SCALED = {"softcap": 4.0, "logit_scale": 0.7}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, F64))
def test_any_settings_give_the_loss_of_the_log_softmax(backend: str, seed: int) -> None:
    choose = random.Random(seed)
    for case in range(30):
        config = random_config(choose)
        arguments = random_batch(choose, config)
        options = {"config": config, "return_entropy": choose.random() < 0.5, **choose.choice([{}, SCALED])}
        if choose.random() < 0.5:
            options["temperature"] = 0.5 + torch.rand(*arguments["targets"].shape, 1, dtype=F64)
        gold = composed(arguments, 1.7, **options)
        if "temperature" in options:
            options["temperature"] = options["temperature"][..., 0]
        got = run(arguments, backend, 1.7, **options)
        # an unbiased k3 cancels exponentials of up to e^10, so we scale by the largest ratio
        extreme = float(gold["metrics"][METRICS.index("ratio_max")].nan_to_num()) if config.kl_unbiased else 1
        assert_close(got, gold, 1e-9, 1e-10 * max(extreme, 1), f"case {case}, {config}")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", KERNELS)
def test_float32_loses_no_more_than_torch_does(backend: str, name: str) -> None:
    exact = cast(cast(batch(name), torch.float32), F64)
    options = {"config": CONFIGS[name], "scale": 1.5, **SCALED}
    got = run(cast(exact, torch.float32), backend, **options)
    working, gold = composed(cast(exact, torch.float32), **options), composed(exact, **options)

    def moved(offsets: Tensor) -> dict[str, Tensor]:
        results = composed(exact, offsets=offsets, **options)
        return {what: results[what] for what in ("loss", "gradient")}

    logprobs = (
        gk.token_logprobs(cast(exact, dtype)["logits"], exact["targets"], backend="reference", **SCALED).logprobs
        for dtype in (torch.float32, F64)
    )
    inherited = reach(moved, exact["targets"].shape, logprob_error(backend, *logprobs, softcap=SCALED["softcap"]))
    for what in ("loss", "gradient"):
        assert got[what].dtype == torch.float32
        assert_within_budget(got[what], working[what], gold[what], what, inherited.get(what, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["clip", "entropy", "sequence"])
@pytest.mark.parametrize("backend", KERNELS)
def test_halves_lose_no_more_than_torch_does(backend: str, name: str, dtype: torch.dtype) -> None:
    exact = cast(cast(batch(name), dtype), F64)
    rounded = cast(exact, torch.float32) | {"logits": exact["logits"].to(dtype)}
    got = run(rounded, backend, config=CONFIGS[name])
    working, gold = run(rounded, "reference", config=CONFIGS[name]), composed(exact, config=CONFIGS[name])
    assert got["loss"].dtype == torch.float32 and got["gradient"].dtype == dtype
    for what in ("loss", "gradient"):
        assert_within_budget(got[what], working[what], gold[what], what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place_gives_the_same_bits(backend: str, name: str, dtype: torch.dtype) -> None:
    if backend == "triton" and name not in ("clip", "entropy", "quantile"):
        pytest.skip("the interpreter is slow, and the config does not matter to the kernels of the logits")
    arguments = cast(batch(name), torch.float32)
    arguments["logits"] = arguments["logits"].to(dtype)
    options = {"config": CONFIGS[name], "scale": 0.5}
    assert_same(run(arguments, backend, inplace=True, **options), run(arguments, backend, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_agree_to_the_bit(backend: str) -> None:
    arguments = cast(batch("entropy"), torch.float32)
    first, second = (run(arguments, backend, config=CONFIGS["entropy"]) for _ in range(2))
    assert_same(second, first)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])
def test_packed_rows_give_the_same(backend: str, name: str) -> None:
    """With tokens behind the last row, which may hold NaN."""
    padded = cast(batch(name), torch.float32)
    rows, width = padded["targets"].shape
    packed = padded | {"cu_seqlens": torch.arange(rows + 1) * width}
    for argument, value in padded.items():
        if argument != "advantages":
            flat = value.flatten(0, 1)
            packed[argument] = torch.cat(
                [flat, torch.full_like(flat[:3], torch.nan) if flat.is_floating_point() else flat[:3]]
            )
    got, expected = run(packed, backend, config=CONFIGS[name]), run(padded, backend, config=CONFIGS[name])
    assert not got["gradient"][rows * width :].any()
    got["gradient"] = got["gradient"][: rows * width].view_as(expected["gradient"])
    assert_close(got, expected, 1e-5, 1e-6)
