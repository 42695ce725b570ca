"""Errors of policy_loss and LossConfig and the parts of their messages; no setting is silently ignored."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS, KLS, LOSSES, RATIOS
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.harness import assert_raises, device_of, runnable_backends

BACKENDS = runnable_backends(SUPPORTS)
NAN, INF = float("nan"), float("inf")
SHAPE = (3, 4)
# Every optional argument but cu_seqlens; tests use configs that read the argument in question.
ARGUMENTS: dict[str, Tensor] = {
    "logprobs": -torch.ones(SHAPE),
    "old_logprobs": -torch.ones(SHAPE),
    "advantages": torch.ones(3),
    "mask": torch.ones(SHAPE, dtype=torch.bool),
    "segments": torch.zeros(SHAPE, dtype=torch.int32),
    "policy_mask": torch.ones(SHAPE, dtype=torch.bool),
    "ref_logprobs": -torch.ones(SHAPE),
    "is_weights": torch.ones(SHAPE),
    "entropy": torch.ones(SHAPE),
    "weights": torch.ones(SHAPE),
}
PER_TOKEN = [name for name in ARGUMENTS if name not in ("logprobs", "advantages", "is_weights")]


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    """Checks that the call raises exactly this type, with a message that contains the op and each part."""
    arguments: dict[str, Any] = {"config": gk.LossConfig(kl="k3")} | ARGUMENTS | changes
    arguments = {name: value for name, value in arguments.items() if value is not None or name in changes}
    for backend in (None, *BACKENDS):
        device = device_of(backend or "cpu")
        moved = {
            k: v.to(device) if isinstance(v, Tensor) and v.device.type != "meta" else v for k, v in arguments.items()
        }
        assert_raises(error, "policy_loss: ", parts, functools.partial(gk.policy_loss, **moved, backend=backend))


def test_the_arguments_as_they_are_taken() -> None:
    result = gk.policy_loss(**ARGUMENTS, config=gk.LossConfig(kl="k3"))  # type: ignore[arg-type]
    assert result.loss.isfinite()


# Arguments


@pytest.mark.parametrize("value", [[[1.0] * 4] * 3, 1.0, "x"], ids=repr)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_that_is_no_tensor(name: str, value: Any) -> None:
    refused(TypeError, name, type(value).__name__, **{name: value})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "advantages", "ref_logprobs", "is_weights", "entropy"])
def test_numbers_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    refused(TypeError, name, str(dtype), **{name: ARGUMENTS[name].to(dtype)})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("segments", torch.float32), ("segments", torch.bool), ("mask", torch.complex64), ("weights", torch.complex64)],
)
def test_other_arguments_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    refused(TypeError, name, str(dtype), **{name: torch.ones(SHAPE).to(dtype)})


@pytest.mark.parametrize("shape", [(3,), (4,), (3, 5), (2, 4), (3, 4, 1), (3, 1), (1, 4), ()], ids=str)
@pytest.mark.parametrize("name", PER_TOKEN)
def test_argument_of_another_shape(name: str, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(ARGUMENTS[name].dtype)
    refused(ValueError, name, str(list(SHAPE)), str(list(shape)), **{name: value})


@pytest.mark.parametrize("shape", [(4,), (2,), (1, 4), (4, 1), (3, 5), (3, 4, 1), ()], ids=str)
@pytest.mark.parametrize("name", ["advantages", "is_weights"])
def test_neither_one_per_row_nor_per_token(name: str, shape: tuple[int, ...]) -> None:
    refused(
        ValueError, name, "per row", "[3]", "per token", str(list(SHAPE)), str(list(shape)), **{name: torch.ones(shape)}
    )


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "logprobs"])
def test_argument_on_another_device(name: str) -> None:
    refused(ValueError, name, "meta", **{name: ARGUMENTS[name].to("meta")})


@pytest.mark.parametrize("shape", [(), (12,), (3, 4, 1)], ids=str)
def test_logprobs_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(ValueError, "logprobs", "[B, T]", str(list(shape)), logprobs=torch.ones(shape))


@pytest.mark.parametrize("shape", [(), (3, 4)], ids=str)
def test_packed_logprobs_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(
        ValueError, "logprobs", "[M]", str(list(shape)), logprobs=torch.ones(shape), cu_seqlens=torch.tensor([0, 4])
    )


@pytest.mark.parametrize(
    ("value", "error", "parts"),
    [
        ([0, 4], TypeError, ("list",)),
        (torch.tensor([0.0, 4.0]), TypeError, ("torch.float32",)),
        (torch.tensor([0, 4], dtype=torch.int16), TypeError, ("torch.int16",)),
        (torch.tensor(4), ValueError, ("[B + 1]", "[]")),
        (torch.tensor([[0, 4]]), ValueError, ("[B + 1]", "[1, 2]")),
        (torch.zeros(0, dtype=torch.int64), ValueError, ("[B + 1]", "[0]")),
        (torch.tensor([0, 4], device="meta"), ValueError, ("meta",)),
    ],
    ids=str,
)
def test_bounds_of_packed_rows(value: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    refused(error, "cu_seqlens", *parts, logprobs=torch.ones(4), cu_seqlens=value)


def test_segments_that_do_not_ascend() -> None:
    config = gk.LossConfig(ratio="segment")
    arguments = {"logprobs": -torch.ones(2, 3), "old_logprobs": None, "advantages": torch.ones(2), "config": config}
    for bad in ([[0, 1, 0], [0, 0, 0]], [[0, 0, 1], [1, 0, 0]], [[0, 5, 5], [0, 0, 0]]):
        with pytest.raises(RuntimeError, match="policy_loss: segments must ascend from 0 along each row"):
            gk.policy_loss(**arguments, segments=torch.tensor(bad), backend="reference")  # type: ignore[arg-type]


NORMALIZERS = [0, -1, 0.0, -2.5, NAN, INF, True, "3", None]


@pytest.mark.parametrize("value", NORMALIZERS[:-1], ids=repr)
def test_normalizer_that_is_no_positive_number(value: Any) -> None:
    refused(ValueError, "normalizer", "positive", repr(value), normalizer=value, weights=None)
    refused(ValueError, "normalizer", "positive", repr(value), normalizer={"tokens": 3, "rows": value}, weights=None)


def test_normalizer_of_another_kind() -> None:
    refused(ValueError, "normalizer", "tokens, rows, segments", "'token'", normalizer={"token": 3}, weights=None)
    refused(ValueError, "normalizer", "one element", "[2]", normalizer=torch.ones(2), weights=None)
    config = gk.LossConfig(kl="k3", aggregation="token-sum")
    refused(ValueError, "normalizer", "token-sum", "3", normalizer=3, weights=None, config=config)
    refused(ValueError, "normalizer", "weights", "3", normalizer=3)


def test_normalizer_without_the_unit_of_the_aggregation() -> None:
    by_row = gk.LossConfig(kl="k3", aggregation="seq-mean-token-mean")
    refused(
        ValueError, "normalizer must have 'tokens'", "aggregation='token-mean'", normalizer={"rows": 3}, weights=None
    )
    refused(ValueError, "normalizer must have 'rows'", normalizer={"tokens": 3}, weights=None, config=by_row)


BY_ROW, NO_KL = "seq-mean-token-mean", {"ref_logprobs": None}
# Fields of a config, other arguments, and the unit that one term of the loss reads beside that of the policy term.
OTHER_UNITS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "kl": ({"kl": "k3", "kl_coef": 0.1, "kl_aggregation": BY_ROW}, {"entropy": None}, "rows", "kl_aggregation"),
    "kl, measured": ({"kl": "k3", "kl_aggregation": BY_ROW}, {"entropy": None}, "rows", "kl_aggregation"),
    "entropy": ({"entropy_coef": 0.1, "entropy_aggregation": BY_ROW}, NO_KL, "rows", "entropy_aggregation"),
    "segments": ({"kl": "k3", "ratio": "segment"}, {"entropy": None}, "tokens", "kl_aggregation"),
    "segments, entropy": ({"ratio": "segment"}, NO_KL, "tokens", "entropy_aggregation"),
}


@pytest.mark.parametrize("case", OTHER_UNITS)
def test_normalizer_without_the_unit_of_another_term(case: str) -> None:
    """The missing unit would be counted in this call alone, so that micro-batches would not add up to the batch."""
    fields, changes, unit, setting = OTHER_UNITS[case]
    config = gk.LossConfig(**fields)
    own = "segments" if config.ratio == "segment" else "tokens"
    others = {"weights": None, "config": config} | changes
    missing = f"normalizer must have {unit!r}, the unit of {setting}="
    refused(ValueError, missing, normalizer={own: 3}, **others)
    both = f"normalizer must be a dict with {own!r} for "
    refused(ValueError, both, f"{unit!r} for {setting}=", "got 3", normalizer=3, **others)
    given = {name: value for name, value in (ARGUMENTS | others).items() if value is not None}
    assert gk.policy_loss(**given, normalizer={own: 3, unit: 2}).loss.isfinite()


@pytest.mark.parametrize("name", ["advantages", "is_weights", "weights", "normalizer"])
def test_factors_of_the_loss_that_require_grad(name: str) -> None:
    value = {"normalizer": torch.ones(())} | ARGUMENTS
    others = {} if name == "weights" else {"weights": None}
    refused(
        ValueError,
        f"{name} must not require grad",
        f"pass {name}.detach()",
        **others | {name: value[name].clone().requires_grad_()},
    )
    with torch.no_grad():
        gk.policy_loss(**ARGUMENTS | {"advantages": torch.ones(3, requires_grad=True)}, config=gk.LossConfig(kl="k3"))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative(backend: str) -> None:
    leaf = ARGUMENTS["logprobs"].to(device_of(backend)).clone().requires_grad_()
    loss = gk.policy_loss(leaf, None, torch.ones(3, device=leaf.device), config="dapo", backend=backend).loss
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    if backend == "reference":
        return  # plain torch, which has one
    with pytest.raises(RuntimeError, match=r"^policy_loss: a second derivative is not implemented"):
        gradient.square().sum().backward()


def test_metrics_that_cannot_be_merged() -> None:
    metrics = gk.policy_loss(-torch.ones(2, 3), None, torch.ones(2)).metrics
    length = len(metrics.names)
    both = metrics.merged([metrics, metrics]).tensor
    torch.testing.assert_close(both, metrics.merged(torch.stack([metrics.tensor] * 2)).tensor, equal_nan=True)
    for rows, got in ((metrics.tensor, f"shape [{length}]"), ([], "list []"), (torch.ones(2, 3), "shape [2, 3]")):
        call = functools.partial(metrics.merged, rows)
        assert_raises(
            ValueError, "PolicyLossMetrics.merged: rows must be a list of metrics", [f"[K, {length}], got {got}"], call
        )


@pytest.mark.parametrize(
    ("config", "missing", "parts"),
    [
        (gk.LossConfig(ratio="segment", kl="k3"), "segments", ("ratio='segment'", "None")),
        (gk.LossConfig(ratio="segment_mean", kl="k3"), "segments", ("ratio='segment_mean'", "None")),
        (gk.LossConfig(kl="k3", kl_coef=0.1), "ref_logprobs", ("kl_coef=0.1", "None")),
        (gk.LossConfig(kl="k3", entropy_coef=0.1), "entropy", ("entropy_coef=0.1", "None")),
    ],
)
def test_argument_that_the_config_needs(config: gk.LossConfig, missing: str, parts: tuple[str, ...]) -> None:
    refused(ValueError, missing, *parts, config=config, **{missing: None})


def test_arguments_that_contradict_the_config() -> None:
    refused(ValueError, "ref_logprobs", "kl='none'", config=gk.LossConfig())
    vespo = gk.LossConfig(loss="vespo", kl="k3")
    refused(ValueError, "is_weights", "vespo", "[3]", config=vespo, is_weights=torch.ones(3))
    geo_mean = gk.LossConfig(loss="geo_mean", kl="k3", aggregation="seq-mean-token-sum")
    refused(ValueError, "policy_mask", "loss='geo_mean', whose terms are rows", config=geo_mean)


@pytest.mark.parametrize("config", [None, 3, {"loss": "clip"}, gk.LossConfig])
def test_config_of_another_type(config: Any) -> None:
    refused(TypeError, "config", type(config).__name__, config=config)


def test_name_of_a_config_is_a_loss_type_of_trl() -> None:
    for name in TRL_LOSS_TYPES:
        assert gk.LossConfig.of(name) == gk.LossConfig.trl(loss_type=name)
    with pytest.raises(
        ValueError, match=r"^LossConfig: loss must be .* got 'grpo', which names a whole config: .*of\('grpo'"
    ):
        gk.LossConfig("grpo")
    with pytest.raises(ValueError, match=r"^policy_loss: config must be one of .*'gropo' \(did you mean 'grpo'\?\)"):
        gk.policy_loss(torch.ones(SHAPE), None, torch.ones(3), config="gropo")


# Config


def config_refused(error: type[Exception], *parts: str, **settings: Any) -> None:
    assert_raises(error, "LossConfig: ", parts, lambda: gk.LossConfig(**settings))


CHOICES = {
    "loss": LOSSES,
    "ratio": RATIOS,
    "kl": KLS,
    "aggregation": AGGREGATIONS[:-1],
    "kl_aggregation": AGGREGATIONS,
    "entropy_aggregation": AGGREGATIONS,
}


@pytest.mark.parametrize("value", ["means", "", 1, True, ["clip"]], ids=repr)
@pytest.mark.parametrize("field", CHOICES)
def test_choice_that_does_not_exist_lists_those_that_do(field: str, value: Any) -> None:
    config_refused(ValueError, field, repr(value), *CHOICES[field], **{field: value})


# Numbers, each with the settings that it requires
NUMBERS: dict[str, dict[str, Any]] = {
    "clip_low": {},
    "clip_high": {},
    "dual_clip": {},
    "delta": {},
    "ratio_cap": {"loss": "dppo_tv"},
    "dro_beta": {"loss": "dro"},
    "kl_coef": {"kl": "k1"},
    "entropy_coef": {},
}
POSITIVE = {"delta": 0.0, "ratio_cap": 0.0, "dro_beta": 0.0, "dual_clip": 1.0}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("field", NUMBERS)
def test_number_that_is_not_finite(field: str, value: float) -> None:
    config_refused(ValueError, field, repr(value), **NUMBERS[field] | {field: value})


@pytest.mark.parametrize("value", ["1e-6", True, [1.0], torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("field", NUMBERS)
def test_number_of_another_type(field: str, value: Any) -> None:
    config_refused(TypeError, field, type(value).__name__, **NUMBERS[field] | {field: value})


@pytest.mark.parametrize("field", sorted({name for name in NUMBERS if not name.endswith("_coef")}))
def test_number_below_its_least(field: str) -> None:
    config_refused(ValueError, field, "-0.5", **NUMBERS[field] | {field: -0.5})
    if field in POSITIVE:
        config_refused(ValueError, field, repr(POSITIVE[field]), **NUMBERS[field] | {field: POSITIVE[field]})


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"loss": "sapo", "sapo_temperatures": (1.0,)}, ("sapo_temperatures", "2 numbers", "(1.0,)")),
        ({"loss": "sapo", "sapo_temperatures": 1.0}, ("sapo_temperatures", "2 numbers", "1.0")),
        ({"loss": "sapo", "sapo_temperatures": (1.0, 0.0)}, ("sapo_temperatures", "above 0", "0.0")),
        ({"loss": "vespo", "vespo_shape": (1.0, 2.0, 3.0)}, ("vespo_shape", "4 numbers", "(1.0, 2.0, 3.0)")),
        ({"loss": "vespo", "vespo_shape": (1.0, 2.0, 3.0, -1.0)}, ("vespo_shape", "at least 0", "-1.0")),
        ({"kl": "k3", "kl_clamp": (20.0,)}, ("kl_clamp", "2 numbers", "(20.0,)")),
        ({"kl": "k3", "kl_clamp": (0.0, 1.0)}, ("kl_clamp", "above 0", "0.0")),
        ({"log_ratio_clamp": (1.0, -1.0)}, ("log_ratio_clamp", "low < high", "(1.0, -1.0)")),
        ({"log_ratio_clamp": (0.0, NAN)}, ("log_ratio_clamp", "low < high", "(0.0, nan)")),
        ({"log_ratio_clamp": 20.0}, ("log_ratio_clamp", "(low, high)", "20.0")),
        ({"log_ratio_clamp": ("a", "b")}, ("log_ratio_clamp", "(low, high)", "('a', 'b')")),
        *[({"max_length": v}, ("max_length", "positive int", repr(v))) for v in (0, -1, 1.5, True, "9")],
        ({"max_length": 9}, ("max_length", "9", "token-mean")),
        ({"aggregation": "seq-mean-token-sum-norm"}, ("max_length", "None", "seq-mean-token-sum-norm")),
        ({"kl": "k1", "kl_aggregation": "seq-mean-token-sum-norm"}, ("max_length", "None")),
        ({"entropy_aggregation": "seq-mean-token-sum-norm"}, ("max_length", "None")),
        ({"kl_coef": 0.1}, ("kl", "'none'", "kl_coef", "0.1")),
        ({"kl_clamp": (1.0, 1.0)}, ("kl", "'none'", "kl_clamp", "(1.0, 1.0)")),
        ({"kl_unbiased": True}, ("kl", "'none'", "kl_unbiased", "True")),
        ({"kl": "k3+", "kl_coef": 1.0, "kl_unbiased": True}, ("kl_unbiased", "'k3+'")),
        ({"kl": "k3", "kl_unbiased": True, "ratio": "segment"}, ("kl_unbiased", "'segment'")),
        ({"loss": "geo_mean"}, ("aggregation", "geo_mean", "token-mean")),
        ({"loss": "dro"}, ("dro_beta", "None")),
        ({"loss": "dppo_tv", "clip_low": None}, ("clip_low", "None", "dppo")),
        ({"loss": "dppo_kl", "clip_high": None}, ("clip_high", "None", "dppo")),
        ({"clip_high": -0.1}, ("clip_high", "-0.1")),
        ({"loss": "cispo", "clip_high": -1.5}, ("clip_high", "-1.5")),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_settings_without_a_meaning(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    config_refused(ValueError, *parts, **settings)


@pytest.mark.parametrize("field", ["kl_unbiased", "count_empty_rows"])
@pytest.mark.parametrize("value", [1, "yes", None])
def test_switch_that_is_no_bool(field: str, value: Any) -> None:
    config_refused(TypeError, field, repr(value), **{field: value})


OWN = {
    "delta": 1.5,
    "dual_clip": 3.0,
    "ratio_cap": 3.0,
    "sapo_temperatures": (1.0, 2.0),
    "dro_beta": 0.1,
    "vespo_shape": (1.0, 1.0, 1.0, 1.0),
    "log_ratio_clamp": (-1.0, 1.0),
    "clip_low": 0.3,
    "clip_high": 0.3,
}
USERS = {
    "delta": {"clip"},
    "dual_clip": {"clip"},
    "ratio_cap": {"dppo_tv", "dppo_kl", "topr"},
    "sapo_temperatures": {"sapo"},
    "dro_beta": {"dro"},
    "vespo_shape": {"vespo"},
    "log_ratio_clamp": {"clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "ipo", "icepop", "topr"},
    "clip_low": {"clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "ipo", "icepop"},
    "clip_high": {"clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "ipo", "icepop"},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("field", OWN)
def test_field_of_another_loss_is_refused(field: str, loss: str) -> None:
    needed: dict[str, Any] = {"loss": loss, field: OWN[field]}
    if loss == "dro":
        needed.setdefault("dro_beta", 0.1)
    if loss == "geo_mean":
        needed["aggregation"] = "seq-mean-token-sum"
    if loss in USERS[field]:
        gk.LossConfig(**needed)
    else:
        config_refused(ValueError, field, repr(loss), **needed)


@pytest.mark.parametrize("loss", ["vespo", "geo_mean", "dppo_tv", "dppo_kl", "reinforce", "dro"])
def test_ratio_without_a_meaning_for_the_loss(loss: str) -> None:
    needed = {"dro_beta": 0.1} if loss == "dro" else {}
    config_refused(ValueError, "ratio", "'segment'", repr(loss), "token", loss=loss, ratio="segment", **needed)
