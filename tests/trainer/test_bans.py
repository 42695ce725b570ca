"""Ids that the policy cannot produce (`model.banned`).

Faults they are there for: an id that one of sampling, scoring, entropies, the loss and the reference still gives a
share; a token text that is read as other ids; a banned id that ends responses or is to be imitated.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

from grpo_trainer import engine
from grpo_trainer.evaluate import evaluate_model
from grpo_trainer.policy import Policy, Reference, evaluating, load_policy
from grpo_trainer.recipe import Lora, Model, Recipe, Tiny
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.recipes import validated
from grpo_trainer.rollout import Rollout, _filtered, roll_out, select_usable
from grpo_trainer.setup import set_up
from grpo_trainer.train import train
from grpo_trainer.vocabulary import banned_ids

import grpo_kernels as gk
from tests.trainer import small
from tests.trainer.test_policy import CORPUS, PROMPTS

KINDS = ("causal", "seq2seq", "softcap")
COPIES = 6


def policy_of(kind: str, banned: tuple[int | str, ...] = (), adapters: bool = False) -> Policy:
    torch.manual_seed(1)
    architecture: Any = "seq2seq" if kind == "seq2seq" else "causal"
    tiny = Tiny(architecture=architecture, hidden=32, layers=2, heads=2, intermediate=64, vocabulary=100)
    policy = load_policy(Model(tiny=tiny, lora=Lora(rank=4) if adapters else None, banned=list(banned)), CORPUS, None)
    if kind == "softcap":
        from transformers import Gemma2Config, Gemma2ForCausalLM

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        size = {"vocab_size": len(policy.tokenizer), "intermediate_size": 64, "head_dim": 16}
        lm = Gemma2ForCausalLM(Gemma2Config(**size, **sizes, final_logit_softcapping=3.0))
        policy = Policy(lm, policy.tokenizer, banned=policy.banned_ids)
    assert policy.has_plain_head is (kind == "causal")
    with torch.no_grad():  # probabilities differ enough for a banned id to have had a large one
        for weight in policy.lm.parameters():
            weight.mul_(1.5)
    return policy


def sampled(policy: Policy, **settings: Any) -> Rollout:
    items = select_usable(policy, [{"prompt": text} for text in PROMPTS], "prompt", 100, False)
    sampling = Sampling().model_copy(update={"num_generations": COPIES, "max_completion_length": 9} | settings)
    policy.temperature = sampling.temperature or 1.0
    return roll_out(policy, items, sampling, torch.Generator().manual_seed(0))


def frequent(kind: str) -> tuple[int, ...]:
    """The ids that a policy without bans produces most, so that a ban is seen."""
    policy = policy_of(kind)
    rollout = sampled(policy)
    counts = torch.bincount(rollout.batch.tokens[rollout.batch.mask], minlength=len(policy.tokenizer))
    counts[policy.stop_ids] = 0
    return tuple(counts.topk(12).indices.tolist())


def logits_of(policy: Policy, rollout: Rollout, i: int) -> tuple[Tensor, Tensor]:
    """Logits in float64 of transformers' own forward pass over one response, and its tokens."""
    tokens = rollout.batch.tokens[i][rollout.batch.mask[i]]
    prompt = torch.tensor([rollout.items[i // rollout.group_size]["prompt_ids"]])
    if not policy.is_seq2seq:
        return policy.lm(torch.cat((prompt, tokens[None]), 1)).logits[0, prompt.shape[1] - 1 : -1], tokens
    start = torch.tensor([[policy.lm.config.decoder_start_token_id]])
    return policy.lm(input_ids=prompt, decoder_input_ids=torch.cat((start, tokens[None, :-1]), 1)).logits[0], tokens


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.6, "min_completion_length": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "keep_support": True},
    {"top_k": 95},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampler_and_trainer_have_a_softmax_over_the_allowed_ids(kind: str, settings: dict[str, Any]) -> None:
    """Errors of float32 are those of sums of logits of up to 30: some 1e-5, where a ban moves log-probs by 0.15."""
    banned = frequent(kind)
    policy = policy_of(kind, banned)
    rollout = sampled(policy, **settings)
    mask, lost = rollout.batch.mask, 0.0
    for ids in (rollout.batch.tokens[mask], rollout.batch.kept):
        assert ids is None or not torch.isin(ids, torch.tensor(banned)).any()
    with torch.no_grad(), evaluating(policy):
        scored = policy("logprobs", rollout.batch)
        policy.lm.double()
        for i in range(0, len(mask), 4):
            logits, tokens = logits_of(policy, rollout, i)
            logits = logits / policy.temperature
            allowed = logits.index_fill(1, torch.tensor(banned), -math.inf)
            if settings.get("temperature") == 0:
                assert torch.equal(allowed.argmax(-1), tokens)
            if settings.get("keep_support"):
                allowed = _filtered(allowed, settings["top_p"], settings["top_k"])
            want = allowed.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
            for got in (rollout.logprobs, scored)[settings.get("temperature") == 0 :]:
                torch.testing.assert_close(got[i, : len(tokens)].double(), want, rtol=1e-4, atol=1e-4)
            lost = max(lost, float(logits.softmax(-1)[:, list(banned)].sum(1).max()))
    assert lost > 0.15, "the bans must matter"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [True, False])
def test_loss_entropy_and_gradient_are_over_the_allowed_ids(kind: str, share: bool) -> None:
    """Against a float64 policy gradient with an entropy bonus, whose formula is written out here."""
    banned = frequent(kind)
    policy = policy_of(kind, banned)
    rollout = sampled(policy, temperature=0.8)
    rows = torch.arange(0, len(rollout.texts), 3)
    batch, advantages = rollout.batch.rows(rows), torch.linspace(-1, 1, len(rows))
    policy.lm.double()
    want, entropies, count = torch.zeros((), dtype=torch.float64), 0.0, int(batch.mask.sum())
    policy.eval()
    for i, advantage in zip(rows.tolist(), advantages.tolist(), strict=True):
        logits, tokens = logits_of(policy, rollout, i)
        allowed = torch.tensor([j for j in range(logits.shape[1]) if j not in banned])
        logprobs = (logits[:, allowed] / 0.8).log_softmax(-1)
        chosen = logprobs.gather(1, torch.searchsorted(allowed, tokens)[:, None])
        entropy = -(logprobs.exp() * logprobs).sum()
        entropies += float(entropy.detach())
        want = want - (advantage * chosen.sum() + 0.1 * entropy) / count
    gradients = torch.autograd.grad(want, list(policy.lm.parameters()), allow_unused=True)
    with torch.no_grad():
        old = policy("logprobs", batch)
    config = gk.LossConfig("reinforce", entropy_coef=0.1, entropy_aggregation="token-mean")
    loss, _ = policy(
        "loss", batch, share=share, old_logprobs=old, advantages=advantages.double(), config=config, return_entropy=True
    )
    loss.loss.backward()
    assert abs(loss.metrics.to_dict()["entropy_sum"] - entropies) / count < 1e-6
    compared = 0
    for parameter, gradient in zip(policy.lm.parameters(), gradients, strict=True):
        if gradient is not None:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared > 5


def test_the_reference_has_the_same_bans_but_for_ids_that_pad_the_vocabulary() -> None:
    for adapters in (False, True):
        policy = policy_of("causal", frequent("causal"), adapters)
        rollout, settings = sampled(policy), Model(lora=Lora(rank=4) if adapters else None)
        with evaluating(policy):
            got = Reference(policy, settings).logprobs(rollout.batch)
        torch.testing.assert_close(got, rollout.logprobs, rtol=1e-4, atol=1e-5)
    policy = policy_of("causal")
    size = len(policy.tokenizer)
    padded = policy_of("causal").lm
    padded.resize_token_embeddings(size + 8)
    banned = banned_ids([*range(size, size + 8), 20], padded, policy.tokenizer)
    rollout = sampled(Policy(padded, policy.tokenizer, banned=banned))
    assert (rollout.batch.tokens[rollout.batch.mask] < size).all()
    reference = Policy(padded, policy.tokenizer, banned=banned).with_lm(policy.lm)
    assert reference.banned_ids == [20]
    torch.testing.assert_close(reference("logprobs", rollout.batch), rollout.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("banned", "message"),
    [
        ((5, "no such"), r"\.1: must be a token of the tokenizer as .*, got 'no such', which it reads as \['n"),
        ((69,), r"\.0: must be a token in \[0, 69\), the model's vocabulary, got 69$"),
        ((5, -1), r"\.1: must be a token in \[0, 69\), the model's vocabulary, got -1$"),
        ((1,), r"\.0: must not end responses, as \[1\] do, got 1$"),
        (("<end>",), r"\.0: must not end responses, as \[1\] do, got '<end>'$"),
        ((0, *range(2, 69)), r": must leave one of 69 tokens that does not end responses, got 68$"),
    ],
)
def test_what_cannot_be_banned_is_an_error(banned: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.banned{message}"):
        policy_of("causal", banned)


def test_tokens_are_named_and_neither_end_turns_nor_are_demonstrated(tmp_path: Path) -> None:
    policy = policy_of("causal", ("7", 7, "<pad>"))
    vocabulary = policy.tokenizer.get_vocab()
    assert (
        policy.banned_ids == sorted({vocabulary["7"], 7, vocabulary["<pad>"]}) and "banned" not in policy.state_dict()
    )
    policy.lm.generation_config.eos_token_id = [1, 30]
    with pytest.raises(ValueError, match=r"must not end responses, as \[1, 30\] do, got 30"):
        banned_ids([30], policy.lm, policy.tokenizer)
    for banned, message in (
        ("[4000]", r"\.0: must be a token in \[0, 1\d\d\), the model's vocabulary, got 4000"),
        ("[Ġ=]", r": must not hold a token of a demonstration, got 'Ġ=', token \d+ of '"),
    ):
        with pytest.raises(ValueError, match=rf"^model\.banned{message}"):
            train(small.recipe(tmp_path, f"model.banned={banned}"))
        assert not (tmp_path / "metrics.jsonl").exists()


def length(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [len(text) / 10 for text in completions]


def test_runs_are_trained_resumed_and_evaluated_with_bans(tmp_path: Path) -> None:
    """No response, from the first step to the evaluation of a checkpoint, has a banned token."""
    tokens = set_up(small.recipe(tmp_path)).policy.tokenizer.get_vocab()
    settings = small.values(tmp_path)
    del settings["sft"]
    settings["rl"]["rewards"] = [{"name": f"{__name__}:length"}]
    settings["model"]["banned"] = [token for token in tokens if any(letter.isdigit() for letter in token)]
    settings |= {"checkpoints": {"every": 1, "keep": 9}, "logging": {"samples": 8, "progress": False}}
    recipe = validated(Recipe, settings)
    train(recipe)
    steps = small.steps(recipe.folder)
    assert len(steps) == 4 and steps[0]["train/kl_rollout"] < 1e-9 and steps[-1]["train/grad_norm"] > 0
    final = evaluate_model(recipe, str(small.newest(recipe.folder)), "test")
    responses = [line["response"] for line in small.lines(recipe.folder, "samples")]
    responses += [line["greedy"] for line in final.lines]
    assert len(responses) > 30 and not any(letter.isdigit() for text in responses for letter in text)
    for folder in (recipe.folder / "checkpoints").glob("rl-[34]"):
        shutil.rmtree(folder)
    assert train(recipe, resume=True)["eval/test_reward"] == final.metrics["reward"]


def test_vllm_takes_a_limited_number() -> None:
    engine.check_banned(range(1024))
    with pytest.raises(ValueError, match=r"^model\.banned: must have at most 1024 tokens with rollout\.engine: vllm, "):
        engine.check_banned(range(1025))
