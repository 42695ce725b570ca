"""Adapters on the LM head in TRL's trainers: against the logits of PEFT's own forward pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("datasets")

import peft
import trl.trainer.utils as host
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import adapters, patch_trl, unpatch_trl
from tests.integrations import tiny_trl


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    patch_trl()
    yield
    unpatch_trl()


def adapted(**options: Any) -> Any:
    """The tiny model with random adapters on its head and its queries, and a fused head."""
    model = AutoModelForCausalLM.from_pretrained(tiny_trl.model())
    defaults = {"r": 3, "lora_alpha": 5, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**defaults | options))
    host.add_fused_lm_head(model.get_base_model(), temperature=0.7, outputs=("log_probs", "entropy"))
    return model


def tokens() -> Tensor:
    return torch.randint(3, len(tiny_trl.WORDS), (3, 9), generator=torch.Generator().manual_seed(2))


def fused(model: Any) -> Tensor:
    result: Tensor = model(input_ids=tokens(), labels=tokens(), fused_lm_head=True).log_probs
    return result


def from_logits(model: Any) -> Tensor:
    logits = model(input_ids=tokens()).logits[:, :-1] / 0.7
    return logits.log_softmax(-1).gather(-1, tokens()[:, 1:, None]).squeeze(-1)


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    logprobs.square().sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}], ids=str
)
def test_values_and_gradients_are_those_of_the_logits(options: dict[str, Any]) -> None:
    model = adapted(**options)
    got, want = fused(model), from_logits(model)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ours, theirs = gradients(model, got), gradients(model, want)
    assert ours.keys() == theirs.keys() and any("lm_head" in name for name in ours)
    for name, value in theirs.items():
        assert value.any()
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)
    with model.disable_adapter():
        base, want = fused(model), from_logits(model)
    torch.testing.assert_close(base, want, rtol=1e-5, atol=1e-5)
    assert (base - got).abs().max() > (0.1 if "modules_to_save" not in options else 0.01)


def test_results_that_only_trl_computes_count_the_adapter() -> None:
    model = adapted()
    host.add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "is_top1"))
    result = model(input_ids=tokens(), labels=tokens(), fused_lm_head=True)
    logits = model(input_ids=tokens()).logits[:, :-1]
    assert torch.equal(result.is_top1.bool(), logits.argmax(-1) == tokens()[:, 1:])
    want = logits.log_softmax(-1).gather(-1, tokens()[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(result.log_probs, want, rtol=1e-5, atol=1e-5)
    assert any("lm_head" in name for name in gradients(model, result.log_probs))


def test_merged_adapter_is_in_the_weight() -> None:
    model = adapted()
    want = from_logits(model)
    model.merge_adapter()
    torch.testing.assert_close(fused(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "plain LoRA"),
        ({"lora_dropout": 0.1}, "lora_dropout=0"),
        ({"lora_bias": True}, "no bias"),
        ({"trainable_token_indices": {"lm_head": [3]}, "target_modules": ["q_proj"]}, "single tokens"),
    ],
    ids=str,
)
def test_heads_that_are_more_than_lora_are_refused(options: dict[str, Any], reason: str) -> None:
    model = adapted(**options)
    model.train()
    with pytest.raises(ValueError, match=f"patch_trl: .*{reason}.*; got "):
        fused(model)
    if "lora_dropout" in options:  # which evaluation does not apply
        model.eval()
        torch.testing.assert_close(fused(model), from_logits(model), rtol=1e-5, atol=1e-5)


def test_two_active_adapters_are_refused() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"one adapter may be active on the LM head, not \['default', 'other'\]"):
        fused(model)


def test_head_in_float32_is_refused_with_an_adapter() -> None:
    model = adapted()
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32 must be False with an adapter"):
        host.add_fused_lm_head(model.get_base_model(), cast_lm_head_to_fp32=True)


def test_without_the_patch_the_adapter_is_not_ignored() -> None:
    model = adapted()
    unpatch_trl()
    with pytest.raises(RuntimeError, match="unpatch_trl: the LM head must have no adapter"):
        fused(model)


def grpo(folder: Path, **options: Any) -> GRPOTrainer:
    config = {"r": 2, "target_modules": ["lm_head"], **options}
    return GRPOTrainer(
        tiny_trl.model(),
        [tiny_trl.many_a],
        GRPOConfig(**tiny_trl.settings(folder, max_steps=3, beta=0.04)),
        tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
        peft_config=peft.LoraConfig(**config),
    )


def test_grpo_trains_the_adapter(tmp_path: Path) -> None:
    trainer = grpo(tmp_path)
    trainer.train()
    factors = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert len(factors) == 2 and all("lm_head" in name for name in factors)
    assert all(value.any() for value in factors.values())  # B begins at 0
    # the reference policy is the model without the adapter, so the first step has no divergence and later ones do
    divergences = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert divergences[0] == 0 and divergences[-1] > 0


@pytest.mark.full
def test_trainers_that_are_imported_after_the_patch_accept_the_adapter() -> None:
    """In a process of its own: TRL imports its trainers when they are first used, and the patch imports GRPO alone."""
    code = """
import importlib, sys, peft, torch
from grpo_kernels.integrations.trl import patch_trl
names = [f"trl.trainer.{name}_trainer" for name in ("kto", "dpo", "sft", "rloo")]
print(not any(name in sys.modules for name in names))
patch_trl()
model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 5)), peft.LoraConfig(target_modules=["0"]))
head = model.base_model.model[0]
assert isinstance(head, peft.tuners.tuners_utils.BaseTunerLayer)
print(*(isinstance(head, importlib.import_module(name).BaseTunerLayer) for name in names))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split()[-5:] == ["True", *["False"] * 4], run.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "plain LoRA"), ({"lora_dropout": 0.1}, "lora_dropout=0"), ({"lora_bias": True}, "no bias")],
    ids=str,
)
def test_a_trainer_is_refused_with_the_reason(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"patch_trl: the adapter 'default' of the LM head must .*{reason}"):
        grpo(tmp_path, **options)


def test_trl_alone_refuses(tmp_path: Path) -> None:
    unpatch_trl()
    with pytest.raises(ValueError, match="PEFT adapter"):
        grpo(tmp_path)


def test_without_peft_a_forward_knows_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 may shard it."""
    unpatch_trl()
    monkeypatch.setattr(adapters, "is_peft_available", lambda: False)
    patch_trl()
    assert vars(host)["add_fused_lm_head"] is adapters._add_fused_lm_head
    model = AutoModelForCausalLM.from_pretrained(tiny_trl.model())
    host.add_fused_lm_head(model)
    seen: list[Any] = []
    linear_logprobs = gk.linear_logprobs

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append(adapters.current())
        return linear_logprobs(*args, **options)

    monkeypatch.setattr(gk, "linear_logprobs", recorded)
    fused(model)
    assert seen == [adapters.Call((model.lm_head, model))] and adapters.current() == adapters.Call()
    unpatch_trl()
    assert vars(host)["add_fused_lm_head"] is not adapters._add_fused_lm_head


def test_sft_trains_the_adapter(tmp_path: Path) -> None:
    texts = tiny_trl.prompts().map(lambda row: {"text": row["prompt"] + " a b c"}, remove_columns=["prompt"])
    arguments = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False}
    trainer = SFTTrainer(
        tiny_trl.model(),
        SFTConfig(output_dir=str(tmp_path), **arguments),
        train_dataset=texts,
        processing_class=tiny_trl.tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["lm_head"]),
    )
    trainer.train()
    assert all(value.any() for value in trainer.model.parameters() if value.requires_grad)
