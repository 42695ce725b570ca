"""Bundled rewards but the judge, the reward model and gsm8k, their components, and functions that return nonsense."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
pytest.importorskip("vaderSentiment")

from grpo_trainer import messages, rewards
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import LoadedReward, RewardError, load_reward, reply, score
from grpo_trainer.rewards.base import WeightedReward
from grpo_trainer.rollout import Rollout

POST = "Just tried the new ramen place downtown, so good!"
GOOD = "The broth there is amazing, I could eat ramen every week. What did you order?"
REPLIES = ["", "ok", "Agreed!", GOOD, "My cat sleeps all day.", POST, "THIS IS SO TRUE OMG", "so " * 100, "x" * 501]
REPEATED = [POST.upper() + "!!!", f"You said: {POST} Right?", "the new ramen place downtown"]
GOLD = "yes, i have two dogs."
TURNS = [GOLD, "R: Yes, I have two dogs", "", "i do not know", "dogs", "two " * 40]
DIALOGUE = ("f1", "rouge_1", "rouge_2", "rouge_l", "bleu", "length")
OPTIONS: dict[str, dict[str, Any]] = {
    "reply": {"embedder": "hashed"},
    "diversity": {"embedder": "hashed"},
    "judge": {"base_url": "http://127.0.0.1/v1", "model": "m", "rubric": "r"},
}
CASES: dict[str, tuple[list[str], dict[str, list[Any]]]] = {
    "reply": (REPLIES + REPEATED, {"post": [POST] * 12}),
    "dialogue": (TURNS, {"answer": [GOLD] * 6}),
}


def made(name: str, **options: Any) -> Any:
    return load_reward(Reward(name=name, options={**OPTIONS.get(name, {}), **options})).function


def parts_of(name: str) -> dict[str, list[float]]:
    """Components of the texts of a case."""
    texts, columns = CASES[name]
    return cast(WeightedReward, made(name)).graded(["p"] * len(texts), texts, **columns)[1]


def rollout(texts: list[str], **columns: Any) -> Rollout:
    """Responses to one prompt, as `score` reads them."""
    items = [{"prompt": "p", "prompt_ids": [1]} | columns]
    truncated = torch.zeros(len(texts), dtype=torch.bool)
    return cast(Rollout, SimpleNamespace(items=items, group_size=len(texts), texts=texts, truncated=truncated))


# Bundled rewards


@pytest.mark.parametrize("name", CASES)
def test_totals_are_weighted_sums_and_do_not_depend_on_other_responses(name: str) -> None:
    function, (texts, columns), parts = made(name), CASES[name], parts_of(name)
    assert all(0 <= value <= 1 for values in parts.values() for value in values)
    weights = function.weight_of()
    together = function(prompts=["p"] * len(texts), completions=texts, **columns)
    assert together == pytest.approx([sum(w * parts[n][i] for n, w in weights.items()) for i in range(len(texts))])
    order = random.Random(0).sample(range(len(texts)), len(texts))
    alone = [function(["p"], [texts[i]], **{key: column[:1] for key, column in columns.items()})[0] for i in order]
    assert alone == [together[i] for i in order]


def test_without_a_reference_there_is_no_reward() -> None:
    function = made("dialogue")
    values, parts = function.graded(["p"] * 3, ["18"] * 3, answer=["so it is", None, " "])
    assert values[0] is not None and values[1:] == [None, None]
    assert all(math.isnan(value) for column in parts.values() for value in column[1:])
    with pytest.raises(ValueError, match=r"reward dialogue: needs the column 'answers' or 'answer', .*\['gold'\]"):
        function(prompts=["p"], completions=["18"], gold=["18"])
    some = [{"prompt": "p", "answer": "4"}, {"prompt": "p", "answer": None}, {"prompt": "p"}]
    rule = "key: 'exact' gets None for 'answer', which 2 of 3 lines lack"
    assert list(rewards.gaps(load_reward(Reward()), "key", some)) == [rule] and not list(
        rewards.gaps(MINE, "key", some)
    )
    narrow = MINE._replace(function=lambda prompts, completions: [])
    with pytest.raises(ValueError, match=r"^key: .*mine' must take prompts, completions and the columns of the data"):
        rewards.require_columns(narrow, "key", some)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact", {"correct": 1}, r"rewards.options.correct: no such key; there is none$"),
        ("gsm8k", {"corect": 1.0}, r"rewards.options.corect: no such key; the nearest is 'correct'"),
        ("reply", {"weights": {"relevanse": 1.0}}, r"options.weights.relevanse: .* nearest is 'relevance'"),
        ("reply", {"weights": {"relevance": 0.5}}, r"options.weights: must sum to 1, got Weights\(relevance=0.5"),
        ("dialogue", {"weights": {"bleu": 1.0}}, r"options.weights: must sum to 1"),
        ("diversity", {"embeder": "hashed"}, r"embeder: .* nearest is 'embedder'"),
        ("dialog", {}, r"rewards.name: must be one of exact, .* got 'dialog'; the nearest is 'dialogue'"),
        ("math:floor", {"a": 1}, r"rewards.options: requires a bundled reward, got {'a': 1} with 'math:floor'"),
        ("collections:Counter", {}, r"rewards.name: must name a function, .* name an instance of the class"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made(name, **options)


def test_names_for_trl_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(rewards.BUNDLED) - {"reward_model"}:  # needs a model: test_reward_model.py
        assert made(name).__name__ == name
    monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: None)
    missing = (("dialogue", "rouge-score", "text"), ("reply", "vaderSentiment", "text"), ("judge", "openai", "judge"))
    for name, package, extra in missing:
        with pytest.raises(ValueError, match=rf'{name}: needs the package {package}, .* "grpo-kernels\[{extra}\]"'):
            made(name)


def test_an_exact_answer_may_be_a_number() -> None:
    answers = ["4", " 4", 4, 4.0, "5", 5, 4.5, None]
    values = made("exact")(prompts=["p"] * 8, completions=["2 + 2 = 4. #### 4"] * 8, answer=answers)
    assert values == [1, 1, 1, 1, 0, 0, 0, None]


# Replies


def test_the_good_reply_is_worth_most_and_repeating_the_post_is_not_relevant() -> None:
    texts, columns = CASES["reply"]
    values, relevance = made("reply")(["p"] * len(texts), texts, **columns), parts_of("reply")["relevance"]
    assert max(range(len(texts)), key=lambda i: values[i]) == texts.index(GOOD)
    assert values[0] == values[1] == 0 and values[8] == pytest.approx(0.3)
    assert relevance[3] > relevance[4] and [relevance[5], *relevance[9:]] == [0] * 4
    # the post is the prompt where there is no column
    assert made("reply")([POST, "other"], [GOOD, GOOD], post=[None, POST]) == [values[3]] * 2
    assert made("reply")([POST], [GOOD]) == [values[3]]


FILM = "I watched all of that film"


def test_parts_of_a_reply() -> None:
    def characters(count: int) -> str:
        return "." * count + "x" * (100 - count)

    lengths = {19: 0.3, 20: 0.6, 50: 1, 151: 0.8, 281: 0.4}
    assert {count: reply.length("x" * count) for count in lengths} == lengths
    shares = {0: 0.7, 1: 0.85, 2: 1.0, 8: 1.0, 15: 0.8, 30: 0.3, 100: 0.3}
    assert {count: reply.punctuation(characters(count)) for count in shares} == pytest.approx(shares)
    engagement = {
        FILM: 0.7,
        f"{FILM}... ???": 0.7,  # an ellipsis is no sentence, and a question mark no question
        "Did you watch all of that?": 0.9,
        f"{FILM}. Did you?": 1.0,
        "So true": 0.35,
        f"{FILM} in Rome, true": 0.7,
        "thistles grow, yesterday": 0.7,  # generic words are whole words
        FILM.upper(): 0.42,
    }
    assert {text: reply.engagement(text) for text in engagement} == pytest.approx(engagement)
    diversity = {"one two, Three": 1.0, "so so so so So": 0.7 / 5, "!!!": 0.0}
    assert {text: reply.lexical_diversity(text) for text in diversity} == pytest.approx(diversity)
    assert reply.sentiment("I love this!", "I love this!") == 1
    assert reply.sentiment("I love this!", "That is horrible, I hate it.") < 0.3


# Dialogue


def test_dialogue_components() -> None:
    parts = parts_of("dialogue")
    assert [parts[name][0] for name in ("f1", "rouge_l", "bleu")] == pytest.approx([1, 1, 1])
    # every n-gram matches, and one of the reference's seven tokens, the full stop, is missing
    assert [parts[name][1] for name in ("f1", "rouge_l", "bleu")] == pytest.approx([1, 1, math.exp(1 - 7 / 6)])
    assert [parts[name][2] for name in ("f1", "rouge_l", "bleu")] == [0, 0, 0]
    assert parts["f1"][4] == pytest.approx(2 * 1 / (1 + 5)) and parts["length"] == [1.0] * len(TURNS)
    # i, have, two; i have, have two; a crossed order leaves one word in common
    rouge = {
        ("i have two cats", "yes i have two dogs"): (6 / 9, 4 / 7, 6 / 9),
        ("two have i", "i have two"): (1, 0, 1 / 3),
    }
    for (text, answer), expected in rouge.items():
        got = made("dialogue").parts("", text, {"answer": answer})
        assert [got[name] for name in ("rouge_1", "rouge_2", "rouge_l")] == pytest.approx(expected)
    only = made("dialogue", weights={"f1": 0.0, "rouge_l": 0.0, "bleu": 0.0, "rouge_2": 1.0})
    assert only(["p"], ["i have two cats"], answer=["yes i have two dogs"]) == [pytest.approx(4 / 7)]


def test_the_nearest_of_several_references_counts_and_other_lengths_are_penalized() -> None:
    function = made("dialogue")
    assert function(["p"], ["i have cats"], answers=[["no.", "i have cats"]], answer=["never"]) == pytest.approx([1.0])
    with pytest.raises(TypeError, match="'answers' must hold lists of texts, and 'answer' a text, got 'cats'"):
        function(["p"], ["cats"], answers=["cats"])
    texts, columns = ["one " * words for words in (4, 2, 6)], {"answer": ["one two three four"] * 3}
    totals, parts = made("dialogue", length_penalty=1.0).graded(["p"] * 3, texts, **columns)
    factors = [1, math.exp(-2 * 0.5), math.exp(-0.5)]  # twice as fast below the reference
    assert parts["length"] == pytest.approx(factors)
    plain = function(["p"] * 3, texts, **columns)
    assert totals == pytest.approx([value * factor for value, factor in zip(plain, factors, strict=True)]) and all(
        plain
    )


# Diversity


def test_diversity_is_within_neighbours_of_one_prompt() -> None:
    function = made("diversity")
    values = function([*"aaabcc"], ["same", "same", "quite another", "same", "same", "same"])
    assert values[0] == values[1] == pytest.approx(values[2] / 2)
    assert values[2:] == pytest.approx([1, 0, 0, 0], abs=0.2) and max(values[3:]) < 1e-12
    # empty responses are not compared, and unfinished ones not scored
    texts = ["the sky is blue", "the sky is blue", "the sky is blue!"]
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


async def late(**_: Any) -> list[float]:
    return [1.0, 1.0]


MINE = LoadedReward(Reward(name=f"{__name__}:mine"), Reporting())


def test_means_are_those_of_the_scored_responses_and_rewards_are_told_apart() -> None:
    scores = score([MINE], rollout(["a", "bb", "?", "c"]))
    assert scores.values[:, 0].tolist() == [1, 2, 1, 1] and scores.components[0]["short"][:2].tolist() == [1.0, 0.0]
    assert rewards.component_means([MINE], scores.components) == {"short": pytest.approx(2 / 3)}
    several, name = [MINE, load_reward(Reward(name="dialogue")), MINE], MINE.settings.name
    means = rewards.component_means(several, score(several, rollout(["a"], answer="a")).components)
    assert set(means) == {f"{name}.0.short", f"{name}.2.short", *(f"dialogue.{part}" for part in DIALOGUE)}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Reporting(1.0), r"mine': component 'short' must have one value for each of 2 responses, got 1"),
        (lambda **_: ["bad"] * 2, r"mine' must be a finite number or None, got 'bad' for response 0"),
        (lambda **_: [1.0], r"mine' must return one value for each of 2 responses, got 1"),
        (lambda **_: 1.0, r"mine' must return one value for each of 2 responses, got float"),
        (late, r"mine' must be a function that is not async"),
        (lambda **_: time.sleep(9), r"mine' raised TimeoutError: no result within 0.05 s \(rewards.timeout\)"),
    ],
)
def test_nonsense_names_the_reward_or_is_skipped(function: Any, message: str) -> None:
    name = MINE.settings.name
    with pytest.raises(RewardError, match=message):
        score([LoadedReward(Reward(name=name, timeout=0.05), function)], rollout(["a", "b"]))
    if "finite" in message or "Timeout" in message:
        skipping = LoadedReward(Reward(name=name, timeout=0.05, on_error="skip"), function)
        values, skipped, _ = score([skipping], rollout(["a", "b"]))
        assert skipped == 2 and bool(values.isnan().all())
