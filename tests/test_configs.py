"""Misspelt keywords of configs are errors that name the nearest one."""

from __future__ import annotations

import copy
import pickle

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


def test_what_is_derived_is_no_keyword() -> None:
    with pytest.raises(TypeError, match=r"^LossConfig: keywords must be one of .*, got 'modes'"):
        gk.LossConfig(modes=[1])  # type: ignore[call-arg]


def test_configs_are_copied_and_pickled() -> None:
    config = gk.LossConfig(clip_low=0.1)
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
