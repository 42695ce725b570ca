"""FusedGRPOTrainer: its additions to GRPOTrainer, and micro-batches that training does not reach."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl
import trl.kernels.chunked_logprob as kernels
import trl.trainer.utils as trl_utils
from trl import GRPOConfig, GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.integrations.trl import patch as trl_patch
from grpo_kernels.integrations.trl import trainer as trl_side
from grpo_kernels.integrations.trl.arguments import check_segments
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.integrations import tiny_trl


def made(folder: Path, kind: type = FusedGRPOTrainer, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    return kind(
        tiny_trl.model(),
        [tiny_trl.many_a, tiny_trl.few_b],
        args=GRPOConfig(**tiny_trl.settings(folder, **({"max_steps": 4} | (changes or {})))),
        train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
        **options,
    )


def letters(texts: Any) -> Tensor:
    """Letter counts of each text."""
    return torch.tensor([[float(text.count(letter)) for letter in "abcdefghijklmnop"] for text in texts]) + 0.01


# ------------------------------------------------------------------------------------------------ single micro-batches


def micro_batch(trainer: Any, by_row: bool) -> dict[str, Tensor]:
    """A micro-batch of a generation with tool tokens, where the sampler has no log-prob for one token."""
    torch.manual_seed(5)
    rows, before, width = 4, 3, 6
    ids = torch.randint(3, len(tiny_trl.WORDS), (rows, before + width))
    mask = (torch.arange(width) < torch.tensor([6, 4, 0, 5])[:, None]).long()
    tool_mask = torch.ones_like(mask)
    tool_mask[0, 2:4] = 0
    inputs = {
        "prompt_ids": ids[:, :before],
        "prompt_mask": torch.ones(rows, before, dtype=torch.long),
        "completion_ids": ids[:, before:],
        "completion_mask": mask,
        "tool_mask": tool_mask,
        "num_items_in_batch": (mask * tool_mask).sum() * 4,
        "advantages": torch.tensor([0.7, -1.1, 0.4, 0.0]),
    }
    with torch.no_grad():
        logprobs, _, _ = trainer._forward(trainer.model, inputs)
    near = [logprobs + 0.3 * torch.randn_like(logprobs) for _ in range(3)]
    near[2][1] += 0.8  # this row is off-policy by the sampler's log-probs, but not by those of the old policy
    ratio = torch.where((mask * tool_mask).bool(), (near[0] - near[2]).exp(), 1.0)
    inputs |= {"old_per_token_logps": near[0], "ref_per_token_logps": near[1], "sampling_per_token_logps": near[2]}
    inputs["sampling_per_token_logps"][1, 2] = float("nan")
    inputs["importance_sampling_ratio"] = ratio.mean(1, keepdim=True) if by_row else ratio
    return inputs


@pytest.mark.parametrize("by_row", [False, True], ids=["token", "row"])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_a_micro_batch_from_vllm_with_tools(tmp_path: Path, loss_type: str, by_row: bool) -> None:
    """The loss does not need vLLM; the same trainer computes it in both ways."""
    if loss_type == "vespo" and by_row:
        pytest.skip("TRL refuses it")
    changes = {"off_policy_mask_threshold": 0.2, "top_entropy_quantile": 0.7, "entropy_coef": 0.02}
    trainer = made(tmp_path, changes={"loss_type": loss_type} | changes)
    trainer.use_vllm = True
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    inputs = micro_batch(trainer, by_row)
    result = []
    for compute in (FusedGRPOTrainer._compute_loss, GRPOTrainer._compute_loss):
        trainer.model.zero_grad()
        trainer._metrics["train"].clear()
        loss = compute(trainer, trainer.model, dict(inputs))
        loss.backward()
        gradients = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
        result.append((loss.detach(), gradients, {name: value[0] for name, value in trainer._metrics["train"].items()}))
    (loss, gradients, metrics), (their_loss, their_gradients, their_metrics) = result
    # float32: terms around 1, some of which cancel
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, their_gradients, rtol=1e-4, atol=1e-6)
    assert metrics == pytest.approx(their_metrics, rel=1e-5, abs=1e-6, nan_ok=True)


def counted(function: Any, calls: Counter[str]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[function.__name__] += 1
        return function(*arguments, **options)

    return call


def test_one_collective_a_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"use_adaptive_entropy": True, "entropy_coef": 0.01}
    counts = {}
    for kind in (FusedGRPOTrainer, GRPOTrainer):
        trainer, calls = made(tmp_path, changes=changes), Counter[str]()
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 2
        for name in ("gather", "reduce", "gather_for_metrics"):
            own = getattr(trainer.accelerator, name)
            monkeypatch.setattr(trainer.accelerator, name, counted(own, calls))
        kind._compute_loss(trainer, trainer.model, micro_batch(trainer, True))
        counts[kind] = calls.total()
    assert counts[FusedGRPOTrainer] == 1 and counts[GRPOTrainer] >= 9


# ---------------------------------------------------------------------------------------------- similarity and segments


@pytest.mark.parametrize("own", [None, gk.AdvantageConfig("dr_grpo", singleton="parent", shrinkage=2.0)])
def test_advantages_within_clusters_of_similar_completions(tmp_path: Path, own: gk.AdvantageConfig | None) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Noted(FusedGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            labels = gk.similarity_groups(self._embeddings, 4, config=gk.SimilarityConfig()).labels
            config = gk.AdvantageConfig.of("trl-group") if own is None else own
            expected = gk.group_advantages(self._scored, 4, subgroups=labels, config=config).advantages
            plain = gk.group_advantages(self._scored, 4, config=gk.AdvantageConfig.of("trl-group")).advantages
            seen.append((output["advantages"], expected))
            assert not torch.equal(expected, plain)
            assert list(self._logs["advantages"])[-len(expected) :] == expected.tolist()
            return output

    trainer = made(tmp_path, Noted, similarity=gk.SimilarityConfig(), embedder=letters, advantages=own)
    trainer.train()
    assert len(seen) == 2 and all(torch.equal(got.double(), expected.float().double()) for got, expected in seen)
    assert any(name.startswith("similarity_groups/") for name in trainer.state.log_history[0])


def test_tokens_in_segments_share_an_advantage(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Noted(FusedGRPOTrainer):
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    changes = {"scale_rewards": "none", "use_bias_correction_kl": False, "save_strategy": "steps", "save_steps": 4}
    config = gk.SegmentConfig(group_variance_threshold=0.5, group_max_size=3, adaptive_threshold=True, lam=0.9)
    trainer = made(tmp_path, Noted, changes, segments=config)
    trainer.train()
    for inputs in seen:
        segments, advantages = inputs["segment_ids"], inputs["advantages"]
        assert advantages.shape == segments.shape == inputs["completion_mask"].shape
        assert torch.equal(segments >= 0, inputs["completion_mask"].bool())
        ends = torch.cat([segments[:, 1:] != segments[:, :-1], torch.ones(len(segments), 1, dtype=torch.bool)], 1)
        assert advantages.any() and not advantages[~ends].any()
    assert max(int(inputs["segment_ids"].max()) for inputs in seen) >= 1
    assert any(name.startswith("group/") for name in trainer.state.log_history[0])
    assert trainer.threshold.value != 0.5
    # four micro-batches per generation, in a different order than in the log
    of_last = torch.cat([inputs["advantages"].sum(1) for inputs in seen[-4:]])
    assert sorted(trainer._logs["advantages"]) == pytest.approx(sorted(of_last.tolist()))
    again = made(tmp_path, changes=changes, segments=config)
    again.create_optimizer_and_scheduler(4)
    again._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))
    assert again.threshold.value == trainer.threshold.value
    (tmp_path / "checkpoint-4" / "segment_threshold.json").unlink()
    with pytest.raises(ValueError, match="resume_from_checkpoint must hold segment_threshold"):
        again._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))


def test_segments_are_cut_where_the_sampler_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts use the sampler's log-probs, and those of the policy where the sampler has none."""
    changes = {"scale_rewards": "none", "use_bias_correction_kl": False}
    trainer = made(tmp_path, changes=changes, segments=gk.SegmentConfig())
    mask = torch.ones(4, 3, dtype=torch.long)
    old, sampled = torch.full((4, 3), -1.0), torch.full((4, 3), -2.0)
    sampled[1, 1] = float("nan")
    trainer._scored = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    calls = []
    monkeypatch.setattr(gk, "endpoint_segments", lambda *a, f=gk.endpoint_segments, **k: calls.append(a) or f(*a, **k))
    output = {"completion_mask": mask, "old_per_token_logps": old, "sampling_per_token_logps": sampled}
    trainer._add_segments(output, 4, "eval")
    assert torch.equal(calls[0][1], old)
    assert torch.equal(calls[0][2], torch.where(sampled.isnan(), -1.0, -2.0))


