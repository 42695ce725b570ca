"""Healthy ranges of the metrics of similarity groups."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer.metrics import similarity_warnings
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines


@pytest.mark.parametrize(
    ("single", "mean", "silhouette", "kinds"),
    [
        (9, 3.0, 0.21, set()),
        (9, 5.0, 0.9, set()),
        (10, 4.0, 0.3, {"one group"}),
        (0, 2.99, 0.3, {"few groups"}),
        (0, 5.01, 0.3, {"many groups"}),
        (0, 4.0, 0.2, {"low silhouette"}),
        (100, 1.0, 0.0, {"one group", "few groups", "low silhouette"}),
    ],
)
def test_ranges(single: int, mean: float, silhouette: float, kinds: set[str]) -> None:
    names = {
        "n_prompts_split_into_1_groups": float(single),
        "n_prompts_split_into_4_groups": float(100 - single),
        "avg_groups_per_prompt": mean,
        "avg_silhouette_score": silhouette,
    }
    assert set(similarity_warnings({f"similarity_groups/{name}": value for name, value in names.items()})) == kinds


def test_without_groups_there_is_no_warning() -> None:
    assert similarity_warnings({"rewards/mean": 1.0}) == {}


def test_each_kind_is_logged_once(tmp_path: Path) -> None:
    algorithm = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}"
    train(small.recipe(tmp_path / "run", algorithm, "evaluation.every=0"))
    steps = [line for line in lines(tmp_path / "run") if line["phase"] == "rl"]
    outside = [set(similarity_warnings(step)) for step in steps]
    events = [event for event in lines(tmp_path / "run", "events") if "healthy" in event["event"]]
    assert sum(map(len, outside)) > len(events) > 0, "a kind is outside in several steps"
    assert sorted(event["of"] for event in events) == sorted(set().union(*outside))
