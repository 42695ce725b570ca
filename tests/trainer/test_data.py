"""Data: files and data sets of the hub, templates, lists of demonstrations, and the conversion of published data.

Faults they are there for: a value that changes while it is read; a line that is lost, or trained on as the text of a
list; a post or persona in two parts; a mistake that is not named with its place.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pandas")

from grpo_trainer.data import encode_demonstration
from grpo_trainer.recipe import Data
from grpo_trainer.recipes import FOLDERS, validated
from grpo_trainer.setup import set_up
from grpo_trainer.splits import corpus_of, load_splits, read_lines
from grpo_trainer.tiny import train_tokenizer

from tests.trainer import small

CHAT = [{"role": "user", "content": "a"}]
TALKS = [
    {"question": "hello?", "answers": ["hi!", "hey {you}"], "n": 1},
    {"question": "who {are} you?", "answers": ["i am ann."], "n": 2.5},
]


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def data(folder: Path, lines: list[Any], **settings: Any) -> Data:
    made: Data = validated(Data, {"task": None, "train": written(folder / "train.jsonl", lines)} | settings)
    return made


# Reading


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Among them what `datasets` would change: dates, numbers in quotes, large numbers, columns of several kinds."""
    lines = [
        {"prompt": "a\u2028b\u0085c", "answer": "2001-01-01", "n": 1, "k": "1"},
        {"prompt": CHAT, "answer": "2001-01-02", "n": 2.5, "k": 2, "big": 10**30, "new": {"a": None}},
    ]
    assert repr(read_lines("x", written(tmp_path / "a.jsonl", lines), "train")) == repr(lines)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(lines, indent=1), encoding="utf-8")
    assert repr(read_lines("x", str(tmp_path / "a.json"), "train")) == repr(lines)
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer,n,code\n"a, ""b""\nc",NA,1,007\nd,,2,1\n', encoding="utf-8")
    rows = [{"prompt": 'a, "b"\nc', "answer": "NA", "n": 1, "code": 7}]
    rows += [{"prompt": "d", "answer": None, "n": 2, "code": 1}]
    assert repr(read_lines("x", str(tmp_path / "a.csv"), "train")) == repr(rows)
    rows = [row | {"prompt": CHAT, "list": [1, None]} for row in rows]
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert read_lines("x", str(tmp_path / "a.parquet"), "train") == rows
    assert len(list(tmp_path.iterdir())) == 4  # no cache beside the data


def test_names_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls, line = list[Any](), {"question": "a", "demonstration": "b", "n": 1}

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        calls.append((name, config, split))
        return datasets.Dataset.from_list([line])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    sources = {"sft": "owner/name::dev", "validation": "openai/gsm8k:main:train[:90%]", "test": "openai/gsm8k"}
    splits = load_splits(validated(Data, {"task": None, "train": "a/b", **sources, "prompt": "question"}), 0)
    assert [splits.train, splits.sft, splits.validation, splits.test] == [[line]] * 4
    gsm8k = [("openai/gsm8k", "main", "train[:90%]"), ("openai/gsm8k", None, "test")]
    assert calls == [("a/b", None, "train"), ("owner/name", None, "dev"), *gsm8k]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a" 2}\n', "line 3 must be JSON, .* got '{\"a\" 2}' .*, column 6"),
        ("a.jsonl", '{"a": 1}\n3\n', "example 2 must be an object, got int 3"),
        ("a.json", '[\n{"a": 1},\n{"a": }]', "line 3 must be JSON"),
        ("a.csv", "a,b\n1,2,3\n", "rows must have as many values as the header, got more"),
        ("a.csv", "", "No columns to parse"),
        ("a.parquet", "nothing", "'a.parquet' cannot be read: .*arquet"),
        ("a.txt", "x", "must be a file that ends in .jsonl, .json, .csv, .parquet, or a hub name, got 'a."),
        ("a.jsonn", None, "must be an existing file, got 'a.jsonn'; the nearest is 'a.jsonl'"),
        ("./owner/name", None, "must be an existing file, got './owner/name'"),
        ("folder/name", None, "must be an existing file, got 'folder/name'"),
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
    assert pairs(settings) == expected and splits.train == lines  # the rewards read the list
    assert [item["answers"] for item in splits.sft] == [TALKS[0]["answers"]] * 2 + [TALKS[1]["answers"]]
    assert corpus_of(settings, splits)[-3:] == [text for _, text in expected]
    limited = load_splits(settings.model_copy(update={"limit": 2}), 0)
    assert limited.sft == splits.sft[:2] and limited.train == lines[:2]


