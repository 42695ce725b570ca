"""The policy samples, scores and learns what transformers' own forward pass computes in float64.

Faults they are there for: log-probs, entropies or gradients that depend on sharing, padding, splitting or batches; an
id that is banned, filtered or an end too early, which sampling, scoring, loss or reference still give a share; a
reference that moves; a critic that moves the policy.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("peft")

from grpo_trainer import checkpoint, engine
from grpo_trainer import train as training
from grpo_trainer.checkpoint import save_policy
from grpo_trainer.policy import Policy, Reference, evaluating, load_policy
from grpo_trainer.recipe import Lora, Model, Tiny
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rollout import Rollout, _filtered, roll_out, select_usable
from grpo_trainer.setup import set_up
from grpo_trainer.vocabulary import banned_ids
from transformers import Gemma2Config, Gemma2ForCausalLM, TopKLogitsWarper, TopPLogitsWarper

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding
from tests.trainer import small

CORPUS = [f"Ann has {i} shells, sells {i % 9}. How many? {i} - {i % 9} = {i - i % 9}. #### {i}" for i in range(60)]
PROMPTS = [text[: 12 + i] for i, text in enumerate(CORPUS[:7])]
COPIES, LONGEST = 6, 9
KINDS = ("causal", "seq2seq", "softcap", "gemma", "adapters", "seq2seq adapters")


def policy_of(kind: str = "causal", banned: tuple[int | str, ...] = (), **settings: Any) -> Policy:
    torch.manual_seed(1)
    architecture: Any = "seq2seq" if "seq2seq" in kind else "causal"
    tiny = Tiny(architecture=architecture, hidden=32, layers=2, heads=2, intermediate=64, vocabulary=100)
    lora = Lora(rank=4) if "adapters" in kind else None
    policy = load_policy(Model(tiny=tiny, lora=lora, banned=list(banned), **settings), CORPUS, None)
    if kind in ("softcap", "gemma"):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        sizes |= {"vocab_size": len(policy.tokenizer), "intermediate_size": 64, "head_dim": 16}
        lm = Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=3.0 if kind == "softcap" else None, **sizes))
        policy = Policy(lm, policy.tokenizer, banned=policy.banned_ids)
    # with a softcap, the fused head would train another model than the one that sampled
    assert policy.has_plain_head is (kind != "softcap" and "seq2seq" not in kind)
    with torch.no_grad():
        for name, weight in policy.lm.named_parameters():
            if "lora_B" in name:
                # T5 does not divide attention scores by sqrt(d); it starts from queries of std 0.04 instead. Updates of
                # std 0.4 led to scores of 300, which amplified roundings 10,000 times.
                weight.normal_(std=0.08 if "seq2seq" in kind else 0.3)
            elif banned:  # probabilities differ enough for a banned id to have had a large one
                weight.mul_(1.5)
    return policy


def sampled(policy: Policy, **settings: Any) -> Rollout:
    items = select_usable(policy, [{"prompt": text} for text in PROMPTS], "prompt", 100, False)
    sampling = Sampling().model_copy(update={"num_generations": COPIES, "max_completion_length": LONGEST} | settings)
    policy.temperature = sampling.temperature or 1.0
    return roll_out(policy, items, sampling, torch.Generator().manual_seed(0))


@functools.cache
def frequent(kind: str) -> tuple[int, ...]:
    """The ids that a policy without bans produces most, so that a ban is seen."""
    policy = policy_of(kind, (0,))
    rollout = sampled(policy)
    counts = torch.bincount(rollout.batch.tokens[rollout.batch.mask], minlength=len(policy.tokenizer))
    counts[policy.stop_ids] = 0
    return tuple(counts.topk(12).indices.tolist())


def logits_of(policy: Policy, rollout: Rollout, i: int) -> tuple[Tensor, Tensor]:
    """Tempered logits in float64 of transformers' own forward pass over one response, and its tokens."""
    tokens = rollout.batch.tokens[i][rollout.batch.mask[i]]
    prompt = torch.tensor([rollout.items[i // rollout.group_size]["prompt_ids"]])
    if policy.is_seq2seq:
        start = torch.tensor([[policy.lm.config.decoder_start_token_id]])
        inputs = {"input_ids": prompt, "decoder_input_ids": torch.cat((start, tokens[None, :-1]), 1)}
        logits = policy.lm(**inputs).logits[0]
    else:
        logits = policy.lm(torch.cat((prompt, tokens[None]), 1)).logits[0, prompt.shape[1] - 1 : -1]
    return logits.double() / policy.temperature, tokens


SUPPORT = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "keep_support": True}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.6, "min_completion_length": 3},
    {"temperature": 1.3, "batch": 6},
    SUPPORT | {"min_completion_length": 2, "batch": 12},
    {"temperature": 0.5, "top_k": 4, "top_p": 0.6},
    {"top_k": 95},
    {"temperature": 0.0, "batch": 18},
]


