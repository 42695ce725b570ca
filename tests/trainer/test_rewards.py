"""Bundled rewards but the judge: the numbers they read, their parts, and the threshold that demonstrations set.

Texts try to look like a part that they have not. Faults they are there for: a part that another response, the order or
a missing reference changes; a wrong answer that is worth a right one; a function's nonsense that is taken as a reward.
"""

from __future__ import annotations

import functools
import math
import random
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sacrebleu")
pytest.importorskip("rouge_score")
pytest.importorskip("vaderSentiment")

from grpo_trainer import recipes, rewards
from grpo_trainer.calibration import calibrate
from grpo_trainer.evaluate import _grade
from grpo_trainer.pretrained import load_lm
from grpo_trainer.recipe import Data, Model, Reward
from grpo_trainer.rewards import LoadedReward, RewardError, load_reward, reward_model, score
from grpo_trainer.rewards.numbers import final_number, parse_number
from grpo_trainer.rollout import Rollout
from grpo_trainer.splits import load_splits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tests.harness import assert_close_to_rounding

# Numbers

# texts that are one number, as people and models write it, by the number
PARSED: list[tuple[int | str | None, list[str]]] = [
    (18, ["18", " 18 ", "018", "18.", "18.0", "$18", "\\$18", "18 dollars.", "18km", "18 \\text{ dollars}", "**$18**"]),
    (-18, ["-18", "\u221218", "-$18", "$-18", "(-18)", "$\\boxed{-18}$"]),
    (42, ["(42)", "[42]", "\\boxed{\\text{42}}", "\\(42\\)", "\\[42\\]", "$x = 42$"]),
    (50, ["50%", "50 %", "50\\%", "50 \u20ac", "50 km/h", "50 m\u00b2"]),
    ("1/2", [".5", "1/2", "\\frac{1}{2}", "\\boxed{\\frac{1}{2}}", "0.50"]),
    ("-3/4", ["-.75", "-3/4", "-3 / 4", "-\\dfrac{3}{4}"]),
    (1234, ["1,234", "1,234.0", "= 1,234", "1{,}234", "1,\\!234", "4,936/4"]),
    (None, ["", "none", "-", "1/0", "9-10", "1,2345", "1 and 2", "she has 18", "H2O", "1e3", "9" * 401]),
]
# whole responses, by their answers
FINAL: list[tuple[int | str | None, list[str]]] = [
    (18, ["####18", "#### x = 18", "The answer is 3 apples * 6 = 18 apples.", "\\boxed{18", "- 18 apples"]),
    (18, ["Final Answer: 18, from 9 * 2", "ANSWER IS 18, not 20", "Final Answer:\n\n18", "**Answer**: $18"]),
    (42, ["#### **42**", "####\n42", "\\boxed{\\boxed{42}} of 7", "#### 1,000 #### 42"]),
    (50, ["#### 50%", "#### 50 dollars", "#### 100/2"]),
    # the last mark of the strongest kind
    (7, ["#### 5\nNo, that is wrong.\n#### 7", "#### 7\nI had 3 apples.", "#### Step 1: add\nThe answer is 7"]),
    (6, ["\\boxed{5} but then \\boxed{6}", "The answer is 5. Wait, the answer is 6.", "#### none\n5 or 6"]),
    (5, ["#### 5\nThe answer is 6", "\\boxed{5}. The answer is 6", "\\boxed{x = 2 + 3 = 5}", "H2O, 5 m2"]),
    (12, ["#### 1. Add\n#### 2. Halve\nSo we have 12", "#### 16 - 4 = 12"]),
    (3, ["The answer is clear. We have 3", "5 - 3", "5 -3", "a gain of $5-$3", "(1,2,3)"]),
    (-7, ["The answer to the question is -7.", "left: -7"]),
    (10, ["It takes 9-10", "It takes 9\u201310 days"]),
    (2345, ["1,2345", "#### $2,345.00"]),
    (None, ["no number", "", "5, or rather 1/0"]),
]
WRITTEN = ("{}", "{}.", "${}", "{}%", "{} apples", "\\boxed{{{}}}", "**{}**", "[{}]", "$\\boxed{{\\text{{{} cm}}}}$")
MARKS = ("#### {}", "So.\n#### {}\n", "The answer is {}", "**Final answer:** {}", "3 of 4 are {}", "\\boxed{{{}}} of 7")
LONG = ["\\boxed{", "\\frac{", "\\text{", "answer is ", "answer: \n", "#### ", "5 ab.", "1", "a1", "1,", "1,111", "("]
LONG += ["1 ", "-", "1/", "1 + ", "= 1", "1 = ", "\\", "1 + 1 "]


