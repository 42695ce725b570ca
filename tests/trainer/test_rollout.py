"""Sampling: log-probs, filters, lengths, and the responses that enter the loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from grpo_trainer import train as training
from grpo_trainer.algorithm import Credit, _keep_largest, rows_in_loss
from grpo_trainer.data import Batch
from grpo_trainer.policy import Policy, evaluating
from grpo_trainer.recipe import Lora
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rollout import Rollout, _filtered, roll_out
from grpo_trainer.setup import Run

from tests.trainer import small
from tests.trainer.test_policy import policy_of, rolled


def ending(policy: Policy, by: float) -> None:
    """Adds `by` to the logit of the end at every token."""

    def more(_module: Any, _inputs: Any, output: Any) -> Any:
        output.logits[..., policy.eos_id] += by
        return output

    policy.lm.register_forward_hook(more)


@pytest.mark.parametrize(
    ("kind", "adapters", "temperature"),
    [("causal", False, 0.7), ("causal", True, 1.3), ("seq2seq", False, 1.3), ("seq2seq", True, 0.7)],
)
def test_log_probs_are_those_of_a_fresh_pass_over_each_response_alone(
    kind: str, adapters: bool, temperature: float
) -> None:
    """Compares with transformers' own forward in float64, without padding, cache and this package's kernels.

    The float32 error is about eps times the length of the sums, a hundred terms here: 1e-5.
    """
    policy = policy_of(kind, Lora(rank=4) if adapters else None)
    for name, parameter in policy.lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    rollout = rolled(policy, temperature=temperature)
    policy.lm.double()
    ends = 0
    for i, stored in enumerate(rollout.logprobs):
        tokens = rollout.batch.tokens[i][rollout.batch.mask[i]]
        prompt = torch.tensor([rollout.items[i // 3]["prompt_ids"]])
        with torch.no_grad(), evaluating(policy):
            if kind == "causal":
                logits = policy.lm(torch.cat((prompt, tokens[None]), 1)).logits[0, prompt.shape[1] - 1 : -1]
            else:
                start = torch.tensor([[policy.lm.config.decoder_start_token_id]])
                logits = policy.lm(input_ids=prompt, decoder_input_ids=torch.cat((start, tokens[None, :-1]), 1)).logits[
                    0
                ]
        expected = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(stored[: len(tokens)].double(), expected, rtol=1e-5, atol=1e-5)
        assert not stored[len(tokens) :].any()
        ends += int(tokens[-1] == policy.eos_id)  # its log-prob is compared, too
    assert ends > 0


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_mixed_precision_applies_to_scoring_too(kind: str) -> None:
    """Sampling and scoring round alike, so they are closer to each other than to float32."""
    policy, exact = policy_of(kind, mixed_precision="bf16"), policy_of(kind)
    rollout = rolled(policy, num_generations=8)
    assert rollout.logprobs.dtype == torch.float32
    with torch.no_grad(), evaluating(policy), evaluating(exact):
        scored, in_float = policy("logprobs", rollout.batch), exact("logprobs", rollout.batch)
    apart = (scored - rollout.logprobs).abs().mean()
    of_precision = (in_float - rollout.logprobs).abs().mean()
    assert apart < of_precision and of_precision > 1e-4


@pytest.mark.parametrize("least", [0, 3])
def test_the_end_is_sampled_from_the_minimum_length_on(least: int) -> None:
    policy = policy_of()
    ending(policy, 50.0)
    rollout = rolled(policy, min_completion_length=least)
    assert rollout.lengths.tolist() == [least + 1] * len(rollout.texts) and not rollout.truncated.any()
    if least == 0:  # the end token is part of the empty response
        assert set(rollout.texts) == {""} and (rollout.batch.tokens == policy.eos_id).all()
        assert rollout.batch.mask.all() and rollout.batch.mask.shape[1] == 1
        torch.testing.assert_close(rollout.logprobs, torch.zeros_like(rollout.logprobs), rtol=0, atol=1e-6)


def test_the_end_is_scored_before_the_minimum_length() -> None:
    """The update has no such rule, and the ratio must start at 1."""
    policy = policy_of()
    rollout = rolled(policy, min_completion_length=4)
    with torch.no_grad(), evaluating(policy):
        fresh = policy("logprobs", rollout.batch)
    torch.testing.assert_close(rollout.logprobs, fresh, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("minibatches", [1, 4, 6])
def test_the_number_of_minibatches_is_that_of_the_recipe(tmp_path: Path, minibatches: int) -> None:
    more = (f"rl.minibatches={minibatches}", "rl.num_iterations=1", "rl.algorithm.drop_flat=false")
    run = small.ready(small.recipe(tmp_path, *more))
    metrics = training.rl_step(run, run.items("train")[:6], 1)
    assert metrics["train/optimizer_steps"] == minibatches


def test_empty_responses_can_be_trained_on(tmp_path: Path) -> None:
    run = small.ready(small.recipe(tmp_path, "rl.algorithm.name=dr_grpo"))
    ending(run.policy, 50.0)
    metrics = training.rl_step(run, run.items("train")[:6], 1)
    assert metrics["rollout/length_max"] == 1 and metrics["train/skipped"] == 1


def captured(run: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments that an RL step passes to its update."""
    arguments: dict[str, Any] = {}

    def update(run: Run, rollout: Rollout, credit: Credit, *_: Any) -> dict[str, float]:
        mask = rollout.batch.mask
        arguments.update(rollout=rollout, credit=credit, rows=rows_in_loss(run.plan, credit, mask, rollout.group_size))
        return {"train/skipped": 1.0}

    monkeypatch.setattr(training, "update", update)
    arguments["metrics"] = training.rl_step(run, run.items("train")[:6], 1)
    return arguments


