"""Errors of group_advantages, its config and backend selection: the exception type and the parts of its message."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.config import CENTERS, COMBINES, GAINS, SCALES, SINGLETONS, WHITENS
from grpo_kernels.ops.group_advantages.registration import SUPPORTS
from tests.harness import assert_raises, device_of, runnable_backends

BACKENDS = runnable_backends(SUPPORTS)
NAN, INF = float("nan"), float("inf")


def refused(error: type[Exception], *parts: str, rewards: Any = None, groups: Any = 3, **options: Any) -> None:
    """Checks that the call raises exactly this type, with a message that contains the op and each part."""
    rewards = torch.randn(6) if rewards is None else rewards
    for backend in (None, *BACKENDS):
        call = functools.partial(gk.group_advantages, rewards, groups, backend=backend, **options)
        assert_raises(error, "group_advantages: ", parts, call)


# Rewards


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_rewards_of_another_dtype(dtype: torch.dtype) -> None:
    way_out = "; .float() converts it" if dtype in (torch.int64, torch.int32, torch.bool) else ""
    refused(TypeError, "rewards", f"{dtype}{way_out}", rewards=torch.ones(6).to(dtype))


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], 1.0, None])
def test_rewards_that_are_no_tensor(value: Any) -> None:
    with pytest.raises(TypeError, match=f"^group_advantages: rewards must be a tensor, got {type(value).__name__}"):
        gk.group_advantages(value, 3)


@pytest.mark.parametrize("shape", [(6, 2, 1), (6, 0), (), (0, 0)])
def test_rewards_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(ValueError, "rewards", str(list(shape)), rewards=torch.zeros(shape))


def test_rewards_that_require_grad_with_the_advice_to_detach() -> None:
    refused(ValueError, "rewards", "requires_grad=True", "detach", rewards=torch.randn(6, requires_grad=True))


# Groups


# bool is an int in Python; True would mean groups of one.
@pytest.mark.parametrize("groups", [True, False, 2.0, None, "3", [0, 0, 0, 1, 1, 1]])
def test_groups_of_another_type(groups: Any) -> None:
    refused(TypeError, "groups", type(groups).__name__, groups=groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.bfloat16])
def test_group_ids_of_another_dtype(dtype: torch.dtype) -> None:
    refused(TypeError, "groups", str(dtype), groups=torch.ones(6, dtype=dtype))


@pytest.mark.parametrize("groups", [0, -1, -3])
def test_group_size_below_one(groups: int) -> None:
    refused(ValueError, "groups", str(groups), groups=groups)


@pytest.mark.parametrize("groups", [4, 5, 7, 12])
def test_group_size_that_does_not_divide_the_rows_with_the_way_out(groups: int) -> None:
    refused(ValueError, "groups", "6", str(groups), "ids", groups=groups)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_lengths_that_are_none(backend: str, wrong: float) -> None:
    if backend not in BACKENDS:
        pytest.skip("not built")
    lengths = torch.tensor([4.0, 2.0, wrong, 1.0, 1.0, 1.0])
    rule = f"^group_advantages: lengths must be finite and not negative, got {wrong:g} in row 2"
    with pytest.raises(RuntimeError, match=rule):
        gk.group_advantages(torch.randn(6), 3, lengths=lengths, config="opo", backend=backend)
    for left_out in ({"valid": torch.arange(6) != 2}, {"subgroups": -(torch.arange(6) == 2).long()}):
        advantages = gk.group_advantages(
            torch.randn(6), 3, lengths=lengths, config="opo", backend=backend, **left_out
        ).advantages
        assert advantages.isfinite().all() and advantages[2] == 0


@pytest.mark.parametrize(
    ("name", "meant"), [("ppo", "gae"), ("GAE", "gae"), ("reinforce++", "reinforce_plus_plus")], ids=str
)
def test_names_of_advantages_of_tokens(name: str, meant: str) -> None:
    rule = rf"^group_advantages: config must be .*; its advantages are of tokens: token_advantages\(config='{meant}'\)$"
    with pytest.raises(ValueError, match=rule):
        gk.group_advantages(torch.randn(6), 3, config=name)


# Arguments with one element per row

PER_ROW = {
    "groups": torch.zeros(6, dtype=torch.int64),
    "subgroups": torch.zeros(6, dtype=torch.int64),
    "valid": torch.ones(6, dtype=torch.bool),
    "lengths": torch.ones(6),
    "baselines": torch.ones(6),
}
USER = {"lengths": "opo", "baselines": "remax"}


@pytest.mark.parametrize("shape", [(5,), (7,), (0,), (6, 1), (1, 6), ()], ids=str)
@pytest.mark.parametrize("name", PER_ROW)
def test_argument_of_another_length_than_the_rewards(name: str, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(PER_ROW[name].dtype)
    refused(ValueError, name, "[6]", str(list(shape)), **{name: value, "config": USER.get(name, "grpo")})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("subgroups", torch.float32),
        ("subgroups", torch.bool),
        ("valid", torch.int64),
        ("valid", torch.uint8),
        ("valid", torch.float32),
        ("lengths", torch.bool),
        ("lengths", torch.complex64),
        ("baselines", torch.int64),
        ("baselines", torch.bool),
    ],
)
def test_argument_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    refused(TypeError, name, str(dtype), **{name: torch.ones(6, dtype=dtype), "config": USER.get(name, "grpo")})


@pytest.mark.parametrize("name", ["subgroups", "valid", "lengths", "baselines"])
def test_argument_that_is_no_tensor(name: str) -> None:
    refused(TypeError, name, "list", **{name: [1] * 6, "config": USER.get(name, "grpo")})


@pytest.mark.parametrize("name", PER_ROW)
def test_argument_on_another_device(name: str) -> None:
    away = PER_ROW[name].to("meta")
    refused(ValueError, name, "meta", "cpu", **{name: away, "config": USER.get(name, "grpo")})


# The estimators whose formula uses token counts or a baseline per row.
USERS = {
    "lengths": {"opo", "reinforce_plus_plus_baseline", "verl-opo", "verl-gdpo", "verl-reinforce-plus-plus-baseline"},
    "baselines": {"remax", "spo", "verl-remax"},
}


@pytest.mark.parametrize("name", gk.AdvantageConfig.names())
@pytest.mark.parametrize("argument", ["lengths", "baselines"])
def test_lengths_and_baselines_are_given_exactly_when_they_are_used(argument: str, name: str) -> None:
    options = {other: torch.ones(6) for other, users in USERS.items() if name in users and other != argument}
    if name not in USERS[argument]:
        options[argument] = torch.ones(6)
    refused(ValueError, argument, repr(name), config=name, **options)


@pytest.mark.parametrize("settings", [{"shrinkage": 2.0}, {"singleton": "parent"}])
def test_setting_that_needs_subgroups_without_them(settings: dict[str, Any]) -> None:
    ((field, value),) = settings.items()
    refused(ValueError, "subgroups", field, repr(value), config=gk.AdvantageConfig(**settings))


@pytest.mark.parametrize(("columns", "weights"), [(1, (1.0, 2.0)), (2, (1.0,)), (3, (1.0, 2.0))])
def test_reward_weights_of_another_length_than_the_columns(columns: int, weights: tuple[float, ...]) -> None:
    config = gk.AdvantageConfig(reward_weights=weights)
    refused(ValueError, "reward_weights", str(columns), str(weights), rewards=torch.ones(6, columns), config=config)
    if columns == 1:
        refused(ValueError, "reward_weights", "1", str(weights), config=config)


# Config


@pytest.mark.parametrize(
    ("config", "suggestion"), [("grop", "grpo"), ("dr-grpo", "dr_grpo"), ("trl_group", "trl-group")]
)
def test_unknown_estimator_with_the_nearest_name(config: str, suggestion: str) -> None:
    refused(ValueError, "config", repr(config), f"did you mean '{suggestion}'?", config=config)
    with pytest.raises(ValueError, match=rf"^AdvantageConfig: estimator .*{config}.*did you mean '{suggestion}'\?"):
        gk.AdvantageConfig(config)


def test_unknown_estimator_unlike_any_lists_them_all() -> None:
    refused(ValueError, "config", "'zzzzzz'", *gk.AdvantageConfig.names(), config="zzzzzz")


@pytest.mark.parametrize("config", [None, 3, {"estimator": "grpo"}, gk.AdvantageConfig])
def test_config_of_another_type(config: Any) -> None:
    refused(TypeError, "config", type(config).__name__, config=config)


def config_refused(error: type[Exception], *parts: str, **settings: Any) -> None:
    assert_raises(error, "AdvantageConfig: ", parts, lambda: gk.AdvantageConfig(**settings))


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1e-6])
@pytest.mark.parametrize("field", ["eps", "std_floor", "shrinkage", "whiten_eps", "clip"])
def test_number_that_is_not_finite_or_negative(field: str, value: float) -> None:
    config_refused(ValueError, field, repr(value), **{field: value})


def test_clip_of_zero_would_silence_everything() -> None:
    config_refused(ValueError, "clip", "0", clip=0.0)


@pytest.mark.parametrize("value", ["1e-6", True, [1.0], torch.tensor(1.0)], ids=repr)
@pytest.mark.parametrize("field", ["eps", "std_floor", "shrinkage", "whiten_eps", "clip"])
def test_number_of_another_type(field: str, value: Any) -> None:
    config_refused(TypeError, field, type(value).__name__, **{field: value})


@pytest.mark.parametrize("value", [2, -1, 0.5, True, NAN, "1"])
def test_ddof_that_is_neither_zero_nor_one(value: Any) -> None:
    config_refused(ValueError, "ddof", repr(value), ddof=value)


CHOICES = {
    "center": CENTERS,
    "scale": SCALES,
    "singleton": SINGLETONS,
    "combine": COMBINES,
    "whiten": WHITENS,
    "gain": GAINS,
}


@pytest.mark.parametrize("value", ["means", "", 1, True])
@pytest.mark.parametrize("field", CHOICES)
def test_choice_that_does_not_exist_lists_those_that_do(field: str, value: Any) -> None:
    config_refused(ValueError, field, repr(value), *CHOICES[field], **{field: value})


@pytest.mark.parametrize("value", [(), []])
def test_reward_weights_without_a_number(value: Any) -> None:
    config_refused(ValueError, "reward_weights", reward_weights=value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *[(value, TypeError) for value in ("1,2", 1.0, (1.0, "2"), (1.0, True), {1.0})],
        *[(value, ValueError) for value in ((1.0, NAN), (INF,))],
    ],
    ids=repr,
)
def test_reward_weights_of_another_kind(value: Any, error: type[Exception]) -> None:
    config_refused(error, "reward_weights", reward_weights=value)


# Every combination that is meaningless or that no kernel computes.
@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"shrinkage": 1.0, "center": "leave_one_out"}, ("shrinkage", "leave_one_out")),
        ({"shrinkage": 1.0, "scale": "batch_std"}, ("shrinkage", "batch_std")),
        ({"shrinkage": 1.0, "scale": "mean"}, ("shrinkage", "mean")),
        ({"singleton": "parent", "center": "none"}, ("singleton", "parent", "none")),
        ({"singleton": "parent", "estimator": "remax"}, ("singleton", "parent", "baseline")),
        ({"singleton": "raw", "estimator": "grpo_passk"}, ("singleton", "raw", "runner_up")),
        ({"singleton": "parent", "estimator": "grpo_passk"}, ("singleton", "parent", "runner_up")),
        ({"combine": "normalize_then_sum", "center": "length"}, ("combine", "length")),
        ({"combine": "normalize_then_sum", "center": "runner_up"}, ("combine", "runner_up")),
        ({"combine": "normalize_then_sum", "center": "baseline"}, ("combine", "baseline")),
        ({"combine": "normalize_then_sum", "scale": "batch_std"}, ("combine", "batch_std")),
        ({"combine": "normalize_then_sum", "gain": "nonzero"}, ("combine", "nonzero")),
        ({"whiten": "rows", "gain": "nonzero"}, ("whiten", "gain", "rows", "nonzero")),
        ({"whiten": "tokens", "scale": "batch_std"}, ("whiten", "scale", "tokens", "batch_std")),
        ({"gain": "nonzero", "scale": "batch_std"}, ("gain", "scale", "nonzero", "batch_std")),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_combination_without_a_meaning(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    config_refused(ValueError, *parts, **settings)


def test_config_is_frozen_and_compares_by_its_settings() -> None:
    config = gk.AdvantageConfig("grpo", reward_weights=[1, 2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.eps = 1.0  # type: ignore[misc]
    assert config == gk.AdvantageConfig(reward_weights=(1.0, 2.0)) != gk.AdvantageConfig()
    assert config.reward_weights == (1.0, 2.0) and hash(config) == hash(gk.AdvantageConfig(reward_weights=(1.0, 2.0)))
    assert dataclasses.replace(config, eps=0.5) == gk.AdvantageConfig(eps=0.5, reward_weights=(1.0, 2.0))


@pytest.mark.parametrize("name", gk.AdvantageConfig.names())
def test_name_and_config_of_that_name_are_the_same(name: str) -> None:
    assert gk.AdvantageConfig.of(name) == gk.AdvantageConfig(name) == gk.AdvantageConfig.of(gk.AdvantageConfig(name))
    assert gk.AdvantageConfig(name).estimator == name


# Backends


def test_available_kernels_names_each_with_ok_or_a_reason() -> None:
    result = gk.available_kernels()
    assert set(result) == {"cuda", "triton", "cpu"}
    assert all(isinstance(reason, str) and reason for reason in result.values())
    assert all(result[name] == "ok" for name in BACKENDS if name != "reference")


def spoken_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the backends that compute a call."""
    from grpo_kernels.ops.group_advantages import registration as op

    calls: list[str] = []
    for name, forward in op.FORWARD.items():
        spy = lambda *args, _name=name, _forward=forward: calls.append(_name) or _forward(*args)  # noqa: E731
        monkeypatch.setitem(op.FORWARD, name, spy)
    return calls