def open_logits_of(logits: Tensor, banned: tuple[int, ...], policy: Policy, settings: dict[str, Any]) -> Tensor:
    """Logits of what may be sampled, before filters."""
    open_logits = logits.index_fill(1, torch.tensor(banned, dtype=torch.int64), -math.inf)
    open_logits[: settings.get("min_completion_length", 0), policy.stop_ids] = -math.inf
    return open_logits


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_banned", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampled_and_scored_log_probs(kind: str, is_banned: bool, settings: dict[str, Any]) -> None:
    banned = frequent(kind) if is_banned else ()
    policy = policy_of(kind, banned)
    rollout = sampled(policy, **settings)
    batch, is_greedy = rollout.batch, settings.get("temperature") == 0
    ends, changed, lost = 0, 0, 0.0
    assert (batch.kept is not None) == bool(settings.get("keep_support"))
    with torch.no_grad(), evaluating(policy):
        scored = [policy("logprobs", batch, share=share) for share in (True, False)]
        rows = torch.tensor([1, 4, 20, 11])
        part = policy("logprobs", batch.rows(rows))
        width = part.shape[1]

        def of_rows() -> Tensor:
            return policy("logprobs", batch, share=True)[rows][:, :width]

        assert_close_to_rounding(part, of_rows(), of_rows)
        policy.lm.double()
        policy.backend = "reference"
        exact = policy("logprobs", batch)  # of all rows at once, whose rounding is quick to measure
        gold = exact.clone()
        for i in range(0, len(rollout.texts), 2):
            logits, tokens = logits_of(policy, rollout, i)
            allowed = open_logits_of(logits, banned, policy, {})
            open_logits = open_logits_of(logits, banned, policy, settings)
            filtered = _filtered(open_logits, settings.get("top_p", 1.0), settings.get("top_k", 0))
            assert filtered.gather(1, tokens[:, None]).isfinite().all()
            changed += int((tokens != open_logits.argmax(-1)).sum())
            if batch.kept is not None:
                kept = [set(row[row >= 0].tolist()) for row in batch.kept[i][: len(tokens)]]
                assert kept == [set(row.isfinite().nonzero().flatten().tolist()) for row in filtered]
            # without the support, ends before the least length are scored, as in the update
            of_vocabulary = (allowed if batch.kept is None else filtered).log_softmax(-1)
            gold[i, : len(tokens)] = of_vocabulary.gather(1, tokens[:, None]).squeeze(1)
            assert is_greedy or not rollout.logprobs[i, len(tokens) :].any()
            lost = max(lost, float(logits.softmax(-1)[:, list(banned)].sum(1).max()))
            has_end = int(tokens[-1]) in policy.stop_ids
            assert policy.eos_id not in tokens[:-1] and bool(rollout.truncated[i]) != has_end
            assert has_end or len(tokens) == LONGEST
            ends += has_end
        results = [gold, *scored, *([] if is_greedy else [rollout.logprobs])]
        many = len(results)
        assert_close_to_rounding(results, [exact] * many, lambda: [policy("logprobs", batch)] * many, torch.float64)
    assert (changed == 0) == is_greedy and (not is_banned or lost > 0.15), "filters and bans must matter"
    assert is_greedy or settings.get("top_p") or ends > 0
    if not policy.is_seq2seq:  # padding on the left is cut off
        lengths = [len(item["prompt_ids"]) for item in rollout.items]
        shortest = batch.rows(torch.tensor([COPIES * lengths.index(min(lengths))]))
        assert shortest.prompts.shape[1] == min(lengths) < max(lengths)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_banned", [False, True])
