"""patch_trl: TRL's scoring functions against ours, adapters on the LM head against PEFT's logits, and its undoing.

The faults to notice: a temperature, softcap, scale, mask or gradient that differs from TRL's; an adapter that the fused
head ignores, or that is more than LoRA and is accepted; a module of TRL that keeps ours after unpatch_trl.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("datasets")

import peft
import trl
import trl.kernels.chunked_logprob as kernels
import trl.trainer.utils as host
from transformers import AutoModelForCausalLM

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, adapters, patch_trl, unpatch_trl
from grpo_kernels.integrations.trl import head as _head
from grpo_kernels.integrations.trl import patch as trl_patch
from tests.harness import assert_close_to_rounding, assert_within_budget
from tests.integrations import tiny_trl
from tests.integrations.test_trl import SGD
from tests.integrations.test_trl_loss import step


@pytest.fixture
def patched() -> Iterator[None]:
    patch_trl()
    yield
    unpatch_trl()


def test_patches_are_taken_back() -> None:
    names = ("_ChunkedLogProbFunction", "selective_log_softmax", "entropy_from_logits", "_use_triton", "DTensor")
    names += ("add_fused_lm_head", "BaseTunerLayer")
    modules = [host, *(importlib.import_module(f"trl.trainer.{name}_trainer") for name in ("grpo", "rloo", "dpo"))]
    before = [{name: vars(module).get(name) for name in names} for module in modules]
    patch_trl(head=False)
    assert host._ChunkedLogProbFunction is before[0]["_ChunkedLogProbFunction"]
    assert host.selective_log_softmax is not before[0]["selective_log_softmax"]
    patch_trl()
    patch_trl()
    during = [{name: vars(module).get(name) for name in names} for module in modules]
    assert not any(during[0][name] is before[0][name] for name in names[:-1])
    for module in range(1, len(modules)):
        for name in set(names) - {"_use_triton", "DTensor"}:
            assert before[module][name] is None or during[module][name] is not before[module][name], name
    # TRL's own kernels still query Triton's availability for the calls left to them
    assert kernels._use_triton is before[0]["_use_triton"]
    unpatch_trl()
    unpatch_trl()
    assert [{name: vars(module).get(name) for name in names} for module in modules] == before


def test_results_have_the_precision_of_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, index = torch.randn(2, 3, 11).bfloat16(), torch.zeros(2, 3, dtype=torch.long)
    for is_on_gpu, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        monkeypatch.setattr(trl_patch, "uses_triton", lambda device, answer=is_on_gpu: answer)
        logprobs, entropy = trl_patch.selective_log_softmax_and_entropy(logits, index)
        assert logprobs.dtype == entropy.dtype == dtype
        own = gk.token_logprobs(logits, index, return_entropy=True)
        assert torch.equal(logprobs, own.logprobs.to(dtype)) and torch.equal(entropy, own.entropy.to(dtype))


INDEX = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))
IS_ROW = (torch.arange(5) < torch.tensor([[5], [2], [4]])).long()
SCORED = {
    "selective_log_softmax": [
        lambda f, x: f(x, INDEX),
        lambda f, x: f(x, INDEX, 0.7),
        lambda f, x: f(x, INDEX, row_mask=IS_ROW),
        lambda f, x: f(x, torch.stack([INDEX, INDEX], -1)),
    ],
    "entropy_from_logits": [lambda f, x: f(x)],
    "selective_log_softmax_and_entropy": [
        lambda f, x: sum(f(x, INDEX)),
        lambda f, x: sum(f(x, INDEX, entropy_requires_grad=False)),
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCORED)
def test_functions_of_logits(name: str, dtype: torch.dtype) -> None:
    theirs = getattr(host, name)
    patch_trl()
    ours = getattr(host, name)
    logits = (3 * torch.randn(3, 5, 11)).to(dtype)

    def scored(case: Any, function: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = logits.to(dtype, copy=True).requires_grad_()
        value = case(function, x)
        value.to(torch.promote_types(dtype, torch.float32)).square().sum().backward()
        return value.detach(), x.grad

    try:
        for case in SCORED[name]:
            got, want = (scored(case, function, dtype) for function in (ours, theirs))
            assert got[0].dtype == want[0].dtype
            if dtype == torch.float32:
                assert_close_to_rounding(got, want, lambda of=case: scored(of, theirs, dtype))
            else:  # TRL's function rounds each of its results to bfloat16
                exact = scored(case, theirs, torch.float64)
                for mine, other, gold in zip(got, want, exact, strict=True):
                    assert_within_budget(mine, other, gold)
    finally:
        unpatch_trl()


@pytest.mark.parametrize("outputs", [(), ("entropy",), ("log_sum_sq_probs",)], ids=["alone", "entropy", "WPO"])
@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(None, 1.0, 1.0), (2.0, 1.0, 0.7), (None, 0.5, 1.3)])
def test_the_head(softcap: float | None, scale: float, temperature: float, outputs: tuple[str, ...]) -> None:
    values = [torch.randn(7, 6), torch.randn(11, 6), torch.randn(11)]
    targets = torch.randint(0, 11, (7,))
    options = temperature, 4, softcap, scale, outputs

    def run(function: Any) -> list[Tensor]:
        hidden, weight, bias = (value.clone().requires_grad_() for value in values)
        result = function.apply(hidden, weight, bias, targets, *options)
        assert [each is not None for each in result[1:]] == [name in outputs for name in kernels.OPTIONAL_OUTPUTS]
        kept = [each for each in result if each is not None]
        sum((each.square().sum() for each in kept), start=torch.zeros(())).backward()
        return [each.detach() for each in kept] + [each.grad for each in (hidden, weight, bias)]

    theirs = functools.partial(run, host._ChunkedLogProbFunction)
    assert_close_to_rounding(run(trl_patch._Head), theirs(), theirs)
    mixed = trl_patch._Head.apply(values[0].bfloat16(), values[1], values[2], targets, *options)
    assert mixed[0].isfinite().all()


def test_the_fused_loss_puts_back_what_it_replaces(patched: None) -> None:
    before = host._ChunkedLogProbFunction, host._use_triton
    with pytest.raises(ZeroDivisionError), _head.head_calls(lambda head, outputs: 1 / 0, nn.Module()):  # type: ignore[arg-type,return-value]
        assert host._ChunkedLogProbFunction is not before[0]
        scored = torch.zeros(1, dtype=torch.long), 1.0, 1, None, 1.0, ("log_probs",)
        host._ChunkedLogProbFunction.apply(torch.ones(1, 2), torch.ones(3, 2), None, *scored)
    assert (host._ChunkedLogProbFunction, host._use_triton) == before


@pytest.mark.full
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_other_trainers_learn_the_same_when_patched(tmp_path: Path, kind: str) -> None:
    of_grpo = ("steps_per_generation", "num_generations", "max_completion_length", "beta")
    every = tiny_trl.settings(tmp_path, max_steps=4, **SGD)
    settings = {name: value for name, value in every.items() if name not in of_grpo}
    settings |= {"loss_type": "chunked_nll"} if kind == "SFT" else {}
    columns = {"SFT": {"completion": " a c"}, "DPO": {"chosen": " a c", "rejected": " b d"}}[kind]

    def trained() -> Any:
        trainer = getattr(trl, f"{kind}Trainer")(
            tiny_trl.model(),
            args=getattr(trl, f"{kind}Config")(**settings),
            train_dataset=tiny_trl.prompts().map(lambda row: columns),
            processing_class=tiny_trl.tokenizer(),
        )
        trainer.train()
        return trainer.model.state_dict()

    patch_trl()
    try:
        patched = trained()
    finally:
        unpatch_trl()
    assert_close_to_rounding(patched, trained(), trained)


# --------------------------------------------------------------------------------------------- adapters on the LM head


def adapted(**options: Any) -> Any:
    """The tiny model with random adapters on its head and its queries, and a fused head."""
    model = AutoModelForCausalLM.from_pretrained(tiny_trl.model())
    defaults = {"r": 3, "lora_alpha": 5, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**defaults | options))
    host.add_fused_lm_head(model.get_base_model(), temperature=0.7, outputs=("log_probs", "entropy"))
    return model


TOKENS = torch.randint(3, len(tiny_trl.WORDS), (3, 9), generator=torch.Generator().manual_seed(2))


def fused(model: Any) -> Tensor:
    result: Tensor = model(input_ids=TOKENS, labels=TOKENS, fused_lm_head=True).log_probs
    return result


def from_logits(model: Any, temperature: float = 0.7) -> Tensor:
    logits = model(input_ids=TOKENS).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, TOKENS[:, 1:, None]).squeeze(-1)


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    logprobs.square().sum().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}], ids=str
)
def test_adapters_have_the_values_and_gradients_of_the_logits(patched: None, options: dict[str, Any]) -> None:
    model = adapted(**options)
    got = fused(model)

    def by_logits() -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = from_logits(model)
        return logprobs, gradients(model, logprobs)

    want = by_logits()
    assert all(value.any() for value in want[1].values())
    assert any("lm_head" in name for name in want[1])
    assert_close_to_rounding((got, gradients(model, got)), want, by_logits)
    with model.disable_adapter():
        base, of_base = fused(model), from_logits(model)
        assert_close_to_rounding(base, of_base, lambda: from_logits(model))
    assert (base - got).abs().max() > (0.1 if "modules_to_save" not in options else 0.01)
    if "modules_to_save" not in options:
        model.merge_adapter()
        assert_close_to_rounding(fused(model), want[0], lambda: from_logits(model))


def test_log_probs_do_not_depend_on_the_metrics_beside_them(patched: None) -> None:
    """DPO's policy has metrics, its reference none, and their ratio is 1 at the start."""
    results = []
    for outputs in (("log_probs",), ("log_probs", "entropy", "mean_logits", "is_top1")):
        model = AutoModelForCausalLM.from_pretrained(tiny_trl.model()).bfloat16()
        host.add_fused_lm_head(model, outputs=outputs)
        results.append(fused(model))
    assert torch.equal(*results)