@pytest.mark.parametrize(("read", "table"), [(parse_number, PARSED), (final_number, FINAL)])
def test_numbers_of_texts(read: Any, table: list[tuple[int | str | None, list[str]]]) -> None:
    for expected, texts in table:
        want = None if expected is None else Fraction(expected)
        assert {text: read(text) for text in texts} == dict.fromkeys(texts, want)


@given(
    value=st.integers(-(10**12), 10**12) | st.decimals(-999, 999, places=2) | st.fractions(-99, 99, max_denominator=99),
    written=st.sampled_from(WRITTEN),
    mark=st.sampled_from(MARKS),
    other=st.text(max_size=60) | st.text("0123/.,-$ #=", max_size=30),
)
def test_reads_back_numbers_and_survives_any_text(value: Any, written: str, mark: str, other: str) -> None:
    text = written.format(value if isinstance(value, Fraction) else f"{value:,}")
    assert parse_number(text) == final_number(mark.format(text)) == Fraction(value)
    assert isinstance(parse_number(other), Fraction | None) and isinstance(final_number(other), Fraction | None)


@pytest.mark.parametrize("repeated", LONG)
def test_long_texts_take_no_longer_than_their_length_allows(repeated: str) -> None:
    text = repeated * (100_000 // len(repeated))
    start = time.process_time()
    parse_number(text), final_number(text + " 5"), part("gsm8k", "calculation", text), part("gsm8k", "numbers", text)
    # at most 1 s on an idle machine; quadratic time would take minutes
    assert time.process_time() - start < 10


# Parts

SHAPING = ("format", "answered", "length", "vocabulary", "steps", "numbers", "calculation")
ALL = {"format": 0.1, "answered": 0.1, **dict.fromkeys(SHAPING[2:], 0.15)}
SOLUTION = (
    "First, she sold half as many: 48 / 2 = 24 clips in total. Then add both months: 48 + 24 = 72. So the sum, twice "
    "counted, is the total of each month.\n#### 72"
)
POST = "Just tried the new ramen place downtown, so good!"
GOOD = "The broth there is amazing, I could eat ramen every week. What did you order?"
GOLD = "yes, i have two dogs."
FILM = "I watched all of that film"
HASHED = {"embedder": "hashed"}
OPTIONS: dict[str, dict[str, Any]] = {"gsm8k": ALL, "reply": HASHED, "diversity": HASHED}
COLUMNS: dict[str, dict[str, Any]] = {
    "exact": {"answer": 72},
    "gsm8k": {"answer": "4 * 18 = 72. #### 72"},
    "reply": {"post": POST},
    "dialogue": {"answer": GOLD},
}
# The value of a part of the responses. Of gsm8k, whatever follows the answer is no solution, and brackets are not read.
PARTS: list[tuple[str, str, float, list[str]]] = [
    ("exact", "correct", 1, ["#### 72", "#### 1 #### 72 "]),
    ("exact", "correct", 0, ["72", "#### 72.", "#### 27"]),
    ("gsm8k", "correct", 1, ["#### 72", "#### 1 #### $72."]),
    ("gsm8k", "correct", 0, ["72 is not it. #### 27", "#### 72.5"]),
    ("gsm8k", "format", 1, ["#### 72", "#### 5"]),
    ("gsm8k", "format", 0, ["72 ####", "#### 72 or 73", "The answer is 72.", ""]),
    ("gsm8k", "answered", 1, ["#### 9", "9"]),
    ("gsm8k", "answered", 0, ["it depends", "####"]),
    ("gsm8k", "length", 1, [SOLUTION, "a" * 51 + "\n#### 72"]),
    ("gsm8k", "length", 0, ["a" * 50 + "\n#### 72", "so " * 100 + "#### 72", " " * 400 + "\n#### 72", "#### 72 a" * 9]),
    ("gsm8k", "vocabulary", 1, [SOLUTION]),
    ("gsm8k", "vocabulary", 0.2, ["sum sum sum sum sum sum", "add-on sums, madden, peruse, halfway, timeshare"]),
    ("gsm8k", "vocabulary", 0.6, ["plus minus times"]),
    ("gsm8k", "steps", 1, [SOLUTION, "step 1: go. step 2: stop."]),
    ("gsm8k", "steps", 0, ["then then then", "thirst, nextdoor, authentic, stepping 1 and 2"]),
    ("gsm8k", "numbers", 1, [SOLUTION]),
    ("gsm8k", "numbers", 0, ["#### 72", "it is 72, so 72.\n#### 72", "x48 is a name\n#### 72"]),
    ("gsm8k", "calculation", 1, [SOLUTION, "2 + 3 * 4 = 14", "10 / 3 = 3.33", "3 - 5 = -2", "48/2 = <<48/2=24>>24"]),
    ("gsm8k", "calculation", 1, ["4 * $300 = $1,200. 1,200 - 200 = 1,000.", "3 + 4 = 5 + 2 = 7"]),
    ("gsm8k", "calculation", 0, ["no calculation at all. 72", "72 = 72", "1 + 1 = 3", "2 + 3 * 4 = 20", "10 / 3 = 3"]),
    ("gsm8k", "calculation", 0, ["5 / 0 = 0", "(3 + 4) * 2 = 14", "1 + 1 = 25"]),
    ("gsm8k", "calculation", 0.5, ["1 + 1 = 2, 2 + 2 = 5", "1 + 1 = 2, " * 9 + "2 + 2 = 5"]),
    *(("reply", "length", value, ["x" * n]) for n, value in {19: 0.3, 20: 0.6, 50: 1, 151: 0.8, 281: 0.4}.items()),
    ("reply", "length", 0.3, ["x" * 501]),
    *(("reply", "punctuation", value, ["." * n + "x" * (100 - n)]) for n, value in {0: 0.7, 1: 0.85, 2: 1.0}.items()),
    *(("reply", "punctuation", value, ["." * n + "x" * (100 - n)]) for n, value in {8: 1.0, 15: 0.8, 30: 0.3}.items()),
    ("reply", "engagement", 0.7, [FILM, f"{FILM}... ???", f"{FILM} in Rome, true", "thistles grow, yesterday"]),
    ("reply", "engagement", 0.9, ["Did you watch all of that?"]),
    ("reply", "engagement", 1, [f"{FILM}. Did you?"]),
    ("reply", "engagement", 0.35, ["So true"]),
    ("reply", "engagement", 0.42, [FILM.upper()]),
    ("reply", "lexical_diversity", 1, ["one two, Three"]),
    ("reply", "lexical_diversity", 0.7 / 5, ["so so so so So"]),
    ("reply", "lexical_diversity", 0, ["!!!", "ok"]),  # too short for any part
    ("reply", "relevance", 0, [POST.upper() + "!!!", f"You said: {POST} Right?", "the new ramen place downtown"]),
    *(("dialogue", name, 1, [GOLD, "R: Yes, I have two dogs"]) for name in ("f1", "rouge_l")),
    ("dialogue", "bleu", 1, [GOLD]),
    # every n-gram matches, and one of the reference's seven tokens, the full stop, is missing
    ("dialogue", "bleu", math.exp(1 - 7 / 6), ["R: Yes, I have two dogs"]),
    *(("dialogue", name, 0, [""]) for name in ("f1", "rouge_l", "bleu")),
    ("dialogue", "f1", 2 * 1 / (1 + 5), ["dogs"]),
    ("dialogue", "length", 1, [GOLD, "two " * 40]),
    # i, have, two; i have, have two; a crossed order leaves one word in common
    ("dialogue", "rouge_1", 6 / 9, ["i have two cats"]),
    ("dialogue", "rouge_2", 4 / 7, ["i have two cats"]),
    ("dialogue", "rouge_l", 2 / 8, ["two have i"]),
]


def made(name: str, **options: Any) -> Any:
    return load_reward(Reward(name=name, options={**OPTIONS.get(name, {}), **options})).function


def graded(function: Any, name: str, texts: list[str]) -> tuple[list[float], dict[str, list[float]]]:
    columns = {key: [value] * len(texts) for key, value in COLUMNS[name].items()}
    return cast(Any, function.graded(["p"] * len(texts), texts, **columns))


def part(name: str, of: str, *texts: str) -> list[float]:
    return graded(made(name), name, list(texts))[1][of]


@pytest.mark.parametrize(("name", "of", "value", "texts"), PARTS)
def test_each_part_measures_what_it_says(name: str, of: str, value: float, texts: list[str]) -> None:
    assert part(name, of, *texts) == pytest.approx([value] * len(texts), abs=1e-12)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in COLUMNS), ("gsm8k", {"numbers": 0.0})])