@pytest.mark.parametrize("settings", [{"temperature": 0.8}, SUPPORT], ids=str)
@pytest.mark.parametrize("share", [True, False])
def test_loss_entropy_and_gradient(kind: str, is_banned: bool, settings: dict[str, Any], share: bool) -> None:
    """Against a float64 policy gradient with an entropy bonus, whose formula is written out here."""
    banned = frequent(kind) if is_banned else ()
    policy = policy_of(kind, banned)
    rollout = sampled(policy, **settings)
    rows = torch.arange(0, len(rollout.texts), 3)
    batch, advantages = rollout.batch.rows(rows), torch.linspace(-1, 1, len(rows))
    policy.lm.double()
    policy.eval()
    want, entropies, count = torch.zeros((), dtype=torch.float64), 0.0, int(batch.mask.sum())
    for i, advantage in zip(rows.tolist(), advantages.tolist(), strict=True):
        logits, tokens = logits_of(policy, rollout, i)
        logits = open_logits_of(logits, banned, policy, {})
        if rollout.batch.kept is not None:
            for t, kept in enumerate(rollout.batch.kept[i][: len(tokens)]):
                logits[t, ~torch.isin(torch.arange(logits.shape[1]), kept)] = -math.inf
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs.masked_fill(logits.isinf(), 0)).sum()
        entropies += float(entropy.detach())
        want = want - (advantage * logprobs.gather(1, tokens[:, None]).sum() + 0.1 * entropy) / count
    weights = [weight for weight in policy.lm.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(want, weights, allow_unused=True)
    with torch.no_grad():
        old = policy("logprobs", batch)
    config = gk.LossConfig("reinforce", entropy_coef=0.1, entropy_aggregation="token-mean")
    given = {"old_logprobs": old, "advantages": advantages.double(), "config": config}

    def learned(backend: str | None) -> list[Any]:
        policy.backend = backend
        loss, _ = policy("loss", batch, share=share, return_entropy=True, **given)
        own = torch.autograd.grad(loss.loss, weights, allow_unused=True)
        pairs = zip(own, gradients, strict=True)
        return [loss.metrics.to_dict()["entropy_sum"], *(mine for mine, gradient in pairs if gradient is not None)]

    gold = [entropies, *(gradient for gradient in gradients if gradient is not None)]
    assert len(gold) > 6
    exact = learned("reference")
    assert_close_to_rounding([gold, learned(None)], [exact] * 2, lambda: [learned("reference")] * 2, torch.float64)


def test_the_reference_is_the_policy_until_it_moves_but_for_ids_that_pad_the_vocabulary() -> None:
    for kind in ("causal", "adapters"):
        policy = policy_of(kind, frequent("causal"))
        rollout = sampled(policy, temperature=0.7)
        reference = Reference(policy, Model(lora=Lora(rank=4) if kind == "adapters" else None))
        before = reference.logprobs(rollout.batch)
        with torch.no_grad(), evaluating(policy):
            assert torch.equal(before, policy("logprobs", rollout.batch))
            for weight in policy.parameters():
                weight += 0.1 * weight.requires_grad
            assert torch.equal(reference.logprobs(rollout.batch), before)
            assert not torch.equal(policy("logprobs", rollout.batch), before)
    policy, padded = policy_of(), policy_of().lm
    size = len(policy.tokenizer)
    padded.resize_token_embeddings(size + 8)
    banned = banned_ids([*range(size, size + 8), 20], padded, policy.tokenizer)
    rollout = sampled(Policy(padded, policy.tokenizer, banned=banned))
    assert (rollout.batch.tokens[rollout.batch.mask] < size).all()
    reference_policy = Policy(padded, policy.tokenizer, banned=banned).with_lm(policy.lm)
    assert reference_policy.banned_ids == [20]
    reference_policy.backend = "reference"

    def scored() -> Tensor:
        return reference_policy("logprobs", rollout.batch).detach()

    assert_close_to_rounding(rollout.logprobs, scored(), scored)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["causal", "seq2seq", "adapters"])
