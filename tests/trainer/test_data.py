"""Data: files and data sets of the hub, templates, lists of demonstrations, and the conversion of published data.

Faults they are there for: a value that changes while it is read; a line that is lost, or trained on as the text of a
list; a post or persona in two parts; a mistake that is not named with its place.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pandas")

from grpo_trainer.data import encode_demonstration
from grpo_trainer.recipe import Data
from grpo_trainer.recipes import FOLDERS, validated
from grpo_trainer.setup import set_up
from grpo_trainer.splits import Template, corpus_of, load_splits, read_lines
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
    values = {"task": None, "train": written(folder / "train.jsonl", lines)} | settings
    settings_of_data: Data = validated(Data, values)
    return settings_of_data


# Reading


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Among them what `datasets` would change: dates, numbers in quotes, large numbers, columns of several kinds."""
    lines = [
        {"prompt": "a\u2028b\u0085c", "answer": "2001-01-01", "n": 1, "k": "1"},
        {"prompt": CHAT, "answer": "2001-01-02", "n": 2.5, "k": 2, "big": 10**30, "new": {"a": None}},
    ]
    assert read_lines("data.train", written(tmp_path / "a.jsonl", lines), "train") == lines
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(lines, indent=1), encoding="utf-8")
    assert read_lines("data.train", str(tmp_path / "a.json"), "train") == lines
    assert list(map(type, (line["n"] for line in lines))) == [int, float]