def test_templates_of_prompt_and_demonstration(tmp_path: Path) -> None:
    more = {"template": "{question} {{R}}:", "demonstration_template": "<extra_id_0> {answers} ({n})"}
    file = written(tmp_path / "other.jsonl", TALKS[:1])
    for settings in (
        data(tmp_path, TALKS, **more),
        data(tmp_path, TALKS, **more, sft=file, validation=file, test=file),
    ):
        expected = [("hello? {R}:", "<extra_id_0> hi! (1)"), ("hello? {R}:", "<extra_id_0> hey {you} (1)")]
        expected += [("who {are} you? {R}:", "<extra_id_0> i am ann. (2.5)")] if settings.sft is None else []
        assert pairs(settings) == expected
    splits = load_splits(settings, 0)
    assert splits.train[:1] == splits.validation == splits.test == [TALKS[0] | {"prompt": "hello? {R}:"}]
    some_empty = [{"question": "q", "a": "", "n": 1}]
    assert pairs(data(tmp_path, some_empty, prompt="question", demonstration_template="{a}{n}")) == [("q", "1")]
    task = {"task": "arithmetic", "options": {"demonstrations": 3, "train": 3, "validation": 2, "test": 2}}
    plain, filled = (load_splits(validated(Data, task | more), 0) for more in ({}, {"template": "<{prompt}>"}))
    for name in ("sft", "train", "validation", "test"):
        prompts = [f"<{item['prompt']}>" for item in getattr(plain, name)]
        assert prompts and [item["prompt"] for item in getattr(filled, name)] == prompts


ERRORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TALKS[0], {"template": "{question"}, "data.template: must have columns in braces, with {{ and }} for a brace"),
    (TALKS[0], {"template": "{{n}}"}, "data.template: must have a column in braces, got '{{n}}'"),
    (TALKS[0], {"template": "{qestion}"}, "data.template: no column 'qestion'; the nearest is 'question', all are"),
    ({"n": 1}, {"template": "{question}"}, "no column 'question'; all are n (example 1 of train)"),
    ({"a": CHAT}, {"template": "{a}"}, "(example 1 of train); the messages of a chat need no template"),
    ({"a": None}, {"template": "{a}"}, "data.template: column 'a' must hold a text or a number, got None"),
    ({"a": True}, {"template": "{a}"}, "column 'a' must hold a text or a number, got True"),
    ({"a": ["x"], "b": ["y"]}, {"demonstration_template": "{a} {b}"}, "at most one column may hold a list, got ['a', "),
    ({"demonstration": []}, {}, "data.demonstration: no text of column 'demonstration' may be empty, got []"),
    ({"demonstration": ["a", " "]}, {}, "may be empty, got ['a', ' '] (example 1 of sft)"),
    ({"demonstration": {"a": 1}}, {}, "column 'demonstration' must hold a text or a number, got {'a': 1}"),
    (
        {"prompt": 3},
        {},
        "data.prompt: must be a text, or a list of messages with role and content, got 3 (example 1 of",
    ),
    ({"prompt": [{"role": "user"}]}, {}, "or a list of messages with role and content, got [{'role': 'user'}]"),
    ({}, {"prompt": "question"}, "data.prompt: no column 'question'; there is no column (example 1 of train)"),
]
ERRORS += [
    (TALKS[0], {"template": text}, f"must have nothing but the name of a column in braces, got '{text}'")
    for text in ("{}", "{0}", "{question!r}", "{question:>9}", "{question.x}", "{answers[0]}")
]