@pytest.mark.parametrize("algorithm", ["dr_grpo", "group_ppo"])
def test_truncated_responses_are_left_out_of_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    more = (f"rl.algorithm.name={algorithm}", "rl.rollout.truncated=leave_out")
    run = small.ready(small.recipe(tmp_path, *more))
    ending(run.policy, 2.0)
    arguments = captured(run, monkeypatch)
    cut, mask = arguments["rollout"].truncated, arguments["credit"].mask
    assert 0 < int(cut.sum()) < len(cut)
    assert not mask[cut].any() and torch.equal(mask[~cut], arguments["rollout"].batch.mask[~cut])
    assert not arguments["rows"][cut].any()
    last = arguments["rollout"].lengths - 1
    ends = arguments["rollout"].batch.tokens[torch.arange(len(cut)), last] == run.policy.eos_id
    assert torch.equal(cut, ~ends)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1e-9), (0, 0.3), (0, 0.9), (5, 1.0), (1, 1.0), (20, 0.7), (500, 0.999)]
)
def test_filters_are_those_of_transformers(top_k: int, top_p: float) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(64, 97, generator=torch.Generator().manual_seed(2))
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    assert torch.equal(_filtered(logits, top_p, top_k), expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (0, 0.5), (4, 0.6)])
def test_samples_pass_the_filters_at_the_temperature(top_k: int, top_p: float) -> None:
    policy = policy_of()
    rollout = rolled(policy, num_generations=8, top_k=top_k, top_p=top_p, temperature=0.5)
    was_left = 0
    for i, tokens in enumerate(rollout.batch.tokens):
        prompt = rollout.items[i // 8]["prompt_ids"]
        length = int(rollout.lengths[i])
        with torch.no_grad():
            logits = policy.lm(torch.tensor([[*prompt, *tokens[:length].tolist()]])).logits[0, len(prompt) - 1 : -1]
        allowed = _filtered(logits / 0.5, top_p, top_k).isfinite()
        assert allowed[torch.arange(length), tokens[:length]].all()
        was_left += int((tokens[:length] != logits.argmax(-1)).sum())
    assert was_left > 0


@pytest.mark.parametrize(("kind", "batch"), [("causal", 512), ("causal", 6), ("seq2seq", 512)])
def test_log_probs_over_the_kept_tokens(kind: str, batch: int) -> None:
    policy = policy_of(kind)
    settings: dict[str, Any] = {
        "top_k": 6,
        "top_p": 0.8,
        "temperature": 0.5,
        "min_completion_length": 2,
        "batch": batch,
    }
    policy.temperature = 0.5
    rollout, whole = rolled(policy, keep_support=True, **settings), rolled(policy, **settings)
    assert torch.equal(rollout.batch.tokens, whole.batch.tokens) and whole.batch.kept is None
    kept, mask = rollout.batch.kept, rollout.batch.mask
    assert kept is not None and ((kept >= 0).any(-1) == mask).all()
    assert (kept == rollout.batch.tokens[..., None]).any(-1)[mask].all()
    # the whole softmax lowers the log-prob by that of the kept tokens together
    assert (rollout.logprobs >= whole.logprobs - 1e-6).all() and (rollout.logprobs > whole.logprobs + 0.01).any()
    rows = torch.tensor([4, 0])
    part = rollout.batch.rows(rows)
    with torch.no_grad(), evaluating(policy):
        again = policy("logprobs", part)
        plain = policy("logprobs", dataclasses.replace(part, kept=None))
    expected = rollout.logprobs[rows][:, : again.shape[1]]
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)  # sums of a hundred float32 terms in another order
    assert (plain - expected).abs().max() > 0.01
    loss, _ = policy("loss", part, old_logprobs=expected, advantages=torch.ones(2), config="grpo", return_entropy=True)
    # all ratios are 1, and all advantages
    assert abs(float(loss.loss.detach()) + 1) < 1e-4


