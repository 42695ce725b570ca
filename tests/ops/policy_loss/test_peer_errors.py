"""Errors of LossConfig's constructors for peers, whose fields all change the config."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.trl_fields import TRL_DEFAULTS, TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.verl_fields import VERL_DEFAULTS
from grpo_kernels.ops.sampling_correction import trl_fields as correction_of_trl
from grpo_kernels.ops.sampling_correction import verl_fields as correction_of_verl

VALUES: tuple[object, ...] = (-1, 0, 3.5, math.nan, "x", None, True, [], {}, object())


_CONSTRUCTORS = {gk.LossConfig.trl: TRL_DEFAULTS, gk.LossConfig.verl: VERL_DEFAULTS}
_OF_CORRECTIONS = {
    gk.CorrectionConfig.trl: correction_of_trl.TRL_DEFAULTS,
    gk.CorrectionConfig.verl: correction_of_verl.VERL_DEFAULTS,
}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"loss_typ": "grpo"}, ("field", "'loss_typ'", "did you mean 'loss_type'?")),
        ({"loss_type": "ppo"}, ("loss_type", "'ppo'", *TRL_LOSS_TYPES)),
        ({"importance_sampling_level": "row"}, ("importance_sampling_level", "'row'", "token, sequence")),
        ({"use_adaptive_entropy": True}, ("use_adaptive_entropy", "True")),
        ({"use_vllm": True}, ("use_vllm", "True", "pass is_weights=gk.sampling_correction(", "CorrectionConfig.trl")),
        ({"top_entropy_quantile": 0.5}, ("top_entropy_quantile", "0.5", "gk.variants.high_entropy_mask")),
        ({"off_policy_mask_threshold": 0.1}, ("off_policy_mask_threshold", "0.1", "gk.variants.off_policy_mask")),
    ],
    ids=str,
)
def test_fields_of_trl(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^LossConfig\.trl: ") as caught:
        gk.LossConfig.trl(**settings)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("peer", "settings", "message"),
    [
        ("trl", {"epsilon": "0.2"}, "epsilon must be a number, got str '0.2'"),
        ("trl", {"sapo_temperature_pos": True}, "sapo_temperature_pos must be a number, got bool True"),
        ("trl", {"use_vllm": 1}, "use_vllm must be a bool, got int 1"),
        ("verl", {"clip_ratio": "0.2"}, "clip_ratio must be a number, got str '0.2'"),
    ],
)
def test_fields_of_another_type(peer: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"^LossConfig\.{peer}: {message}$"):
        getattr(gk.LossConfig, peer)(**settings)


@pytest.mark.parametrize(
    ("constructor", "settings", "message"),
    [
        (gk.LossConfig.trl, {"epsilon": -1}, r"clip_low must be .* got -1; clip_low is made from epsilon"),
        (
            gk.LossConfig.trl,
            {"epsilon_high": math.nan},
            r"clip_high must be .* got nan; clip_high is made from epsilon_hi",
        ),
        (
            gk.LossConfig.verl,
            {"clip_ratio_c": 0.5},
            r"dual_clip must be .* above 1, got 0\.5; dual_clip is made from clip_ratio_c$",
        ),
        (gk.LossConfig.trl, {"delta": -2}, r"delta must be .* above 0, got -2$"),
        (
            gk.CorrectionConfig.trl,
            {"vllm_importance_sampling_clip_max": -1},
            r"weight_max must .* is made from vllm_imp",
        ),
    ],
)
def test_errors_of_fields_name_those_of_the_peer(
    constructor: Callable[..., object], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(constructor.__qualname__)}: {message}"):
        constructor(**settings)


@pytest.mark.parametrize("constructor", [*_CONSTRUCTORS, *_OF_CORRECTIONS], ids=lambda made: made.__qualname__)
def test_errors_of_any_value_name_the_config(constructor: Callable[..., object]) -> None:
    defaults = _CONSTRUCTORS.get(constructor) or _OF_CORRECTIONS[constructor]
    refused = 0
    for field, default in defaults.items():
        groups = [{name: value} for name in default for value in VALUES] if isinstance(default, dict) else []
        for value in (*VALUES, *groups):
            try:
                constructor(**{field: value})
            except (TypeError, ValueError) as error:
                refused += 1
                assert re.match(r"(Loss|Correction)Config", str(error)), (field, value, error)
    assert refused > len(defaults)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("vanilla", r"; verl's is LossConfig\.verl\(loss_mode='vanilla'\)"),
        ("ppo", r"; PPO's policy term is LossConfig\('clip'\)"),
        ("clip", r"; the policy term is LossConfig\('clip'\)"),
        ("DAPO", r" \(did you mean 'dapo'\?\)"),
        (
            "rloo",
            r"; it names advantages; its loss is LossConfig\(loss='reinforce', aggregation='seq-mean-token-sum'\)",
        ),
        ("GMPO", r"; GMPO is LossConfig\.verl\(loss_mode='geo_mean'\)"),
    ],
)
def test_names_that_another_constructor_takes(name: str, way_out: str) -> None:
    with pytest.raises(ValueError, match=rf"^policy_loss: config must be one of .*, got '{name}'.*{way_out}$"):
        gk.LossConfig.of(name)


def test_clip_ratio_that_verl_would_not_read() -> None:
    with pytest.raises(ValueError, match=r"clip_ratio must be given with clip_ratio_low=None, .* got 0.3 alone"):
        gk.LossConfig.verl(clip_ratio=0.3)
    config = gk.LossConfig.verl(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None)
    assert (config.clip_low, config.clip_high) == (0.3, 0.3)
    assert gk.LossConfig.verl(clip_ratio=0.2) == gk.LossConfig.verl()


def test_keywords_and_losses_of_peers() -> None:
    with pytest.raises(TypeError, match=r", got 'beta'; TRL's is LossConfig\.trl\(beta=\.\.\.\)$"):
        gk.LossConfig(beta=0.04)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r", got 'clip_ratio'; verl's is LossConfig\.verl\(clip_ratio=\.\.\.\)$"):
        gk.LossConfig(clip_ratio=0.2)  # type: ignore[call-arg]
    with pytest.raises(
        ValueError, match=r"loss must be .*, got 'gspo'; verl's is LossConfig\.verl\(loss_mode='gspo'\)$"
    ):
        gk.LossConfig("gspo")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"loss_agg": "token-mean"}, ("field", "'loss_agg'", "loss_agg_mode")),
        ({"loss_mode": "ppo"}, ("loss_mode", "'ppo'", "vanilla")),
        ({"loss_agg_mode": "mean"}, ("loss_agg_mode", "'mean'", "token-mean")),
        ({"use_kl_loss": True, "kl_loss_type": "full"}, ("kl_loss_type", "'full'", "low_var_kl", "k3+")),
        ({"use_kl_loss": True, "kl_loss_type": None}, ("kl_loss_type", "None", "low_var_kl")),
        ({"loss_mode": "bypass_mode"}, ("loss_mode", "'bypass_mode'", "not implemented")),
        ({"loss_mode": "clip_cov"}, ("loss_mode", "'clip_cov'", "gk.variants.clip_cov_weights")),
        ({"loss_mode": "kl_cov"}, ("loss_mode", "'kl_cov'", "gk.variants.kl_cov_penalty")),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, ("loss_scale_factor", "None")),
    ],
    ids=str,
)
def test_fields_of_verl(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"^LossConfig\.verl: ") as caught:
        gk.LossConfig.verl(**settings)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_config_is_frozen_and_compares_by_its_settings() -> None:
    config = gk.LossConfig(loss="sapo", sapo_temperatures=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kl = "k1"  # type: ignore[misc]
    assert config == gk.LossConfig(loss="sapo", sapo_temperatures=(1.0, 2.0)) != gk.LossConfig(loss="sapo")
    assert hash(config) == hash(gk.LossConfig(loss="sapo", sapo_temperatures=(1.0, 2.0)))
    clamped = gk.LossConfig(log_ratio_clamp=[-20, 20])  # type: ignore[arg-type]
    assert hash(clamped) == hash(gk.LossConfig(log_ratio_clamp=(-20.0, 20.0)))
    assert dataclasses.replace(config, kl="k1").sapo_temperatures == (1.0, 2.0)


def test_metric_that_does_not_exist() -> None:
    metrics = gk.policy_loss(torch.ones(3, 4), None, torch.ones(3)).metrics
    with pytest.raises(KeyError, match=r"PolicyLossMetrics: 'kls' is none of .*kl_sum"):
        metrics["kls"]
    assert re.search("policy_loss", repr(metrics))


# No field is ignored: the base settings and the changed field

TRL_CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "loss_type": ({}, "grpo"),
    "importance_sampling_level": ({}, "sequence"),
    "epsilon": ({}, 0.3),
    "epsilon_high": ({}, 0.3),
    "delta": ({}, 1.5),
    "beta": ({}, 0.1),
    "use_bias_correction_kl": ({"beta": 0.1}, False),
    "sapo_temperature_pos": ({"loss_type": "sapo"}, 2.0),
    "sapo_temperature_neg": ({"loss_type": "sapo"}, 2.0),
    **{f"vespo_{name}": ({"loss_type": "vespo"}, 1.5) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
    "max_completion_length": ({"loss_type": "dr_grpo"}, 64),
    "entropy_coef": ({}, 0.1),
}
VERL_CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "loss_mode": ({}, "gspo"),
    "loss_agg_mode": ({}, "token-sum"),
    "loss_scale_factor": ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5}, 6),
    "clip_ratio": ({"clip_ratio_low": None}, 0.3),
    "clip_ratio_low": ({}, 0.3),
    "clip_ratio_high": ({}, 0.3),
    "clip_ratio_c": ({}, 4.0),
    "tau_pos": ({"loss_mode": "sapo"}, 2.0),
    "tau_neg": ({"loss_mode": "sapo"}, 2.0),
    "dro_beta": ({"loss_mode": "dro", "dro_beta": 0.1}, 0.2),
    "entropy_coeff": ({}, 0.1),
    "use_kl_loss": ({}, True),
    "kl_loss_coef": ({"use_kl_loss": True}, 0.1),
    "kl_loss_type": ({"use_kl_loss": True}, "k1"),
}


def test_no_field_of_trl_is_ignored() -> None:
    refused = {"use_adaptive_entropy", "use_vllm", "top_entropy_quantile", "off_policy_mask_threshold"}
    beside_vllm = {name for name in TRL_DEFAULTS if name.startswith("vllm_")}
    assert set(TRL_CHANGES) | refused | beside_vllm == set(TRL_DEFAULTS)
    for field, (base, value) in TRL_CHANGES.items():
        assert gk.LossConfig.trl(**base) != gk.LossConfig.trl(**base | {field: value}), field


def test_no_field_of_verl_is_ignored() -> None:
    assert set(VERL_CHANGES) == set(VERL_DEFAULTS)
    for field, (base, value) in VERL_CHANGES.items():
        assert gk.LossConfig.verl(**base) != gk.LossConfig.verl(**base | {field: value}), field
