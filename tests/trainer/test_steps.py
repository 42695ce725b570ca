"""Steps of a run: their data, seeds, ratios, rates and critic; SFT; and what is left out, skipped or fails in them.

Faults they are there for: a divisor of the wrong rows; a step that repeats another's random numbers; a failure that is
not named, or changes a result without a word; a line, a response or a reward that is left out and not counted.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from grpo_trainer import response_map, sft
from grpo_trainer import train as training
from grpo_trainer.algorithm import Plan, total_rewards
from grpo_trainer.data import Batch
from grpo_trainer.embed import load_embedder
from grpo_trainer.evaluate import is_solved
from grpo_trainer.metrics import loss_metrics
from grpo_trainer.optimizer import lr_factor
from grpo_trainer.policy import Policy, Reference
from grpo_trainer.recipe import Algorithm, Critic, Optimizer, Recipe, Reward, Rl, Similarity
from grpo_trainer.rewards import RewardError, load_reward, score
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.setup import set_up
from grpo_trainer.tiny import train_tokenizer
from grpo_trainer.train import train
from transformers import GPT2Config, GPT2LMHeadModel

import grpo_kernels as gk
from tests.trainer import small
from tests.trainer.small import lines, rewarded_by, steps
from tests.trainer.test_rewards import rollout as responses

# Data, seeds and rates


def test_every_epoch_walks_over_all_the_data_and_no_two_steps_draw_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, data = small.recipe(tmp_path), [{"i": i} for i in range(24)]
    seen = [[item["i"] for item in training.items_of_step(recipe, "rl", data, 6, step)] for step in range(1, 9)]
    first, second = ([i for step in part for i in step] for part in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    across = [item["i"] for step in (1, 2, 3) for item in training.items_of_step(recipe, "rl", data, 16, step)]
    assert across == first + second
    seeds, real = list[tuple[object, ...]](), Recipe.seed_of
    monkeypatch.setattr(Recipe, "seed_of", lambda self, *parts: seeds.append(parts) or real(self, *parts))
    # at another temperature, at which the reference must be the policy, too
    more = ("sft.steps=2", "rl.steps=3", "evaluation.every=0", "logging.every=2", "rl.rollout.temperature=0.7")
    train(small.recipe(tmp_path, *more))
    assert [step["step"] for step in steps(tmp_path)] == [2]
    drawn = [parts for parts in seeds if parts[0] in ("step", "sampling", "minibatches")]
    assert len(drawn) == len({*drawn}) == 2 + 3 * 3


def test_learning_rates(tmp_path: Path) -> None:
    """The critic has its own rate and no decay; rates are those of the step that is taken."""
    warm = Optimizer(warmup=3, schedule="linear", final=0.1)
    factors = [lr_factor(warm, step, 13) for step in range(1, 14)]
    assert factors[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.91]) and factors[-1] == pytest.approx(0.19)
    assert lr_factor(Optimizer(schedule="constant"), 9, 9) == 1.0
    cosine = Optimizer(schedule="cosine", final=0.0)
    assert lr_factor(cosine, 1, 10) == 1.0 and lr_factor(cosine, 6, 10) == pytest.approx(0.5)
    more = ("rl.algorithm={name: ppo, critic: {lr: 0.5}}", "rl.optimizer={lr: 0.25, weight_decay: 0.1, warmup: 1}")
    run = small.ready(small.recipe(tmp_path, *more, "rl.steps=2"))
    groups = [
        (group["full_lr"], group["weight_decay"], group["params"][0].dim()) for group in run.optimizer.param_groups
    ]
    assert groups == [(0.25, 0.1, 2), (0.25, 0.0, 1), (0.5, 0.0, 2)]
    train(run.recipe)
    assert [step["train/lr"] for step in steps(tmp_path)] == [0.125, 0.25]


# Updates


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("half", ["mixed_precision: bf16", "dtype: bfloat16"])
def test_the_first_ratio_is_one_in_halves(tmp_path: Path, half: str, checkpointing: str) -> None:
    """Although sampling rounds logits, and a token at a time, and an update may not share prompts."""
    model = f"model={{{half}, gradient_checkpointing: {checkpointing}, tiny: {{layers: 4, hidden: 64}}}}"
    run = small.ready(small.recipe(tmp_path, model, "rl.num_iterations=1", "rl.minibatches=1"))
    with torch.no_grad():
        for weight in run.policy.lm.parameters():
            weight.mul_(1.5)
    metrics = training.rl_step(run, run.items("train")[:6], 2)
    assert metrics["train/ratio_min"] == pytest.approx(1, abs=1e-5) == metrics["train/ratio_max"]


@pytest.mark.parametrize("iterations", [1, 4])
def test_the_first_ratio_is_one_and_later_ones_are_not(tmp_path: Path, iterations: int) -> None:
    clip = "rl.algorithm={epsilon: 0.9, epsilon_high: 0.001, drop_flat: false}"
    run = small.ready(small.recipe(tmp_path, f"rl.num_iterations={iterations}", "rl.minibatches=1", clip))
    with torch.no_grad():
        for weight in run.policy.lm.parameters():
            weight.mul_(1.1)
    metrics = training.rl_step(run, run.items("train")[:6], 2)
    ratio = metrics["train/ratio_max"]
    assert metrics["train/optimizer_steps"] == iterations
    assert metrics["train/tokens"] == pytest.approx(24 * metrics["rollout/length_mean"]), "of one step"
    assert (abs(ratio - 1) < 1e-4) == (iterations == 1) and (ratio > 1.001) == (iterations == 4)
    assert metrics["train/clip_low"] == 0 and (metrics["train/clip_high"] > 0) == (iterations == 4)
    if iterations == 1:  # both are k3, before the weights change
        assert metrics["train/kl_rollout"] == pytest.approx(metrics["train/kl_mean"], rel=1e-3)
        assert metrics["train/kl_rollout"] > 1e-5


@pytest.mark.parametrize("prompt", [1, 40])
@pytest.mark.parametrize("share", [False, True])
def test_micro_batches_are_by_length_unless_neighbours_share_long_prompts(prompt: int, share: bool) -> None:
    lengths = torch.tensor([9, 1, 5, 2, 8, 1, 6, 1])
    mask, prompts = torch.arange(9) < lengths[:, None], torch.ones(2, prompt, dtype=torch.long)
    batch = Batch(prompts, prompts > 0, mask.long(), mask, torch.arange(8) // 4)
    run: Any = SimpleNamespace(policy=SimpleNamespace(is_sharded=False))
    for rows in (None, torch.tensor([0, 1, 4, 5, 6, 7])):
        parts = [part.tolist() for part, _ in training.micro_batches(run, batch, rows, 4, share)]
        assert sorted(itertools.chain(*parts)) == (list(range(8)) if rows is None else rows.tolist())
        assert len(parts) == 2
        dealt = {(0, 4, 6), (1, 2, 3, 5, 7)} if rows is None else {(0, 4), (1, 5, 6, 7)}
        neighbours = {(0, 1, 2, 3), (4, 5, 6, 7)} if rows is None else {(0, 1, 4, 5), (6, 7)}
        expected = neighbours if share and prompt == 40 else dealt
        assert {tuple(sorted(part)) for part in parts} == expected


def test_gmpo_clips_tokens_although_its_terms_are_rows() -> None:
    plan = Plan.of(Rl(algorithm=Algorithm(name="gmpo")))
    logprobs, advantages = torch.zeros(4, 10), torch.tensor([1.0, 1.0, 1.0, -1.0])
    result = gk.policy_loss(logprobs, logprobs - 1, advantages, config=plan.loss)
    assert loss_metrics([result.metrics.tensor], [0.0], [0.0], plan)["train/clip_high"] == pytest.approx(0.75)


def test_a_map_of_responses_survives_a_judge_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed}}"
    run = small.ready(small.recipe(tmp_path, algorithm))

    def fails(*_: Any) -> None:
        raise RewardError("1 of 4 failed")

    monkeypatch.setattr(response_map, "score", fails)
    drawn = response_map.response_map(run)
    assert drawn is not None and [response["reward"] for response in drawn["responses"]] == [None] * 4


def test_minibatches_are_as_many_as_asked_and_responses_may_be_empty(tmp_path: Path) -> None:
    run = small.ready(small.recipe(tmp_path, "rl.minibatches=6", "rl.algorithm={name: dr_grpo, drop_flat: false}"))
    assert training.rl_step(run, run.items("train")[:6], 1)["train/optimizer_steps"] == 2 * 6
    small.ending(run.policy, 50.0)
    metrics = training.rl_step(run, run.items("train")[:6], 1)
    assert metrics["rollout/length_max"] == 1 and math.isfinite(metrics["train/total_loss"])


def test_a_step_sampled_by_an_engine(tmp_path: Path) -> None:
    """The policy's own log-probs are the old ones of the loss, and the engine's enter the correction."""
    run = small.ready(small.recipe(tmp_path, "rl.num_iterations=1", "rl.minibatches=1"))

    def by_engine(items: Any, generator: Any) -> Rollout:
        rollout = roll_out(run.policy, items, run.rl.rollout, generator)
        rollout.logprobs = rollout.logprobs - 0.5
        return rollout

    engine = SimpleNamespace(roll_out=by_engine, is_current=True)
    run.engine = cast(Any, engine)
    metrics = training.rl_step(run, run.items("train")[:6], 1)
    assert metrics["train/ratio_max"] == pytest.approx(1) and metrics["sampling/gap_mean"] == pytest.approx(0.5)
    assert not engine.is_current


def test_errors_of_values_are_clipped_and_divided_by_the_tokens_of_their_minibatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted, old, returns = torch.tensor([2.0, 2.0, 0.1]), torch.zeros(3), torch.tensor([3.0, 0.0, 1.0])
    errors = training.value_error(predicted, old, returns, Critic(clip=0.5))
    torch.testing.assert_close(errors, torch.tensor([2.5**2, 2.0**2, 0.9**2]) / 2)
    run = small.ready(small.recipe(tmp_path, "rl.algorithm={name: ppo, critic: {warmup: 1}}", "rl.micro_batch=5"))
    monkeypatch.setattr(training, "value_error", lambda predicted, *_: 0 * predicted + 3)
    assert training.rl_step(run, run.items("train")[:6], 1)["train/total_loss"] == pytest.approx(3)


@pytest.mark.parametrize("architecture", ["causal", "seq2seq"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_critic_warms_up_alone(tmp_path: Path, architecture: str, separate: bool) -> None:
    critic = f"rl.algorithm={{name: group_ppo, critic: {{warmup: 1, lr: 0.1, separate: {str(separate).lower()}}}}}"
    run = small.ready(small.recipe(tmp_path, critic, f"model.tiny.architecture={architecture}"))
    changed = []
    for step in (1, 2):
        before = {name: value.clone() for name, value in run.policy.named_parameters()}
        training.rl_step(run, run.items("train")[:6], step)
        now = dict(run.policy.named_parameters())
        of_critic = ("value_head", "critic.")
        changed.append({name.startswith(of_critic) for name in now if not torch.equal(now[name], before[name])})
    assert changed == [{True}, {True, False}]


def test_checkpointing_does_not_turn_dropout_on(tmp_path: Path) -> None:
    """The weights are the same bit for bit."""
    runs = []
    for checkpointing, rate in (("true", 0.5), ("false", 0.5), ("false", 0.0)):
        more = ("model.tiny.architecture=seq2seq", "rl.share_prompts=false", "rl.algorithm.beta=0.0")
        run = set_up(small.recipe(tmp_path, *more, f"model.gradient_checkpointing={checkpointing}"))
        for module in run.policy.lm.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = rate
        training.prepare_rl(run, 0)
        training.rl_step(run, run.items("train")[:6], 1)
        runs.append(run.policy.state_dict())
    assert all(torch.equal(runs[0][name], other[name]) for other in runs[1:] for name in other)


# Supervised steps


def test_rare_demonstrations_of_a_prompt_count_for_more() -> None:
    prompts = ["p", "q", "p", "p", "p", "q"]
    texts = ["same words here", "alone", "same words here", "quite another", "same words here", "two"]
    embedder = load_embedder(Similarity(embedder="hashed", text="whole"))
    computed = sft.diversity_weights(prompts, texts, embedder, 1.0)
    # three copies and one at similarity s: 1 / (3 + s) each, and 1 / (1 + 3 s), over their mean
    vectors = torch.nn.functional.normalize(embedder(texts).double(), dim=1)
    s = float(vectors[0] @ vectors[3])
    copy, other = 1 / (3 + s), 1 / max(1 + 3 * s, 1)
    mean = (3 * copy + other) / 4
    assert computed == pytest.approx([copy / mean, 1, copy / mean, other / mean, copy / mean, 1], rel=1e-5)
    half = sft.diversity_weights(prompts, texts, embedder, 0.5)
    assert half == pytest.approx([(1 + weight) / 2 for weight in computed])


def test_demonstrations_of_a_batch_are_compared_whatever_their_prompts(tmp_path: Path) -> None:
    """With one demonstration per prompt, comparing those of a prompt changes nothing, those of a batch do."""
    data = [{"prompt": f"p{i}", "demonstration": "same words" if i % 4 else f"other {i} of {i * i}"} for i in range(16)]
    files = f"data={{task: null, train: {small.write_data(tmp_path / 'data.jsonl', data)}}}"
    computed = []
    for kind in ("null", "{embedder: hashed}", "{embedder: hashed, among: batch}"):
        run = set_up(small.recipe(tmp_path, files, f"sft.polychromic={kind}"))
        sft.prepare(run)
        computed.append(sft.batch_of(run, run.items("sft"))[1])
    plain, of_prompt, of_batch = computed
    assert torch.equal(plain, of_prompt)
    same = torch.tensor([i % 4 != 0 for i in range(16)])
    assert of_batch.mean() == pytest.approx(1) and of_batch[same].max() < 1 < of_batch[~same].min()
    small.write_data(tmp_path / "data.jsonl", [{"prompt": "a", "demonstration": "b"}] * 257)
    with pytest.raises(ValueError, match=r"^sft.polychromic: must have at most 256 .* got 257 of 'a'$"):
        train(small.recipe(tmp_path / "run", files, "sft.polychromic={embedder: hashed}"))


def test_weights_of_demonstrations_enter_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the weighted mean of the tokens' negative log-probs, irrespective of micro-batches."""
    run = set_up(small.recipe(tmp_path, "sft.polychromic={embedder: hashed}", "sft.micro_batch=5"))
    training.make_optimizer(run, Optimizer(), 0.0, 0)
    items = [item | {"sft_weight": 0.5 + i % 3} for i, item in enumerate(run.items("sft")[:16])]
    sums, lengths, real = list[float](), list[int](), Policy._logprobs

    def noted(self: Policy, batch: Any, share: bool = True) -> torch.Tensor:
        logprobs = real(self, batch, share)
        sums.extend((logprobs * batch.mask).sum(1).tolist())
        lengths.extend(batch.mask.sum(1).tolist())
        return logprobs

    monkeypatch.setattr(Policy, "_logprobs", noted)
    dealt, deal = list[Any](), training.micro_batches
    monkeypatch.setattr(training, "micro_batches", lambda *a, **b: dealt.append(deal(*a, **b)) or dealt[0])
    loss = training.sft_step(run, items, 1)["train/loss"]
    own = [items[row]["sft_weight"] for part, _ in dealt[0] for row in part.tolist()]
    total = sum(weight * length for weight, length in zip(own, lengths, strict=True))
    assert loss == pytest.approx(-sum(w * s for w, s in zip(own, sums, strict=True)) / total, rel=1e-5)