def test_evaluation_of_segments_keeps_prompts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is a prompt's mean, so each process needs all completions of its prompts."""
    changes = {"scale_rewards": "none", "use_bias_correction_kl": False, "eval_strategy": "steps"}
    trainer = made(tmp_path, changes=changes, segments=gk.SegmentConfig(), eval_dataset=tiny_trl.prompts())
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    trainer.args.per_device_eval_batch_size = 8
    check_segments(trainer)
    trainer.args.per_device_eval_batch_size = 6
    with pytest.raises(ValueError, match=r"per_device_eval_batch_size must hold whole groups of 4 .*, got 6"):
        check_segments(trainer)


def test_evaluation_of_more_than_a_generation(tmp_path: Path) -> None:
    """The evaluation batch is larger than the log, which holds the rows of one training generation."""
    result = []
    for kind in (FusedGRPOTrainer, GRPOTrainer):
        trainer = made(
            tmp_path,
            kind,
            {"per_device_eval_batch_size": 24, "steps_per_generation": 2},
            eval_dataset=tiny_trl.prompts(),
        )
        trainer.evaluate()
        result.append(list(trainer._logs["advantages"]))
    assert len(result[0]) == len(result[1]) and result[0] == pytest.approx(result[1], abs=1e-4)


def test_advantages_that_need_lengths(tmp_path: Path) -> None:
    trainer = made(tmp_path, advantages=gk.AdvantageConfig("opo"))
    trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("shape", [(15, 8), (16,)])
