"""Prompts and demonstrations from columns, and lists of demonstrations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer.data import encode_demonstration
from grpo_trainer.recipe import Data, Recipe
from grpo_trainer.recipes import validated
from grpo_trainer.setup import set_up
from grpo_trainer.splits import corpus_of, load_splits
from grpo_trainer.templates import Template
from grpo_trainer.tiny import train_tokenizer

from tests.trainer import small

TALKS = [
    {"question": "hello?", "answers": ["hi!", "hey {you}"], "n": 1},
    {"question": "who {are} you?", "answers": ["i am ann."], "n": 2.5},
]


def data(tmp_path: Path, lines: list[Any], **settings: Any) -> Data:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return build(Data, {"task": None, "train": str(tmp_path / "train.jsonl")} | settings)


def pairs(settings: Data) -> list[tuple[str, str]]:
    return [(item[settings.prompt], item["demonstration"]) for item in load_splits(settings, 0).sft]


def test_a_template_has_columns_and_literal_braces() -> None:
    template = Template("data.template", "Q{n}: {question} {{x}} ####")
    assert template.fill("", TALKS[0]) == "Q1: hello? {x} ####"
    assert template.fill("", TALKS[1]) == "Q2.5: who {are} you? {x} ####"  # braces of a value are left alone
    assert template.columns == ["n", "question"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{question", "must have columns in braces"),
        ("question}", "must have columns in braces"),
        ("{}", r"nothing but the name of a column in braces, got '\{\}'"),
        ("{question!r}", r"got '\{question!r\}'"),
        ("{question:>9}", r"got '\{question:>9\}'"),
        ("{question.__class__}", r"got '\{question.__class__\}'"),
        ("{answers[0]}", r"got '\{answers\[0\]\}'"),
        ("no column", "must have a column in braces, got 'no column'"),
        ("{{question}}", "must have a column in braces"),
    ],
)
def test_bad_templates_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="^data.template: .*" + message):
        Template("data.template", text)


def test_each_element_of_a_list_is_a_demonstration(tmp_path: Path) -> None:
    expected = [("hello?", "hi!"), ("hello?", "hey {you}"), ("who {are} you?", "i am ann.")]
    settings = data(tmp_path, TALKS, prompt="question", demonstration="answers")
    assert pairs(settings) == expected
    splits = load_splits(settings, 0)
    assert splits.train == TALKS  # the rewards read the list
    assert [item["answers"] for item in splits.sft] == [TALKS[0]["answers"]] * 2 + [TALKS[1]["answers"]]
    limited = data(tmp_path, TALKS, prompt="question", demonstration="answers", limit=2)
    assert pairs(limited) == expected[:2]


def test_templates_of_prompt_and_demonstration(tmp_path: Path) -> None:
    settings = data(tmp_path, TALKS, template="{question} R:", demonstration_template="<extra_id_0> {answers} ({n})")
    assert pairs(settings) == [
        ("hello? R:", "<extra_id_0> hi! (1)"),
        ("hello? R:", "<extra_id_0> hey {you} (1)"),
        ("who {are} you? R:", "<extra_id_0> i am ann. (2.5)"),
    ]
    assert [item["prompt"] for item in load_splits(settings, 0).train] == ["hello? R:", "who {are} you? R:"]


def test_a_template_changes_the_prompts_of_a_task_in_every_split() -> None:
    settings = {"task": "arithmetic", "options": {"demonstrations": 3, "train": 3, "validation": 2, "test": 2}}
    plain, filled = (load_splits(build(Data, settings | more), 0) for more in ({}, {"template": "<{prompt}>"}))
    for split in ("sft", "train", "validation", "test"):
        prompts = [f"<{item['prompt']}>" for item in getattr(plain, split)]
        assert prompts and [item["prompt"] for item in getattr(filled, split)] == prompts


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (TALKS, {"template": "{qestion}"}, r"data.template: no column 'qestion'; the nearest is 'question', all are"),
        ([TALKS[0], {"n": 1}], {"template": "{question}"}, r"no column 'question'; .* \(example 2 of train\)"),
        (
            TALKS,
            {"template": "{n}", "demonstration_template": "{answer}"},
            r"demonstration_template: no column 'answer'",
        ),
        (
            [{"prompt": [{"role": "user", "content": "a"}]}],
            {"template": "{prompt}"},
            r"must hold .* messages of a chat",
        ),
        ([{"a": None}], {"template": "{a}"}, r"data.template: column 'a' must hold a text or a number, got None"),
        ([{"a": True}], {"template": "{a}"}, r"column 'a' must hold a text or a number, got True"),
        (
            [{"a": ["x"], "b": ["y"], "prompt": "p"}],
            {"demonstration_template": "{a} {b}"},
            r"demonstration_template: at most one column may hold a list, got \['a', 'b'\] \(example 1 of sft\)",
        ),
        (
            [{"prompt": "p", "demonstration": []}],
            {},
            r"data.demonstration: must be a text or a list of texts, .* got \[\]",
        ),
        ([{"prompt": "p", "demonstration": ["a", " "]}], {}, r"data.demonstration: .* none of them empty"),
        ([{"prompt": "p", "demonstration": {"a": 1}}], {}, r"data.demonstration: must be a text .* got \{'a': 1\}"),
    ],
)
def test_columns_that_do_not_fit_are_named(
    tmp_path: Path, lines: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_splits(data(tmp_path, lines, **settings), 0)


def test_an_unknown_column_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.template: no column 'promt'; the nearest is 'prompt'"):
        set_up(small.recipe(tmp_path, "data.template='{promt}'"))
    with pytest.raises(ValueError, match=r"data.prompt: cannot be combined with template, .* got 'question'"):
        small.recipe(tmp_path, "data.template='{question}'", "data.prompt=question")
    with pytest.raises(ValueError, match=r"data.demonstration: cannot be combined with demonstration_template"):
        small.recipe(tmp_path, "data.demonstration_template='{a}'", "data.demonstration=a")


def test_sft_trains_on_the_elements_and_never_on_the_text_of_a_list(tmp_path: Path) -> None:
    settings = small.values(tmp_path / "run")
    lines = [{"prompt": f"hello {i}", "answers": [f"hi {i}", f"hey {i}"]} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings["data"] = {"task": None, "train": str(tmp_path / "train.jsonl"), "demonstration": "answers"}
    trainer = set_up(validated(Recipe, settings))
    texts = [item["demonstration"] for item in trainer.items("sft")]
    assert texts == [f"{word} {i}" for i in range(8) for word in ("hi", "hey")]
    assert not any("[" in text for text in corpus_of(trainer.recipe.data, trainer.splits))
    trainer.run()


def test_the_sentinel_of_t5_is_trained_as_one_token_and_hidden_from_rewards() -> None:
    tokenizer = train_tokenizer(["yes, i have two dogs. hi there"] * 9, 60, is_seq2seq=True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra_id_0>"]})
    ids = encode_demonstration(tokenizer, Template("t", "<extra_id_0> {answer}").fill("", {"answer": "yes, i have"}))
    assert ids[0] == tokenizer.convert_tokens_to_ids("<extra_id_0>") and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "yes, i have"
