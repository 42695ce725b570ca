"""The engine samples as the policy would, from the weights it was given, and the trainer finds its log-probs again."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grpo_trainer.engine import Engine, EngineError
from grpo_trainer.policy import Policy, evaluating, load_policy
from grpo_trainer.recipe import Lora, Model, Rl, Tiny
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rollout import Rollout, _filtered, roll_out, select_usable

CORPUS = [f"Ann has {i} shells, sells {i % 9}. How many? {i} - {i % 9} = {i - i % 9}. #### {i}" for i in range(60)]
PROMPTS = [text[: 12 + i] for i, text in enumerate(CORPUS[:7])]
TINY = Tiny(hidden=64, layers=2, heads=2, intermediate=64, vocabulary=100)
LORA = Lora(rank=4, alpha=12)


def policy_of(model: Model) -> Policy:
    torch.manual_seed(1)
    policy = load_policy(model, CORPUS, None)
    change(policy, "lora_B", 0.3)
    with torch.no_grad():  # flat distributions would not show an error of the logits
        policy.inner.get_input_embeddings().weight.mul_(3)
    return policy


@torch.no_grad()
def change(policy: Policy, part: str, by: float) -> None:
    for name, parameter in policy.lm.named_parameters():
        if part in name:
            parameter.add_(torch.randn_like(parameter) * by)


@contextmanager
def started(model: Model, **settings: Any) -> Iterator[tuple[Policy, Engine]]:
    policy = policy_of(model)
    sampling = Sampling().model_copy(
        update={"num_generations": 3, "max_completion_length": 9, "engine": "vllm"} | settings
    )
    engine = Engine(policy, model, Rl(rollout=sampling), "rl.rollout")
    try:
        yield policy, engine
    finally:
        engine.close()


def items_of(policy: Policy, before: str = "") -> list[dict[str, Any]]:
    return select_usable(policy, [{"prompt": before + text} for text in PROMPTS], "prompt", 500, False)


def sampled(policy: Policy, engine: Engine, seed: int = 0, before: str = "") -> Rollout:
    return engine.roll_out(items_of(policy, before), torch.Generator().manual_seed(seed))


def logits_of(policy: Policy, rollout: Rollout, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in float64 of transformers' own forward pass over one response, and its tokens."""
    tokens = rollout.batch.tokens[i][rollout.batch.mask[i]]
    prompt = torch.tensor([rollout.items[i // rollout.group_size]["prompt_ids"]])
    policy.lm.double()
    with torch.no_grad(), evaluating(policy):
        logits = policy.lm(torch.cat((prompt, tokens[None]), 1)).logits[0, prompt.shape[1] - 1 : -1]
    policy.lm.float()
    return logits, tokens


def assert_scored_alike(policy: Policy, rollout: Rollout, sampling: Sampling) -> None:
    """Errors of float32 are about eps times the length of the sums, a hundred terms: 1e-5 of a log-prob or logit."""
    for i, stored in enumerate(rollout.logprobs):
        logits, tokens = logits_of(policy, rollout, i)
        logits = _filtered(logits / sampling.temperature, sampling.top_p, sampling.top_k)
        expected = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(stored[: len(tokens)].double(), expected, rtol=1e-5, atol=1e-5)
        assert not stored[len(tokens) :].any()
        assert bool(rollout.truncated[i]) == (int(tokens[-1]) not in policy.stop_ids)
        assert not torch.isin(tokens[:-1], torch.tensor(policy.stop_ids)).any()


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_log_probs_are_those_of_the_policy_before_and_after_it_changes(lora: Lora | None) -> None:
    """Prompts share more than a block of the cache, 128 tokens, whose keys and values must not outlive the weights."""
    shared = " ".join(CORPUS[:8])
    with started(Model(tiny=TINY, lora=lora), temperature=0.7, num_generations=8) as (policy, engine):
        first = sampled(policy, engine, before=shared)
        assert first.batch.prompt_mask.sum(1).min() > 140
        assert_scored_alike(policy, first, engine.sampling)
        assert 0 < first.truncated.sum() < len(first.texts), "some must end by a stop token, others by their length"
        change(policy, "lora_" if lora else "", 0.1)
        engine.is_current = False
        second = sampled(policy, engine, before=shared)
        assert_scored_alike(policy, second, engine.sampling)
        assert second.texts != first.texts


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 7, "top_p": 0.8, "temperature": 1.3}], ids=str
)
def test_filters_keep_the_tokens_that_the_trainers_own_keep(settings: dict[str, Any]) -> None:
    """A token that `_filtered` drops would have a log-prob of minus infinity."""
    with started(Model(tiny=TINY), **settings) as (policy, engine):
        assert_scored_alike(policy, sampled(policy, engine), engine.sampling)