def test_embedder_that_gives_something_else(tmp_path: Path, shape: tuple[int, ...]) -> None:
    trainer = made(tmp_path, similarity=gk.SimilarityConfig(), embedder=lambda texts: torch.ones(shape).numpy())
    with pytest.raises(ValueError, match=rf"embedder must give a vector for each of 16 texts, got shape \[{shape[0]}"):
        trainer.train()


def test_text_of_a_conversation() -> None:
    parts = [{"type": "text", "text": "an "}, {"type": "image", "image": object()}, {"type": "text", "text": "end"}]
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert trl_side._text("plain") == "plain" and trl_side._text([]) == ""
    assert trl_side._text([{"role": "assistant", "content": parts}]) == "an end"
    assert trl_side._text([{"role": "assistant", "content": "said"}, {"role": "tool", "content": "9"}]) == "said"
    assert trl_side._text([call]) == trl_side._text([{"role": "assistant", "content": None}]) == ""


# -------------------------------------------------------------------------------------------------------------- patches


def test_patches_are_taken_back() -> None:
    names = ("_ChunkedLogProbFunction", "selective_log_softmax", "entropy_from_logits", "_use_triton")
    modules = [trl_utils, sys.modules["trl.trainer.grpo_trainer"]]
    before = [{name: vars(module).get(name) for name in names} for module in modules]
    patch_trl(head=False)
    assert trl_utils._ChunkedLogProbFunction is before[0]["_ChunkedLogProbFunction"]
    assert trl_utils.selective_log_softmax is not before[0]["selective_log_softmax"]
    patch_trl()
    patch_trl()
    assert trl_utils._ChunkedLogProbFunction is not before[0]["_ChunkedLogProbFunction"]
    # TRL's own kernels still query Triton's availability for the calls left to them
    assert kernels._use_triton is before[0]["_use_triton"] is not trl_utils._use_triton
    unpatch_trl()
    unpatch_trl()
    assert [{name: vars(module).get(name) for name in names} for module in modules] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patched_functions_of_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(3, 5, 11)).to(dtype)
    index, mask = torch.randint(0, 11, (3, 5)), torch.arange(5) < torch.tensor([[5], [2], [4]])
    calls = {
        "selective_log_softmax": [
            lambda f, x: f(x, index),
            lambda f, x: f(x, index, 0.7),
            lambda f, x: f(x, index, row_mask=where),
            lambda f, x: f(x, torch.stack([index, index], -1)),
        ],
        "entropy_from_logits": [lambda f, x: f(x)],
        "selective_log_softmax_and_entropy": [
            lambda f, x: sum(f(x, index)),
            lambda f, x: sum(f(x, index, entropy_requires_grad=False)),
        ],
    }
    # rounding of one element at the largest magnitude here
    exact = 8 * torch.finfo(dtype).eps * 16
    where = mask.to(torch.int64)
    for name, cases in calls.items():
        theirs = getattr(trl_utils, name)
        patch_trl()
        try:
            ours = getattr(trl_utils, name)
            for case in cases:
                results = []
                for function in (ours, theirs):
                    x = logits.clone().requires_grad_()
                    value = case(function, x)
                    value.float().square().sum().backward()
                    results.append((value.detach(), x.grad))
                assert results[0][0].dtype == results[1][0].dtype
                torch.testing.assert_close(results[0], results[1], rtol=exact, atol=exact)
        finally:
            unpatch_trl()