def test_use_backend_nests_and_is_restored_after_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rewards = spoken_for(monkeypatch), torch.randn(6, device=device_of("reference"))
    first, second = BACKENDS[0], "reference"
    gk.group_advantages(rewards, 3)
    with gk.use_backend(second):
        gk.group_advantages(rewards, 3)
        with pytest.raises(KeyError), gk.use_backend(first):
            gk.group_advantages(rewards, 3)
            raise KeyError
        gk.group_advantages(rewards, 3)
        gk.group_advantages(rewards, 3, backend=first)  # the argument takes precedence over the context manager
        with pytest.raises(ValueError), gk.use_backend("gpu"):
            pass
        gk.group_advantages(rewards, 3)
    gk.group_advantages(rewards, 3)
    assert calls[1:-1] == [second, first, second, first, second] and calls[0] == calls[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_explicit_backend_is_the_one_that_computes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spoken_for(monkeypatch)
    gk.group_advantages(torch.randn(6, device=device_of(backend)), 3, backend=backend)
    assert calls == [backend]


# Ids


def test_group_ids_number_keys_by_first_appearance() -> None:
    keys = ["b", "a", "b", ("a", 1), 3, 3.0, "a", None]
    got = gk.group_ids(keys)
    assert got.tolist() == [0, 1, 0, 2, 3, 3, 1, 4] and got.dtype == torch.int64
    assert gk.group_ids(iter(keys)).tolist() == got.tolist()


def test_group_ids_keep_keys_with_like_digits_apart() -> None:
    assert gk.group_ids(["1_10", "11_0", "110", 110, "1_10"]).tolist() == [0, 1, 2, 3, 0]


def test_group_ids_of_a_tensor_are_those_of_its_elements() -> None:
    keys = torch.tensor([7, 7, 9, 7, 8])
    assert gk.group_ids(keys).tolist() == gk.group_ids(keys.tolist()).tolist() == [0, 0, 1, 0, 2]
    for wrong, message in (
        (list(keys), "got tensor(7) in row 0; pass one tensor"),
        (keys[:, None], "got shape [5, 1]"),
    ):
        assert_raises(TypeError, "group_ids: keys must", [message], functools.partial(gk.group_ids, wrong))


def test_group_ids_of_nothing_are_empty_ids() -> None:
    empty = gk.group_ids([])
    assert empty.shape == (0,) and empty.dtype == torch.int64
    assert gk.group_ids(["a"], device="meta").device.type == "meta"


def test_group_ids_refuse_a_text_and_keys_without_a_hash() -> None:
    with pytest.raises(TypeError, match=r"^group_ids: keys must be an iterable with a key for each row, got str 'ab'"):
        gk.group_ids("ab")
    with pytest.raises(TypeError, match=r"^group_ids: keys must be an iterable .*, got int 4$"):
        gk.group_ids(4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"groups must divide .*, got 4; rewards \[P, K\] of P prompts are flattened"):
        gk.group_advantages(torch.ones(3, 4), 4)
    with pytest.raises(TypeError, match=r"subgroups must be a tensor, got list; gk.group_ids\(...\) makes"):
        gk.group_advantages(torch.ones(4), 2, subgroups=["a"] * 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^group_ids: keys must be hashable, got list \[1\] in row 0"):
        gk.group_ids([[1], [2]])
