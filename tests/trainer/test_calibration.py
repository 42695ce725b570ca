"""Correctness by the rewards of demonstrations: the threshold, where it is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer import calibration
from grpo_trainer.calibration import calibrate
from grpo_trainer.checkpoint import CheckpointError
from grpo_trainer.recipe import Data, Recipe, Reward
from grpo_trainer.report import write_report
from grpo_trainer.setup import set_up
from grpo_trainer.train import train, evaluate_model

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after


def letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "?" else float(len(text)) for text in completions]


def threshold(quantile: float, texts: list[str]) -> float:
    items = [{"prompt": "p", "demonstration": text} for text in texts]
    return calibrate(quantile, items, Data(), [Reward(weight=2.0)], [letters]).threshold


def test_the_threshold_is_the_quantile_of_the_demonstrations_rewards() -> None:
    texts = ["a" * n for n in (5, 1, 3, 2, 4)]  # rewards 2, 4, 6, 8, 10
    assert [threshold(q, texts) for q in (0.0, 0.25, 0.5, 0.6, 1.0)] == [2.0, 4.0, 6.0, 6.8, 10.0]
    assert threshold(1.0, [*texts, "?"]) == 10.0  # without a reward
    # between 2 and 4 at 1/3: 2 + 2/3, rounded down
    assert threshold(1 / 3, ["a", "aa"]) == 2.666666


def test_lines_without_a_demonstration_are_left_out() -> None:
    items = [{"prompt": "p", "demonstration": "aaa"}, {"prompt": "q"}, {"prompt": "r", "demonstration": None}]
    computed = calibrate(0.5, items, Data(), [Reward()], [letters])
    assert (computed.threshold, computed.demonstrations) == (3.0, 1)


def correct_reward() -> Any:
    from grpo_trainer.rewards import load_reward

    return load_reward(Reward(name="gsm8k"))


@pytest.mark.parametrize(
    ("items", "reward", "message"),
    [
        ([{"prompt": "p"}], letters, r"^evaluation.solved_quantile: needs the column 'demonstration'.* got 1 lines"),
        ([], letters, r"^evaluation.solved_quantile: needs the column 'demonstration'"),
        ([{"prompt": "p", "demonstration": "?"}], letters, r"^evaluation.solved_quantile: needs demonstrations with"),
        ([{"prompt": "p", "demonstration": "#### 3", "answer": "3"}], None, r"must be null with the reward 'gsm8k'"),
    ],
)
def test_what_cannot_be_calibrated_is_named(items: list[Any], reward: Any, message: str) -> None:
    name = "exact" if reward else "gsm8k"
    with pytest.raises(ValueError, match=message):
        calibrate(0.5, items, Data(), [Reward(name=name)], [reward or correct_reward()])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("evaluation.solved_quantile=1.5", r"^evaluation.solved_quantile: must be in \[0, 1\], got 1.5"),
        (
            "evaluation={solved: 0.3, solved_quantile: 0.5}",
            r"^evaluation.solved: cannot be combined with solved_quantile; set one of them, got 0.3",
        ),
        ("evaluation.max_completion_length=0", r"^evaluation.max_completion_length: must be positive, got 0"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small.recipe(tmp_path, change)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    content = [{"prompt": f"p {i}", "demonstration": f"{i} {10 * i}"} for i in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    file = tmp_path / "data.jsonl"
    return small.recipe(
        tmp_path / "run",
        f"data={{task: null, train: {file}, validation: {file}, test: {file}}}",
        "evaluation={every: 0, solved_quantile: 0.5, samples: 4, pass_k: [1, 3], embedder: hashed}",
        "sft.steps=2",
        "rl.steps=2",
    )


def evaluation(folder: Path, name: str) -> Any:
    return json.loads((folder / "evaluations" / f"{name}.json").read_text())


def test_the_threshold_decides_in_every_evaluation_and_is_reported(recipe: Recipe) -> None:
    train(recipe)
    folder = recipe.folder
    stored = json.loads((folder / "solved.json").read_text())
    # the digits of "0 0" to "8 80": one and one, from "1 10" on three, each worth 0.1
    assert stored == {"demonstrations": 9, "quantile": 0.5, "threshold": 0.3}
    for name in ("validation-0-000000", "test-rl-4"):
        content = evaluation(folder, name)
        assert content["solved"] == 0.3
        for line in content["prompts"]:
            assert line["correct"] == float(line["reward"] >= 0.3)
            assert line["right"] == [float(reward >= 0.3) for reward in line["rewards"]]
    values = {value for line in evaluation(folder, "test-rl-4")["prompts"] for value in line["right"]}
    assert values == {0.0, 1.0}  # else nothing was decided
    text = write_report(folder).read_text()
    assert (
        "counts as correct from a reward of 0.300000 on: the quantile 0.50 of the rewards of 9 demonstrations" in text
    )
    model = str(sorted((folder / "checkpoints").iterdir())[-1] / "model")
    result = evaluate_model(recipe, model, "test")
    assert result.solved == 0.3
    assert result.metrics["pass@1"] == evaluation(folder, "test-rl-4")["metrics"]["pass@1"]


def test_a_resumed_run_keeps_its_threshold(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_after(monkeypatch, recipe, 1, 1)
    path = recipe.folder / calibration.FILE
    path.write_text(path.read_text().replace("0.3", "0.2"))

    def refuse(*_: Any) -> Any:
        raise AssertionError("computed again")

    monkeypatch.setattr(calibration, "calibrate", refuse)
    train(recipe, resume=True)
    assert evaluation(recipe.folder, "test-rl-4")["solved"] == 0.2
    assert lines(recipe.folder, "events")[-1]["event"] == "checkpoint"


def test_another_quantile_and_a_damaged_file_are_refused(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    stopped_after(monkeypatch, recipe, 1, 1)
    other = recipe.model_copy(update=dict(evaluation=recipe.evaluation.model_copy(update=dict(solved_quantile=0.6))
    with pytest.raises(CheckpointError, match=r"solved_quantile: must be 0.5 as in the original run.* got 0.6"):
        train(other, resume=True)
    (recipe.folder / calibration.FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"solved.json: cannot be read .*; delete it"):
        train(recipe, resume=True)


def test_bundled_replies_can_be_correct_and_wrong() -> None:
    """The good kind of replies reaches the threshold of reply.yaml, the generic kind does not."""
    pytest.importorskip("vaderSentiment")
    from grpo_trainer import recipe as recipes
    from grpo_trainer.rewards import load_reward
    from grpo_trainer.tasks import make

    loaded = recipes.load("reply")
    rewards, quantile = loaded.evaluation.rewards, loaded.evaluation.solved_quantile
    assert quantile is not None and loaded.evaluation.pass_k == [1, 5, 10] and loaded.evaluation.samples == 10
    functions = [load_reward(reward) for reward in rewards]
    splits = make("reply", 0, {"demonstrations": 8, "train": 8})
    computed = calibrate(quantile, splits.validation, loaded.data, rewards, functions)
    assert computed.demonstrations == 128
    texts = [str(item["demonstration"]) for item in splits.test]
    scores = functions[0](
        prompts=[item["prompt"] for item in splits.test], completions=texts, post=[item["post"] for item in splits.test]
    )
    is_right = torch.tensor([score >= computed.threshold for score in scores if score is not None])
    assert 0.1 < float(is_right.double().mean()) < 0.4
    assert not any(right for right, text in zip(is_right.tolist(), texts, strict=True) if len(text) < 15)
