"""Trainers of models, tokenizers and references that the caller has loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from grpo_trainer import checkpoint
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.policy import load_policy
from grpo_trainer.recipe import Lora, Model, Recipe
from grpo_trainer.recipes import load
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.trainer import small
from tests.trainer.small import lines, timeless


class MyModel(LlamaForCausalLM):
    """A class that no automatic choice finds."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    policy = set_up(small.recipe(folder / "run", "seed=5")).policy
    policy.lm.save_pretrained(folder / "model")
    policy.tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def loaded(folder: Path, kind: Any = AutoModelForCausalLM) -> dict[str, Any]:
    return {"model": kind.from_pretrained(folder), "tokenizer": AutoTokenizer.from_pretrained(folder)}


def object_recipe(folder: Path, *overrides: str) -> Recipe:
    """The small recipe without the keys that say how a model is loaded."""
    return small.recipe(folder, "model={}", *overrides)


def test_objects_of_another_type(tmp_path: Path) -> None:
    recipe = small.recipe(tmp_path)
    with pytest.raises(TypeError, match=r"^train: recipe must be a Recipe, .* got dict \{\}"):
        set_up({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^load: path must be a YAML file or the name of a recipe, got dict"):
        load({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^train: reference must be a model of transformers, got str"):
        set_up(recipe, reference="gpt2")
    policy = set_up(recipe).policy
    with pytest.raises(TypeError, match=r"^train: tokenizer must be one of transformers, got str 'gpt2'"):
        set_up(recipe, model=policy.lm, tokenizer="gpt2")
    with pytest.raises(TypeError, match=r"^train: model must have a language-modelling head, got \w+ without one"):
        set_up(recipe, model=policy.lm.base_model, tokenizer=policy.tokenizer)


@pytest.mark.parametrize("adapters", [[], ["model.lora={rank: 4}"]], ids=["all weights", "adapters"])
def test_an_object_trains_as_its_folder_does(saved: Path, tmp_path: Path, adapters: list[str]) -> None:
    train(small.recipe(tmp_path / "folder", f"model={{path: {saved}}}", *adapters))
    objects = loaded(saved)
    train(object_recipe(tmp_path / "object", *adapters), **objects)
    assert timeless(lines(tmp_path / "object")) == timeless(lines(tmp_path / "folder"))
    before = loaded(saved)["model"].state_dict()
    now = objects["model"].state_dict()
    assert any(not torch.equal(value, before.get(name, value + 1)) for name, value in now.items()), (
        "it is trained itself"
    )


def test_a_resumed_run_keeps_the_class_of_the_object(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = (object_recipe(tmp_path / name, "checkpoints.every=1") for name in ("whole", "broken"))
    train(whole, **halved(saved))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop(patch, broken)
        train(broken, **halved(saved))
    kinds: list[Any] = []
    load_lm = checkpoint.load_lm
    monkeypatch.setattr(checkpoint, "load_lm", lambda *a: kinds.append(type(load_lm(*a))) or load_lm(*a))
    train(broken, resume=True, **halved(saved))
    assert MyModel in kinds
    small.assert_equal_runs(whole.folder, broken.folder)  # the KL term, too, is that to a model of half precision


def halved(folder: Path) -> dict[str, Any]:
    objects = loaded(folder, MyModel)
    objects["model"].bfloat16()
    return objects


def stop(patch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """Interrupts a run after the second RL step's checkpoint."""
    save = checkpoint.save

    def saving(of: Recipe, policy: Any, optimizer: Any, state: checkpoint.State, log: Any) -> None:
        save(of, policy, optimizer, state, log)
        if (state.phase, state.step) == ("rl", 2):
            raise KeyboardInterrupt

    patch.setattr(checkpoint, "save", saving)


def test_a_reference_is_that_of_its_path(saved: Path, tmp_path: Path) -> None:
    other = load_policy(Model(path=str(saved)), [], None).lm
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(saved).save_pretrained(tmp_path / "other")
    named = small.recipe(tmp_path / "named", f"model={{path: {saved}, reference_model_path: {tmp_path / 'other'}}}")
    train(named)
    before = [weight.clone() for weight in other.parameters()]
    train(object_recipe(tmp_path / "object"), **loaded(saved), reference=other)
    entries = lines(tmp_path / "object")
    assert timeless(entries) == timeless(lines(tmp_path / "named"))
    assert (
        next(entry for entry in entries if entry["kind"] == "train" and entry["phase"] == "rl")["train/kl_mean"] > 1e-3
    )
    assert all(torch.equal(*pair) for pair in zip(before, other.parameters(), strict=True))
    assert all(weight.requires_grad for weight in other.parameters())  # the caller's object is left as it was


@pytest.mark.parametrize(
    ("overrides", "without", "message"),
    [
        ([], ["tokenizer"], "train: tokenizer must be given with a model, got None"),
        ([], ["model"], "train: tokenizer must be given with a model, got a tokenizer alone"),
        (["model.path=here"], [], "model.path: must be unset with a model object, which is loaded already, got 'here'"),
        (["model.dtype=bfloat16"], [], "model.dtype: must be unset"),
        (["model.tiny.hidden=64"], [], "model.tiny: must be unset"),
        (["rl.rollout.engine=vllm"], [], "rl.rollout.engine: must be transformers with a model"),
    ],
)
def test_objects_that_do_not_fit_are_refused(
    saved: Path, tmp_path: Path, overrides: list[str], without: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_trainer.engine.check_installed", lambda key, sampling: None)
    objects = {name: value for name, value in loaded(saved).items() if name not in without}
    with pytest.raises(ValueError, match=message):
        set_up(object_recipe(tmp_path, *overrides), **objects)


def test_a_reference_object_and_path_are_refused_together(saved: Path, tmp_path: Path) -> None:
    objects = loaded(saved)
    with pytest.raises(ValueError, match="must be null with a reference object"):
        set_up(object_recipe(tmp_path, "model.reference_model_path=x"), **objects, reference=objects["model"])


def test_models_with_adapters_are_refused(saved: Path, tmp_path: Path) -> None:
    adapted = load_policy(Model(path=str(saved), lora=Lora(rank=2)), [], None)
    with pytest.raises(TypeError, match="must be a model of transformers without adapters"):
        set_up(object_recipe(tmp_path), adapted.lm, adapted.tokenizer)


def test_a_reference_that_reads_other_tokens_is_refused(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(saved, other)

    def refused(path: Path) -> str:
        recipe = small.recipe(tmp_path / "run", f"model={{path: {saved}, reference_model_path: {path}}}")
        with pytest.raises((ValueError, FileNotFoundError)) as raised:
            set_up(recipe)
        return str(raised.value)

    assert refused(tmp_path / "none").startswith("model.reference_model_path: no such model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    assert "must read the tokens of model.path, got" in refused(other)
    (other / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    first, second = sorted(words, key=words.get)[-2:]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert f"is token {words[first]} and not {words[second]}" in refused(other)
    recipe = small.recipe(tmp_path / "run", f"model={{path: {saved}, reference_model_path: {other}}}")
    assert evaluate_model(recipe, str(saved), "test").metrics  # which has no KL term
