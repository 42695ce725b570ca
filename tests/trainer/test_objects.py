"""Trainers of models, tokenizers and references that the caller has loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from grpo_trainer import checkpoint
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.policy import load_policy
from grpo_trainer.recipe import Lora, Model, Recipe
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.trainer import small
from tests.trainer.small import lines, steps, stop_before, timeless

SHORT = ("sft.steps=2", "rl.steps=3", "evaluation.every=0", "checkpoints.every=1")


class MyModel(LlamaForCausalLM):
    """A class that no automatic choice finds."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    policy = set_up(small.recipe(folder / "run", "seed=5")).policy
    checkpoint.save_policy(policy, folder / "model")
    return folder / "model"


def loaded(folder: Path, kind: Any = AutoModelForCausalLM, **more: Any) -> dict[str, Any]:
    return {"model": kind.from_pretrained(folder, **more), "tokenizer": AutoTokenizer.from_pretrained(folder)}


def object_recipe(folder: Path, *overrides: str) -> Recipe:
    """The small recipe without the keys that say how a model is loaded."""
    return small.recipe(folder, "model={}", *SHORT, *overrides)


@pytest.mark.parametrize("adapters", [[], ["model.lora={rank: 4}"]], ids=["all weights", "adapters"])
def test_an_object_trains_as_its_folder_does(saved: Path, tmp_path: Path, adapters: list[str]) -> None:
    train(small.recipe(tmp_path / "folder", f"model={{path: {saved}}}", *SHORT, *adapters))
    objects, before = loaded(saved), loaded(saved)["model"].state_dict()
    train(object_recipe(tmp_path / "object", *adapters), **objects)
    assert timeless(lines(tmp_path / "object")) == timeless(lines(tmp_path / "folder"))
    now = objects["model"].state_dict()
    assert any(not torch.equal(value, before.get(name, value + 1)) for name, value in now.items()), "itself is trained"


def test_a_resumed_run_keeps_the_class_of_the_object(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (object_recipe(tmp_path / name) for name in ("whole", "broken"))
    # the KL term, too, is that to a model of half precision
    objects = {name: loaded(saved, MyModel, dtype=torch.bfloat16) for name in ("whole", "stopped", "resumed")}
    train(whole, **objects["whole"])
    with monkeypatch.context() as patch:
        real = small.training.train
        patch.setattr(small.training, "train", lambda recipe: real(recipe, **objects["stopped"]))
        stop_before(patch, broken, "rl", 3)
    kinds: list[Any] = []
    load_lm = checkpoint.load_lm
    monkeypatch.setattr(checkpoint, "load_lm", lambda *a: kinds.append(type(load_lm(*a))) or load_lm(*a))
    train(broken, resume=True, **objects["resumed"])
    assert MyModel in kinds
    small.assert_equal_runs(whole.folder, broken.folder)


def test_a_reference_is_that_of_its_path(saved: Path, tmp_path: Path) -> None:
    other = load_policy(Model(path=str(saved)), [], None)
    with torch.no_grad():
        for weight in other.lm.parameters():
            weight.mul_(1.1)
    checkpoint.save_policy(other, tmp_path / "other")
    model = f"model={{path: {saved}, reference_model_path: {tmp_path / 'other'}}}"
    train(small.recipe(tmp_path / "named", model, *SHORT))
    before = [weight.clone() for weight in other.lm.parameters()]
    train(object_recipe(tmp_path / "object"), **loaded(saved), reference=other.lm)
    assert timeless(lines(tmp_path / "object")) == timeless(lines(tmp_path / "named"))
    assert steps(tmp_path / "object")[0]["train/kl_mean"] > 1e-3
    # the caller's object is left as it was
    assert all(torch.equal(*pair) for pair in zip(before, other.lm.parameters(), strict=True))
    assert all(weight.requires_grad for weight in other.lm.parameters())


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"recipe": {}}, "", r"train: recipe must be a Recipe, .* got dict \{\}"),
        ({"reference": "gpt2"}, "", "train: reference must be a model of transformers, got str"),
        ({"tokenizer": "gpt2"}, "", "train: tokenizer must be one of transformers, got str 'gpt2'"),
        ({"tokenizer": None}, "", "train: tokenizer must be given with a model, got None"),
        ({"model": None}, "", "train: tokenizer must be given with a model, got a tokenizer alone"),
        ({"model": "base"}, "", r"train: model must have a language-modelling head, got \w+ without one"),
        ({"model": "adapted"}, "", "train: model must be a model of transformers without adapters"),
        ({}, "model.path=here", "model.path: must be unset with a model object, which is loaded already, got 'here'"),
        ({}, "model.dtype=bfloat16", "model.dtype: must be unset"),
        ({}, "model.tiny.hidden=64", "model.tiny: must be unset"),
        ({}, "rl.rollout.engine=vllm", "rl.rollout.engine: must be transformers with a model"),
        ({"reference": "model"}, "model.reference_model_path=x", ".* must be null with a reference object"),
    ],
)
def test_objects_that_do_not_fit_are_refused(
    saved: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    overrides: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_trainer.engine.check_installed", lambda key, sampling: None)
    objects = {"recipe": object_recipe(tmp_path, *overrides.split())} | loaded(saved)
    special = {"base": objects["model"].base_model, "model": objects["model"]}
    if "adapted" in changes.values():
        special["adapted"] = load_policy(Model(path=str(saved), lora=Lora(rank=2)), [], None).lm
    objects |= {
        name: value if isinstance(value, dict) else special.get(value, value) for name, value in changes.items()
    }
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        set_up(**objects)


def test_a_reference_that_reads_other_tokens_is_refused(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(saved, other)

    def recipe(path: Path) -> Recipe:
        return small.recipe(tmp_path / "run", f"model={{path: {saved}, reference_model_path: {path}}}")

    def refused(path: Path = other) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as raised:
            set_up(recipe(path))
        return str(raised.value)

    assert refused(tmp_path / "none").startswith("model.reference_model_path: no such model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    assert "must read the tokens of model.path, got" in refused()
    (other / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    first, second = sorted(words, key=words.get)[-2:]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert f"is token {words[first]} and not {words[second]}" in refused()
    assert evaluate_model(recipe(other), str(saved), "test").metrics  # which has no KL term