# Responses left out, steps skipped, failures


def if_answered(prompts: list[str], completions: list[str], answer: list[int | None], **_: Any) -> list[float | None]:
    return [value and float(value % 2) for value in answer]


def scored_in_part(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    values = small.digits(prompts, completions)
    return [None if i < 4 or i % 4 == 0 or i == 5 else value + i / 7 for i, value in enumerate(values)]


def test_unscored_responses_are_left_out_of_the_spread_and_not_their_prompts(tmp_path: Path) -> None:
    train(small.recipe(tmp_path, rewarded_by(f"{__name__}:scored_in_part"), "rl.steps=1", "logging.samples=100"))
    (step,) = steps(tmp_path)
    values = [sample["rewards"][0] for sample in lines(tmp_path, "samples")]
    scored = [[v for v in values[i : i + 4] if v is not None] for i in range(0, 24, 4)]
    assert [len(group) for group in scored] == [0, 2, 3, 3, 3, 3]
    within = statistics.mean(statistics.stdev(group) for group in scored[1:])
    assert step["rewards/group_std"] == pytest.approx(within, rel=1e-5)
    assert step["train/reward_std"] == pytest.approx(statistics.stdev(map(statistics.mean, scored[1:])), rel=1e-5)
    assert step["group_stats/flat_groups"] == 1  # the one without a reward


def test_failures_are_counted_where_they_may_be_skipped(tmp_path: Path) -> None:
    samples = "evaluation={samples: 2, embedder: hashed}"
    train(small.recipe(tmp_path, rewarded_by("not_a_number", ", on_error: skip"), "rl.steps=1", samples))
    (step,) = steps(tmp_path)
    assert lines(tmp_path, "evaluations")[-1]["metrics"]["skipped"] == 8 / 2 + 2 * 8 / 2  # greedy and sampled
    assert step["rewards/skipped"] == 12 and math.isfinite(step["train/total_loss"])
    set_up(small.recipe(tmp_path, rewarded_by("needs_a_column", ", on_error: skip")))  # its failures are counted


def test_a_line_that_fails_concerns_no_other_unless_the_call_is_slow() -> None:
    skipping = load_reward(Reward(name="gsm8k", on_error="skip"))
    answers = ["#### 4", "unknown", "#### 4", "#### 5"]
    four = cast(Any, responses(["#### 4"] * 4))
    four.items, four.group_size = [{"prompt": "p", "answer": answer} for answer in answers], 1
    scores = score([skipping], four)
    assert scores.skipped == 1 and scores.values[:, 0].isnan().tolist() == [False, True, False, False]
    assert scores.values[0, 0] == scores.values[2, 0] > scores.values[3, 0]
    assert scores.components[0]["correct"][1].isnan()
    slow = load_reward(Reward(name="gsm8k", on_error="skip", timeout=0.05))
    calls = list[int]()
    with mock.patch.object(type(slow.function), "graded", lambda *_, **columns: calls.append(1) or time.sleep(0.2)):
        assert score([slow], responses(["#### 4"] * 4, answer="#### 4")).skipped == 4 and len(calls) == 1


def test_a_perfect_response_is_solved_whatever_the_rounding_of_weights() -> None:
    for weights in ([0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]):
        totals = total_rewards(
            torch.ones(1, len(weights), dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
        )
        assert is_solved(totals, 1.0).all() and not is_solved(totals - 1e-6, 1.0).any()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "step 1: no response has a reward, so nothing is learned"),
        ("equal", "step 1: no response has an advantage, so the weights stay; mean reward 1"),
    ],
)
def test_a_step_that_teaches_nothing_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    train(small.recipe(tmp_path, rewarded_by(name), "rl.steps=2", "rl.rollout.prompts=50", "logging.progress=true"))
    taken, printed = steps(tmp_path), capsys.readouterr().err
    assert all(step["train/skipped"] == 1 and "train/total_loss" not in step for step in taken)
    assert [line for line in printed.splitlines() if line.startswith("step ")] == [said]
    assert re.search(r"rl.rollout.prompts: 50 of \d+ prompts, so that some occur twice", printed)
    events = [event["event"] for event in lines(tmp_path, "events")]
    assert "minibatch skipped: no response has an advantage" in events
    assert events.count("no response of a step has a reward") == (name == "nothing")
    if name == "nothing":
        assert taken[0]["rewards/unscored"] == 50 * 4 and taken[0]["rewards/mean"] is None
        assert {line["reward"] for e in lines(tmp_path, "evaluations") for line in e["prompts"]} == {None}


