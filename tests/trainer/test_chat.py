"""Chat prompts: lists of messages, and texts through a chat template, from the data to the report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from grpo_trainer.checkpoint import save_policy
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import validated
from grpo_trainer.report import write_report
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} and so{% endif %}"
)
TEXTS = [f"How many is {i} and {i + 1}?" for i in range(6)]
seen: list[dict[str, Any]] = []


def noting(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    seen.append({"prompts": prompts, "completions": completions})
    return [float(i % 3) for i in range(len(completions))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    policy = set_up(small.recipe(folder.parent / "run", "model.tiny.vocabulary=200")).policy
    policy.tokenizer.chat_template = TEMPLATE
    save_policy(policy, folder)
    return folder


def recipe(folder: Path, model: Path | str, as_messages: bool, *rewards: str, chat: bool = True) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in TEXTS] if as_messages else TEXTS
    data = [
        {"prompt": prompt, "demonstration": f"#### {i}", "answer": str(i), "post": text}
        for i, (prompt, text) in enumerate(zip(prompts, TEXTS, strict=True))
    ]
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in data))
    values = small.values(folder / "run")
    values["model"] = {"path": str(model), "chat_template": chat}
    values["data"] = {"task": None, "train": str(file), "validation": str(file), "test": str(file)}
    values["phases"][0]["sft"]["steps"] = values["phases"][1]["rl"]["steps"] = 1
    values["phases"][1]["rl"]["algorithm"] = {"similarity": {"embedder": "hashed"}}
    values["phases"][1]["rl"]["rewards"] = [{"name": name} for name in rewards or ("tests.trainer.test_chat:noting",)]
    return validated(Recipe, values)


def test_messages_and_templated_texts_are_the_same_prompts(tmp_path: Path, model: Path) -> None:
    policy = set_up(recipe(tmp_path, model, True)).policy
    expected = policy.tokenizer(f"user: {TEXTS[0]}\nassistant:", add_special_tokens=False)["input_ids"]
    for as_messages in (True, False):
        items = set_up(recipe(tmp_path, model, as_messages)).items("train")
        assert items[0]["prompt_ids"] == expected
    assert set_up(recipe(tmp_path, model, False, chat=False)).items("train")[0]["prompt_ids"] != expected


def test_variables_of_the_template(tmp_path: Path, model: Path) -> None:
    def with_options(options: dict[str, Any], chat: bool = True) -> Trainer:
        values = recipe(tmp_path, model, False, chat=chat)
        return set_up(
            dataclasses.replace(values, model=dataclasses.replace(values.model, chat_template_options=options))
        )

    trainer = with_options({"enable_thinking": False})
    expected = trainer.policy.tokenizer(f"user: {TEXTS[0]}\nassistant: and so", add_special_tokens=False)["input_ids"]
    assert trainer.items("train")[0]["prompt_ids"] == trainer.items("validation")[0]["prompt_ids"] == expected
    for options, rule in (
        ({"enable_thinkng": False}, "must be variables of the tokenizer's chat template, got 'enable_thinkng'"),
        ({"messages": []}, "must be variables of the tokenizer's chat template, got 'messages'"),
    ):
        with pytest.raises(ValueError, match=f"^model.chat_template_options: {rule}"):
            with_options(options).items("train")
    with pytest.raises(ValueError, match=r"^model.chat_template_options: need model.chat_template: true"):
        with_options({"enable_thinking": False}, chat=False).items("train")


def test_a_chat_from_the_data_to_the_report(tmp_path: Path, model: Path) -> None:
    seen.clear()
    chat_recipe = recipe(tmp_path, model, True, "tests.trainer.test_chat:noting", "reply", "exact")
    train(chat_recipe)
    for call in seen:
        assert all(prompt[0]["role"] == "user" and prompt[0]["content"] in TEXTS for prompt in call["prompts"])
        assert all(
            [*answer[0]] == ["role", "content"] and answer[0]["role"] == "assistant" for answer in call["completions"]
        )
    sample = lines(chat_recipe.folder, "samples")[0]
    assert sample["prompt"][0]["content"] in TEXTS and isinstance(sample["response"], str)
    assert lines(chat_recipe.folder, "maps")[0]["prompt"] in TEXTS
    page = write_report(chat_recipe.folder).read_text()
    assert f"user: {TEXTS[0]}" in page and "&#x27;content&#x27;" not in page.split("all settings of this run")[0]
    result = evaluate_model(
        chat_recipe, str(sorted((chat_recipe.folder / "checkpoints").iterdir())[-1] / "model"), "test"
    )
    assert result.lines[0]["prompt"] == [{"role": "user", "content": TEXTS[0]}]


def test_functions_get_texts_where_the_data_has_texts(tmp_path: Path, model: Path) -> None:
    seen.clear()
    train(recipe(tmp_path, model, False))
    assert all(isinstance(text, str) for call in seen for text in (*call["prompts"], *call["completions"]))


@pytest.mark.parametrize(
    ("as_messages", "key"), [(True, "data.prompt: a list of messages"), (False, "model.chat_templ")]
)
def test_a_tokenizer_without_a_template_is_named(tmp_path: Path, as_messages: bool, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}.* needs a tokenizer with a chat template"):
        train(recipe(tmp_path, "tiny", as_messages))