@pytest.mark.parametrize("lora", [None, LORA], ids=["weights", "adapters"])
def test_greedy_tokens_are_those_of_transformers(lora: Lora | None) -> None:
    with started(Model(tiny=TINY, lora=lora), top_k=1, max_completion_length=24) as (policy, engine):
        ours = sampled(policy, engine)
        theirs = roll_out(policy, items_of(policy), engine.sampling, torch.Generator())
        assert ours.batch.tokens.tolist() == theirs.batch.tokens.tolist()
        assert torch.equal(ours.batch.mask, theirs.batch.mask) and torch.equal(ours.truncated, theirs.truncated)
        assert not ours.logprobs.any() and torch.equal(ours.batch.prompts, theirs.batch.prompts)
        assert torch.equal(ours.batch.prompt_of, theirs.batch.prompt_of) and ours.texts == theirs.texts


@pytest.mark.parametrize("settings", [{}, {"top_k": 9, "top_p": 0.9, "min_completion_length": 3}], ids=str)
def test_banned_tokens_have_no_share_of_the_probability(settings: dict[str, Any]) -> None:
    with started(Model(tiny=TINY), **settings) as (policy, engine):
        rollout = sampled(policy, engine)
        counts = torch.bincount(rollout.batch.tokens[rollout.batch.mask], minlength=100)
        counts[policy.stop_ids] = 0
        banned = counts.topk(12).indices.tolist()
    with started(Model(tiny=TINY, banned=banned), **settings) as (policy, engine):
        rollout = sampled(policy, engine)
        assert not torch.isin(rollout.batch.tokens[rollout.batch.mask], torch.tensor(banned)).any()
        lost = 0.0
        for i, stored in enumerate(rollout.logprobs):
            logits, tokens = logits_of(policy, rollout, i)
            lost = max(lost, float(logits.softmax(-1)[:, banned].sum(1).max()))
            allowed = logits.index_fill(1, torch.tensor(banned), -math.inf)
            allowed[: engine.sampling.min_completion_length, policy.stop_ids] = -math.inf
            allowed = _filtered(allowed, engine.sampling.top_p, engine.sampling.top_k)
            expected = allowed.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
            torch.testing.assert_close(stored[: len(tokens)].double(), expected, rtol=1e-5, atol=1e-5)
        assert lost > 0.2, "the bans must matter"


def test_banned_tokens_are_not_sampled_whatever_their_logits() -> None:
    """Logits that are hundreds apart would outweigh a bias of -100."""
    banned = [i for i in range(60) if i not in (1, 5, 9)]
    with started(Model(tiny=TINY, banned=banned), top_k=1) as (policy, engine):
        with torch.no_grad():
            policy.inner.get_output_embeddings().weight.mul_(1000)
        engine.is_current = False
        ours = sampled(policy, engine)
        theirs = roll_out(policy, items_of(policy), engine.sampling, torch.Generator())
        assert not torch.isin(ours.batch.tokens[ours.batch.mask], torch.tensor(banned)).any()
        assert ours.batch.tokens.tolist() == theirs.batch.tokens.tolist()
        logits, tokens = logits_of(policy, ours, 0)
        gap = logits.max(-1).values - logits.gather(1, tokens[:, None]).squeeze(1)
        assert gap.max() > 200


def test_the_end_is_not_sampled_before_the_minimum_length() -> None:
    shortest = []
    for least in (0, 6):
        with started(Model(tiny=TINY), min_completion_length=least, num_generations=64) as (policy, engine):
            shortest.append(int(sampled(policy, engine).lengths.min()))
    assert shortest[0] < 7 and shortest[1] == 7, "six tokens and the end"


def test_tokens_follow_from_the_seed_and_the_prompts_place() -> None:
    with started(Model(tiny=TINY)) as (policy, engine):
        one, again, other = (sampled(policy, engine, seed) for seed in (3, 3, 4))
        assert torch.equal(one.batch.tokens, again.batch.tokens) and torch.equal(one.logprobs, again.logprobs)
        assert one.texts != other.texts
        prompts = [item["prompt_ids"] for item in items_of(policy)]
        whole = engine._generate(prompts, 0, 3, engine.sampling)
        parts = engine._generate(prompts[:2], 0, 3, engine.sampling) + engine._generate(
            prompts[2:], 2, 3, engine.sampling
        )
        assert [tokens for tokens, _ in whole] == [tokens for tokens, _ in parts]
        same = engine._generate([prompts[0]] * 2, 0, 3, engine.sampling)
        assert len({tuple(tokens) for tokens, _ in same}) == len(same), "equal prompts have different responses"