def test_what_cannot_be_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that is not the policy, a gradient that is not finite, and a token without an embedding."""
    references, logprobs = Reference.logprobs, Policy._logprobs
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "logprobs", lambda self, batch: references(self, batch) + 1e-3)
        with pytest.raises(RuntimeError, match="the reference must equal the policy before the first step"):
            train(small.recipe(tmp_path / "reference"))
    with monkeypatch.context() as patch:
        patch.setattr(Policy, "_logprobs", lambda self, batch, share=True: logprobs(self, batch, share) * math.nan)
        with pytest.raises(FloatingPointError, match="step 1: the gradient's norm must be finite, got nan"):
            train(small.recipe(tmp_path / "gradient"))
    run = set_up(small.recipe(tmp_path))
    monkeypatch.setattr("grpo_trainer.setup.encode_demonstration", lambda *_: [0, 10**6])
    with pytest.raises(ValueError, match=r"model\.path: .* of every token of the demonstrations, got token 1000000"):
        run.items("sft")


def test_notes_on_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward of files without one is named, and lines without a column that a reward takes are counted."""
    some = [{"prompt": f"{i} + 1", "answer": i or None, "d": "2"} for i in range(8)]
    path = small.write_data(tmp_path / "lines.jsonl", some)
    data = f"data={{task: null, train: '{path}', demonstration: d, test: '{path}'}}"
    for name, reward, note in (
        ("none", "rl.rewards=[]", "rl.rewards: none is named, so exact rewards the responses"),
        (
            "gaps",
            rewarded_by(f"{__name__}:if_answered"),
            "if_answered' gets None for 'answer', which 1 of 8 lines lack",
        ),
    ):
        train(small.recipe(tmp_path / name, data, reward, "logging.progress=true", "sft.steps=1", "rl.steps=1"))
        assert capsys.readouterr().err.count(note) == 1


