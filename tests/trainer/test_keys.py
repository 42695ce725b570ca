"""Every key of a recipe changes something: a table says what, and a key without an entry fails."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

from grpo_trainer.checkpoint import save_policy
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import validated, fields_of, override, plain
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.key_cases import CASES, CHANGES, Run

SMALL = (
    "data.options={demonstrations: 24, train: 12, validation: 0, test: 2, boxes: 0.0}",
    "phases=[{rl: {steps: 2, epochs: 1, minibatches: 1, micro_batch: 16, optimizer: {lr: 0.01}, rewards: [{name: "
    "'tests.trainer.small:digits'}], rollout: {prompts: 4, group_size: 4, max_new_tokens: 6}}}]",
    "evaluation.every=0",
)
LINES = [
    {
        "prompt": f"what is {i % 3}",
        "question": f"and what is {i}",
        "demonstration": f"so {i} #### {i}" * (1 + i % 2),
        "solution": f"#### {i}{i}",
        "answer": str(i),
    }
    for i in range(9)
]


def keys(kind: type, where: str = "") -> Iterator[str]:
    """Keys with a value: leaves, and optional parts of a recipe."""
    for name, field in fields_of(kind).items():
        path = f"{where}{name}"
        options = [
            kind_of_field
            for kind_of_field in (field.type, *typing.get_args(field.type))
            if dataclasses.is_dataclass(kind_of_field)
        ]
        is_list = typing.get_origin(field.type) is list
        if not options or type(None) in typing.get_args(field.type) or name == "rewards":
            yield path
        for kind_of_field in options:
            yield from keys(typing.cast(type, kind_of_field), f"{path}[]." if is_list else f"{path}.")


def place(key: str) -> str:
    """Path of a key in the small recipe."""
    return key.replace("[]", ".0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    policy = set_up(small.recipe(folder / "run", "seed=5")).policy
    policy.tokenizer.chat_template = "{% for message in messages %}said {{ tone }}: {{ message.content }}{% endfor %}"
    save_policy(policy, folder / "saved")
    with torch.no_grad():
        for weight in policy.lm.parameters():
            weight.mul_(1.1)
    save_policy(policy, folder / "sibling")
    for name, lines in (("data", LINES), ("other", LINES[::-2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    models = {name: str(folder / name) for name in ("saved", "sibling")}
    return models | {name: str(folder / f"{name}.jsonl") for name in ("data", "other")}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, files: dict[str, str]) -> Any:
    """Observation of a case; runs of equal recipes are shared."""
    runs: dict[str, Run] = {}

    def look(case: Any, *changes: str) -> Any:
        values = small.values(tmp_path_factory.mktemp("run"))
        for assignment in SMALL:
            override(values, assignment)
        for assignment in (*case.given, *changes):
            if assignment.startswith("data="):
                values["data"] = {}
            override(values, assignment.format(**files))
        recipe = validated(Recipe, values)
        if not case.runs:
            return case.seen(recipe)
        same = json.dumps(plain(recipe.model_copy(update=dict(output="")))
        if same not in runs:
            runs[same] = Run.of(recipe)
        return case.seen(runs[same])

    return look


def test_every_key_has_an_entry() -> None:
    assert set(keys(Recipe)) == set(CASES)


@pytest.mark.full
@pytest.mark.parametrize("key", CASES)
def test_every_key_changes_something(seen: Any, key: str) -> None:
    case = CASES[key]
    value = json.dumps(case.value).replace("{", "{{").replace("}", "}}")
    for name in ("saved", "sibling", "data", "other"):
        value = value.replace(f"{{{{{name}}}}}", f"{{{name}}}")
    changed = CHANGES.get(key, (f"{place(key)}={value}",))
    # outside the assertion, as observations may be long
    is_different = seen(case) != seen(case, *changed)
    assert is_different