def weights_of(worker: Any) -> dict[str, torch.Tensor]:
    """Weights of the engine. Those packed for the CPU are read as products with the identity, which have their bits."""
    weights = {name: value.clone() for name, value in worker.model_runner.model.named_parameters()}
    for name, module in worker.model_runner.model.named_modules():
        if f"{name}.weight" in weights and weights[f"{name}.weight"].numel() == 0:
            size = {"down_proj": TINY.intermediate}.get(name.rpartition(".")[2], TINY.hidden)
            weights[f"{name}.weight"] = module.quant_method.apply(module, torch.eye(size)).T.contiguous()
    return weights


def adapters_of(worker: Any) -> dict[str, Any]:
    return worker.model_runner.lora_manager._adapter_manager.get_adapter(1).loras


def test_weights_after_a_hand_over_are_equal_bit_by_bit() -> None:
    with started(Model(tiny=TINY)) as (policy, engine):
        before = {name: value.clone() for name, value in policy.lm.state_dict().items()}
        assert_same_weights(before, engine.llm.collective_rpc(weights_of)[0])
        change(policy, "", 0.1)
        assert_same_weights(before, engine.llm.collective_rpc(weights_of)[0])
        engine.hand_over()
        assert_same_weights(policy.lm.state_dict(), engine.llm.collective_rpc(weights_of)[0])


def assert_same_weights(ours: dict[str, torch.Tensor], engines: dict[str, torch.Tensor]) -> None:
    """The engine stacks the projections of attention, those of the gate, and pads the vocabulary with zeros."""
    for name, value in engines.items():
        for whole, parts in {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }.items():
            if whole in name:
                expected = torch.cat([ours[name.replace(whole, part)] for part in parts])
                break
        else:
            expected = ours[name]
        assert torch.equal(value[: len(expected)], expected), name
        assert not value[len(expected) :].any(), name
    assert len(engines) == 4 * TINY.layers + 2 * TINY.layers + 3


def test_adapters_after_a_hand_over_are_equal_bit_by_bit() -> None:
    """alpha / rank is 3; the engine multiplies the second factor by it."""
    with started(Model(tiny=TINY, lora=LORA)) as (policy, engine):
        change(policy, "lora_", 0.1)
        engine.hand_over()
        engines = engine.llm.collective_rpc(adapters_of)[0]
        ours = {name: value for name, value in policy.lm.named_parameters() if "lora_" in name}
        compared = 0
        for name, layer in engines.items():
            packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
            parts = packed.get(name.rpartition(".")[2], (name.rpartition(".")[2],))
            firsts = layer.lora_a if isinstance(layer.lora_a, list) else [layer.lora_a]
            seconds = layer.lora_b if isinstance(layer.lora_b, list) else [layer.lora_b]
            for part, a, b in zip(parts, firsts, seconds, strict=True):
                path = f"base_model.model.{name.rpartition('.')[0]}.{part}"
                assert torch.equal(a, ours[f"{path}.lora_A.default.weight"]), path
                assert torch.equal(b, ours[f"{path}.lora_B.default.weight"] * 3), path
                compared += 2
        assert compared == len(ours) > 0


def test_a_weight_that_is_left_out_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine._weights
    monkeypatch.setattr(
        Engine, "_weights", lambda self: ((name, value) for name, value in real(self) if "1.mlp.down_proj" not in name)
    )
    with (
        pytest.raises(
            EngineError, match=r"rollout.engine: vLLM must take over all weights, got none for .*1.mlp.down_proj"
        ),
        started(Model(tiny=TINY)),
    ):
        pass


def test_the_process_keeps_its_threads_seeds_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.manual_seed(5)
    random.seed(5)
    names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    before = torch.get_rng_state(), random.getstate(), [os.environ.get(name) for name in names], torch.set_num_threads
    policy = policy_of(Model(tiny=TINY))
    torch.set_rng_state(before[0])
    engine = Engine(policy, Model(tiny=TINY), Rl(rollout=Sampling(engine="vllm")), "rl.rollout")
    engine.close()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert ([os.environ.get(name) for name in names], torch.set_num_threads) == before[2:]
    assert not torch.distributed.is_initialized()