CONTEXT = 24


def test_prompts_beyond_the_models_context_are_dropped_and_counted(tmp_path: Path) -> None:
    """The model has learned position embeddings, and none beyond CONTEXT."""
    folder = tmp_path / "gpt2"
    tokenizer = train_tokenizer(["digits 0123456789"], 60, False)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # one token per digit, one for the start, and one for the end of demonstrations
    texts = [("1" * prompt, "2" * response) for prompt in (3, 10, 12) for response in (2, 12, 14)]
    some = [{"prompt": p, "demonstration": d, "answer": "2"} for p, d in texts]
    file = small.write_data(tmp_path / "data.jsonl", some)
    data = f"data={{task: null, train: '{file}', test: '{file}'}}"
    model = f"model={{path: '{folder}', max_prompt_length: 100}}"
    recipe = small.recipe(tmp_path / "run", model, data, "sft.steps=1", "rl.steps=1", "rl.rollout.prompts=2")
    run = set_up(recipe)
    kept = [(len(item["prompt"]), len(item["demonstration"])) for item in run.items("sft")]
    assert kept == [(3, 2), (3, 12), (3, 14), (10, 2), (10, 12), (12, 2)]
    assert {len(item["prompt"]) for item in run.items("train")} == {3, 10}
    longer = set_up(small.recipe(tmp_path, model, data, "evaluation.max_completion_length=20"))
    assert {len(item["prompt"]) for item in longer.items("test")} == {3}
    assert {len(item["prompt"]) for item in longer.items("train")} == {3, 10}  # as without evaluations
    shorter = set_up(small.recipe(tmp_path, model, data, "evaluation.max_completion_length=1"))
    assert {len(item["prompt"]) for item in shorter.items("train")} == {3, 10}  # rollouts are longer
    assert {len(item["prompt"]) for item in shorter.items("test")} == {3, 10, 12}
    train(recipe)
    dropped = [e for e in lines(tmp_path / "run", "events") if e["event"] == "prompts left out"]
    assert {e["split"]: e["count"] for e in dropped} == {"sft": 3, "train": 3, "test": 3}
    assert {(e["limit"], e["of"]) for e in dropped} == {(CONTEXT, "the model's context")}
    with pytest.raises(ValueError, match=r"^rl.rollout.max_completion_length: must be less than .* 24, got 24$"):
        set_up(small.recipe(tmp_path, f"model.path={folder}", "rl.rollout.max_completion_length=24"))