def test_totals_are_weighted_sums_and_do_not_depend_on_other_responses(name: str, options: dict[str, float]) -> None:
    function, texts = made(name, **options), [text for of, *_, row in PARTS if of == name for text in row]
    totals, parts = graded(function, name, texts)
    weights = function.weight_of()
    assert {"length", *weights} == {"length", *parts} and ("numbers" in parts) == (name == "gsm8k" and not options)
    assert all(0 <= value <= 1 for values in parts.values() for value in values)
    assert totals == pytest.approx([sum(w * parts[n][i] for n, w in weights.items()) for i in range(len(texts))])
    order = random.Random(0).sample(range(len(texts)), len(texts))
    assert [graded(function, name, [texts[i]])[0][0] for i in order] == [totals[i] for i in order]
    if name == "gsm8k":
        assert max(totals) == pytest.approx(sum(weights.values())) and min(totals) == 0


def test_missing_references_and_truncated_responses() -> None:
    values, parts = made("dialogue").graded(["p"] * 3, ["18"] * 3, answer=["so it is", None, " "])
    assert values[0] is not None and values[1:] == [None, None]
    assert all(math.isnan(value) for column in parts.values() for value in column[1:])
    with pytest.raises(ValueError, match=r"reward dialogue: needs the column 'answers' or 'answer', .*\['gold'\]"):
        made("dialogue")(prompts=["p"], completions=["18"], gold=["18"])
    plain, columns = load_reward(Reward(name="gsm8k")).function, {"answer": [18, 18.0, None, ""]}
    values = plain(["p"] * 4, ["#### 18"] * 4, **columns, truncated=[True, False, False, False])
    assert values == [1.0, 1.1, None, None]
    with pytest.raises(ValueError, match="'answer' must hold a number, got 'many'"):
        made("gsm8k")(["p"], ["18"], answer=["many"])
    answers = ["4", " 4", 4, 4.0, "5", 5, 4.5, None]
    values = made("exact")(prompts=["p"] * 8, completions=["2 + 2 = 4. #### 4"] * 8, answer=answers)
    assert values == [1, 1, 1, 1, 0, 0, 0, None]
    exact, some = load_reward(Reward()), [{"answer": "4"}, {"answer": None}, {"prompt": "p"}]
    rule = "key: 'exact' gets None for 'answer', which 2 of 3 lines lack"
    assert [[*rewards.gaps(exact, "key", lines)] for lines in (some, some[:1], some[1:])] == [[rule], [], []]
    with pytest.raises(ValueError, match=r"^key: the data must not have the column 'truncated'"):
        rewards.require_columns(MINE, "key", [{"prompt": "p", "truncated": 1}])


