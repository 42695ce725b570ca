"""Adapters on 4-bit weights, on the CPU: quantisation, training, resuming, evaluation of the base."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import bitsandbytes
from grpo_trainer import loading, memory
from grpo_trainer.policy import Policy, load_policy
from grpo_trainer.recipe import Recipe
from grpo_trainer.setup import set_up
from grpo_trainer.train import train, evaluate_model
from safetensors.torch import load_file

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after, timeless

SIZES = ("model.tiny.hidden=64", "model.tiny.intermediate=128")  # blocks of a scale have 64 weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    policy = set_up(small.recipe(folder / "run", "seed=5", *SIZES)).policy
    policy.lm.save_pretrained(folder / "model")
    policy.tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def four_bit(saved: Path, folder: Path, *overrides: str) -> Recipe:
    model = f"model={{path: {saved}, four_bit: true, lora: {{rank: 4}}}}"
    return small.recipe(folder, model, "checkpoints.every=1", *overrides)


def quantized(policy: Policy) -> dict[str, Any]:
    """Layers with weights in 4 bits, which adapters wrap, by name."""
    layers = {name: layer for name, layer in policy.inner.named_modules() if name.endswith(".base_layer")}
    return {name: layer for name, layer in layers.items() if hasattr(layer.weight, "quant_state")}


def adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "1-000004" / "model" / "adapter_model.safetensors")


def test_linear_layers_are_stored_in_four_bits(saved: Path, tmp_path: Path) -> None:
    recipe = four_bit(saved, tmp_path)
    policy = load_policy(recipe.model, [], None)
    layers = {name.removesuffix(".base_layer") for name in quantized(policy)}
    assert len(layers) == 7 and all("proj" in name for name in layers)  # not the head, nor the adapters
    stored = 0.0
    for module in quantized(policy).values():
        state = module.weight.quant_state
        stored += module.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
        assert module.weight.dtype == torch.uint8 and state.quant_type == "nf4"
    skeleton = memory.load_skeleton(recipe.model)
    estimated = sum(memory.NF4_BYTES * weight.numel() for weight in skeleton._quantized())
    # scales of scales are whole numbers here, one of 4 bytes a layer, where larger layers need 1 / 16384 a weight
    assert stored == pytest.approx(estimated, abs=4 * len(layers))


def test_log_probs_are_those_of_the_dequantized_weights(saved: Path, tmp_path: Path) -> None:
    recipe = four_bit(saved, tmp_path)
    policy = load_policy(recipe.model, [], None)
    plain = load_policy(recipe.model.model_copy(update=dict(four_bit=False, lora=None), [], None)
    modules = dict(plain.inner.named_modules())
    for name, module in quantized(policy).items():
        weight = bitsandbytes.functional.dequantize_4bit(module.weight, module.weight.quant_state)
        modules[name.removesuffix(".base_layer")].weight.data.copy_(weight)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        ours, expected = (of.lm(input_ids=ids).logits for of in (policy, plain))
    # Seven products in a row round their operands to bfloat16, each by 2^-9 at most.
    assert float((ours - expected).abs().max()) < 7 * 2 * 2.0**-9 * float(expected.abs().max())
    assert not torch.equal(ours, expected)


def test_adapters_are_trained_resumed_and_compared_with_their_base(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = four_bit(saved, tmp_path / "whole")
    trainer = set_up(whole)
    before = {name: module.weight.clone() for name, module in quantized(trainer.policy).items()}
    trainer.run()
    assert all(torch.equal(before[name], module.weight) for name, module in quantized(trainer.policy).items())
    trained = adapters(whole.folder)
    assert all("lora" in name for name in trained) and any(bool(value.any()) for value in trained.values())
    parts = four_bit(saved, tmp_path / "parts")
    stopped_after(monkeypatch, parts, 1, 2)
    train(parts, resume=True)
    assert all(torch.equal(value, trained[name]) for name, value in adapters(parts.folder).items())
    assert timeless(lines(parts.folder)) == timeless(lines(whole.folder))

    loaded: list[Policy] = []
    load = loading.load_lm
    monkeypatch.setattr("grpo_trainer.policy.load_lm", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1])
    evaluated = dataclasses.replace(whole, evaluation=dataclasses.replace(whole.evaluation, samples=0))
    base = evaluate_model(evaluated, str(saved), "validation")
    start = next(line for line in lines(whole.folder) if line["phase"] == "eval" and line["number"] == 0)
    assert base.metrics["reward"] == start["eval/validation_reward"]
    (lm,) = loaded
    assert any(hasattr(weight, "quant_state") for weight in lm.parameters())


def test_versions_that_were_not_tried_on_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.49.2")
    with pytest.raises(ValueError, match=r"needs bitsandbytes 0\.50 or later without a GPU, got 0\.49\.2"):
        loading.check_four_bit()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    loading.check_four_bit()
