"""LossConfig, its constructors for peers and its metrics: no setting is silently ignored.

Faults that this is for: an error of a constructor that names something else; a field of a peer that changes nothing; a
config that is equal to another one, or cannot be a key; metrics of several calls that are merged otherwise.
"""

from __future__ import annotations

import dataclasses
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
from tests.ops.policy_loss.cases import F64, METRICS, NAN, NORM
from tests.ops.policy_loss.errors import METRICS as MEASURED

VALUES: tuple[object, ...] = (-1, 0, 3.5, NAN, "x", None, True, [], {}, object())
CONSTRUCTORS: dict[Callable[..., object], dict[str, Any]] = {
    gk.LossConfig.trl: TRL_DEFAULTS,
    gk.LossConfig.verl: VERL_DEFAULTS,
    gk.CorrectionConfig.trl: correction_of_trl.TRL_DEFAULTS,
    gk.CorrectionConfig.verl: correction_of_verl.VERL_DEFAULTS,
}
# settings beside which a field is read, and values of which one differs from each default
BASES: dict[Callable[..., object], list[dict[str, Any]]] = {
    gk.LossConfig.trl: [{}, {"beta": 0.1}, *({"loss_type": kind} for kind in ("sapo", "vespo", "dr_grpo"))],
    gk.LossConfig.verl: [
        *({}, {"loss_mode": "sapo"}, {"loss_mode": "dro", "dro_beta": 0.1}),
        *({"use_kl_loss": True}, {"clip_ratio_low": None}, {"loss_agg_mode": NORM, "loss_scale_factor": 5}),
    ],
}
OTHERS = (0.3, 1.5, 64, False, True, "grpo", "sequence", "gspo", "token-sum", "k1")


def made(constructor: Callable[..., object], fields: dict[str, Any]) -> object:
    """The config, or None if the fields are refused, by an error that names the config."""
    try:
        return constructor(**fields)
    except (TypeError, ValueError) as error:
        assert re.match(r"(Loss|Correction)Config", str(error)), (fields, error)
        return None


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda made: made.__qualname__)
def test_errors_of_any_value_name_the_config(constructor: Callable[..., object]) -> None:
    defaults = CONSTRUCTORS[constructor]
    results = [made(constructor, {field: value}) for field in defaults for value in VALUES]
    assert results.count(None) > len(defaults)


@pytest.mark.parametrize("constructor", BASES, ids=lambda made: made.__qualname__)
def test_no_field_of_a_peer_is_ignored(constructor: Callable[..., object]) -> None:
    refused = {"use_adaptive_entropy", "use_vllm", "top_entropy_quantile", "off_policy_mask_threshold"}
    for field in CONSTRUCTORS[constructor].keys() - refused:
        pairs = [
            (made(constructor, base), made(constructor, base | {field: value}))
            for base in BASES[constructor]
            for value in OTHERS
        ]
        is_read = any(changed not in (None, config) for config, changed in pairs)
        assert is_read != field.startswith("vllm_"), field  # those are read beside use_vllm


def test_configs_that_are_the_same() -> None:
    for name in TRL_LOSS_TYPES:
        assert gk.LossConfig.of(name) == gk.LossConfig.trl(loss_type=name)
    both = gk.LossConfig.verl(clip_ratio=0.3, clip_ratio_low=None, clip_ratio_high=None)
    assert (both.clip_low, both.clip_high) == (0.3, 0.3)
    assert gk.LossConfig.verl(clip_ratio=0.2) == gk.LossConfig.verl()
    # lists, as JSON has them
    config = gk.LossConfig(loss="sapo", sapo_temperatures=[1, 2], log_ratio_clamp=[-20, 20])  # type: ignore[arg-type]
    tuples = gk.LossConfig(loss="sapo", sapo_temperatures=(1.0, 2.0), log_ratio_clamp=(-20.0, 20.0))
    assert config == tuples != gk.LossConfig(loss="sapo") and hash(config) == hash(tuples)
    assert dataclasses.replace(config, kl="k1").sapo_temperatures == (1.0, 2.0)


def test_metrics_by_name() -> None:
    with pytest.raises(KeyError, match=r"PolicyLossMetrics: 'kls' is none of .*kl_sum"):
        MEASURED["kls"]
    assert "policy_loss" in repr(MEASURED)
    both = MEASURED.merged([MEASURED, MEASURED]).tensor
    torch.testing.assert_close(both, MEASURED.merged(torch.stack([MEASURED.tensor] * 2)).tensor, equal_nan=True)


def test_a_row_without_tokens_has_no_extreme_of_another() -> None:
    """A micro-batch without tokens has no extremes and leaves those of the others unchanged."""
    rows = torch.arange(2.0 * len(METRICS), dtype=F64).view(2, -1)
    extremes = [i for i, name in enumerate(METRICS) if name.endswith(("_min", "_max"))]
    rows[1] = 0
    rows[1, extremes] = NAN
    assert extremes and gk.PolicyLossMetrics.merge(rows).equal(rows[0])
    assert gk.PolicyLossMetrics.merge(rows[1:])[extremes].isnan().all()


def test_advantages_may_require_grad_where_none_is_recorded() -> None:
    with torch.no_grad():
        assert gk.policy_loss(-torch.ones(3, 4), None, torch.ones(3, requires_grad=True)).loss.isfinite()