def test_form_must_be_worth_less_than_correctness_unless_asked_otherwise() -> None:
    wrong = [SOLUTION[:-2] + "27", "#### 7", "First, add both: 70 + 2 = 72. Then the sum.\n#### 71"]
    totals, parts = graded(made("gsm8k"), "gsm8k", [*wrong, "72"])
    assert parts["correct"] == [0, 0, 0, 1] and max(totals[:3]) < totals[3]
    for name in SHAPING:
        alone = {**dict.fromkeys(SHAPING, 0.0), name: 1.0}
        with pytest.raises(ValueError, match=rf"correct: must exceed {name} = 1.0, or a wrong .* dominant is false, "):
            made("gsm8k", **alone)
        assert made("gsm8k", **alone, dominant=False).weight_of()[name] == 1.0
        with pytest.raises(ValueError, match=rf"options.{name}: must be greater than or equal to 0, got -0.1"):
            made("gsm8k", **{name: -0.1})


def test_the_good_reply_is_worth_most() -> None:
    texts = ["", "ok", "Agreed!", GOOD, "My cat sleeps all day.", POST, "THIS IS SO TRUE OMG", "so " * 100]
    values, parts = graded(made("reply"), "reply", texts)
    assert values.index(max(values)) == 3 and values[0] == values[1] == 0
    assert parts["relevance"][3] > parts["relevance"][4]
    # the post is the prompt where there is no column
    assert made("reply")([POST, "other"], [GOOD, GOOD], post=[None, POST]) == [values[3]] * 2
    _, parts = made("reply").graded(["I love this!"] * 2, ["I love this!", "That is horrible, I hate it."])
    assert parts["sentiment"][0] == 1 and parts["sentiment"][1] < 0.3