def test_a_critic(kind: str, separate: bool) -> None:
    """A separate critic has no gradient into the policy; before it is trained, both read the same states."""
    policy = policy_of(kind)
    policy.add_critic() if separate else policy.add_value_head()
    head = (policy.critic or policy).value_head
    assert head is not None
    rollout = sampled(policy)
    assert torch.equal(policy("values", rollout.batch), torch.zeros_like(rollout.logprobs))
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
    rows = {"old_logprobs": rollout.logprobs, "advantages": torch.ones(len(rollout.texts))}
    own = [name for name, p in policy.lm.named_parameters() if p.requires_grad]
    for values in ("head", "all"):
        policy.zero_grad()
        _, predicted = policy("loss", rollout.batch, values=values, **rows)
        torch.testing.assert_close(predicted, policy("values", rollout.batch))
        predicted.square().sum().backward()
        moved = [name for name, p in policy.lm.named_parameters() if p.grad is not None and float(p.grad.norm()) > 0]
        assert bool(moved) == (values == "all" and not separate) and set(moved) <= set(own)
        if policy.critic is not None:
            assert any(p.grad is not None and float(p.grad.norm()) > 0 for p in policy.critic.parameters())
    unshared = policy("values", rollout.batch, share=False).detach()

    def shared() -> Tensor:
        return policy("values", rollout.batch).detach()

    assert_close_to_rounding(unshared, shared(), shared)


# Sampling


def test_sampling_follows_the_policys_probabilities_and_filters_are_those_of_transformers() -> None:
    """Chi-squared of the first tokens of 6,000 responses against the softmax, within five sigma."""
    policy = policy_of()
    items = select_usable(policy, [{"prompt": PROMPTS[3]}], "prompt", 100, False)
    sampling = Sampling(num_generations=6000, max_completion_length=1, batch=6000)
    rollout = roll_out(policy, items, sampling, torch.Generator().manual_seed(3))
    with torch.no_grad():
        chances = policy.lm(torch.tensor([items[0]["prompt_ids"]])).logits[0, -1].softmax(-1).double()
    counts = torch.bincount(rollout.batch.tokens[:, 0], minlength=len(chances)).double()
    often = chances * 6000 >= 5
    apart = ((counts - chances * 6000).square() / (chances * 6000))[often].sum()
    degrees = int(often.sum())
    assert abs(float(apart) - degrees) < 5 * (2 * degrees) ** 0.5
    logits = 3 * torch.randn(64, 97, generator=torch.Generator().manual_seed(2))
    for top_k, top_p in ((0, 1e-9), (0, 0.3), (5, 1.0), (1, 1.0), (20, 0.7), (500, 0.999)):
        expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
        expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
        assert torch.equal(_filtered(logits, top_p, top_k), expected)


def test_responses_end_at_every_stop_token_of_the_generation_config(tmp_path: Path) -> None:
    policy = policy_of()
    before = sampled(policy, temperature=0.0)
    other = int(before.batch.tokens[0, 2])
    policy.lm.generation_config.eos_token_id = [policy.eos_id, other]
    with pytest.raises(ValueError, match=rf"must not end responses, as \[1, {other}\] do, got {other}"):
        banned_ids([other], policy.lm, policy.tokenizer)
    save_policy(policy, tmp_path)
    policy = load_policy(Model(path=str(tmp_path)), [], None)
    assert policy.stop_ids == sorted({policy.eos_id, other})
    rollout = sampled(policy, temperature=0.0)
    tokens, first = rollout.batch.tokens[0][rollout.batch.mask[0]].tolist(), before.batch.tokens[0].tolist()
    assert tokens == first[: first.index(other) + 1] and not rollout.truncated[0]
    rollout = sampled(policy, min_completion_length=5)
    assert not torch.isin(rollout.batch.tokens[:, :5], torch.tensor(policy.stop_ids)).any()


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_mixed_precision_applies_to_scoring_too(kind: str) -> None:
    """Sampling and scoring round alike, so they are closer to each other than to float32."""
    policy, exact = policy_of(kind, mixed_precision="bf16"), policy_of(kind)
    rollout = sampled(policy)
    assert rollout.logprobs.dtype == torch.float32
    with torch.no_grad(), evaluating(policy), evaluating(exact):
        scored, in_float = policy("logprobs", rollout.batch), exact("logprobs", rollout.batch)
    apart = (scored - rollout.logprobs).abs().mean()
    of_precision = (in_float - rollout.logprobs).abs().mean()
    assert apart < of_precision and of_precision > 1e-4


