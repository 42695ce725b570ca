"""Data: files and data sets of the hub, templates, demonstrations, published data, and the bundled tasks.

Faults they are there for: a value that changes while it is read; a line that is lost, or trained on as the text of a
list; a post or persona in two parts; a test problem that is trained on; an answer that is wrong; a mixture of
demonstrations that is not the one asked for; a mistake that is not named with its place.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("pandas")

from grpo_trainer import tasks
from grpo_trainer.data import encode_demonstration
from grpo_trainer.recipe import Data, Reward
from grpo_trainer.recipes import FOLDERS, validated
from grpo_trainer.rewards import load_reward
from grpo_trainer.rewards.numbers import final_number
from grpo_trainer.splits import corpus_of, digest, load_splits, read_lines
from grpo_trainer.tasks import Item, Splits, load_task
from grpo_trainer.tiny import train_tokenizer

from tests.trainer.small import write_data

CHAT = [{"role": "user", "content": "a"}]
TALKS = [
    {"question": "hello?", "answers": ["hi!", "hey {you}"], "n": 1},
    {"question": "who {are} you?", "answers": ["i am ann."], "n": 2.5},
]


def data(folder: Path, lines: list[Any], **settings: Any) -> Data:
    made: Data = validated(Data, {"task": None, "train": write_data(folder / "train.jsonl", lines)} | settings)
    return made


# Files


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Among them what `datasets` would change: dates, numbers in quotes, large numbers, columns of several kinds."""
    lines = [
        {"prompt": "a\u2028b\u0085c", "answer": "2001-01-01", "n": 1, "k": "1"},
        {"prompt": CHAT, "answer": "2001-01-02", "n": 2.5, "k": 2, "big": 10**30, "new": {"a": None}},
    ]
    assert repr(read_lines("x", write_data(tmp_path / "a.jsonl", lines), "train")) == repr(lines)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(lines, indent=1), encoding="utf-8")
    assert repr(read_lines("x", str(tmp_path / "a.json"), "train")) == repr(lines)
    text = '\ufeffprompt,answer,n,code,some,half,large,flag\n"a, ""b""\nc",NA,1,007,4,,,true\n'
    text += "d,,2,1,,0.5,9007199254740993,\n"
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    rows = [{"prompt": 'a, "b"\nc', "answer": "NA", "n": 1, "code": 7, "some": 4, "half": None, "large": None}]
    rows += [{"prompt": "d", "answer": None, "n": 2, "code": 1, "some": None, "half": 0.5, "large": 2**53 + 1}]
    rows[0]["flag"], rows[1]["flag"] = "true", None
    assert repr(read_lines("x", str(tmp_path / "a.csv"), "train")) == repr(rows)
    rows = [row | {"prompt": CHAT, "list": [1, None]} for row in rows]
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert read_lines("x", str(tmp_path / "a.parquet"), "train") == rows
    assert len(list(tmp_path.iterdir())) == 4  # no cache beside the data


def test_nan_is_an_absent_value(tmp_path: Path) -> None:
    """As pandas writes it."""
    (tmp_path / "a.jsonl").write_text('{"a": NaN, "b": -Infinity}\n')
    assert read_lines("x", str(tmp_path / "a.jsonl"), "train") == [{"a": None, "b": -math.inf}]
    table = pytest.importorskip("pyarrow").Table.from_pylist([{"a": math.nan, "b": [math.inf]}, {"a": 2.0, "b": None}])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    want = [{"a": None, "b": [math.inf]}, {"a": 2.0, "b": None}]
    assert read_lines("x", str(tmp_path / "a.parquet"), "train") == want


def test_a_digest_sees_every_value() -> None:
    values = [1, 1.5, "1", None, Decimal(1), Decimal(2), datetime.date(2001, 1, 1), b"a", b"b", [1], [2]]
    assert len({digest(Splits([{"a": value}], [], [], [])) for value in values}) == len(values)
    first, second = ([{"a": object()}] for _ in range(2))
    assert digest(Splits(first, [], [], [])) == digest(Splits(second, [], [], []))