@pytest.mark.parametrize("outputs", [(), ("entropy",)], ids=["alone", "entropy"])
@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(None, 1.0, 1.0), (2.0, 1.0, 0.7), (None, 0.5, 1.3)])
def test_patched_head(softcap: float | None, scale: float, temperature: float, outputs: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    values = [torch.randn(7, 6), torch.randn(11, 6), torch.randn(11)]
    targets = torch.randint(0, 11, (7,))
    theirs = trl_utils._ChunkedLogProbFunction
    patch_trl()
    try:
        ours = trl_utils._ChunkedLogProbFunction
    finally:
        unpatch_trl()
    results = []
    for function in (ours, theirs):
        hidden, weight, bias = (value.clone().requires_grad_() for value in values)
        result = function.apply(hidden, weight, bias, targets, temperature, 4, softcap, scale, outputs)
        assert [each is not None for each in result] == [True, bool(outputs), False, False, False]
        kept = [each for each in result if each is not None]
        sum((each.square().sum() for each in kept), start=torch.zeros(())).backward()
        results.append([each.detach() for each in kept] + [each.grad for each in (hidden, weight, bias)])
    # float32: log-probs of magnitude 10, and sums of eleven of them in the gradients
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=2e-5)
    mixed = ours.apply(values[0].bfloat16(), values[1], values[2], targets, 1.0, 4, softcap, scale, outputs)
    assert mixed[0].isfinite().all()


def test_a_head_in_parts_is_left_to_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ZeRO-3, where the head is partitioned."""
    torch.manual_seed(0)
    arguments = (torch.randn(7, 6), torch.randn(11, 6), None, torch.randint(0, 11, (7,)), 1.0, 4, None, 1.0, ())
    asked = []
    patch_trl()
    try:
        theirs = trl_patch._originals["_ChunkedLogProbFunction"]
        monkeypatch.setattr(theirs, "apply", lambda *given: asked.append(given) or "theirs")
        assert trl_utils._ChunkedLogProbFunction.apply(*arguments) != "theirs" and not asked
        monkeypatch.setattr(trl_patch, "is_deepspeed_zero3_enabled", lambda: True)
        assert trl_utils._ChunkedLogProbFunction.apply(*arguments) == "theirs" and asked == [arguments]
    finally:
        unpatch_trl()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["SFT", "DPO", "RLOO"])
def test_other_trainers_learn_the_same_when_patched(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    texts = tiny_trl.prompts()["prompt"]
    common = {
        name: value
        for name, value in tiny_trl.settings(tmp_path, max_steps=4).items()
        if name not in ("steps_per_generation", "num_generations", "max_completion_length", "beta")
    }

    def trained() -> Any:
        model, tokenizer = tiny_trl.model(), tiny_trl.tokenizer()
        if kind == "SFT":
            data = Dataset.from_list([{"prompt": text, "completion": " " + text} for text in texts])
            args: Any = trl.SFTConfig(**common, loss_type="chunked_nll")
            trainer: Any = trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        elif kind == "DPO":
            data = Dataset.from_list([{"prompt": text, "chosen": " " + text, "rejected": " b d"} for text in texts])
            trainer = trl.DPOTrainer(
                model, args=trl.DPOConfig(**common), train_dataset=data, processing_class=tokenizer
            )
        else:
            own = {"num_generations": 4, "max_completion_length": 7, "beta": 0.04}
            trainer = trl.RLOOTrainer(
                model,
                tiny_trl.many_a,
                args=trl.RLOOConfig(**common, **own),
                train_dataset=tiny_trl.prompts(),
                processing_class=tokenizer,
            )
        trainer.train()
        return trainer.model.state_dict()

    theirs = trained()
    patch_trl()
    try:
        ours = trained()
    finally:
        unpatch_trl()
    for name, weight in theirs.items():  # Adam amplifies the rounding of a small gradient to a fraction of a 1e-2 step
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- two processes

TWO = Path(__file__).parent / "two_trl.py"


@pytest.mark.full
def test_two_processes(tmp_path: Path) -> None:
    """Compares losses and metrics over all ranks, including the entropy threshold of the kept share of tokens."""
    outputs = {}
    for kind in ("ours", "theirs"):
        outputs[kind] = tmp_path / f"{kind}.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
                str(TWO),
                kind,
                str(outputs[kind]),
            ],
            check=True,
            timeout=300,
            cwd=Path(__file__).parent.parent.parent,
            capture_output=True,
        )
    ours, theirs = (json.loads(path.read_text()) for path in outputs.values())
    assert len(ours) == len(theirs) >= 4
    for got, expected in zip(ours, theirs, strict=True):
        assert got == pytest.approx(expected, rel=2e-4, abs=2e-5, nan_ok=True)