def test_tokens_are_never_read_back_from_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small.ready(small.recipe(tmp_path, "rl.algorithm.similarity={embedder: hashed}"))
    items = run.items("train")[:6]
    tokenizer = run.policy.tokenizer
    sampling = Sampling(num_generations=4, max_completion_length=12)
    rollout = roll_out(run.policy, items, sampling, torch.Generator().manual_seed(0))
    again = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rollout.texts]
    tokens = [row[mask].tolist() for row, mask in zip(rollout.batch.tokens, rollout.batch.mask, strict=True)]
    # tokenizing the texts would differ, as a text has several tokenizations
    assert any(a != [t for t in b if t != run.policy.eos_id] for a, b in zip(again, tokens, strict=True))
    for name in ("__call__", "encode", "_encode_plus"):
        monkeypatch.setattr(type(tokenizer), name, lambda *_: pytest.fail("a text was read back"))
    training.rl_step(run, items, 1)


def test_batches_do_not_change_the_most_probable_response() -> None:
    policy = policy_of()
    texts = [rolled(policy, num_generations=1, temperature=0.0, batch=batch).texts for batch in (1, 3, 100)]
    assert texts[0] == texts[1] == texts[2]


def fake_rollout(rows: int, size: int, width: int) -> Rollout:
    ones = torch.ones(rows, width, dtype=torch.bool)
    batch = Batch(
        torch.ones(rows // size, 1), ones[: rows // size, :1], torch.ones(rows, width), ones, torch.arange(rows) // size
    )
    return Rollout([{}] * (rows // size), batch, torch.zeros(rows, width), ~ones[:, 0], [""] * rows)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("ratio", "kept"), [(0.5, 4), (0.25, 2), (0.01, 1), (0.9, 7)])
def test_top_k_ratio_keeps_the_largest_advantages(per_token: bool, ratio: float, kept: int) -> None:
    rollout = fake_rollout(40, 8, 6)
    shape = (40, 6) if per_token else (40,)
    advantages = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    credit = Credit(advantages)
    _keep_largest(credit, rollout, ratio)
    assert credit.mask is not None
    keeps = credit.mask.any(1).view(5, 8)
    assert torch.equal(credit.mask, credit.mask.any(1)[:, None].expand_as(credit.mask))
    assert keeps.sum(1).tolist() == [kept] * 5
    size = (advantages.abs().amax(1) if per_token else advantages.abs()).view(5, 8)
    for row, chosen in zip(size, keeps, strict=True):
        assert sorted(row.tolist(), reverse=True)[:kept] == sorted(row[chosen].tolist(), reverse=True)
    before = rollout.batch.mask.clone()
    before[:, 3:] = False
    within = dataclasses.replace(credit, mask=before)
    _keep_largest(within, rollout, ratio)
    assert within.mask is not None and not within.mask[:, 3:].any() and within.mask[:, :3].any(1).sum() == 5 * kept