def test_results_that_only_trl_computes_count_the_adapter(patched: None) -> None:
    model = adapted()
    host.add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "is_top1"))
    result = model(input_ids=TOKENS, labels=TOKENS, fused_lm_head=True)
    logits = model(input_ids=TOKENS).logits[:, :-1]
    assert torch.equal(result.is_top1.bool(), logits.argmax(-1) == TOKENS[:, 1:])
    want = from_logits(model, 1.0)
    assert_close_to_rounding(result.log_probs, want, lambda: from_logits(model, 1.0))
    assert any("lm_head" in name for name in gradients(model, result.log_probs))


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
def test_heads_that_are_more_than_lora_are_refused(patched: None, options: dict[str, Any], reason: str) -> None:
    model = adapted(**options)
    model.train()
    with pytest.raises(ValueError, match=f"patch_trl: .*{reason}.*; got "):
        fused(model)
    if "lora_dropout" in options:  # which evaluation does not apply, and disable_dropout takes away
        assert not isinstance(model.get_output_embeddings(), adapters._Refused)
        model.eval()
        assert_close_to_rounding(fused(model), from_logits(model), lambda: from_logits(model))


def test_other_refusals_of_adapters(patched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32 must be False with an adapter"):
        host.add_fused_lm_head(model.get_base_model(), cast_lm_head_to_fp32=True)
    with monkeypatch.context() as context:
        context.setattr(adapters, "is_deepspeed_zero3_enabled", lambda: True)
        with pytest.raises(ValueError, match="patch_trl: the LM head must have no adapter under ZeRO-3"):
            host.add_fused_lm_head(model.get_base_model())
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match=r"patch_trl: the adapter 'default' of the LM head must .*plain LoRA"):
        tiny_trl.trainer(tmp_path, trl.GRPOTrainer, peft_config=config)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"one adapter may be active on the LM head, not \['default', 'other'\]"):
        fused(model)
    unpatch_trl()
    with pytest.raises(RuntimeError, match="unpatch_trl: the LM head must have no adapter"):
        fused(model)
    for kind in (trl.GRPOTrainer, FusedGRPOTrainer):  # by TRL itself
        with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
            tiny_trl.trainer(tmp_path, kind, peft_config=peft.LoraConfig(r=2, target_modules=["lm_head"]))


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_a_trainer_trains_the_adapter(patched: None, tmp_path: Path, kind: str) -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    if kind == "GRPO":
        trainer = tiny_trl.trainer(tmp_path, trl.GRPOTrainer, peft_config=config)
    else:
        texts = tiny_trl.prompts().map(lambda row: {"text": row["prompt"] + " a b c"}, remove_columns=["prompt"])
        options = {
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        }
        trainer = trl.SFTTrainer(
            tiny_trl.model(),
            trl.SFTConfig(output_dir=str(tmp_path), **options),
            train_dataset=texts,
            processing_class=tiny_trl.tokenizer(),
            peft_config=config,
        )
    trainer.train()
    factors = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert len(factors) == 2 and all("lm_head" in name for name in factors)
    assert all(value.any() for value in factors.values())  # B begins at 0
    if kind == "GRPO":
        # the reference policy is the model without the adapter, so the first step has no divergence and later ones do
        divergences = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
        assert divergences[0] == 0 and divergences[-1] > 0


def test_both_heads_of_our_trainer_have_the_adapters_gradients(patched: None, tmp_path: Path) -> None:
    calls = []
    for head in ("fused", "logprobs"):
        torch.manual_seed(0)
        adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        trainer = tiny_trl.trainer(tmp_path, head=head, peft_config=adapter)
        inputs = tiny_trl.micro_batch(trainer)
        calls.append(functools.partial(step, trainer, FusedGRPOTrainer, inputs))
    got = calls[0]()
    assert_close_to_rounding(got, calls[1](), calls[1])
    of_head = [gradient for name, gradient in got[1].items() if "lm_head" in name]
    assert len(of_head) == 2 and all(float(gradient.abs().max()) > 1e-4 for gradient in of_head)


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


def test_without_peft_a_forward_knows_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 may shard it."""
    monkeypatch.setattr(adapters, "is_peft_available", lambda: False)
    patch_trl()
    try:
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
    finally:
        unpatch_trl()
    assert vars(host)["add_fused_lm_head"] is not adapters._add_fused_lm_head
