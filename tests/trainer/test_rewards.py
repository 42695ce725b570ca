"""Bundled rewards but the judge and the reward model, their components, and functions that return nonsense."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
pytest.importorskip("vaderSentiment")

from grpo_trainer import messages
from grpo_trainer.recipe import Reward
from grpo_trainer.recipes import override, validated
from grpo_trainer.rewards import BUNDLED, LoadedReward, RewardError, component_means, load_reward, reply, score
from grpo_trainer.rewards.dialogue import length_factor
from grpo_trainer.rewards.weighted import WeightedReward
from grpo_trainer.rollout import Rollout
from grpo_trainer.train import train

from tests.trainer import small

POST = "Just tried the new ramen place downtown, so good!"
GOOD = "The broth there is amazing, I could eat ramen every week. What did you order?"
REPLIES = ["", "ok", "Agreed!", GOOD, "My cat sleeps all day.", POST, "THIS IS SO TRUE OMG", "so " * 100, "x" * 501]
GOLD = "yes, i have two dogs."
TURNS = [GOLD, "R: Yes, I have two dogs", "", "i do not know", "dogs", "two " * 40]
DIALOGUE = ("f1", "rouge_1", "rouge_2", "rouge_l", "bleu", "length")
OPTIONS: dict[str, dict[str, Any]] = {
    "reply": {"embedder": "hashed"},
    "diversity": {"embedder": "hashed"},
    "judge": {"base_url": "http://127.0.0.1/v1", "model": "m", "rubric": "r"},
}
CASES: dict[str, tuple[list[str], dict[str, list[Any]]]] = {
    "gsm8k": (["#### 1,000", "1000", "so 7 #### 7", "no", ""], {"answer": ["4 * 250 = 1,000. #### 1,000"] * 5}),
    "reply": (REPLIES, {"post": [POST] * len(REPLIES)}),
    "dialogue": (TURNS, {"answer": [GOLD] * len(TURNS)}),
}


def made(name: str, **options: Any) -> Any:
    return load_reward(Reward(name=name, options={**OPTIONS.get(name, {}), **options})).function


def worth(function: WeightedReward, text: str, **columns: Any) -> float:
    value = function(prompts=["p"], completions=[text], **{name: [entry] for name, entry in columns.items()})[0]
    assert value is not None
    return value


def rollout(texts: list[str], **columns: Any) -> Rollout:
    """Responses to one prompt, as `score` reads them."""
    items = [{"prompt": "p", "prompt_ids": [1]} | columns]
    truncated = torch.zeros(len(texts), dtype=torch.bool)
    return cast(Rollout, SimpleNamespace(items=items, group_size=len(texts), texts=texts, truncated=truncated))


# Bundled rewards


@pytest.mark.parametrize("name", CASES)
def test_totals_are_weighted_sums_and_do_not_depend_on_other_responses(name: str) -> None:
    function, (texts, columns) = made(name), CASES[name]
    parts = function.components(["p"] * len(texts), texts, **columns)
    assert all(0 <= value <= 1 for values in parts.values() for value in values)
    totals = [sum(weight * parts[part][i] for part, weight in function.weights.items()) for i in range(len(texts))]
    together = function(prompts=["p"] * len(texts), completions=texts, **columns)
    one_by_one = [{key: column[i] for key, column in columns.items()} for i in range(len(texts))]
    assert together == [worth(made(name), text, **row) for text, row in zip(texts, one_by_one, strict=True)]
    assert together == pytest.approx(totals)
    order = random.Random(0).sample(range(len(texts)), len(texts))
    shuffled = function(prompts=["p"] * len(texts), completions=[texts[i] for i in order], **columns)
    assert shuffled == [together[i] for i in order]


def test_every_bundled_reward_has_the_name_that_trl_logs_it_under() -> None:
    for name in set(BUNDLED) - {"reward_model"}:  # needs a model: test_reward_model.py
        assert getattr(made(name), "__name__", None) == name


@pytest.mark.parametrize("name", ["gsm8k", "dialogue"])
def test_without_a_gold_there_is_no_reward(name: str) -> None:
    function = made(name)
    golds = {"gsm8k": ["18", None, ""], "dialogue": ["so it is", None, " "]}[name]
    values = function(prompts=["p"] * 3, completions=["18"] * 3, answer=golds)
    assert values[0] is not None and values[1:] == [None, None]
    parts = function.components(["p"] * 3, ["18"] * 3, answer=golds)
    assert all(math.isnan(value) for values in parts.values() for value in values[1:])
    with pytest.raises(ValueError, match=rf"reward {name}: needs the column .*'answer'.*\['gold'\]"):
        function(prompts=["p"], completions=["18"], gold=["18"])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact", {"correct": 1}, r"rewards.options.correct: no such key; there is none$"),
        ("gsm8k", {"corect": 1.0}, r"rewards.options.corect: no such key; the nearest is 'correct'"),
        ("gsm8k", {"correct": 0.1, "format": 0.1}, r"gsm8k.format: .* less than correct = 0.1, got 0.1"),
        ("gsm8k", {"correct": math.inf}, r"options.correct: must be a finite number, got inf|correct: .* got inf"),
        ("reply", {"weights": {"relevanse": 1.0}}, r"reply.weights.relevanse: .* nearest is 'relevance'"),
        ("reply", {"weights": {"relevance": 0.5}}, r"reply.weights: must sum to 1, got 1.2"),
        ("reply", {"weights": {"relevance": 0.55, "length": -0.1}}, r"reply.weights.length: .* got -0.1"),
        ("dialogue", {"length_penalty": -1.0}, r"dialogue.length_penalty: must be 0 or more, got -1.0"),
        ("diversity", {"embeder": "hashed"}, r"embeder: .* nearest is 'embedder'"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_reward(Reward(name=name, options=options))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: None)
    for name, package in (("dialogue", "rouge-score"), ("reply", "vaderSentiment")):
        with pytest.raises(ValueError, match=rf'{name}: needs the package {package}, .* "grpo-kernels\[text\]"'):
            made(name)


@pytest.mark.parametrize(("answer", "reward"), [("4", 1), (" 4", 1), (4, 1), (4.0, 1), ("5", 0), (5, 0), (None, None)])
def test_an_exact_answer_may_be_a_number(answer: object, reward: float | None) -> None:
    assert made("exact")(prompts=["p"], completions=["2 + 2 = 4. #### 4"], answer=[answer]) == [reward]


# Replies


def test_the_good_reply_is_worth_most() -> None:
    values = made("reply")(["p"] * len(REPLIES), REPLIES, post=[POST] * len(REPLIES))
    assert max(range(len(REPLIES)), key=lambda i: values[i] or 0) == REPLIES.index(GOOD)
    assert values[0] == values[1] == 0
    assert values[-1] == pytest.approx(0.3)


def test_the_post_is_the_prompt_where_there_is_no_column() -> None:
    function = made("reply")
    assert function([POST], [GOOD]) == function(["Post: ...\nReply:"], [GOOD], post=[POST])
    assert function([POST, "other"], [GOOD, GOOD], post=[None, POST]) == function([POST] * 2, [GOOD] * 2)


def test_repeating_the_post_is_not_relevant() -> None:
    repeated = [POST, POST.upper() + "!!!", f"You said: {POST} Right?", "the new ramen place downtown"]
    texts = [GOOD, "My cat sleeps.", *repeated]
    good, other, *others = made("reply").components([POST] * len(texts), texts)["relevance"]
    assert good > other >= 0 and others == [0] * len(repeated)


FILM = "I watched all of that film"


@pytest.mark.parametrize(
    ("part", "texts", "value"),
    [
        *(
            (reply.length, ["x" * count], value)
            for count, value in ((19, 0.3), (20, 0.6), (50, 1), (151, 0.8), (281, 0.4))
        ),
        *(
            (reply.punctuation, ["." * count + "x" * (100 - count)], value)
            for count, value in {0: 0.7, 1: 0.85, 2: 1.0, 8: 1.0, 15: 0.8, 30: 0.3, 100: 0.3}.items()
        ),
        (reply.engagement, [FILM], 0.7),
        (reply.engagement, [f"{FILM}... ???"], 0.7),  # an ellipsis is no sentence, and a question mark no question
        (reply.engagement, ["Did you watch all of that?"], 0.9),
        (reply.engagement, [f"{FILM}. Did you?"], 1.0),
        (reply.engagement, ["So true"], 0.35),
        (reply.engagement, [f"{FILM} in Rome, true"], 0.7),
        (reply.engagement, ["thistles grow, yesterday"], 0.7),  # generic words are whole words
        (reply.engagement, [FILM.upper()], 0.42),
        (reply.sentiment, ["I love this!", "I love this!"], 1.0),
        (reply.lexical_diversity, ["one two, Three"], 1.0),
        (reply.lexical_diversity, ["so so so so So"], 0.7 / 5),
        (reply.lexical_diversity, ["!!!"], 0.0),
    ],
)
def test_parts_of_a_reply(part: Callable[..., float], texts: list[str], value: float) -> None:
    assert part(*texts) == pytest.approx(value)
    assert reply.sentiment("I love this!", "That is horrible, I hate it.") < 0.3


# Dialogue


def test_dialogue_components() -> None:
    parts = made("dialogue").components(["p"] * len(TURNS), TURNS, answer=[GOLD] * len(TURNS))
    assert [parts[name][0] for name in ("f1", "rouge_l", "bleu")] == pytest.approx([1, 1, 1])
    assert parts["f1"][1] == parts["rouge_l"][1] == 1
    # every n-gram matches, and one of the reference's seven tokens, the full stop, is missing
    assert parts["bleu"][1] == pytest.approx(math.exp(1 - 7 / 6))
    assert [parts[name][2] for name in ("f1", "rouge_l", "bleu")] == [0, 0, 0]
    assert parts["f1"][4] == pytest.approx(2 * 1 / (1 + 5))
    assert parts["length"] == [1.0] * len(TURNS)


def test_rouge_is_that_of_its_definition() -> None:
    parts = made("dialogue").parts("", "i have two cats", {"answer": "yes i have two dogs"})
    assert parts["rouge_1"] == pytest.approx(2 * 3 / (4 + 5))  # i, have, two
    assert parts["rouge_2"] == pytest.approx(2 * 2 / (3 + 4))  # i have, have two
    crossed = made("dialogue").parts("", "two have i", {"answer": "i have two"})
    assert [crossed[name] for name in ("rouge_1", "rouge_2", "rouge_l")] == pytest.approx([1, 0, 1 / 3])
    only = made("dialogue", weights={"f1": 0.0, "rouge_l": 0.0, "bleu": 0.0, "rouge_2": 1.0})
    assert only(["p"], ["i have two cats"], answer=["yes i have two dogs"]) == [pytest.approx(4 / 7)]


def test_the_nearest_of_several_golds_counts() -> None:
    several = made("dialogue")(["p"], ["i have cats"], answers=[["no.", "i have cats"]], answer=["never"])
    assert several == pytest.approx([1.0])
    with pytest.raises(TypeError, match="'answers' must hold lists of texts, and 'answer' a text, got 'cats'"):
        made("dialogue")(["p"], ["cats"], answers=["cats"])


def test_length_factor() -> None:
    gold = "one two three four"
    assert length_factor("five six seven eight", gold, 3.0) == 1
    assert length_factor("five six", gold, 1.0) == pytest.approx(math.exp(-2 * 0.5))
    assert length_factor("five six " * 3, gold, 1.0) == pytest.approx(math.exp(-0.5))
    long, plain = "yes, i have two dogs, dogs and dogs", made("dialogue")
    penalized = worth(made("dialogue", length_penalty=1.0), long, answer=GOLD)
    assert penalized == pytest.approx(worth(plain, long, answer=GOLD) * length_factor(long, GOLD, 1.0))


# Diversity


def test_diversity_is_within_neighbours_of_one_prompt() -> None:
    function = made("diversity")
    prompts = ["a", "a", "a", "b", "c", "c"]
    values = function(prompts, ["same", "same", "quite another", "same", "same", "same"])
    assert values[0] == values[1] == pytest.approx(values[2] / 2)
    assert values[2] == pytest.approx(1, abs=0.2)
    assert values[3:] == pytest.approx([0, 0, 0], abs=1e-12)


def test_diversity_of_empty_and_unfinished_responses() -> None:
    function, texts = made("diversity"), ["the sky is blue", "the sky is blue", "the sky is blue!"]
    with_empty = function(["p"] * 5, [*texts, "", " "])
    assert with_empty[3:] == [0.0, 0.0] and with_empty[:3] == pytest.approx(function(["p"] * 3, texts))
    values = function(["a"] * 3, ["<think>never ends", "one", "<think>x</think> other words"])
    assert values[0] is None and values[1] == values[2] != 0
    assert function(["a"], ["<think>never ends"]) == [None]


# Components and nonsense


class Reporting:
    """A reward of the user's that reports components."""

    def __init__(self, *short: float) -> None:
        self.short = short  # a wrong number of values, if any

    def __call__(self, prompts: list[Any], completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def components(self, prompts: list[str], completions: list[str], **_: Any) -> dict[str, list[Any]]:
        return {"short": [*self.short] or [None if text == "?" else float(len(text) < 2) for text in completions]}


MINE = LoadedReward(Reward(name=f"{__name__}:mine"), Reporting())


def test_means_are_those_of_the_scored_responses() -> None:
    scores = score([MINE], rollout(["a", "bb", "?", "c"]))
    assert scores.values[:, 0].tolist() == [1, 2, 1, 1]
    assert scores.components[0]["short"][:2].tolist() == [1.0, 0.0]
    assert component_means([MINE], scores.components) == {"short": pytest.approx(2 / 3)}
    assert math.isnan(component_means([MINE], score([MINE], rollout(["?"])).components)["short"])


def test_components_of_several_rewards_are_told_apart() -> None:
    rewards = [MINE, load_reward(Reward(name="dialogue")), MINE]
    means = component_means(rewards, score(rewards, rollout(["a"], answer="a")).components)
    name = MINE.settings.name
    assert set(means) == {f"{name}.0.short", f"{name}.2.short", *(f"dialogue.{part}" for part in DIALOGUE)}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Reporting(1.0), r"mine': component 'short' must have one value for each of 2 responses, got 1"),
        (lambda **_: ["bad"] * 2, r"mine' must be a finite number or None, got 'bad' for response 0"),
        (lambda **_: [1.0], r"mine' must return one value for each of 2 responses, got 1"),
        (lambda **_: 1.0, r"mine' must return one value for each of 2 responses, got float"),
    ],
)
def test_nonsense_names_the_reward(function: Any, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score([MINE._replace(function=function)], rollout(["a", "b"]))


def test_a_reward_that_may_fail_is_skipped() -> None:
    bad = LoadedReward(Reward(name=MINE.settings.name, on_error="skip"), lambda **_: ["bad"] * 2)
    values, skipped, _ = score([bad], rollout(["a", "b"]))
    assert skipped == 2 and bool(values.isnan().all())
    scores = score([load_reward(Reward(name="dialogue", on_error="skip"))], rollout(["a"], answers=["not", 1]))
    assert scores.skipped == 1 and scores.components == [{}]


def test_components_reach_metrics_and_evaluations(tmp_path: Path) -> None:
    settings = small.values(tmp_path / "run")
    sizes = {"demonstrations": 32, "train": 12, "validation": 4, "test": 4}
    settings["data"] = {"task": "dialogue", "options": sizes}
    for change in ("rl.rewards=[{name: dialogue}]", "rl.steps=2"):
        override(settings, change)
    train(validated(type(small.recipe(tmp_path)), settings))
    content = small.lines(tmp_path / "run")
    places = [("rewards/components/", "rewards/mean")]
    places += [(f"eval/{split}_components/", f"eval/{split}_reward") for split in ("validation", "test")]
    for prefix, total in places:
        reported = [line for line in content if total in line and f"{prefix}f1" in line]
        assert len(reported) >= 2
        for line in reported:
            parts = {name: line[f"{prefix}{name}"] for name in DIALOGUE}
            assert parts["length"] == 1.0  # no penalty
            assert line[total] == pytest.approx((parts["f1"] + parts["rouge_l"] + parts["bleu"]) / 3, abs=1e-6)