def test_tokens_are_never_read_back_from_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text has several tokenizations, of which the sampled one is rarely that of the tokenizer."""
    run = small.ready(small.recipe(tmp_path, "rl.algorithm.similarity={embedder: hashed}"))
    items = run.items("train")[:6]
    for name in ("__call__", "encode", "_encode_plus"):
        monkeypatch.setattr(type(run.policy.tokenizer), name, lambda *_: pytest.fail("a text was read back"))
    training.rl_step(run, items, 1)


# Tokens and devices


def test_tokens_that_are_banned_or_have_no_embedding_and_prompts_that_do_not_fit() -> None:
    policy = policy_of("causal", ("7", 7, "<pad>"))
    vocabulary = policy.tokenizer.get_vocab()
    assert policy.banned_ids == sorted({vocabulary["7"], 7, vocabulary["<pad>"]})
    assert "banned" not in policy.state_dict()
    with pytest.raises(
        ValueError, match=r"^model\.banned: must leave one of 69 tokens that does not end responses, got 68$"
    ):
        policy_of("causal", (0, *range(2, 69)))
    engine.check_banned(range(1024))
    with pytest.raises(ValueError, match=r"^model\.banned: must have at most 1024 tokens with rollout\.engine: vllm, "):
        engine.check_banned(range(1025))
    lines = [{"prompt": text} for text in (*PROMPTS, "")]
    lengths = [len(policy.tokenizer(line["prompt"])["input_ids"]) for line in lines]
    longest = sorted(lengths)[4]
    usable = select_usable(policy, lines, "prompt", longest, False)
    assert [len(item["prompt_ids"]) for item in usable] == [length for length in lengths if 0 < length <= longest]
    for kind in ("causal", "seq2seq"):
        policy = policy_of(kind)
        rows = len(policy.tokenizer)
        policy.lm.resize_token_embeddings(rows - 1)
        policy.check_tokens([rows - 2], "the prompts")
        missing = f"must have an embedding of every token of the prompts, got token {rows - 1} of its tokenizer"
        with pytest.raises(ValueError, match=rf"^model\.path: {missing} and an embedding of {rows - 1} rows$"):
            policy.check_tokens([0, rows - 1], "the prompts")
        policy.lm.resize_token_embeddings(20)
        with pytest.raises(ValueError, match="of every token of the prompts"):
            sampled(policy)


def test_a_model_is_on_its_device_before_a_policy_is_made_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy runs its model when it is created, and a reference is created before the first step."""
    model = tmp_path / "checkpoints" / "rl-1" / "model"
    save_policy(policy_of(), model)
    seen = []
    monkeypatch.setattr(Policy, "_head_is_plain", lambda self: bool(seen.append(self.device.type)))
    monkeypatch.setattr("grpo_trainer.distributed.start", lambda: torch.device("meta"))
    monkeypatch.setattr("grpo_trainer.setup.check_cache", lambda policy: None)  # which samples, and meta has no numbers
    recipe = small.recipe(tmp_path, f"model.path={model}")
    for path in ("tiny", model):
        policy = set_up(small.recipe(tmp_path / "run", f"model.path={path}")).policy
    assert checkpoint.restore_policy(recipe, checkpoint.State("rl", 1, None, {}, 1, {}, ""), policy) is policy
    Reference(policy, Model(reference_model_path=str(model)))
    policy.add_critic()
    assert seen == ["meta"] * 4
