"""Correctness by the rewards of demonstrations: the threshold, and demonstrations that give none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_trainer import recipes
from grpo_trainer.calibration import calibrate
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.recipe import Data, Reward
from grpo_trainer.rewards import LoadedReward, load_reward
from grpo_trainer.splits import load_splits
from grpo_trainer.train import train

from tests.trainer import small


def letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "?" else float(len(text)) for text in completions]


LETTERS = LoadedReward(Reward(name=f"{__name__}:letters", weight=2.0), letters)


def threshold(quantile: float, *texts: str | None, reward: LoadedReward = LETTERS) -> float:
    items = [{"prompt": "p", "answer": "3"} | ({} if text is None else {"demonstration": text}) for text in texts]
    return calibrate(quantile, items, Data(), [reward])


def test_the_threshold_is_the_quantile_of_the_demonstrations_rewards() -> None:
    texts = ["a" * n for n in (5, 1, 3, 2, 4)]  # rewards 2, 4, 6, 8, 10
    assert [threshold(q, *texts) for q in (0.0, 0.25, 0.5, 0.6, 1.0)] == [2.0, 4.0, 6.0, 6.8, 10.0]
    assert threshold(0.0, *texts, "?", None) == 2.0  # without a reward, and without a demonstration
    # between 2 and 4 at 1/3: 2 + 2/3, rounded down
    assert threshold(1 / 3, "a", "aa") == 2.666666
    for missing in ([], [None]):
        with pytest.raises(ValueError, match=r"^evaluation.solved_quantile: needs the column 'demonstration'.* got \d"):
            threshold(0.5, *missing)
    with pytest.raises(ValueError, match=r"^evaluation.solved_quantile: needs demonstrations with a reward, got none"):
        threshold(0.5, "?")
    with pytest.raises(ValueError, match=r"must be null with the reward 'gsm8k', which reports correctness"):
        threshold(0.5, "#### 3", reward=load_reward(Reward(name="gsm8k")))


def test_the_threshold_decides_in_every_evaluation_also_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the digits of "0 0" to "8 80": one and one, from "1 10" on three, each worth 0.1
    content = [{"prompt": f"p {i}", "demonstration": f"{i} {10 * i}"} for i in range(9)]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in content))
    files = f"data={{task: null, train: {file}, validation: {file}, test: {file}}}"
    evaluation = "evaluation={every: 0, solved_quantile: 0.5, samples: 4, pass_k: [1, 3], embedder: hashed}"
    recipe = small.recipe(tmp_path / "run", files, evaluation, "sft.steps=2", "rl.steps=2")
    small.stop_before(monkeypatch, recipe, "rl", 1)
    train(recipe, resume=True)
    evaluations = small.lines(recipe.folder, "evaluations")
    for evaluation in evaluations:
        assert evaluation["solved"] == 0.3
        for line in evaluation["prompts"]:
            assert line["correct"] == float(line["reward"] >= 0.3)
            assert line["right"] == [float(reward >= 0.3) for reward in line["rewards"]]
    assert {value for line in evaluations[-1]["prompts"] for value in line["right"]} == {0.0, 1.0}
    result = evaluate_model(recipe, str(small.newest(recipe.folder)), "test")
    assert result.solved == 0.3 and result.metrics["pass@1"] == evaluations[-1]["metrics"]["pass@1"]


def test_bundled_replies_can_be_correct_and_wrong() -> None:
    """The good kind of replies reaches the threshold of reply.yaml, the generic kind does not."""
    pytest.importorskip("vaderSentiment")
    loaded = recipes.load("reply", ["data.options={demonstrations: 8, train: 8}"])
    quantile, reward = loaded.evaluation.solved_quantile, load_reward(loaded.evaluation.rewards[0])
    assert quantile is not None and loaded.evaluation.pass_k == [1, 5, 10] and loaded.evaluation.samples == 10
    splits = load_splits(loaded.data, 0)
    computed = calibrate(quantile, splits.validation, loaded.data, [reward])
    texts = [str(item["demonstration"]) for item in splits.test]
    scores = reward.function(["p"] * len(texts), texts, post=[item["post"] for item in splits.test])
    right = [text for text, value in zip(texts, scores, strict=True) if value is not None and value >= computed]
    assert 0.1 < len(right) / len(texts) < 0.4 and min(map(len, right)) >= 15