def test_csv_and_parquet(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer,n,code\n"a, ""b""\nc",NA,1,007\nd,,2,1\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    lines = read_lines("data.train", str(tmp_path / "a.csv"), "train")
    assert lines == [
        {"prompt": 'a, "b"\nc', "answer": "NA", "n": 1, "code": 7},
        {"prompt": "d", "answer": None, "n": 2, "code": 1},
    ]
    assert type(lines[0]["n"]) is int
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [line | {"prompt": CHAT, "list": [1, None]} for line in lines]
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_lines("data.train", str(tmp_path / "a.parquet"), "train") == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.parquet"]  # no cache beside the data


@pytest.mark.parametrize(
    ("source", "split", "expected"),
    [
        ("openai/gsm8k", "test", ("openai/gsm8k", None, "test")),
        ("openai/gsm8k:main", "train", ("openai/gsm8k", "main", "train")),
        ("openai/gsm8k:main:train[:90%]", "validation", ("openai/gsm8k", "main", "train[:90%]")),
        ("owner/name::dev", "validation", ("owner/name", None, "dev")),
    ],
)
def test_names_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, source: str, split: str, expected: tuple[str, str | None, str]
) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(name: str, config: str | None, split: str) -> Any:
        calls.append((name, config, split))
        return datasets.Dataset.from_list([{"question": "a", "n": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    key = "data.validation" if split == "validation" else f"data.{split}"
    assert read_lines(key, source, split) == [{"question": "a", "n": 1}] and calls == [expected]
    settings = {"task": None, "train": source, split: source, "prompt": "question"}
    assert getattr(load_splits(validated(Data, settings), 0), split) == [{"question": "a", "n": 1}]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a" 2}\n', ValueError, "line 3 must be JSON, .* got '{\"a\" 2}' .*, column 6"),
        ("a.jsonl", '{"a": 1}\n3\n', ValueError, "example 2 must be an object, got int 3"),
        ("a.json", '[\n{"a": 1},\n{"a": }]', ValueError, "line 3 must be JSON"),
        ("a.csv", "a,b\n1,2,3\n", ValueError, "rows must have as many values as the header, got more"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", ValueError, "Expected 2 fields in line 3, saw 3"),
        ("a.csv", "", ValueError, "No columns to parse"),
        ("a.parquet", "nothing", ValueError, "'a.parquet' cannot be read: .*arquet"),
        ("a.txt", "x", ValueError, "must be a file that ends in .jsonl, .json, .csv, .parquet, or a hub name, got 'a."),
        ("a.jsonn", None, FileNotFoundError, "must be an existing file, got 'a.jsonn'; the nearest is 'a.jsonl'"),
        ("./owner/name", None, FileNotFoundError, "must be an existing file, got './owner/name'"),
        ("folder/name", None, FileNotFoundError, "must be an existing file, got 'folder/name'"),
        ("folder", None, FileNotFoundError, "must be an existing file, got the folder 'folder'"),
        ("owner/name", None, ValueError, "'owner/name' is no file here, and was not loaded from the .* hub: .*ffline"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, error: type, message: str
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if text is None:
        (tmp_path / "a.jsonl").touch()
    else:
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=f"^data.test: .*{message}"):
        read_lines("data.test", name, "test")


# Templates and demonstrations


def pairs(settings: Data) -> list[tuple[str, str]]:
    return [(item[settings.prompt], item["demonstration"]) for item in load_splits(settings, 0).sft]


def test_each_element_of_a_list_is_a_demonstration(tmp_path: Path) -> None:
    expected = [("hello?", "hi!"), ("hello?", "hey {you}"), ("who {are} you?", "i am ann.")]
    settings = data(tmp_path, TALKS, prompt="question", demonstration="answers")
    assert pairs(settings) == expected
    splits = load_splits(settings, 0)
    assert splits.train == TALKS  # the rewards read the list
    assert [item["answers"] for item in splits.sft] == [TALKS[0]["answers"]] * 2 + [TALKS[1]["answers"]]
    assert corpus_of(settings, splits)[-3:] == [text for _, text in expected]
    assert pairs(settings.model_copy(update={"limit": 2})) == expected[:2]
    lines = [*TALKS, {"question": "without"}, {"question": "null", "answers": None}]
    assert pairs(data(tmp_path, lines, prompt="question", demonstration="answers")) == expected


def test_templates_of_prompt_and_demonstration(tmp_path: Path) -> None:
    more = {"template": "{question} {{R}}:", "demonstration_template": "<extra_id_0> {answers} ({n})"}
    assert pairs(data(tmp_path, TALKS, **more)) == [
        ("hello? {R}:", "<extra_id_0> hi! (1)"),
        ("hello? {R}:", "<extra_id_0> hey {you} (1)"),
        ("who {are} you? {R}:", "<extra_id_0> i am ann. (2.5)"),
    ]
    file = written(tmp_path / "other.jsonl", TALKS[:1])
    splits = load_splits(data(tmp_path, TALKS, **more, sft=file, validation=file, test=file), 0)
    assert len(splits.sft) == 2
    for split in (splits.train[:1], splits.validation, splits.test):
        assert split == [TALKS[0] | {"prompt": "hello? {R}:"}]
    task = {"task": "arithmetic", "options": {"demonstrations": 3, "train": 3, "validation": 2, "test": 2}}
    plain, filled = (load_splits(validated(Data, task | more), 0) for more in ({}, {"template": "<{prompt}>"}))
    for name in ("sft", "train", "validation", "test"):
        prompts = [f"<{item['prompt']}>" for item in getattr(plain, name)]
        assert prompts and [item["prompt"] for item in getattr(filled, name)] == prompts


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (TALKS, {"template": "{question"}, "data.template: must have columns in braces, with {{ and }} for a brace"),
        *(
            (
                TALKS,
                {"template": text},
                f"data.template: must have nothing but the name of a column in braces, got '{text}'",
            )
            for text in ("{}", "{0}", "{question!r}", "{question:>9}", "{question.x}", "{answers[0]}")
        ),
        (TALKS, {"template": "{{n}}"}, "data.template: must have a column in braces, got '{{n}}'"),
        (TALKS, {"template": "{qestion}"}, "data.template: no column 'qestion'; the nearest is 'question', all are"),
        ([TALKS[0], {"n": 1}], {"template": "{question}"}, "no column 'question'; all are n (example 2 of train)"),
        ([{"a": CHAT}], {"template": "{a}"}, "(example 1 of train); the messages of a chat need no template"),
        ([{"a": None}], {"template": "{a}"}, "data.template: column 'a' must hold a text or a number, got None"),
        ([{"a": True}], {"template": "{a}"}, "column 'a' must hold a text or a number, got True"),
        (
            [{"a": ["x"], "b": ["y"], "prompt": "p"}],
            {"demonstration_template": "{a} {b}"},
            "demonstration_template: at most one column may hold a list, got ['a', 'b'] (example 1 of sft)",
        ),
        ([{"prompt": "p", "demonstration": []}], {}, "data.demonstration: must be a text or a list of texts, none of"),
        ([{"prompt": "p", "demonstration": ["a", " "]}], {}, "none of them empty, got ['a', ' '] (example 1 of sft)"),
        ([{"prompt": "p", "demonstration": {"a": 1}}], {}, "none of them empty, got {'a': 1}"),
        ([{"prompt": 3}], {}, "data.prompt: must be a text, or a list of messages, got 3 (example 1 of train)"),
        ([{"prompt": [{"role": "user"}]}], {}, "data.prompt: must have 'content' in every message, got"),
        ([TALKS[0], {}], {"prompt": "question"}, "data.prompt: must be a column of every line, got 'question'; there"),
    ],
)
def test_columns_that_do_not_fit_are_named(
    tmp_path: Path, lines: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        load_splits(data(tmp_path, lines, **settings), 0)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "demonstration: anser",
            "data.demonstration: must have a column of some line, got 'anser'; the nearest is 'answ",
        ),
        (
            "demonstration_template: '{n}'",
            "data.demonstration_template: must have a column of some line, got 'n', which",
        ),
    ],
)
def test_sft_without_a_demonstration_is_refused(tmp_path: Path, override: str, message: str) -> None:
    file = written(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1", "n": None}])
    with pytest.raises(ValueError, match=f"^{message}"):
        set_up(small.recipe(tmp_path / "run", f"data={{task: null, train: {file}, {override}}}"))


def test_the_sentinel_of_t5_is_trained_as_one_token_and_hidden_from_rewards() -> None:
    tokenizer = train_tokenizer(["yes, i have two dogs. hi there"] * 9, 60, is_seq2seq=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_id_0>"]})
    ids = encode_demonstration(tokenizer, Template("t", "<extra_id_0> {answer}").fill("", {"answer": "yes, i have"}))
    assert ids[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>") and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "yes, i have"


# Published data

CLIPS = {
    "question": "Natalia sold clips to 48 friends, and then half as many. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
}
SOLUTION = "She sold 48/2 = 24 clips.\nThat is 48+24 = 72.\n#### 72"
TALK = {"question": "persona: i like tea. context: Q: hello R:", "answers": ["hi!", "hello."]}
TWEET = {"tweet": "so good,\nreally!", "reply": "hi", "reply_likes": 3, "tweet_likes": 10}


def prepare(system: str, *arguments: str) -> None:
    """Runs the script of a system."""
    path = next(folder / system / "prepare.py" for folder in FOLDERS if folder.is_dir())
    spec = importlib.util.spec_from_file_location(f"prepare_{system}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)


def parts(prefix: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted(prefix.parent.glob(f"{prefix.name}-*.jsonl"))
    return {path.stem.removeprefix(f"{prefix.name}-"): read_lines("x", str(path), "") for path in files}


@pytest.mark.parametrize(
    ("system", "line", "expected"),
    [
        ("gsm8k", CLIPS, CLIPS | {"answer": SOLUTION}),
        ("dialogue", TALK, {"prompt": TALK["question"], "answers": TALK["answers"]}),
        (
            "reply",
            TWEET,
            {"prompt": "Post: so good,\nreally!\nReply:", "post": TWEET["tweet"], "reply": "hi", "likes": 3}
            | {"post_likes": 10},
        ),
    ],
)
def test_published_lines_become_those_of_the_recipes(
    tmp_path: Path, system: str, line: dict[str, Any], expected: dict[str, Any]
) -> None:
    prepare(
        system, written(tmp_path / "in.jsonl", [line]), "--output", str(tmp_path / "new" / "out"), "--into", "all=1"
    )
    assert parts(tmp_path / "new" / "out") == {"all": [expected]}


@pytest.mark.parametrize(
    ("system", "line", "message"),
    [
        ("gsm8k", {"question": "a", "anwser": "1"}, "answer: must be a column of every line; the nearest is 'anwser'"),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, "question: must be a text that is not empty, got ' '"),
        ("gsm8k", {"question": "a", "answer": "72"}, "answer: must end in #### and a number, got '72'"),
        ("gsm8k", {"question": "a", "answer": "#### x"}, "answer: must end in #### and a number, got '#### x'"),
        ("gsm8k", {"question": "a", "answer": "<<1+1=2\n#### 2"}, "answer: annotations must have the form <<48/2=24>>"),
        (
            "dialogue",
            TALK | {"answers": []},
            "answers: must be a list of at least one text, and of no empty one, got []",
        ),
        (
            "dialogue",
            TALK | {"answers": ["x", " "]},
            "answers: must be a list of at least one text, and of no empty one",
        ),
        ("reply", TWEET | {"reply_likes": -1}, "reply_likes: must be a whole number of 0 or more, got -1"),
        ("reply", TWEET | {"reply_likes": True}, "reply_likes: must be a whole number of 0 or more, got True"),
        ("reply", TWEET | {"tweet_likes": 1.5}, "tweet_likes: must be a whole number of 0 or more, got 1.5"),
    ],
)
def test_bad_lines_are_named_or_left_out(
    tmp_path: Path, system: str, line: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "in.jsonl", [{"gsm8k": CLIPS, "dialogue": TALK, "reply": TWEET}[system], line])
    to = (file, "--output", str(tmp_path / "out"), "--into", "all=1")
    with pytest.raises(SystemExit, match="2"):
        prepare(system, *to)
    assert f"{file}, example 2: {message}" in capsys.readouterr().err and not parts(tmp_path / "out")
    prepare(system, *to, "--leave-out")
    assert f"left out: {file}, example 2: {message}" in capsys.readouterr().err
    assert len(parts(tmp_path / "out")["all"]) == 1
    with pytest.raises(SystemExit, match="2"):
        prepare(system, *to, "--leave-out")
    assert "--output: must not replace a file, got" in capsys.readouterr().err


def test_parts_share_no_post_and_have_equal_likes(tmp_path: Path) -> None:
    lines = [
        TWEET | {"tweet": f"post {i // 2}", "reply": f"r{i}", "reply_likes": i // 2 * 37 % 101} for i in range(400)
    ]
    prepare("reply", written(tmp_path / "in.jsonl", lines), "--output", str(tmp_path / "out"))
    divided = parts(tmp_path / "out")
    assert {name: len(part) for name, part in divided.items()} == {"phase1": 180, "phase2": 180, "validation": 40}
    assert sum(len({line["post"] for line in part}) for part in divided.values()) == 200
    likes = sorted(line["reply_likes"] for line in lines)
    for part in divided.values():
        for low, high in zip([-1, *likes[99::100]], likes[99::100], strict=False):
            share = sum(low < line["likes"] <= high for line in part) / len(part)
            assert abs(share - 0.25) <= 4 / len(part)  # two posts of two replies
        assert [int(line["reply"][1:]) for line in part] == sorted(int(line["reply"][1:]) for line in part)


def test_one_persona_is_in_one_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"question": f"Persona: fact {i % 30}. context: Q: {i} R:", "answers": ["a"]} for i in range(300)]
    file = written(tmp_path / "in.jsonl", lines)
    prepare("dialogue", file, "--output", str(tmp_path / "out"))
    personas = [{line["prompt"].split("context")[0] for line in part} for part in parts(tmp_path / "out").values()]
    assert [len(names) for names in personas] == [27, 3] and len(set.union(*personas)) == 30
    prepare("dialogue", file, "--output", str(tmp_path / "again"))
    assert parts(tmp_path / "again") == parts(tmp_path / "out")
    prepare("dialogue", file, "--output", str(tmp_path / "other"), "--seed", "1")
    assert parts(tmp_path / "other") != parts(tmp_path / "out")
    for into, message in (
        (["a"], "--into: must be PART=SHARE, each part once and a share in (0, 1], got 'a'"),
        (["a=0.5", "a=0.5"], "got 'a=0.5'"),
        (["a=0.5", "b=0.4"], "--into: the shares must sum to 1, got a=0.5 b=0.4"),
        (["a=0.999", "b=0.001"], "--into: must leave lines to every part, got b=0.001 of 300 usable lines"),
    ):
        with pytest.raises(SystemExit, match="2"):
            prepare("dialogue", file, "--output", str(tmp_path / "bad"), "--into", *into)
        assert message in capsys.readouterr().err
