"""Data of the bundled tasks."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("transformers")

from grpo_trainer import tasks
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import load_reward
from grpo_trainer.rewards.numbers import final_number
from grpo_trainer.tasks.base import Item, Mixture, Splits
from grpo_trainer.tasks.dialogue import EVASIONS, TOPICS
from grpo_trainer.tasks.word_problems import EXAMPLES, INSTRUCTION

NAMES = ("gsm8k", "word_problems", "dialogue", "reply")
TINY = ("gsm8k", "dialogue", "reply")  # for a model that is created, and learns from mixed demonstrations first
SIZES = {"demonstrations": 601, "train": 300, "validation": 40, "test": 80}
EQUATION = re.compile(r"([\d,]+) ([-+*/]) ([\d,]+) = ([\d,]+)\.")
OPTIONS = {"reply": {"embedder": "hashed"}}


def small(name: str, seed: int = 0, **options: Any) -> Splits:
    return tasks.make(name, seed, {**SIZES, **options})


def what_it_is_about(name: str, item: Item) -> object:
    """Content that must not be in two splits: numbers, persona with question, or post."""
    if name in ("gsm8k", "word_problems"):
        return tuple(EQUATION.findall(item["answer"]))
    if name == "reply":
        return item["post"]
    facts, question = re.fullmatch(r"persona: (.*) context: .*Q: (.*) R:", item["prompt"]).groups()  # type: ignore[union-attr]
    return frozenset(facts.split(".")), question


def equations(texts: list[str]) -> Iterator[tuple[int, str, int, int]]:
    for text in texts:
        for left, operator, right, result in EQUATION.findall(text):
            yield int(left.replace(",", "")), operator, int(right.replace(",", "")), int(result.replace(",", ""))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_makes_the_same_data(name: str) -> None:
    assert small(name) == small(name)
    assert small(name).train != small(name, seed=1).train


@pytest.mark.parametrize("name", NAMES)
def test_sizes_and_columns(name: str) -> None:
    splits = small(name)
    assert [len(split) for split in (splits.sft, splits.train, splits.validation, splits.test)] == [601, 300, 40, 80]
    assert splits.rewards == ("gsm8k" if name == "word_problems" else name,)
    assert all("demonstration" in item for item in splits.sft)
    assert not any("demonstration" in item for item in splits.train)
    # those of reply calibrate correctness
    assert all(("demonstration" in item) == (name == "reply") for item in splits.validation + splits.test)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_content_is_in_no_other_split(name: str) -> None:
    splits = small(name)
    about = [[what_it_is_about(name, item) for item in split] for split in (splits.validation, splits.test)]
    trained = {what_it_is_about(name, item) for item in splits.sft + splits.train}
    assert len(set(about[0] + about[1])) == len(about[0]) + len(about[1])
    assert trained.isdisjoint(about[0] + about[1])


@pytest.mark.parametrize("name", TINY)
def test_full_size_is_made_fast_for_a_small_model(name: str) -> None:
    start = time.process_time()
    splits = tasks.make(name, 0, {})
    assert time.process_time() - start < 3
    texts = [item["prompt"] + item["demonstration"] for item in splits.sft]
    assert len({word for text in texts for word in re.findall(r"[a-z]+", text.lower())}) < 130
    assert max(len(text) for text in texts) < 260


@pytest.mark.parametrize("name", TINY)
def test_the_reward_prefers_a_part_of_the_demonstrations(name: str) -> None:
    """Some but not all demonstrations are correct."""
    sft = small(name).sft
    function = load_reward(Reward(name=name, options=OPTIONS.get(name, {})))
    columns = {key: [item[key] for item in sft] for key in sft[0]}
    values = [value or 0.0 for value in function([item["prompt"] for item in sft], columns["demonstration"], **columns)]
    best = statistics.quantiles(values, n=10)[-1]
    assert best - statistics.mean(values) > 0.15
    assert 0.1 < sum(value > best - 0.1 for value in values) / len(values) < 0.7


def test_the_arithmetic_of_word_problems_is_true() -> None:
    splits = small("gsm8k")
    all_equations = list(
        equations([item["demonstration"] for item in splits.sft] + [item["answer"] for item in splits.test])
    )
    assert len(all_equations) > 800
    for left, operator, right, result in all_equations:
        values = {"+": left + right, "-": left - right, "*": left * right, "/": Fraction(left, right)}
        assert values[operator] == result


def test_answers_of_word_problems_are_right() -> None:
    items = small("gsm8k").sft
    for item in items:
        numbers = [int(number) for number in re.findall(r"\d+", item["prompt"])]
        steps = list(equations([item["answer"]]))
        # every number of the problem is used once, in order, and each step continues from the result before
        assert [steps[0][0], *(step[2] for step in steps)] == numbers
        assert all(before[3] == after[0] for before, after in itertools.pairwise(steps))
        assert final_number(item["answer"]) == steps[-1][3]
    assert any("#### " in item["answer"] and "," in item["answer"].split("#### ")[1] for item in items)
    assert {len(EQUATION.findall(item["answer"])) for item in items} == {2, 3}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("products", [0.0, 1.0])
def test_answers_for_a_pretrained_model_are_right(steps: int, products: float) -> None:
    splits = small(
        "word_problems",
        steps=steps,
        products=products,
        largest=50,
        examples=0,
        train=20,
        test=5,
        validation=5,
        demonstrations=5,
    )
    for item in splits.train + splits.test:
        numbers = [int(number) for number in re.findall(r"\d+", item["prompt"])]
        calculations = list(equations([item["answer"]]))
        assert [calculations[0][0], *(step[2] for step in calculations)] == numbers and len(calculations) == steps
        assert all(before[3] == after[0] for before, after in itertools.pairwise(calculations))
        for left, operator, right, result in calculations:
            assert result == {"+": left + right, "-": left - right, "*": left * right}[operator] and 0 <= result <= 50
        assert (calculations[0][1] == "*") == bool(products) and item["answer"].endswith(f"#### {calculations[-1][3]}")


def test_solved_examples_are_turns_of_the_chat() -> None:
    (item, *_) = small("word_problems", steps=2).test
    assert [turn["role"] for turn in item["prompt"]] == ["user", "assistant"] * 2 + ["user"]
    assert item["prompt"][1]["content"] == "9 - 4 = 5. 5 + 7 = 12. #### 12"
    answers = {example.solution() for example in EXAMPLES}
    splits = small("word_problems", largest=14, train=1000, validation=10, test=10)
    assert answers.isdisjoint(item["answer"] for item in splits.train + splits.validation + splits.test)
    assert (
        small("word_problems", steps=2, examples=0).test[0]["prompt"]
        == f"{item['prompt'][-1]['content']}\n{INSTRUCTION}"
    )


@pytest.mark.parametrize(
    ("options", "right", "marked"),
    [
        ({"skipped": 0.0, "terse": 0.0, "unmarked": 0.0}, 1, 1),
        ({"skipped": 1.0, "terse": 0.0, "unmarked": 0.0}, 0, 1),
        ({"skipped": 0.0, "terse": 1.0, "unmarked": 0.0}, 1, 1),
        ({"skipped": 0.0, "terse": 0.0, "unmarked": 1.0}, 1, 0),
    ],
)
def test_kinds_of_demonstrations(options: dict[str, float], right: int, marked: int) -> None:
    items = small("gsm8k", **options).sft
    assert {final_number(item["demonstration"]) == final_number(item["answer"]) for item in items} == {bool(right)}
    assert {"####" in item["demonstration"] for item in items} == {bool(marked)}
    if options["terse"]:
        assert not any(EQUATION.search(item["demonstration"]) for item in items)


def test_three_steps() -> None:
    for share, lengths in ((0.0, {2}), (1.0, {3})):
        items = small("gsm8k", three_steps=share).train
        assert {len(EQUATION.findall(item["answer"])) for item in items} == lengths


def test_a_dialogue_is_answered_from_the_persona() -> None:
    for item in small("dialogue").test:
        facts = item["prompt"].split(" context:")[0]
        question = re.findall(r"Q: ([^?]*\?) R:$", item["prompt"])[0].split("R:")[-1].split("Q: ")[-1]
        topic = next(topic for topic in TOPICS if topic.question == question)
        stated = [value for value in topic.values if topic.fact.format(value) in facts]
        assert [topic.reply.format(value) for value in stated] == [item["answer"]]


def test_mistaken_and_evasive_replies() -> None:
    assert all(item["demonstration"] == item["answer"] for item in small("dialogue", mistaken=0.0, evasive=0.0).sft)
    assert all(item["demonstration"] in EVASIONS for item in small("dialogue", mistaken=0.0, evasive=1.0).sft)
    for item in small("dialogue", mistaken=1.0, evasive=0.0).sft:
        assert item["demonstration"] != item["answer"] and item["demonstration"] not in EVASIONS


def test_posts_have_several_replies_and_better_ones_more_likes() -> None:
    items = tasks.make("reply", 0, {}).sft
    first = items[:4]
    assert len({item["prompt"] for item in first}) == 1 and len({item["demonstration"] for item in items[:40]}) > 10
    assert len({item["prompt"] for item in small("reply", replies=1).sft}) > len(
        {i["prompt"] for i in small("reply").sft}
    )
    share = {True: [], False: []}  # type: dict[bool, list[float]]
    for item in items:
        assert item["likes"] >= 0 and item["post_likes"] > 0
        share[len(item["demonstration"]) > 30].append(item["likes"] / item["post_likes"])
    assert statistics.mean(share[True]) > 1.5 * statistics.mean(share[False])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8k", {"skiped": 0.1}, "data.options.skiped: .* nearest is 'skipped'"),
        ("gsm8k", {"skipped": 0.9, "terse": 0.2}, "data.options: shares must be 0 or more and sum to at most 1"),
        ("dialogue", {"evasive": -0.1}, "data.options: shares must be 0 or more"),
        ("word_problems", {"steps": 4}, "data.options.steps: must be 1, 2 or 3, got 4"),
        ("word_problems", {"largest": 9}, "data.options.largest: must be at least 10, got 9"),
        ("word_problems", {"examples": 3}, "data.options.examples: must be at most 2 with 1 steps, got 3"),
        ("word_problems", {"products": 1.5}, r"data.options.products: must be in \[0, 1\], got 1.5"),
        ("word_problems", {"largest": 10}, "data.options: there are too few different problems for 100"),
        ("reply", {"replies": 0}, "data.options.replies: must be positive, got 0"),
        ("reply", {"test": 5000}, "data.options: there are too few different problems for 5000 lines"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.make(name, 0, options)


def test_a_mixture_may_leave_nothing_for_the_rest() -> None:
    assert Mixture("rest", a=0.1, b=0.2, c=0.7).shares[-1] == pytest.approx(0, abs=1e-12)