@pytest.mark.parametrize(("line", "settings", "message"), ERRORS)
def test_columns_that_do_not_fit_are_named(
    tmp_path: Path, line: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        load_splits(data(tmp_path, [line], **settings), 0)
    assert message in str(error.value)


def test_sft_without_a_demonstration_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1", "n": None}])
    for key, column, reason in (
        ("demonstration", "anser", "'anser'; the nearest is 'answer'"),
        ("demonstration_template", "'{n}'", "'n', which are null"),
    ):
        with pytest.raises(ValueError, match=f"^data.{key}: must have a column of some line, got {reason}"):
            set_up(small.recipe(tmp_path / "run", f"data={{task: null, train: {file}, {key}: {column}}}"))


def test_the_sentinel_of_t5_is_trained_as_one_token_and_hidden_from_rewards() -> None:
    tokenizer = train_tokenizer(["yes, i have two dogs. hi there"] * 9, 60, is_seq2seq=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_id_0>"]})
    ids = encode_demonstration(tokenizer, "<extra_id_0> yes, i have")
    assert ids[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>") and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "yes, i have"


# Published data

CLIPS = {
    "question": "Natalia sold clips to 48 friends, and then half as many. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
}
SOLUTION = "She sold 48/2 = 24 clips.\nThat is 48+24 = 72.\n#### 72"
TALK = {"question": "persona: i like tea. context: Q: hello R:", "answers": ["hi!", "hello."]}
TWEET = {"tweet": "so good,\nreally!", "reply": "hi", "reply_likes": 3, "tweet_likes": 10.0}
POST = {
    "prompt": "Post: so good,\nreally!\nReply:",
    "post": TWEET["tweet"],
    "reply": "hi",
    "likes": 3,
    "post_likes": 10,
}
PUBLISHED = {  # a line, and that of the recipe
    "gsm8k": (CLIPS, CLIPS | {"answer": SOLUTION}),
    "dialogue": (TALK, {"prompt": TALK["question"], "answers": TALK["answers"]}),
    "reply": (TWEET, POST),
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
        ("gsm8k", {"answer": "#### x"}, "answer: must end in #### and a number, got '#### x'"),
        ("gsm8k", {"answer": "<<1+1=2\n#### 2"}, "answer: annotations must have the form <<48/2=24>>"),
        ("dialogue", {"answers": []}, "answers: List should have at least 1 item"),
        ("dialogue", {"answers": ["x", " "]}, "answers.1: String should match pattern"),
        ("reply", {"reply_likes": -1}, "reply_likes: must be greater than or equal to 0, got -1"),
        ("reply", {"reply_likes": True}, "reply_likes: must be of type number, got True"),
        ("reply", {"tweet_likes": 1.5}, "tweet_likes: must be a multiple of 1, got 1.5"),
        ("reply", {"tweet": None}, "tweet: must be of type string, got None"),
    ],
)
def test_published_lines_are_converted_and_bad_ones_named_or_left_out(
    tmp_path: Path, system: str, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, expected = PUBLISHED[system]
    file = written(tmp_path / "in.jsonl", [line, line | changes])
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
    prepare("reply", written(tmp_path / "replies.jsonl", lines), "--output", str(tmp_path / "out"))
    divided = parts(tmp_path / "out")
    assert {name: len(part) for name, part in divided.items()} == {"phase1": 180, "phase2": 180, "validation": 40}
    assert sum(len({line["post"] for line in part}) for part in divided.values()) == 200
    likes = sorted(line["reply_likes"] for line in lines)
    for part in divided.values():
        for low, high in zip([-1, *likes[99::100]], likes[99::100], strict=False):
            share = sum(low < line["likes"] <= high for line in part) / len(part)
            assert abs(share - 0.25) <= 4 / len(part)  # two posts of two replies
        assert [int(line["reply"]) for line in part] == sorted(int(line["reply"]) for line in part)
    lines = [{"question": f"Persona: fact {i % 30}. context: Q: {i} R:", "answers": ["a"]} for i in range(300)]
    file = written(tmp_path / "talks.jsonl", lines)
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
