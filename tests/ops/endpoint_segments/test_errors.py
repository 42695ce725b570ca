"""Errors of endpoint_segments, its config and its threshold: the exception type and the parts of its message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises, device_of, needs_cpu_kernels
from tests.ops.endpoint_segments.batches import BACKENDS, F64, INF, NAN, config_of

TOKENS = ("rewards", "logprobs", "old_logprobs", "values")
OP = "endpoint_segments"


def arguments(*shape: int, **changes: Any) -> dict[str, Any]:
    """Valid arguments with `changes` applied."""
    tokens = -torch.rand(*(shape or (4, 5)))
    return {**dict.fromkeys(TOKENS, tokens), "config": {"norm": "none"}, **changes}


def message_of(error: type[Exception], **given: Any) -> str:
    """Checks that every backend raises exactly this type with the same message naming the op, and returns it."""
    result = set()
    for backend in (None, *BACKENDS):
        with pytest.raises(error) as caught:
            gk.endpoint_segments(**given, backend=backend)
        assert caught.type is error
        result.add(str(caught.value))
    (message,) = result
    assert message.startswith(f"{OP}: "), message
    return message


def refused(error: type[Exception], *parts: str, **given: Any) -> None:
    message = message_of(error, **given)
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


def test_the_arguments_are_valid_but_for_the_changes() -> None:
    for backend in BACKENDS:
        kwargs = {k: v.to(device_of(backend)) if k in TOKENS else v for k, v in arguments().items()}
        gk.endpoint_segments(**kwargs, backend=backend)


# Tensors


@pytest.mark.parametrize("name", [*TOKENS, "mask"])
@pytest.mark.parametrize("value", [1.0, [[0.0] * 5] * 4, "rewards"], ids=repr)
def test_tokens_that_are_no_tensor(name: str, value: Any) -> None:
    refused(TypeError, f"{name} must be a tensor", type(value).__name__, **arguments(**{name: value}))


@pytest.mark.parametrize("name", ["rewards", "logprobs", "old_logprobs"])
def test_tokens_that_are_missing(name: str) -> None:
    refused(TypeError, f"{name} must be a tensor", "NoneType", **arguments(**{name: None}))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    kwargs = arguments(**{name: torch.ones(4, 5).to(dtype)})
    refused(TypeError, f"{name} must be of dtype", "float32", "bfloat16", str(dtype), **kwargs)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_mask_of_another_dtype(dtype: torch.dtype) -> None:
    refused(TypeError, "mask must be of dtype", str(dtype), **arguments(mask=torch.ones(4, 5).to(dtype)))


@pytest.mark.parametrize("shape", [(4,), (5, 4), (4, 6), (3, 5), (4, 5, 1), (20,), (), (1, 5)], ids=str)
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "values", "mask"])
def test_tokens_of_another_shape_than_the_rewards(name: str, shape: tuple[int, ...]) -> None:
    parts = (f"{name} must have the shape of rewards", "[4, 5]", str(list(shape)))
    refused(ValueError, *parts, **arguments(**{name: torch.ones(shape)}))


@pytest.mark.parametrize("shape", [(), (20,), (2, 2, 5)], ids=str)
def test_padded_rewards_of_another_rank(shape: tuple[int, ...]) -> None:
    refused(
        ValueError,
        "rewards must have shape [B, T]",
        "cu_seqlens",
        str(list(shape)),
        **arguments(rewards=torch.zeros(shape)),
    )


@pytest.mark.parametrize("shape", [(), (4, 5), (2, 2, 5)], ids=str)
def test_packed_rewards_of_another_rank(shape: tuple[int, ...]) -> None:
    kwargs = arguments(rewards=torch.zeros(shape), cu_seqlens=torch.tensor([0, 4]))
    refused(ValueError, "rewards must have shape", "[M] with cu_seqlens", str(list(shape)), **kwargs)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "values", "mask"])
def test_tokens_on_another_device(name: str) -> None:
    kwargs = arguments(**{name: torch.ones(4, 5, device="meta")})
    refused(ValueError, f"{name} must be on cpu", "meta", **kwargs)


def test_groups_and_bounds_on_another_device() -> None:
    groups = torch.zeros(4, dtype=torch.int64, device="meta")
    refused(ValueError, "groups must be on cpu", "meta", **arguments(groups=groups, config={"norm": "prompt"}))
    bounds = torch.zeros(2, dtype=torch.int64, device="meta")
    refused(ValueError, "cu_seqlens must be on cpu", "meta", **arguments(6, cu_seqlens=bounds))


# cu_seqlens


@pytest.mark.parametrize("value", [[0, 6], (0, 6), 6], ids=repr)
def test_bounds_that_are_no_tensor(value: Any) -> None:
    refused(TypeError, "cu_seqlens must be a tensor", type(value).__name__, **arguments(6, cu_seqlens=value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool], ids=str)
def test_bounds_of_another_dtype(dtype: torch.dtype) -> None:
    kwargs = arguments(6, cu_seqlens=torch.tensor([0, 6]).to(dtype))
    refused(TypeError, "cu_seqlens must be of dtype int64 or int32", str(dtype), **kwargs)


@pytest.mark.parametrize("shape", [(), (0,), (2, 1)], ids=str)
def test_bounds_of_another_shape(shape: tuple[int, ...]) -> None:
    kwargs = arguments(6, cu_seqlens=torch.zeros(shape, dtype=torch.int64))
    refused(ValueError, "cu_seqlens must have shape [B + 1]", str(list(shape)), **kwargs)


# Groups


def test_groups_missing_without_values() -> None:
    for norm in ("none", "batch", "prompt"):
        refused(ValueError, "groups must be given", "None", **arguments(values=None, config={"norm": norm}))


def test_groups_missing_for_the_norm_of_a_prompt() -> None:
    refused(ValueError, "groups must be given", "norm='prompt'", "None", **arguments(config={"norm": "prompt"}))


@pytest.mark.parametrize("groups", [2, torch.zeros(4, dtype=torch.int64)], ids=["int", "ids"])
def test_groups_that_nothing_uses(groups: Any) -> None:
    for norm in ("none", "batch"):
        kwargs = arguments(groups=groups, config={"norm": norm})
        refused(ValueError, "groups must be left out", "values", "norm", type(groups).__name__, **kwargs)


@pytest.mark.parametrize("groups", [True, 2.0, "2", [0, 0, 1, 1]], ids=repr)
def test_groups_of_another_type(groups: Any) -> None:
    refused(
        TypeError,
        "groups must be an int or an integer tensor",
        type(groups).__name__,
        repr(groups) + ("; gk.group_ids(...) makes the tensor" if isinstance(groups, list) else ""),
        **arguments(values=None, groups=groups),
    )


@pytest.mark.parametrize("groups", [3, 0, -2, 8])
def test_groups_that_do_not_divide_the_rows(groups: int) -> None:
    kwargs = arguments(values=None, groups=groups)
    refused(ValueError, "groups must divide the number of rows, 4", f"got {groups}", **kwargs)
    packed = arguments(6, values=None, groups=groups, cu_seqlens=torch.tensor([0, 1, 2, 3, 4]))
    refused(ValueError, "groups must divide the number of rows, 4", f"got {groups}", **packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, F64], ids=str)
def test_ids_of_another_dtype(dtype: torch.dtype) -> None:
    kwargs = arguments(values=None, groups=torch.zeros(4, dtype=dtype))
    refused(TypeError, "groups must be of dtype int64", str(dtype), **kwargs)


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), (4, 5), ()], ids=str)
def test_ids_of_another_shape(shape: tuple[int, ...]) -> None:
    ids = torch.zeros(shape, dtype=torch.int64)
    refused(ValueError, "groups must have shape [4]", str(list(shape)), **arguments(values=None, groups=ids))
    packed = arguments(6, values=None, groups=ids, cu_seqlens=torch.tensor([0, 1, 2, 3, 4]))
    refused(ValueError, "groups must have shape [4]", str(list(shape)), **packed)


# Numbers


def not_finite(name: str, value: float, packed: bool, with_values: bool) -> dict[str, Any]:
    """Arguments with `value` at one token of row 2."""
    kwargs = arguments(**({} if with_values else {"values": None, "groups": 2}))
    kwargs[name] = kwargs[name].clone()
    kwargs[name][2, 3] = value
    if packed:
        bounds = torch.arange(5) * 5
        kwargs = {k: v.reshape(-1) if k in TOKENS and v is not None else v for k, v in kwargs.items()}
        kwargs["cu_seqlens"] = bounds
    return kwargs


def assert_row_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError) as caught:
        gk.endpoint_segments(**given, backend="cpu")
    for part in (f"{OP}: ", "must be finite where the mask is True", "row 2"):
        assert part in str(caught.value)


@needs_cpu_kernels
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", ["rewards", "values"])
def test_reward_or_value_that_is_not_finite(name: str, value: float, packed: bool) -> None:
    assert_row_is_named(not_finite(name, value, packed, with_values=True))
    if name != "values":
        assert_row_is_named(not_finite(name, value, packed, with_values=False))


@needs_cpu_kernels
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs"])
def test_logprob_that_is_nan(name: str, packed: bool) -> None:
    for with_values in (True, False):
        assert_row_is_named(not_finite(name, NAN, packed, with_values))


@needs_cpu_kernels
def test_first_row_with_something_else_is_named() -> None:
    for rows in ((2, 3), (2,)):
        kwargs = arguments()
        kwargs["rewards"] = kwargs["rewards"].clone()
        kwargs["rewards"][list(rows)] = NAN
        assert_row_is_named(kwargs)


@needs_cpu_kernels
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("value", [INF, -INF], ids=str)
@pytest.mark.parametrize("name", ["logprobs", "old_logprobs"])
def test_logprob_that_is_infinite(name: str, value: float, packed: bool) -> None:
    for with_values in (True, False):
        assert_row_is_named(not_finite(name, value, packed, with_values))


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["rewards", "logprobs", "old_logprobs"])
def test_row_is_named_and_not_the_first_of_its_prompt(name: str) -> None:
    assert_row_is_named(not_finite(name, NAN, packed=False, with_values=False) | {"groups": 4})


@needs_cpu_kernels
def test_what_does_not_count_may_be_anything() -> None:
    for name in TOKENS:
        kwargs = arguments(mask=torch.ones(4, 5))
        kwargs["mask"][2, 3] = 0
        kwargs[name] = kwargs[name].clone()
        kwargs[name][2, 3] = NAN
        assert gk.endpoint_segments(**kwargs, backend="cpu").advantages.isfinite().all()


# Threshold


@pytest.mark.parametrize(
    "threshold", [True, "1", [1.0], torch.tensor(1.0), gk.SegmentConfig()], ids=lambda x: type(x).__name__
)
def test_threshold_of_another_type(threshold: Any) -> None:
    parts = ("threshold must be a number or a SegmentThreshold", type(threshold).__name__)
    refused(TypeError, *parts, **arguments(threshold=threshold))


@pytest.mark.parametrize("threshold", [0, -1.0, 0.0999, 10.01, INF, NAN, -INF], ids=str)
def test_threshold_out_of_bounds(threshold: float) -> None:
    parts = ("threshold must be within min_threshold and max_threshold", "[0.1, 10.0]", f"got {threshold!r}")
    refused(ValueError, *parts, **arguments(threshold=threshold))


def test_a_fixed_threshold_has_no_bounds_but_zero() -> None:
    """With adaptive_threshold=False the bounds, which limit the adaptation, say nothing."""
    fixed = {"adaptive_threshold": False, "min_threshold": 0.5, "max_threshold": 0.6}
    for tau in (1e-3, 2.0, 50.0):
        config = gk.SegmentConfig(group_variance_threshold=tau, **fixed)  # type: ignore[arg-type]
        of_config = gk.endpoint_segments(**arguments(config=config))
        given = gk.endpoint_segments(**arguments(config=gk.SegmentConfig(**fixed), threshold=tau))  # type: ignore[arg-type]
        assert torch.equal(of_config.segment_ids, given.segment_ids)
        kept = gk.SegmentThreshold(config)
        kept.load_state_dict({"value": tau})
        assert kept.value == tau == kept.update(of_config)
    for tau in (0.0, -1.0, INF, NAN):
        config_refused(ValueError, "group_variance_threshold must be", group_variance_threshold=tau, **fixed)
        with pytest.raises(ValueError, match="threshold must be"):
            gk.endpoint_segments(**arguments(config=gk.SegmentConfig(**fixed), threshold=tau))  # type: ignore[arg-type]


def test_thresholds_update_takes_results_alone() -> None:
    for result in (0.3, None, torch.zeros(3)):
        with pytest.raises(
            TypeError, match=r"^SegmentThreshold\.update: result must be EndpointSegments, got "
        ) as caught:
            gk.SegmentThreshold().update(result)  # type: ignore[arg-type]
        assert type(result).__name__ in str(caught.value)


# Config


@pytest.mark.parametrize("config", ["grpo", 1.0, [("gamma", 1.0)], gk.LossConfig()], ids=lambda x: type(x).__name__)
def test_config_of_another_type(config: Any) -> None:
    refused(TypeError, "config must be a SegmentConfig or a mapping", type(config).__name__, **arguments(config=config))
    with pytest.raises(TypeError, match=r"^SegmentThreshold: config must be a SegmentConfig or a mapping"):
        gk.SegmentThreshold(config)


FIELDS = tuple(field.name for field in dataclasses.fields(gk.SegmentConfig) if field.init)


@pytest.mark.parametrize("key", ["group_variance_treshold", "sparse_threshold", "tau", "modes", "coefficients", 3])
def test_unknown_key_with_those_that_there_are(key: Any) -> None:
    refused(ValueError, "config's keys", repr(key), *FIELDS, **arguments(config={"gamma": 1.0, key: 1.0}))
    with pytest.raises(ValueError, match=r"^SegmentThreshold: config's keys"):
        gk.SegmentThreshold({key: 1.0})


def test_misspelt_key_with_the_nearest() -> None:
    refused(ValueError, "did you mean 'group_max_size'?", **arguments(config={"group_maxsize": 8}))


def config_refused(error: type[Exception], *parts: str, **fields: Any) -> None:
    assert_raises(error, "SegmentConfig: ", parts, lambda: gk.SegmentConfig(**fields))
    with pytest.raises(error):
        gk.endpoint_segments(**arguments(config=fields))


CHOICES = {
    "rule": ("bounded", "literal"),
    "proxy": ("coherent", "uncorrelated"),
    "credit": ("endpoint", "broadcast"),
    "norm": ("none", "batch", "prompt"),
}


@pytest.mark.parametrize("value", ["Bounded", "", None, 0, True])
@pytest.mark.parametrize("field", CHOICES)
def test_choices(field: str, value: Any) -> None:
    config_refused(ValueError, f"{field} must be one of", *CHOICES[field], repr(value), **{field: value})


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_adaptive_threshold_of_another_type(value: Any) -> None:
    parts = ("adaptive_threshold must be a bool", type(value).__name__, repr(value))
    config_refused(TypeError, *parts, adaptive_threshold=value)


@pytest.mark.parametrize("value", [True, 8.0, "8", None])
def test_size_of_another_type(value: Any) -> None:
    config_refused(TypeError, "group_max_size must be an int", type(value).__name__, repr(value), group_max_size=value)


@pytest.mark.parametrize("value", [0, -16])
def test_size_below_one(value: int) -> None:
    config_refused(ValueError, "group_max_size must be at least 1", str(value), group_max_size=value)


POSITIVE = ("group_variance_threshold", "group_epsilon", "min_threshold", "max_threshold")
NUMBERS = (*POSITIVE, "threshold_lr", "gamma", "lam")


@pytest.mark.parametrize("value", ["1", None, True, [1.0]], ids=repr)
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_of_another_type(field: str, value: Any) -> None:
    config_refused(TypeError, f"{field} must be a number", type(value).__name__, repr(value), **{field: value})


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, 0.0], ids=str)
@pytest.mark.parametrize("field", POSITIVE)
def test_numbers_that_must_be_positive(field: str, value: float) -> None:
    config_refused(ValueError, f"{field} must be a finite number above 0", repr(value), **{field: value})


@pytest.mark.parametrize("value", [NAN, INF, -INF, -0.1], ids=str)
@pytest.mark.parametrize("field", ["threshold_lr", "gamma", "lam"])
def test_numbers_that_may_be_zero(field: str, value: float) -> None:
    config_refused(ValueError, f"{field} must be a finite number of at least 0", repr(value), **{field: value})
    gk.SegmentConfig(**{field: 0.0})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["gamma", "lam"])
def test_discounts_above_one(field: str) -> None:
    config_refused(ValueError, f"{field} must be in [0, 1]", "1.5", **{field: 1.5})
    gk.SegmentConfig(**{field: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "bounds", "tau"),
    [
        ({"group_variance_threshold": 0.05}, "[0.1, 10.0]", "0.05"),
        ({"group_variance_threshold": 11.0}, "[0.1, 10.0]", "11.0"),
        ({"min_threshold": 2.0}, "[2.0, 10.0]", "1.0"),
        ({"max_threshold": 0.5}, "[0.1, 0.5]", "1.0"),
        ({"min_threshold": 3.0, "max_threshold": 2.0, "group_variance_threshold": 2.5}, "[3.0, 2.0]", "2.5"),
    ],
    ids=str,
)
def test_threshold_outside_of_its_own_bounds(fields: dict[str, float], bounds: str, tau: str) -> None:
    rule = "group_variance_threshold must be within min_threshold and max_threshold"
    config_refused(ValueError, rule, bounds, f"got {tau}", **fields)


def test_derived_fields_cannot_be_given() -> None:
    with pytest.raises(TypeError):
        gk.SegmentConfig(modes=[0])  # type: ignore[call-arg]


def test_valid_settings_at_their_ends() -> None:
    for config in (config_of(gamma=0.0, lam=0.0), config_of(group_max_size=1), {"group_max_size": 2**31 - 1}):
        for backend in BACKENDS:
            kwargs = {k: v.to(device_of(backend)) if k in TOKENS else v for k, v in arguments().items()}
            groups = {"config": config}
            assert gk.endpoint_segments(**kwargs | groups, backend=backend).num_segments.min() >= 1
