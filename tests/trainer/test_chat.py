"""Chat prompts: lists of messages, and texts through a chat template, from the data to the evaluations.

Faults they are there for: a prompt that training and evaluation encode differently; a template's variable that is
misspelt and ignored; a reward that gets texts for messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_trainer.checkpoint import save_policy
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.recipe import Recipe
from grpo_trainer.rewards.reply import Weights
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from transformers import AutoTokenizer

from tests.trainer import small
from tests.trainer.small import lines, newest

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} and so{% endif %}"
)
TEXTS = [f"How many is {i} and {i + 1}?" for i in range(6)]
NOTING = "{name: 'tests.trainer.test_chat:noting'}"
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


def recipe(folder: Path, model: Path | str, as_messages: bool, *overrides: str) -> Recipe:
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in TEXTS] if as_messages else TEXTS
    data = [
        {"prompt": prompt, "demonstration": f"#### {i}", "answer": str(i), "post": text}
        for i, (prompt, text) in enumerate(zip(prompts, TEXTS, strict=True))
    ]
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in data))
    files = f"{{task: null, train: {file}, validation: {file}, test: {file}}}"
    settings = (f"model={{path: {model}, chat_template: true}}", f"data={files}", f"rl.rewards=[{NOTING}]")
    return small.recipe(folder / "run", *settings, "sft.steps=1", "rl.steps=1", *overrides)


def test_messages_and_templated_texts_are_the_same_prompts(tmp_path: Path, model: Path) -> None:
    def first(as_messages: bool, *overrides: str, split: str = "train") -> Any:
        return set_up(recipe(tmp_path, model, as_messages, *overrides)).items(split)[0]["prompt_ids"]

    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = tokenizer(f"user: {TEXTS[0]}\nassistant:", add_special_tokens=False)["input_ids"]
    assert first(True) == first(False) == expected
    assert first(False, "model.chat_template=false") == tokenizer(TEXTS[0])["input_ids"]
    thinking = "model.chat_template_options={enable_thinking: false}"
    expected = tokenizer(f"user: {TEXTS[0]}\nassistant: and so", add_special_tokens=False)["input_ids"]
    for split in ("train", "validation", "sft"):
        assert first(False, thinking, split=split) == expected
    for name in ("enable_thinkng", "messages"):
        rule = f"must be variables of the tokenizer's chat template, got '{name}'"
        with pytest.raises(ValueError, match=f"^model.chat_template_options: {rule}"):
            first(False, f"model.chat_template_options={{{name}: 1}}")
    with pytest.raises(ValueError, match=r"^model.chat_template_options: need model.chat_template: true"):
        first(False, thinking, "model.chat_template=false")


@pytest.mark.parametrize("as_messages", [True, False])
def test_a_chat_from_the_data_to_the_evaluations(tmp_path: Path, model: Path, as_messages: bool) -> None:
    seen.clear()
    clusters = "rl.algorithm.similarity.embedder=hashed"
    chat = recipe(tmp_path, model, as_messages, f"rl.rewards=[{NOTING}, {{name: reply}}, {{name: exact}}]", clusters)
    train(chat)

    def text_of(value: Any, role: str) -> str:
        assert isinstance(value, list if as_messages else str)
        return str(value[0]["content"]) if as_messages and value[0]["role"] == role else str(value)

    assert seen and all(text_of(prompt, "user") in TEXTS for call in seen for prompt in call["prompts"])
    answers = {text_of(value, "assistant") for call in seen for value in call["completions"]}
    (step,) = small.steps(chat.folder)
    parts = {name: step[f"rewards/components/{name}"] for name in Weights.model_fields}
    total = sum(weight * parts[name] for name, weight in Weights())
    assert step["rewards/reply"] == pytest.approx(total, abs=1e-6) and total > 0
    evaluated = {name for line in lines(chat.folder) for name in line}
    assert {f"eval/{split}_components/relevance" for split in ("validation", "test")} <= evaluated
    sample = lines(chat.folder, "samples")[0]
    assert text_of(sample["prompt"], "user") in TEXTS and sample["response"] in answers
    maps = [line["map"] for line in lines(chat.folder, "evaluations") if "map" in line]
    assert maps and maps[0]["prompt"] in TEXTS
    result = evaluate_model(chat, str(newest(chat.folder)), "test")
    assert text_of(result.lines[0]["prompt"], "user") == TEXTS[0]
    key = "data.prompt: a list of messages" if as_messages else "model.chat_templ"
    with pytest.raises(ValueError, match=f"^{key}.* needs a tokenizer with a chat template"):
        set_up(recipe(tmp_path, "tiny", as_messages)).items("train")
