"""Rules of all configs: their keywords and fields are checked, and they are frozen, copied and stored as JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

import grpo_kernels as gk


@pytest.mark.parametrize(
    ("config", "misspelt", "near"),
    [
        (gk.LossConfig, "clip_lo", "clip_low"),
        (gk.AdvantageConfig, "shrinkige", "shrinkage"),
        (gk.SegmentConfig, "gama", "gamma"),
        (gk.SimilarityConfig, "linkages", "linkage"),
        (gk.TokenAdvantageConfig, "lamb", "lam"),
        (gk.CorrectionConfig, "weight", "weights"),
    ],
)
def test_misspelt_keywords(config: type, misspelt: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"^{config.__name__}: keywords must be one of .*{near}") as error:
        config(**{misspelt: 0.5})
    assert str(error.value).endswith(f"got {misspelt!r} (did you mean {near!r}?)")


CONFIGS = (
    gk.AdvantageConfig(clip=1.0),
    gk.CorrectionConfig(weights="token", weight_min=0.5, weight_max=2.0, m2_threshold=0.1),
    gk.LossConfig(),
    gk.SegmentConfig(),
    gk.SimilarityConfig(k_max=3, different="one"),
    gk.TokenAdvantageConfig(),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_fields_of_another_kind_are_refused(config: Any) -> None:
    """A name that does not exist lists those that do; numbers are finite, and neither texts nor bools."""
    name = type(config).__name__
    for field, value in dataclasses.asdict(config).items():
        wrong: list[tuple[type[Exception], str, Any]] = []
        if isinstance(value, bool):
            wrong = [(TypeError, "must be a bool, got int 1", 1), (TypeError, "must be a bool, got str", "yes")]
        elif isinstance(value, str):
            wrong = [(ValueError, f"must be one of .*{value}.*, got {x!r}", x) for x in ("no such", "", 1, True)]
        elif isinstance(value, int) and field != "ddof":
            wrong = [(TypeError, f"must be an int, got {type(x).__name__} {x!r}", x) for x in ("3", 2.0, True)]
        elif isinstance(value, float):
            wrong = [(TypeError, "must be a number, got ", x) for x in ("1e-6", True, [1.0])]
            wrong += [(ValueError, f"must be .*, got {x!r}", x) for x in (float("nan"), float("inf"), -float("inf"))]
        for error, rule, given in wrong:
            with pytest.raises(error, match=rf"^{name}: {field} {rule}"):
                type(config)(**{field: given})


NESTED = (
    gk.AdvantageConfig("rloo", reward_weights=(1, 2)),
    gk.CorrectionConfig(weights="token", rejections=(("seq_max_k1", None, 3.0),)),
    gk.LossConfig.trl(loss_type="vespo"),
)


@pytest.mark.parametrize("config", [*CONFIGS, *NESTED], ids=lambda config: type(config).__name__)
def test_configs_are_frozen_dicts_json_and_pickles(config: Any) -> None:
    fields = json.loads(json.dumps(dataclasses.asdict(config)))
    for again in (type(config)(**fields), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert again == config and vars(again) == vars(config) and hash(again) == hash(config)
    for name in fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, None)


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: gk.AdvantageConfig(epsilon=1e-4), "in an AdvantageConfig it is eps"),  # type: ignore[call-arg]
        (lambda: gk.AdvantageConfig(scale_rewards="none"), "AdvantageConfig('trl-group'), 'trl-batch' and 'trl-none'"),  # type: ignore[call-arg]
        (lambda: gk.LossConfig(kl_beta=0.1), "it is kl_coef"),  # type: ignore[call-arg]
        (lambda: gk.LossConfig(loss="clip_cov"), "it composes: see gk.variants"),
        (lambda: gk.LossConfig(loss="gvpo"), "it is gk.variants.gvpo_loss"),
        (lambda: gk.LossConfig.verl(loss_mode="kl_cov"), "and add gk.variants.kl_cov_penalty(...)"),
        (lambda: gk.LossConfig.trl(top_entropy_quantile=0.2), "pass policy_mask=gk.variants.high_entropy_mask(...)"),
        (lambda: gk.LossConfig.trl(temperature=0.7), "it is an argument of the ops that take logits or hidden states"),
        (lambda: gk.LossConfig.verl(adv_estimator="grpo"), "AdvantageConfig('verl-grpo') and so on"),
        (
            lambda: gk.CorrectionConfig.trl(vllm_importance_sampling_cap=2.0),
            "calls it vllm_importance_sampling_clip_max",
        ),
    ],
)
def test_keywords_that_are_elsewhere(make: Any, meant: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make()
    assert str(error.value).endswith(meant)
