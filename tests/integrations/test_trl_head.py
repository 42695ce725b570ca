"""FusedGRPOTrainer(head="fused") against the default head and TRL: losses, weights, metrics, memory and refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl.trainer.utils as trl_utils
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.integrations.trl import head as _head
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.harness import quick
from tests.integrations import tiny_trl, tiny_vision
from tests.integrations.test_trl import OPTIONS, Ours, Theirs, assert_same, trained
from tests.integrations.test_trl_parts import TWO, made, micro_batch


class Fused(Ours):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, head="fused", **options)


@pytest.mark.parametrize("loss_type", quick(TRL_LOSS_TYPES, "sapo"))
def test_steps_of_every_loss(tmp_path: Path, loss_type: str) -> None:
    fused, theirs = (trained(kind, tmp_path, loss_type=loss_type, max_steps=6) for kind in (Fused, Theirs))
    assert_same(fused, theirs)
    assert max(abs(loss) for loss in fused.losses) > 1e-3


@pytest.mark.parametrize("options", quick(OPTIONS, *OPTIONS[1:10:4]), ids=lambda options: ",".join(options))
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    fused, ours = (trained(kind, tmp_path, max_steps=5, **options) for kind in (Fused, Ours))
    assert_same(fused, ours)


def step(trainer: Any, compute: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    loss = compute(trainer, trainer.model, dict(inputs))
    loss.backward()
    weights = trainer.model.named_parameters()
    gradients = {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
    return loss.detach(), gradients, {name: value[0] for name, value in trainer._metrics["train"].items()}


def assert_same_step(got: Any, want: Any) -> None:
    # float32: terms around 1, some of which cancel
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
    assert got[2] == pytest.approx(want[2], rel=1e-5, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("by_row", [False, True], ids=["token", "row"])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_a_micro_batch_from_vllm_with_tools(tmp_path: Path, loss_type: str, by_row: bool) -> None:
    if loss_type == "vespo" and by_row:
        pytest.skip("TRL refuses it")
    changes = {"loss_type": loss_type, "off_policy_mask_threshold": 0.2}
    trainer = made(tmp_path, changes=changes, head="fused")
    trainer.use_vllm = True
    inputs = micro_batch(trainer, by_row)
    want = step(trainer, GRPOTrainer._compute_loss, inputs)
    assert_same_step(step(trainer, FusedGRPOTrainer._compute_loss, inputs), want)


def cut(inputs: dict[str, Tensor], lengths: list[int]) -> dict[str, Tensor]:
    """The micro-batch with completions of other lengths."""
    width = inputs["completion_mask"].shape[1]
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    del inputs["tool_mask"]
    return inputs | {"completion_mask": mask, "num_items_in_batch": mask.sum() * 4}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lengths", [[2, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 3, 0, 0]])
def test_few_tokens(tmp_path: Path, lengths: list[int], level: str) -> None:
    """As many tokens as rows must not make advantages of rows those of tokens; no token must not stop a backward."""
    changes = {"importance_sampling_level": level}
    fused, ours = (made(tmp_path, changes=changes, head=head) for head in ("fused", "logprobs"))
    inputs = cut(micro_batch(fused, False), lengths)
    assert_same_step(
        step(fused, FusedGRPOTrainer._compute_loss, inputs), step(ours, FusedGRPOTrainer._compute_loss, inputs)
    )


def test_the_head_gets_no_padding_and_the_loss_three_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(tmp_path, head="fused")
    inputs = micro_batch(trainer, False)
    calls: list[tuple[tuple[int, ...], str]] = []
    original = gk.linear_policy_loss

    def noted(hidden: Tensor, *arguments: Any, **options: Any) -> gk.PolicyLoss:
        calls.append((tuple(hidden.shape), options.get("memory", "fast")))
        return original(hidden, *arguments, **options)

    monkeypatch.setattr(gk, "linear_policy_loss", noted)
    monkeypatch.delattr(gk, "policy_loss")
    trainer.current_gradient_accumulation_steps = 1
    loss = FusedGRPOTrainer._compute_loss(trainer, trainer.model.train(), inputs)
    assert calls == [((int(inputs["completion_mask"].sum()), 16), "fast")]
    names, node = set(), loss.grad_fn
    while node is not None:
        names.add(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert "PrecomputedGradientBackward" in names


# ------------------------------------------------------------------------------------------------- kinds of models

SIZES = {
    "vocab_size": len(tiny_trl.WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "max_position_embeddings": 64,
}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 2.5}),
    "moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.3}
        | {"shared_expert_intermediate_size": 8, "output_router_logits": True},
    ),
}


def of_model(model: Any, folder: Path, head: str, **changes: Any) -> Any:
    return FusedGRPOTrainer(
        model,
        [tiny_trl.many_a],
        args=GRPOConfig(**tiny_trl.settings(folder, max_steps=4, beta=0.0, **changes)),
        train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
        head=head,
    )


def small(name: str) -> Any:
    torch.manual_seed(7)
    kind, config, options = KINDS[name]
    return kind(config(**SIZES, attn_implementation="eager", **options))


@pytest.mark.parametrize("name", KINDS)
def test_what_models_do_with_their_logits(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for head in ("fused", "logprobs"):
        trainer = of_model(small(name), tmp_path, head)
        inputs = micro_batch(trainer, False)
        results.append(step(trainer, FusedGRPOTrainer._compute_loss, inputs))
        results.append(step(trainer, GRPOTrainer._compute_loss, inputs))
    for other in results[1:]:
        assert_same_step(results[0], other)
    assert (name == "moe") == ("aux_loss" in results[0][2])
    if name == "moe":
        assert results[0][2]["aux_loss"] > 0.1
        assert any("gate" in each and float(gradient.abs().max()) > 0 for each, gradient in results[0][1].items())
        return
    # what the head would do without it
    plain, original = of_model(small(name), tmp_path, "fused"), _head.packed_policy_loss

    def without(head: Any, *rest: Any, **options: Any) -> Any:
        lm_head = dataclasses.replace(head.lm_head, softcap=None, logit_scale=1.0)
        return original(head._replace(lm_head=lm_head), *rest, **options)

    monkeypatch.setattr(_head, "packed_policy_loss", without)
    other = step(plain, FusedGRPOTrainer._compute_loss, inputs)
    assert abs(other[2]["entropy"] - results[0][2]["entropy"]) > 0.05


def test_images(tmp_path: Path) -> None:
    results = []
    for head in ("fused", "logprobs"):
        trainer = of_model(tiny_vision.model(), tmp_path, head)
        inputs = tiny_vision.with_images(micro_batch(of_model(small("granite"), tmp_path, "fused"), False))
        results.append(step(trainer, FusedGRPOTrainer._compute_loss, inputs))
        results.append(step(trainer, GRPOTrainer._compute_loss, inputs))
    for other in results[1:]:
        assert_same_step(results[0], other)
    of_pixels = [gradient for name, gradient in results[0][1].items() if "patch_embed" in name]
    assert of_pixels and all(float(gradient.abs().max()) > 0 for gradient in of_pixels)


def test_no_logits(tmp_path: Path) -> None:
    """The largest allocation of a step, beside the logits of the scored tokens."""
    torch.manual_seed(7)
    columns = 4096
    config = LlamaConfig(**(SIZES | {"vocab_size": columns, "max_position_embeddings": 256}))
    ids = torch.randint(3, columns, (8, 100))
    mask = (torch.arange(96) < torch.tensor([96, 96, 90, 80, 96, 70, 96, 96])[:, None]).long()
    inputs = {
        "prompt_ids": ids[:, :4],
        "prompt_mask": torch.ones(8, 4, dtype=torch.long),
        "completion_ids": ids[:, 4:],
        "completion_mask": mask,
        "num_items_in_batch": mask.sum() * 4,
        "advantages": torch.linspace(-1, 1, 8),
    }
    largest = {}
    for head in _head.HEADS:
        trainer = of_model(LlamaForCausalLM(config), tmp_path, head)
        trainer.current_gradient_accumulation_steps = 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            trainer._compute_loss(trainer.model.train(), dict(inputs)).backward()
        events = profile.profiler.kineto_results.events()
        largest[head] = max(event.nbytes() for event in events if event.name() == "[memory]")
    logits = 4 * int(mask.sum()) * columns
    assert largest["logprobs"] >= logits  # on the CPU TRL scores all positions at once
    assert largest["fused"] <= 0.4 * logits  # a third of the rows at a time


# ---------------------------------------------------------------------------------------------------- surroundings


def test_evaluation_and_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    results = []
    for head in _head.HEADS:
        torch.manual_seed(0)
        trainer = FusedGRPOTrainer(
            tiny_trl.model(),
            [tiny_trl.many_a],
            GRPOConfig(**tiny_trl.settings(tmp_path, per_device_eval_batch_size=8, max_steps=3)),
            tiny_trl.prompts(),
            tiny_trl.prompts(),
            processing_class=tiny_trl.tokenizer(),
            peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
            head=head,
        )
        trainer.train()
        evaluated = trainer.evaluate()
        figures = {k: v for k, v in evaluated.items() if "runtime" not in k and "per_second" not in k}
        adapters = {name: w.detach().clone() for name, w in trainer.model.named_parameters() if w.requires_grad}
        results.append((figures, adapters))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4, abs=1e-5, nan_ok=True)
    assert results[0][1] and all("lora" in name for name in results[0][1])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-4)


def test_segments_and_another_policy_term(tmp_path: Path) -> None:
    for options, changes in (
        ({"segments": gk.SegmentConfig()}, {"scale_rewards": "none", "use_bias_correction_kl": False}),
        ({"loss": gk.LossConfig(loss="topr")}, {}),
    ):
        runs = [
            trained(functools.partial(Ours, head=head, **options), tmp_path, max_steps=4, **changes)  # type: ignore[arg-type]
            for head in _head.HEADS
        ]
        assert_same(*runs)


def test_with_patched_log_probs_and_restored_afterwards(tmp_path: Path) -> None:
    theirs = trained(Theirs, tmp_path, max_steps=3)
    patch_trl()
    try:
        during = trl_utils._ChunkedLogProbFunction
        fused = trained(Fused, tmp_path, max_steps=3)
        assert trl_utils._ChunkedLogProbFunction is during
    finally:
        unpatch_trl()
    assert_same(fused, theirs)
    before = trl_utils._ChunkedLogProbFunction, trl_utils._use_triton
    with pytest.raises(ZeroDivisionError), _head.head_calls(lambda head, outputs: 1 / 0):  # type: ignore[arg-type,return-value]
        assert trl_utils._ChunkedLogProbFunction is not before[0]
        scored = torch.zeros(1, dtype=torch.long), 1.0, 1, None, 1.0, ("log_probs",)
        trl_utils._ChunkedLogProbFunction.apply(torch.ones(1, 2), torch.ones(3, 2), None, *scored)
    assert (trl_utils._ChunkedLogProbFunction, trl_utils._use_triton) == before


def test_adapters_on_the_head_after_patch_trl(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    patch_trl()
    try:
        results = []
        for head in _head.HEADS:
            torch.manual_seed(0)
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
            trainer = made(tmp_path, head=head, peft_config=adapter)
            inputs = micro_batch(trainer, False)
            results.append(step(trainer, FusedGRPOTrainer._compute_loss, inputs))
    finally:
        unpatch_trl()
    assert_same_step(*results)
    of_head = [gradient for name, gradient in results[0][1].items() if "lm_head" in name]
    assert len(of_head) == 2 and all(float(gradient.abs().max()) > 1e-4 for gradient in of_head)


def test_a_policy_that_has_not_changed_has_ratios_of_one(tmp_path: Path) -> None:
    """In bfloat16: the old log-probs come from the head that the loss has."""
    trainer = made(tmp_path, head="fused")
    trainer.model.bfloat16()
    inputs = micro_batch(trainer, False)
    with torch.no_grad():
        inputs["old_per_token_logps"], _, _ = trainer._forward(trainer.model, inputs)
    seen: list[Any] = []
    original = trainer._log_loss
    trainer._log_loss = lambda mode, metrics, aux: (seen.append(metrics), original(mode, metrics, aux))
    step(trainer, FusedGRPOTrainer._compute_loss, inputs)
    # the sum over 15 tokens of (ratio - 1)**2, with log-probs of about 10 rounded to float32
    assert 0 <= seen[0].to_dict()["ratio_spread_sum"] < 15 * (10 * 2**-22) ** 2


@pytest.mark.full
def test_two_processes(tmp_path: Path) -> None:
    """DistributedDataParallel looks in the forward for the parameters of a step, among them the head's."""
    logs = []
    for kind in ("fused", "default"):
        output = tmp_path / f"{kind}.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        subprocess.run([*launch, str(TWO), kind, str(output)], check=True, timeout=300, cwd=TWO.parents[2])
        logs.append(json.loads(output.read_text()))
    assert len(logs[0]) == len(logs[1]) == 6
    for fused, ours in zip(*logs, strict=True):
        assert fused == pytest.approx(ours, rel=2e-4, abs=2e-5, nan_ok=True)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^FusedGRPOTrainer: head must be one of logprobs, fused, got 'fuse'"):
        made(tmp_path, head="fuse")
    with pytest.raises(ValueError, match=r"^FusedGRPOTrainer: torch_compile must be False for head='fused', as"):
        made(tmp_path, changes={"torch_compile": True}, head="fused")
    args = SimpleNamespace(torch_compile=False, fsdp=["full_shard"], deepspeed="zero3.json", top_entropy_quantile=0.5)
    trainer = SimpleNamespace(
        args=args, is_fsdp_enabled=False, top_entropy_quantile=0.5, accelerator=SimpleNamespace(num_processes=2)
    )
    trainer.model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"top_entropy_quantile must be 1 with several processes for .*, got 0.5$"):
        _head.check_fused(trainer)
    trainer.accelerator.num_processes = 1
    _head.check_fused(trainer)
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match=r"fsdp must be off for head='fused', whose ranks .*, got \['full_shard'\]$"):
        _head.check_fused(trainer)
    trainer.is_fsdp_enabled, whole = False, trainer.model
    trainer.model = SimpleNamespace(parameters=lambda: [type("DTensor", (), {})()])
    with pytest.raises(ValueError, match="fsdp must be off for head='fused'"):
        _head.check_fused(trainer)
    trainer.model = whole
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match=r"deepspeed must not be ZeRO-3 for head='fused', .*, got 'zero3.json'$"):
        _head.check_fused(trainer)


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    """By TRL itself, as the head's weight alone is multiplied."""
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        made(tmp_path, head="fused", peft_config=peft.LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(RuntimeError, match="needs the hidden states of 3 tokens from TRL's forward, got 2"):
        inputs = _head.HeadInputs(torch.ones(2, 4), gk.LMHead(torch.ones(3, 4)), torch.ones(2).long(), 1.0)
        tokens = _head.TokenInputs(None, torch.ones(1), torch.ones(1, 3).bool(), None, None, None)
        _head.packed_policy_loss(inputs, tokens, torch.ones(1, 3).bool())