def test_the_nearest_of_several_references_counts_and_other_lengths_are_penalized() -> None:
    function = made("dialogue")
    assert function(["p"], ["i have cats"], answers=[["no.", "i have cats"]], answer=["never"]) == pytest.approx([1.0])
    with pytest.raises(TypeError, match="'answers' must hold lists of texts, and 'answer' a text, got 'cats'"):
        function(["p"], ["cats"], answers=["cats"])
    texts, columns = ["one " * words for words in (4, 2, 6)], {"answer": ["one two three four"] * 3}
    totals, parts = made("dialogue", length_penalty=1.0).graded(["p"] * 3, texts, **columns)
    factors = [1, math.exp(-2 * 0.5), math.exp(-0.5)]  # twice as fast below the reference
    plain = function(["p"] * 3, texts, **columns)
    assert parts["length"] == pytest.approx(factors) and all(plain)
    assert totals == pytest.approx([value * factor for value, factor in zip(plain, factors, strict=True)])


def test_diversity_is_within_neighbours_of_one_prompt() -> None:
    function = made("diversity")
    values = function([*"aaabcc"], ["same", "same", "quite another", "same", "same", "same"])
    assert values[0] == values[1] == pytest.approx(values[2] / 2)
    assert values[2:] == pytest.approx([1, 0, 0, 0], abs=0.2) and max(values[3:]) < 1e-12
    # empty responses are not compared, and unfinished ones not scored
    texts = ["one", "<think>x</think> other words", "one"]
    with_more = function(["p"] * 6, [*texts, " ", "<think>no answer</think>", "<think>never ends"])
    assert with_more[3:] == [0.0, 0.0, None] and with_more[:3] == pytest.approx(function(["p"] * 3, texts))


# Functions of the user


