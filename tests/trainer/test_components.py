"""Components of rewards in the metrics of training and evaluation, and in the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")

from grpo_trainer.recipe import Recipe, Reward
from grpo_trainer.recipes import validated
from grpo_trainer.report import write_report
from grpo_trainer.rewards import RewardError, component_means, dialogue, score
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_rewards_edges import rollout

DIALOGUE = ("f1", "rouge_1", "rouge_2", "rouge_l", "bleu", "length")


def test_rouge_is_that_of_its_definition() -> None:
    parts = dialogue.make().parts("", "i have two cats", {"answer": "yes i have two dogs"})
    assert parts is not None
    assert parts["rouge_1"] == pytest.approx(2 * 3 / (4 + 5))  # i, have, two
    assert parts["rouge_2"] == pytest.approx(2 * 2 / (3 + 4))  # i have, have two
    crossed = dialogue.make().parts("", "two have i", {"answer": "i have two"})
    assert crossed is not None and crossed["rouge_1"] == 1 and crossed["rouge_2"] == 0
    assert crossed["rouge_l"] == pytest.approx(1 / 3)
    only = dialogue.make(weights={"f1": 0.0, "rouge_l": 0.0, "bleu": 0.0, "rouge_2": 1.0})
    assert only(["p"], ["i have two cats"], answer=["yes i have two dogs"]) == [pytest.approx(4 / 7)]


class Reporting:
    """A reward of the user's that reports components."""

    def __call__(self, prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def components(self, prompts: list[str], completions: list[str], **_: Any) -> dict[str, list[Any]]:
        return {"short": [None if text == "?" else float(len(text) < 2) for text in completions]}


class Uneven(Reporting):
    def components(self, prompts: list[str], completions: list[str], **_: Any) -> dict[str, list[Any]]:
        return {"short": [1.0]}


reporting, uneven = Reporting(), Uneven()
MINE = Reward(name=f"{__name__}:reporting")


def test_means_are_those_of_the_scored_responses() -> None:
    scores = score([MINE], [reporting], rollout(["a", "bb", "?", "c"]))
    assert scores.values[:, 0].tolist() == [1, 2, 1, 1]
    assert torch.equal(scores.components[0]["short"][:2], torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert component_means([MINE], scores.components) == {"short": pytest.approx(2 / 3)}
    assert math.isnan(component_means([MINE], score([MINE], [reporting], rollout(["?"])).components)["short"])


def test_components_of_several_rewards_are_told_apart() -> None:
    talk = Reward(name="dialogue")
    settings, functions = [MINE, talk, MINE], [reporting, dialogue.make(), reporting]
    means = component_means(settings, score(settings, functions, rollout(["a"], answer="a")).components)
    assert set(means) == {f"{MINE.name}.0.short", f"{MINE.name}.2.short", *(f"dialogue.{name}" for name in DIALOGUE)}


def test_a_wrong_number_of_components_is_an_error_that_names_them() -> None:
    with pytest.raises(RewardError, match=r"uneven': component 'short' must have one value for each of 2 .* got 1"):
        score([Reward(name=f"{__name__}:uneven")], [uneven], rollout(["a", "b"]))


def test_a_reward_that_fails_and_may_has_no_components() -> None:
    talk = Reward(name="dialogue", on_error="skip")
    scores = score([talk], [dialogue.make()], rollout(["a"], answers=["not", 1]))
    assert scores.skipped == 1 and scores.components == [{}]


def test_components_reach_metrics_evaluations_and_report(tmp_path: Path) -> None:
    settings = small.values(tmp_path / "run")
    sizes = {"demonstrations": 32, "train": 12, "validation": 4, "test": 4}
    settings["data"] = {"task": "dialogue", "options": sizes}
    settings["phases"][1]["rl"] |= {"rewards": [{"name": "dialogue"}], "steps": 2}
    train(validated(Recipe, settings))
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train" and e["phase"] == "rl"]
    assert len(steps) == 2
    for line in steps:
        parts = {name: line[f"rewards/components/{name}"] for name in DIALOGUE}
        assert parts["length"] == 1.0  # no penalty
        mean = (parts["f1"] + parts["rouge_l"] + parts["bleu"]) / 3
        assert line["rewards/mean"] == pytest.approx(mean, abs=1e-6)
    for split in ("validation", "test"):
        evaluated = [line for line in lines if f"eval/{split}_reward" in line]
        assert evaluated
        for line in evaluated:
            parts = {name: line[f"eval/{split}_components/{name}"] for name in DIALOGUE}
            mean = (parts["f1"] + parts["rouge_l"] + parts["bleu"]) / 3
            assert line[f"eval/{split}_reward"] == pytest.approx(mean, abs=1e-6)
    text = write_report(folder).read_text()
    assert "Components of the reward" in text and "Components, validation" in text
    assert all(f"components/{name}" in text for name in DIALOGUE)
