"""Data of the bundled tasks.

Faults they are there for: a test problem that is trained on; an answer that is wrong; a mixture of demonstrations that
is not the one asked for.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from grpo_trainer import tasks
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import load_reward
from grpo_trainer.rewards.numbers import final_number
from grpo_trainer.tasks import Item, Splits, load_task

NAMES = tuple(tasks.SYSTEMS)
TINY = ("gsm8k", "dialogue", "reply")  # for a model that is created, and learns from mixed demonstrations first
SIZES = {"demonstrations": 601, "train": 300, "validation": 40, "test": 80}
EQUATION = re.compile(r"(-?[\d,]+) ([-+*/]) ([\d,]+) = (-?[\d,]+)\.")
REWARDS = {"gsm8k": "gsm8k", "word_problems": "gsm8k", "dialogue": "dialogue", "reply": "reply"}

PROBLEMS = [("word_problems", steps, products) for steps in (1, 2, 3) for products in (0.0, 1.0)]


def small(name: str, seed: int = 0, **options: Any) -> Splits:
    return tasks.make(name, seed, {**SIZES, **options})


def what_it_is_about(name: str, item: Item) -> object:
    """Content that must not be in two splits: numbers, persona with question, or post."""
    if name in ("arithmetic", "strategies"):
        is_gain = [verb in load_task("arithmetic").GAINS for verb in re.findall(r", (\w+) \d", item["prompt"])]
        return tuple(re.findall(r"\d+", item["prompt"])), tuple(is_gain)
    if name in ("gsm8k", "word_problems"):
        return tuple(EQUATION.findall(item["answer"]))
    if name == "reply":
        return item["post"]
    facts, question = re.fullmatch(r"persona: (.*) context: .*Q: (.*) R:", item["prompt"]).groups()  # type: ignore[union-attr]
    return frozenset(facts.split(".")), question


def equations(text: str) -> Iterator[tuple[int, str, int, int]]:
    for left, operator, right, result in EQUATION.findall(text.replace(",", "")):
        yield int(left), operator, int(right), int(result)


@pytest.mark.parametrize("name", NAMES)
def test_splits(name: str) -> None:
    splits = small(name)
    assert splits == small(name) and splits.train != small(name, seed=1).train
    assert [len(split) for split in (splits.sft, splits.train, splits.validation, splits.test)] == [601, 300, 40, 80]
    assert splits.rewards == (REWARDS.get(name, "exact"),)
    assert all("demonstration" in item for item in splits.sft)
    assert not any("demonstration" in item for item in splits.train)
    # those of reply calibrate correctness
    assert all(("demonstration" in item) == (name == "reply") for item in splits.validation + splits.test)
    held_out = [what_it_is_about(name, item) for item in splits.validation + splits.test]
    trained = {what_it_is_about(name, item) for item in splits.sft + splits.train}
    assert len(set(held_out)) == len(held_out) or name in ("arithmetic", "strategies")
    assert trained.isdisjoint(held_out)


@pytest.mark.parametrize("name", TINY)
def test_the_reward_prefers_a_part_of_the_demonstrations(name: str) -> None:
    sft = small(name).sft
    function = load_reward(Reward(name=name, options={"embedder": "hashed"} if name == "reply" else {})).function
    columns = {key: [item[key] for item in sft] for key in sft[0]}
    values = [value or 0.0 for value in function([item["prompt"] for item in sft], columns["demonstration"], **columns)]
    best = statistics.quantiles(values, n=10)[-1]
    assert best - statistics.mean(values) > 0.15
    assert 0.1 < sum(value > best - 0.1 for value in values) / len(values) < 0.7


@pytest.mark.parametrize(("name", "steps", "products"), [("gsm8k", 2, 0.0), ("gsm8k", 3, 0.0), *PROBLEMS])
def test_answers_are_right(name: str, steps: int, products: float) -> None:
    """Each number of the problem is used once, in order, and each step continues from the result before."""
    of_problems = {"steps": steps, "products": products, "largest": 50, "examples": 0}
    options: dict[str, Any] = {"three_steps": steps - 2.0} if name == "gsm8k" else of_problems
    splits = small(name, **options, train=20, demonstrations=20, validation=5, test=5)
    for item in splits.sft + splits.test:
        numbers = [int(number) for number in re.findall(r"\d+", item["prompt"])]
        calculations = list(equations(item["answer"]))
        assert len(calculations) == steps and [calculations[0][0], *(step[2] for step in calculations)] == numbers
        for left, operator, right, result in calculations:
            assert left * right == result if operator == "*" else right * result == left if operator == "/" else True
            assert result == {"+": left + right, "-": left - right}.get(operator, result) and result >= 0
        assert all(before[3] == after[0] for before, after in itertools.pairwise(calculations))
        assert final_number(item["answer"]) == calculations[-1][3]
        assert name == "gsm8k" or max(max(a, b, c) for a, _, b, c in calculations) <= 50
        assert name == "gsm8k" or (calculations[0][1] == "*") == bool(products)


def test_worked_solutions_are_right_unless_verbs_are_misread() -> None:
    strategy = load_task("strategies").strategy
    for name, options in (("arithmetic", {"misread": 0.0}), ("strategies", {})):
        for item in small(name, **options).sft:
            for left, operator, right, result in equations(item["demonstration"]):
                assert result == {"+": left + right, "-": left - right, "*": left * right}[operator]
            assert item["demonstration"].endswith(f"#### {item['answer']}")
            assert name == "arithmetic" or strategy(item["demonstration"]) is not None
    reverse = small("strategies", forward=0.0, reverse=1.0, boxes=0.0).sft
    last_change = [int(re.findall(r"\d+", item["prompt"])[-1]) for item in reverse]
    first_step = [next(equations(item["demonstration"]))[2] for item in reverse]
    # the others would leave the numbers that a problem may have
    assert sum(a == b for a, b in zip(last_change, first_step, strict=True)) > 0.9 * len(reverse)
    misread = [item["demonstration"].split()[-1] != item["answer"] for item in small("arithmetic", misread=0.8).sft]
    assert 0.4 < sum(misread) / len(misread) < 0.8  # some problems have no verb that is misread


def test_solved_examples_are_turns_of_the_chat() -> None:
    (item, *_) = small("word_problems", steps=2).test
    task = load_task("word_problems")
    assert [turn["role"] for turn in item["prompt"]] == ["user", "assistant"] * 2 + ["user"]
    assert item["prompt"][1]["content"] == "9 - 4 = 5. 5 + 7 = 12. #### 12"
    answers = {example.solution() for example in task.EXAMPLES}
    splits = small("word_problems", largest=14, train=1000, validation=10, test=10)
    assert answers.isdisjoint(item["answer"] for item in splits.train + splits.validation + splits.test)
    without = small("word_problems", steps=2, examples=0).test[0]["prompt"]
    assert without == f"{item['prompt'][-1]['content']}\n{task.INSTRUCTION}"


def test_kinds_of_demonstrations() -> None:
    for options, is_right, is_marked, is_worked in (
        ({"skipped": 0.0, "terse": 0.0, "unmarked": 0.0}, True, True, True),
        ({"skipped": 1.0, "terse": 0.0, "unmarked": 0.0}, False, True, True),
        ({"skipped": 0.0, "terse": 1.0, "unmarked": 0.0}, True, True, False),
        ({"skipped": 0.0, "terse": 0.0, "unmarked": 1.0}, True, False, True),
    ):
        texts = [(item["demonstration"], item["answer"]) for item in small("gsm8k", **options).sft]
        assert {final_number(text) == final_number(answer) for text, answer in texts} == {is_right}
        assert {"####" in text for text, _ in texts} == {is_marked}
        assert any(EQUATION.search(text) for text, _ in texts) == is_worked
    evasions = load_task("dialogue").EVASIONS
    for mistaken, evasive in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
        for item in small("dialogue", mistaken=mistaken, evasive=evasive).sft:
            assert (item["demonstration"] == item["answer"]) == (mistaken == evasive)
            assert (item["demonstration"] in evasions) == (evasive == 1)


def test_a_dialogue_is_answered_from_the_persona() -> None:
    for item in small("dialogue").test:
        facts, question = re.fullmatch(r"(.*) context:.* Q: ([^?]*\?) R:", item["prompt"]).groups()  # type: ignore[union-attr]
        topic = next(topic for topic in load_task("dialogue").TOPICS if topic.question == question)
        stated = [value for value in topic.values if topic.fact.format(value) in facts]
        assert [topic.reply.format(value) for value in stated] == [item["answer"]]


def test_posts_have_several_replies_and_better_ones_more_likes() -> None:
    items = tasks.make("reply", 0, {}).sft
    assert len({item["prompt"] for item in items[:4]}) == 1 and len({item["demonstration"] for item in items[:40]}) > 10
    assert len({item["prompt"] for item in small("reply", replies=1).sft}) > 300
    share: dict[bool, list[float]] = {True: [], False: []}
    for item in items:
        share[len(item["demonstration"]) > 30].append(item["likes"] / item["post_likes"])
    assert statistics.mean(share[True]) > 1.5 * statistics.mean(share[False]) and min(share[False]) >= 0


@pytest.mark.slow
def test_an_installation_has_the_tasks_beside_its_recipes(tmp_path: Path) -> None:
    root, env = Path(__file__).parents[2], os.environ | {"GRPO_KERNELS_BUILD": "none"}
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=root, env=env, check=True)
    wanted = {file.relative_to(root) for end in ("yaml", "py") for file in root.glob(f"recipes/*/*.{end}")}
    installed = tmp_path / "grpo_trainer"
    assert {path.relative_to(installed) for path in (installed / "recipes").rglob("*.*")} == wanted
    code = "from grpo_trainer import tasks as t; print(len(t.make('word_problems', 0, {'test': 7}).test), t.__file__)"
    env |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=env, text=True)
    assert printed.split() == ["7", str(installed / "tasks.py")]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("base", {}, "task: must be one of arithmetic, strategies, .* got 'base'"),
        ("replly", {}, "task: .* the nearest is 'reply'"),
        ("gsm8k", {"skiped": 0.1}, "options.skiped: .* nearest is 'skipped'"),
        ("gsm8k", {"skipped": 0.9, "terse": 0.2}, "options.skipped: must sum to at most 1 with terse and unmarked"),
        ("word_problems", {"steps": 4}, "options.steps: must be less than or equal to 3, got 4"),
        ("word_problems", {"largest": 9}, "options.largest: must be greater than or equal to 10, got 9"),
        ("word_problems", {"examples": 3}, "options.examples: must be at most 2 with 1 steps, got 3"),
        ("word_problems", {"largest": 10}, "options: there are too few different problems for 100"),
        ("reply", {"test": 5000}, "options: there are too few different problems for 5000 lines"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"data.{message}"):
        tasks.make(name, 0, options)