def rollout(texts: list[str], **columns: Any) -> Rollout:
    """Responses to one prompt, as `score` reads them."""
    items = [{"prompt": "p", "prompt_ids": [1]} | columns]
    truncated = torch.zeros(len(texts), dtype=torch.bool)
    return cast(Rollout, SimpleNamespace(items=items, group_size=len(texts), texts=texts, truncated=truncated))


class Reporting:
    """A reward that reports components; `short` are a wrong number of values, if any."""

    def __init__(self, *short: float) -> None:
        self.short = short

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
    parts = ("f1", "rouge_1", "rouge_2", "rouge_l", "bleu", "length")
    assert set(means) == {f"{name}.0.short", f"{name}.2.short", *(f"dialogue.{part}" for part in parts)}
    for name in set(rewards.BUNDLED) - {"reward_model", "judge"}:  # the name under which TRL logs it
        assert made(name).__name__ == name


@pytest.mark.parametrize("others", [[], [LoadedReward(Reward(name=f"{__name__}:mine"), lambda **_: [1.0] * 3)]])
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_exact_decides_correctness_whatever_its_weight_and_company(others: list[LoadedReward], weight: float) -> None:
    loaded = [load_reward(Reward(name="exact", weight=weight)), *others]
    totals, correct, *_ = _grade(rollout(["#### 4", "4", ""], answer="4"), loaded, 1.0)
    assert correct == [1, 0, 0] and totals == [weight + len(others), *[float(len(others))] * 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Reporting(1.0), r"mine': component 'short' must have one value for each of 2 responses, got 1"),
        (lambda **_: {}["x"], r"mine' raised KeyError: 'x' \(test_rewards\.py, line \d+; GRPO_TRACEBACK=1 shows"),
        (lambda **_: ["bad"] * 2, r"mine' must be a finite number or None, got 'bad' for response 0"),
        (lambda **_: [0.0, math.nan], r"mine' must be a finite number or None, got nan for response 1"),
        (lambda **_: [1.0], r"mine' must return one value for each of 2 responses, got 1"),
        (lambda **_: 1.0, r"mine' must return one value for each of 2 responses, got float"),
        (lambda **_: {"a": 1, "b": 2}, r"mine' must return one value for each of 2 responses, got dict \{'a': 1"),
        (lambda **_: {1, 2}, r"mine' must return one value for each of 2 responses, got set \{1, 2\}"),
        (late, r"mine' must be a function that is not async"),
        (lambda **_: time.sleep(9), r"mine' raised TimeoutError: no result within 0.05 s \(rewards.timeout\)"),
    ],
)
def test_nonsense_names_the_reward_or_is_skipped(function: Any, message: str) -> None:
    name = MINE.settings.name
    with pytest.raises(RewardError, match=message):
        score([LoadedReward(Reward(name=name, timeout=0.05), function)], rollout(["a", "b"]))
    if "'bad'" in message or "Timeout" in message:
        skipping = LoadedReward(Reward(name=name, timeout=0.05, on_error="skip"), function)
        values, skipped, _ = score([skipping], rollout(["a", "b"]))
        assert skipped == 2 and bool(values.isnan().all())


# Thresholds of correctness