def test_a_column_of_a_long_file_has_one_type(tmp_path: Path) -> None:
    texts = ["prompt,answer", *(f"{'x' * 60},{i}" for i in range(30_000)), "y,last"]
    (tmp_path / "a.csv").write_text("\n".join(texts))
    assert {type(row["answer"]) for row in read_lines("x", str(tmp_path / "a.csv"), "train")} == {str}


def test_names_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    line = {"question": "a", "demonstration": "b", "n": 1}
    load_dataset = mock.Mock(return_value=datasets.Dataset.from_list([line]))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sources = {"sft": "owner/name::dev", "validation": "openai/gsm8k:main:train[:90%]", "test": "openai/gsm8k"}
    splits = load_splits(validated(Data, {"task": None, "train": "a/b", **sources, "prompt": "question"}), 0)
    assert [splits.train, splits.sft, splits.validation, splits.test] == [[line]] * 4
    names = [("a/b", None, "train"), ("owner/name", None, "dev"), ("openai/gsm8k", "main", "train[:90%]")]
    calls = [(*call.args, call.kwargs["split"]) for call in load_dataset.call_args_list]
    assert calls == [*names, ("openai/gsm8k", None, "test")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a" 2}\n', "line 3 must be JSON, .* got '{\"a\" 2}' .*, column 6"),
        ("a.jsonl", '{"a": 1}\n3\n', "example 2 must be an object, got int 3"),
        ("a.csv", "a,b\n1,2,3\n", "rows must have as many values as the header, got more"),
        ("a.parquet", "nothing", "'a.parquet' cannot be read: .*arquet"),
        ("a.txt", "x", "must be a file that ends in .jsonl, .json, .csv, .parquet, or a hub name, got 'a."),
        ("a.jsonn", None, "must be an existing file, got 'a.jsonn'; the nearest is 'a.jsonl'"),
        ("folder", None, "must be an existing file, got the folder 'folder'"),
        ("owner/name", None, "'owner/name' is no file here, and was not loaded from the .* hub: .*ffline"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, message: str
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("a.jsonl" if text is None else name).write_text(text or "")
    with pytest.raises((FileNotFoundError, ValueError), match=f"^data.test: .*{message}"):
        read_lines("data.test", name, "test")


# Templates and demonstrations


def pairs(settings: Data) -> list[tuple[str, str]]:
    return [(item[settings.prompt], item["demonstration"]) for item in load_splits(settings, 0).sft]


def test_each_element_of_a_list_is_a_demonstration(tmp_path: Path) -> None:
    expected = [("hello?", "hi!"), ("hello?", "hey {you}"), ("who {are} you?", "i am ann.")]
    lines = [*TALKS, {"question": "without"}, {"question": "null", "answers": None}]
    settings = data(tmp_path, lines, prompt="question", demonstration="answers")
    splits = load_splits(settings, 0)
    lines = [{"answers": None, "n": None} | line for line in lines]  # a reward gets a column that a step's lines lack
    assert pairs(settings) == expected and splits.train == lines  # the rewards read the list
    assert [item["answers"] for item in splits.sft] == [TALKS[0]["answers"]] * 2 + [TALKS[1]["answers"]]
    assert corpus_of(settings, splits)[-3:] == [text for _, text in expected]
    limited = load_splits(settings.model_copy(update={"limit": 2}), 0)
    assert limited.sft == splits.sft[:2] and limited.train == lines[:2]


def test_templates_of_prompt_and_demonstration(tmp_path: Path) -> None:
    more = {"template": "{question} {{R}}:", "demonstration_template": "<extra_id_0> {answers} ({n})"}
    expected = [("hello? {R}:", "<extra_id_0> hi! (1)"), ("hello? {R}:", "<extra_id_0> hey {you} (1)")]
    assert pairs(data(tmp_path, TALKS, **more)) == [*expected, ("who {are} you? {R}:", "<extra_id_0> i am ann. (2.5)")]
    file = write_data(tmp_path / "other.jsonl", TALKS[:1])
    settings = data(tmp_path, TALKS, **more, sft=file, validation=file, test=file)
    splits = load_splits(settings, 0)
    assert pairs(settings) == expected
    assert splits.train[:1] == splits.validation == splits.test == [TALKS[0] | {"prompt": "hello? {R}:"}]
    some_empty = [{"question": "q", "a": "", "n": 1}]
    assert pairs(data(tmp_path, some_empty, prompt="question", demonstration_template="{a}{n}")) == [("q", "1")]
    task = {"task": "arithmetic", "options": {"demonstrations": 3, "train": 3, "validation": 2, "test": 2}}
    plain, filled = (load_splits(validated(Data, task | more), 0) for more in ({}, {"template": "<{prompt}>"}))
    for name in ("sft", "train", "validation", "test"):
        prompts = [f"<{item['prompt']}>" for item in getattr(plain, name)]
        assert prompts and [item["prompt"] for item in getattr(filled, name)] == prompts
    # the sentinel of T5 is trained as one token and hidden from rewards
    tokenizer = train_tokenizer(["yes, i have two dogs. hi there"] * 9, 60, is_seq2seq=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_id_0>"]})
    ids = encode_demonstration(tokenizer, "<extra_id_0> yes, i have")
    assert ids[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>") and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "yes, i have"


ERRORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TALKS[0], {"template": "{question"}, "data.template: must have columns in braces, with {{ and }} for a brace"),
    (TALKS[0], {"template": "{{n}}"}, "data.template: must have a column in braces, got '{{n}}'"),
    (TALKS[0], {"template": "{qestion}"}, "data.template: no column 'qestion'; the nearest is 'question', all are"),
    ({"a": CHAT}, {"template": "{a}"}, "(example 1 of train); the messages of a chat need no template"),
    ({"a": None}, {"template": "{a}"}, "data.template: column 'a' must hold a text or a number, got None"),
    ({"a": ["x"], "b": ["y"]}, {"demonstration_template": "{a} {b}"}, "at most one column may hold a list, got ['a', "),
    ({"demonstration": []}, {}, "data.demonstration: no text of column 'demonstration' may be empty, got []"),
    ({"prompt": 3}, {}, "data.prompt: must be a text, or a list of messages with role and content, got 3 (ex"),
    ({}, {"prompt": "question"}, "data.prompt: no column 'question'; there is no column (example 1 of train)"),
]
ERRORS += [
    (TALKS[0], {"template": text}, f"must have nothing but the name of a column in braces, got '{text}'")
    for text in ("{}", "{question!r}", "{question:>9}", "{question.x}", "{answers[0]}")
]


@pytest.mark.parametrize(("line", "settings", "message"), ERRORS)
def test_columns_that_do_not_fit_are_named(
    tmp_path: Path, line: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        load_splits(data(tmp_path, [line], **settings), 0)
    assert message in str(error.value)


# Published data

CLIPS = {
    "question": "Natalia sold clips to 48 friends, and then half as many. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
}
SOLUTION = "She sold 48/2 = 24 clips.\nThat is 48+24 = 72.\n#### 72"
TALK = {"question": "persona: i like tea. context: Q: hello R:", "answers": ["hi!", "hello."]}
TWEET = {"tweet": "so good,\nreally!", "reply": "hi", "reply_likes": 3, "tweet_likes": 10.0}
POST = {"post": TWEET["tweet"], "reply": "hi", "likes": 3, "post_likes": 10}
PUBLISHED = {  # a line, and that of the recipe
    "gsm8k": (CLIPS, CLIPS | {"answer": SOLUTION}),
    "dialogue": (TALK, {"prompt": TALK["question"], "answers": TALK["answers"]}),
    "reply": (TWEET, POST | {"prompt": "Post: so good,\nreally!\nReply:"}),
}


def prepare(system: str, *arguments: str) -> None:
    """Runs the script of a system."""
    path = next(folder / system / "prepare.py" for folder in FOLDERS if folder.is_dir())
    runpy.run_path(str(path))["main"](arguments)


def parts(prefix: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted(prefix.parent.glob(f"{prefix.name}-*.jsonl"))
    return {path.stem.removeprefix(f"{prefix.name}-"): read_lines("x", str(path), "") for path in files}


@pytest.mark.parametrize(
    ("system", "changes", "message"),
    [
        ("gsm8k", {"question": " "}, "question: String should have at least 1 character, got ' '"),
        ("gsm8k", {"answer": "72"}, "answer: must end in #### and a number, got '72'"),
        ("gsm8k", {"answer": "<<1+1=2\n#### 2"}, "answer: annotations must have the form <<48/2=24>>"),
        ("dialogue", {"answers": ["x", " "]}, "answers.1: String should match pattern"),
        ("reply", {"reply_likes": -1}, "reply_likes: must be greater than or equal to 0, got -1"),
        ("reply", {"tweet_likes": 1.5}, "tweet_likes: must be a multiple of 1, got 1.5"),
        ("reply", {"tweet": None}, "tweet: must be of type string, got None"),
    ],
)
def test_published_lines_are_converted_and_bad_ones_named_or_left_out(
    tmp_path: Path, system: str, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, expected = PUBLISHED[system]
    file = write_data(tmp_path / "in.jsonl", [line, line | changes])
    to, said = (file, "--output", str(tmp_path / "new" / "out"), "--into", "all=1"), f"{file}, example 2: {message}"
    with pytest.raises(SystemExit, match="2"):
        prepare(system, *to)
    assert said in capsys.readouterr().err and not parts(tmp_path / "new" / "out")
    prepare(system, *to, "--leave-out")
    assert f"left out: {said}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        prepare(system, *to, "--leave-out")
    assert "--output: must not replace a file, got" in capsys.readouterr().err
    assert parts(tmp_path / "new" / "out") == {"all": [expected]}


def test_parts_share_no_post_and_no_persona_and_have_equal_likes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [TWEET | {"tweet": f"post {i // 2}", "reply": f"{i}", "reply_likes": i // 2 * 37 % 101} for i in range(400)]
    prepare("reply", write_data(tmp_path / "replies.jsonl", lines), "--output", str(tmp_path / "out"))
    divided = parts(tmp_path / "out")
    assert {name: len(part) for name, part in divided.items()} == {"phase1": 180, "phase2": 180, "validation": 40}
    assert sum(len({line["post"] for line in part}) for part in divided.values()) == 200
    likes = sorted(line["reply_likes"] for line in lines)
    for part in divided.values():
        for low, high in zip([-1, *likes[99::100]], likes[99::100], strict=False):
            share = sum(low < line["likes"] <= high for line in part) / len(part)
            assert abs(share - 0.25) <= 4 / len(part)  # two posts of two replies
        assert [int(line["reply"]) for line in part] == sorted(int(line["reply"]) for line in part)
    few = write_data(tmp_path / "few.jsonl", lines[:48])
    into = ("a=0.45", "b=0.45", "c=0.05", "d=0.05")
    prepare("reply", few, "--output", str(tmp_path / "few"), "--into", *into)
    assert sum(len({line["post"] for line in part}) for part in parts(tmp_path / "few").values()) == 24
    lines = [{"question": f"Persona: fact {i % 30}. context: Q: {i} R:", "answers": ["a"]} for i in range(300)]
    file = write_data(tmp_path / "talks.jsonl", lines)
    for name, more in (("talks", ()), ("again", ()), ("other", ("--seed", "1"))):
        prepare("dialogue", file, "--output", str(tmp_path / name), *more)
    personas = [{line["prompt"].split("context")[0] for line in part} for part in parts(tmp_path / "talks").values()]
    assert [len(names) for names in personas] == [27, 3] and len(set.union(*personas)) == 30
    assert parts(tmp_path / "again") == parts(tmp_path / "talks") != parts(tmp_path / "other")
    for into in ("a=1 b", "a=x", "a/b=1", "a=0.5 a=0.5", "a=0.5 b=0.4", "a=0.999 b=0.001"):
        with pytest.raises(SystemExit, match="2"):
            prepare("dialogue", file, "--output", str(tmp_path / "bad"), "--into", *into.split())
        rule = "PART=SHARE, each part once, and the shares must sum to 1, got " + into
        assert (rule if "9" not in into else "must leave lines to every part, got b=0.001") in capsys.readouterr().err


# Bundled tasks

SIZES = {"demonstrations": 601, "train": 300, "validation": 40, "test": 80}
EQUATION = re.compile(r"(-?[\d,]+) ([-+*/]) ([\d,]+) = (-?[\d,]+)\.")
REWARDS = {"gsm8k": "gsm8k", "word_problems": "gsm8k", "dialogue": "dialogue", "reply": "reply"}


def task(name: str, seed: int = 0, **options: Any) -> Splits:
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


def equations(text: str) -> list[tuple[int, str, int, int]]:
    """The equations of a text, which are right."""
    result = []
    for left, operator, right, value in EQUATION.findall(text.replace(",", "")):
        a, b, c = int(left), int(right), int(value)
        is_right = {"+": c == a + b, "-": c == a - b, "*": c == a * b, "/": b != 0 and b * c == a}
        assert is_right[operator], text
        result.append((a, operator, b, c))
    return result


@pytest.mark.parametrize("name", tuple(tasks.SYSTEMS))
def test_splits(name: str) -> None:
    splits = task(name)
    assert splits == task(name) and splits.train != task(name, seed=1).train
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


PROBLEMS = [("word_problems", steps, products) for steps in (1, 2, 3) for products in (0.0, 1.0)]


@pytest.mark.parametrize(("name", "steps", "products"), [("gsm8k", 2, 0.0), ("gsm8k", 3, 0.0), *PROBLEMS])
def test_answers_are_right(name: str, steps: int, products: float) -> None:
    """Each number of the problem is used once, in order, and each step continues from the result before."""
    of_problems = {"steps": steps, "products": products, "largest": 50, "examples": 0}
    options: dict[str, Any] = {"three_steps": steps - 2.0} if name == "gsm8k" else of_problems
    splits = task(name, **options, train=20, demonstrations=20, validation=5, test=5)
    for item in splits.sft + splits.test:
        calculations = equations(item["answer"])
        numbers = [calculations[0][0], *(step[2] for step in calculations)]
        assert len(calculations) == steps and numbers == [int(n) for n in re.findall(r"\d+", item["prompt"])]
        assert all(before[3] == after[0] for before, after in itertools.pairwise(calculations))
        assert final_number(item["answer"]) == calculations[-1][3] and min(step[3] for step in calculations) >= 0
        assert name == "gsm8k" or max(max(a, b, c) for a, _, b, c in calculations) <= 50
        assert name == "gsm8k" or (calculations[0][1] == "*") == bool(products)


def is_right(item: Item) -> bool:
    """Its equations are right either way."""
    assert equations(item["demonstration"]) or "=" not in item["demonstration"]
    return final_number(item["demonstration"]) == final_number(item["answer"])


def is_reversed(item: Item) -> bool:
    return int(re.findall(r"\d+", item["prompt"])[-1]) == equations(item["demonstration"])[0][2]


def is_evasive(item: Item) -> bool:
    return item["demonstration"] in load_task("dialogue").EVASIONS


def has_strategy(item: Item) -> bool:
    return load_task("strategies").strategy(item["demonstration"]) is not None


# Options of a task, and the shares of the demonstrations for which a predicate holds. Some problems have no verb that
# is misread, or would leave the numbers that a problem may have in the other order.
KINDS: list[tuple[str, dict[str, float], Callable[[Item], bool], float, float]] = [
    ("arithmetic", {"misread": 0.0}, is_right, 1, 1),
    ("arithmetic", {"misread": 0.8, "terse": 0.0}, is_right, 0.2, 0.6),
    ("strategies", {}, is_right, 1, 1),
    ("strategies", {}, has_strategy, 1, 1),
    ("strategies", {"forward": 0.0, "reverse": 1.0, "boxes": 0.0}, is_reversed, 0.9, 1),
    ("gsm8k", {"skipped": 1.0, "terse": 0.0, "unmarked": 0.0}, is_right, 0, 0),
    ("gsm8k", {"skipped": 0.0, "terse": 0.5, "unmarked": 0.5}, is_right, 1, 1),
    ("gsm8k", {"skipped": 0.0, "terse": 1.0, "unmarked": 0.0}, lambda item: "=" in item["demonstration"], 0, 0),
    ("gsm8k", {"skipped": 0.0, "terse": 0.0, "unmarked": 1.0}, lambda item: "####" in item["demonstration"], 0, 0),
    ("dialogue", {"mistaken": 0.0, "evasive": 0.0}, lambda item: item["demonstration"] == item["answer"], 1, 1),
    ("dialogue", {"mistaken": 1.0, "evasive": 0.0}, lambda item: item["demonstration"] == item["answer"], 0, 0),
    (
        "dialogue",
        {"mistaken": 0.0, "evasive": 1.0},
        lambda i: i["demonstration"] in load_task("dialogue").EVASIONS,
        1,
        1,
    ),
]


@pytest.mark.parametrize(("name", "options", "holds", "least", "most"), KINDS)
def test_kinds_of_demonstrations(
    name: str, options: dict[str, float], holds: Callable[[Item], bool], least: float, most: float
) -> None:
    assert least <= statistics.mean(holds(item) for item in task(name, **options).sft) <= most


def test_replies_are_from_the_persona_and_the_reward_prefers_some() -> None:
    topics = {topic.question: topic for topic in load_task("dialogue").TOPICS}
    for item in task("dialogue").test:
        facts, question = re.fullmatch(r"(.*) context:.* Q: ([^?]*\?) R:", item["prompt"]).groups()  # type: ignore[union-attr]
        stated = [value for value in topics[question].values if topics[question].fact.format(value) in facts]
        assert [topics[question].reply.format(value) for value in stated] == [item["answer"]]
    items = tasks.make("reply", 0, {}).sft
    assert len({item["prompt"] for item in items[:4]}) == 1 and len({item["demonstration"] for item in items[:40]}) > 10
    is_long = [len(item["demonstration"]) > 30 for item in items]
    likes = [item["likes"] / item["post_likes"] for item in items]
    of_long, of_short = ([share for share, long in zip(likes, is_long, strict=True) if long == kind] for kind in (1, 0))
    assert statistics.mean(of_long) > 1.5 * statistics.mean(of_short) and min(likes) >= 0
    for name in ("gsm8k", "dialogue", "reply"):
        sft = task(name).sft
        reward = load_reward(Reward(name=name, options={"embedder": "hashed"} if name == "reply" else {})).function
        columns = {key: [item[key] for item in sft] for key in sft[0]}
        values = [value or 0.0 for value in reward([i["prompt"] for i in sft], columns["demonstration"], **columns)]
        best = statistics.quantiles(values, n=10)[-1]
        assert best - statistics.mean(values) > 0.15
        assert 0.1 < sum(value > best - 0.1 for value in values) / len(values) < 0.7


def test_solved_examples_are_turns_of_the_chat_and_no_problems() -> None:
    (item, *_) = task("word_problems", steps=2).test
    problems = load_task("word_problems")
    assert [turn["role"] for turn in item["prompt"]] == ["user", "assistant"] * 2 + ["user"]
    assert item["prompt"][1]["content"] == "9 - 4 = 5. 5 + 7 = 12. #### 12"
    answers = {example.solution() for example in problems.EXAMPLES}
    splits = task("word_problems", largest=14, train=1000, validation=10, test=10)
    assert answers.isdisjoint(item["answer"] for item in splits.train + splits.validation + splits.test)


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