def letters(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    return [None if text == "?" else float(len(text)) for text in completions]


LETTERS = LoadedReward(Reward(name=f"{__name__}:letters", weight=2.0), letters)


def threshold(quantile: float, *texts: str | None, reward: LoadedReward = LETTERS) -> float:
    items = [{"prompt": "p", "answer": "3"} | ({} if text is None else {"demonstration": text}) for text in texts]
    return calibrate(quantile, items, Data(), [reward])


def test_the_threshold_is_the_quantile_of_the_demonstrations_rewards() -> None:
    texts = ["a" * n for n in (5, 1, 3, 2, 4)]  # rewards 2, 4, 6, 8, 10
    assert [threshold(q, *texts, "?", None) for q in (0.0, 0.25, 0.5, 0.6, 1.0)] == [2.0, 4.0, 6.0, 6.8, 10.0]
    assert threshold(1 / 3, "a", "aa") == 2.666666  # between 2 and 4 at 1/3: 2 + 2/3, rounded down
    for text, reward, message in (
        (None, LETTERS, "evaluation.solved_quantile: needs the column 'demonstration'.* got 1"),
        ("?", LETTERS, "evaluation.solved_quantile: needs demonstrations with a reward, got none"),
        *(
            ("#### 3", load_reward(Reward(name=name)), f"must be null with the reward '{name}', which reports corr")
            for name in ("exact", "gsm8k")
        ),
    ):
        with pytest.raises(ValueError, match=message):
            threshold(0.5, text, reward=reward)
    # the good kind of replies reaches the threshold of reply.yaml, the generic kind does not
    loaded = recipes.load("reply", ["data.options={demonstrations: 8, train: 8}"])
    quantile, reward = loaded.evaluation.solved_quantile, load_reward(loaded.evaluation.rewards[0])
    splits = load_splits(loaded.data, 0)
    computed = calibrate(cast(float, quantile), splits.validation, loaded.data, [reward])
    texts = [str(item["demonstration"]) for item in splits.test]
    scores = reward.function(["p"] * len(texts), texts, post=[item["post"] for item in splits.test])
    right = [text for text, value in zip(texts, scores, strict=True) if value is not None and value >= computed]
    assert 0.1 < len(right) / len(texts) < 0.4 and min(map(len, right)) >= 15


# The reward from a sequence classifier

PROMPTS = ["what is this"] * 3 + ["say more"] * 3 + ["what is this"]
RESPONSES = ["it is a cat", "a cat it is", "it", "", "a cat " * 9, "it is a cat", "it is a cat"]
PLAIN = "{prompt} : {response}"
READ = [f"{prompt} : {response}" for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
WORDS = ["<unk>", "<end>", "what", "is", "this", "say", "more", "it", "a", "cat", ":", "user", "assistant"]
TURN = "assistant : it is <end>"
CHAT = "{% for m in messages %}{{ m.role + ' : ' + m.content + ' <end> ' }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model, and classifiers with one label, with a chat template and with three labels."""
    top = tmp_path_factory.mktemp("classifiers")
    torch.manual_seed(0)
    base = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    base.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", eos_token="<end>")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, labels in (("language", 1), ("plain", 1), ("several", 3), ("chat", 1)):
        config: Any = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=40, num_labels=labels, **sizes)
        tokenizer.chat_template = CHAT if name == "chat" else None
        model: Any = (LlamaForCausalLM if name == "language" else LlamaForSequenceClassification)(config)
        if name != "language":
            torch.nn.init.normal_(model.score.weight)  # large enough that the tokens decide
        model.save_pretrained(top / name)
        tokenizer.save_pretrained(top / name)
    return top


def model_reward(path: Path, **options: Any) -> Any:
    return load_reward(Reward(name="reward_model", options={"path": str(path), **options})).function


def logits_of(path: Path, *texts: str, label: int = 0) -> list[float]:
    """Logits of texts one by one, from transformers alone."""
    model = LlamaForSequenceClassification.from_pretrained(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    return [model(**tokenizer(text, return_tensors="pt")).logits[0, label].item() for text in texts]


def test_scores_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = functools.partial(logits_of, folder / "plain", *READ)
    want = one_by_one()
    assert len({round(value, 3) for value in want}) == 6, "the texts have different scores"
    plain, sizes = model_reward(folder / "plain", template=PLAIN), list[list[int]]()
    note = lambda _, __, inputs: sizes.append([*inputs["input_ids"].shape])  # noqa: E731
    plain._model.register_forward_pre_hook(note, with_kwargs=True)
    for tokens in (16384, 8):
        monkeypatch.setattr(reward_model, "BATCH_TOKENS", tokens)
        assert_close_to_rounding(plain(PROMPTS, RESPONSES), want, one_by_one)
    # lengths: 3 + 1 + words of the response, or 2 + 1 + words; the last text repeats the first
    assert sizes[:5] == [[1, 3], [1, 5], [1, 7], [2, 8], [1, 21]] and sizes[5:] == [[1, n] for n in (3, 5, 7, 8, 8, 21)]
    assert model_reward(folder / "plain", template=PLAIN, dtype="bfloat16")._model.dtype == torch.bfloat16
    several = functools.partial(logits_of, folder / "several", *READ, label=2)
    for label in ("LABEL_2", 2):
        scores = model_reward(folder / "several", template=PLAIN, label=label)(PROMPTS, RESPONSES)
        assert_close_to_rounding(scores, several(), several)


def test_the_text_that_is_read(folder: Path) -> None:
    """The last token is the end token, which must be read although models often pad with it."""
    text = "user : what is this <end> assistant : it is a cat"
    read = functools.partial(logits_of, folder / "chat", f"{text} <end>")
    assert_close_to_rounding(model_reward(folder / "chat")(PROMPTS[:1], RESPONSES[:1]), read(), read)
    assert read() != pytest.approx(logits_of(folder / "chat", text), abs=1e-3)
    # the turns of a chat keep their roles
    chat = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    turns = f"user : user <end> assistant : assistant <end> user : user <end> {TURN}"
    read = functools.partial(logits_of, folder / "chat", turns)
    loaded = load_reward(Reward(name="reward_model", options={"path": str(folder / "chat")}))
    assert_close_to_rounding(score([loaded], rollout(["it is"], prompt=chat)).values.flatten().tolist(), read(), read)
    plain = model_reward(folder / "plain", template="{prompt} {response}")
    assert plain._tokenizer.decode(plain._ids(chat, "it")) == "user assistant user it"
    # braces are left alone
    reward = model_reward(folder / "plain", template="{x} {prompt} : {response}")
    read = reward._tokenizer.decode(reward._ids("{response} a", "{prompt} it"))
    assert read.split() == ["<unk>", "<unk>", "a", ":", "<unk>", "it"]
    for kind, options, message in (
        ("plain", {}, r"options.template: must be given for a tokenizer without a chat template"),
        ("plain", {"template": "{prompt}"}, r"options.template: must contain \{response\}, got '\{prompt\}'"),
        ("several", {"template": PLAIN}, r"options.label: must be one of \['LABEL_0', .*number, got None"),
        ("several", {"template": PLAIN, "label": 3}, r"options.label: .* got 3"),
        # its head would be drawn at random
        ("language", {"template": PLAIN}, r"must have every weight of a LlamaForSequence.* without score\.weight$"),
    ):
        with pytest.raises(ValueError, match=message):
            model_reward(folder / kind, **options)
    with pytest.raises(ValueError, match=r"reward_model: .* at most 40 tokens, .* got 103 for response 1"):
        reward(["say more"] * 2, ["it", "it " * 99])
    rule = r"every weight of a LlamaForCausalLM, got '.*' without lm_head\.weight$"
    with pytest.raises(ValueError, match=rf"^model\.path: must have {rule}"):
        load_lm(Model(path=str(folder / "plain")), "cpu")


def test_exact_compares_decimal_numbers_by_value() -> None:
    texts = ["#### 3.50", "#### 3.5", "#### 7", "#### 8"]
    assert made("exact").graded(["p"] * 4, texts, answer=[3.5, "3.50", 7.0, "7"])[0] == [1, 0, 1, 0]
    assert made("exact").graded(["p"] * 2, ["#### 0.10"] * 2, answer=[Decimal("0.1"), Decimal("0.2")])[0] == [1, 0]
    assert made("exact").graded(["p"] * 2, [f"#### {2**53 + 1}", "#### sNaN"], answer=[Decimal(2**53)] * 2)[0] == [0, 0]
    large = str(10**20 + 1)
    assert made("exact").graded(["p"] * 2, [f"#### {large}"] * 2, answer=[10**20 + 1, None])[0] == [1, None]
