"""From rewards to the gradient of a step: what is compared, shared, left out and divided by.

Faults they are there for: rewards of responses that were truncated or rejected are part of what the others are compared
with; they, or unscored responses and groups of equal rewards, count in a divisor, or in the KL and the entropy; similar
responses that share with another prompt, or with a wrong one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from grpo_trainer import engine
from grpo_trainer import train as training
from grpo_trainer.algorithm import (
    ALGORITHMS,
    Credit,
    Plan,
    _keep_largest,
    assign_credit,
    minibatch_counts,
    rows_in_loss,
    share_rewards,
)
from grpo_trainer.data import Batch
from grpo_trainer.recipe import Algorithm, Rl
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.recipes import load, validated
from grpo_trainer.rollout import Rollout
from grpo_trainer.setup import Run
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding
from tests.trainer import small

SIZE, WIDTH = 6, 5
LENGTHS = torch.tensor([3, 5, 1, 2, 4, 3, 5, 5, 2, 1, 3, 4])
MASK = torch.arange(WIDTH) < LENGTHS[:, None]
# a prompt with two such responses, and one with three
LEFT_OUT = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0], dtype=torch.bool)
# Two prompts with six responses each. The first has a cluster of four, of which one is wrong, and two singletons; the
# second has clusters of two and four.
REWARDS = torch.tensor([[1.0, 1, 1, 0, 1, 0], [3, 5, 2, 5, 5, 4]], dtype=torch.float64).view(12, 1)
CLUSTERS = torch.tensor([0, 0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4])
EMBEDDINGS = torch.eye(5)[CLUSTERS]


def credited(
    settings: dict[str, Any],
    rewards: Tensor = REWARDS,
    embeddings: Tensor = EMBEDDINGS,
    counted: Tensor | None = None,
) -> tuple[Plan, Credit]:
    random = torch.Generator().manual_seed(5)
    logprobs, values = (-torch.rand(len(LENGTHS), WIDTH, generator=random) for _ in range(2))
    batch = SimpleNamespace(mask=MASK)
    rollout = cast(Rollout, SimpleNamespace(group_size=SIZE, batch=batch, lengths=LENGTHS, logprobs=logprobs))
    sampling = Sampling(max_completion_length=WIDTH, num_generations=SIZE)
    plan = Plan.of(Rl(algorithm=validated(Algorithm, settings), rollout=sampling))
    return plan, assign_credit(plan, rollout, rewards.float().view(12, 1), torch.ones(1), embeddings, values, counted)


def advantages(name: str, embeddings: Tensor = EMBEDDINGS, **similarity: float) -> Tensor:
    return credited({"name": name, "similarity": similarity or None}, embeddings=embeddings)[1].advantages


# Similar responses


@pytest.mark.parametrize("power", [0.25, 1.0, 2.0])
def test_rewards_above_the_lowest_are_divided_among_similar_responses(power: float) -> None:
    third, half = 3**-power, 2**-power
    of_second = [2 + half, 2 + 3 * half, 2, 2 + 3 * third, 2 + 3 * third, 2 + 2 * third]
    expected = torch.tensor([third, third, third, 0, 1, 0, *of_second], dtype=torch.float64).view(12, 1)
    # three roundings of doubles up to 5: a power, a product and a sum
    close = {"rtol": 0, "atol": 3 * 5 * torch.finfo(torch.float64).eps}
    torch.testing.assert_close(share_rewards(REWARDS, CLUSTERS, 6, power), expected, **close)
    both = torch.cat([REWARDS, REWARDS.flip(0)], 1)  # columns share apart from each other
    torch.testing.assert_close(share_rewards(both, CLUSTERS, 6, power)[:, :1], expected, **close)
    # responses without a cluster or a reward take no share
    outside = torch.where((torch.arange(12) == 1) | (torch.arange(12) == 2), -1, CLUSTERS)
    assert share_rewards(REWARDS, outside, 6, power).flatten()[:3].tolist() == [1, 1, 1]
    missing = REWARDS.clone()
    missing[0] = math.nan
    divided = share_rewards(missing, CLUSTERS, 6, power).flatten()
    assert divided[0].isnan() and divided[1:5].tolist() == pytest.approx([half, half, 0, 1])
    assert share_rewards(torch.full_like(REWARDS, math.nan), CLUSTERS, 6, power).isnan().all()


def test_advantages_within_and_between_clusters() -> None:
    between = advantages("similarity_group_grpo", within=0.0, between=1.0)
    assert torch.equal(between, advantages("grpo"))
    both = advantages("similarity_group_grpo", within=0.5, between=1.0)
    torch.testing.assert_close(both, between + 0.5 * advantages("similarity_group_grpo", within=1.0, between=0.0))
    assert not torch.equal(both, between)
    similarity = {"within": 0.5, "between": 1.0}
    alone = credited({"name": "similarity_group_grpo", "similarity": similarity, "advantage": {"singleton": "parent"}})
    torch.testing.assert_close(alone[1].advantages[4:6], 1.5 * between[4:6])
    shared = advantages("similarity_group_grpo", within=0.0, between=1.0, sharing=1.0)
    expected = gk.group_advantages(share_rewards(REWARDS.float(), CLUSTERS, 6, 1.0), 6).advantages
    assert torch.equal(shared, expected)
    spoilt = EMBEDDINGS.clone()
    spoilt[4] = math.nan
    computed = advantages("similarity_group_grpo", spoilt, within=1.0, between=1.0)
    assert computed[4] == 0 and computed[[0, 1, 2, 3, 5]].all()


# Responses left out


@pytest.mark.parametrize(
    "settings",
    [
        *({"name": name} for name in ALGORITHMS),
        {"name": "similarity_group_grpo", "similarity": {"sharing": 1.0, "between": 0.5}},
        {"name": "group_ppo", "segments": {"norm": "prompt"}},
        {"name": "group_ppo", "sparse": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_what_is_left_out_decides_nothing(settings: dict[str, Any]) -> None:
    """Neither its reward nor its text changes the credit of another response."""
    random = torch.Generator().manual_seed(1)
    credits = []
    for scale, text in ((1.0, torch.full([4], -1.0)), (-100.0, torch.tensor([0.0, 1, 1, 0]))):
        rewards = torch.randn(12, generator=random) * scale
        embeddings = text.repeat(12, 1)  # far from all others, or between two of them, which make one cluster then
        rewards[~LEFT_OUT] = torch.tensor([0.5, 1.0, 0.0, 0.75, 0.25, 1.0, 0.0])
        embeddings[~LEFT_OUT] = torch.eye(4)[[0, 0, 1, 2, 3, 3, 1]]
        plan, credit = credited(settings, rewards, embeddings, MASK & ~LEFT_OUT[:, None])
        credits.append(credit)
    first, second = credits
    assert first.mask is not None and second.mask is not None
    assert torch.equal(first.mask, second.mask) and not first.mask[LEFT_OUT].any()
    assert first.mask[~LEFT_OUT].any(1).all() and not rows_in_loss(plan, first, MASK, SIZE)[LEFT_OUT].any()
    assert first.advantages.any() and torch.equal(first.advantages, second.advantages)
    assert not first.advantages[LEFT_OUT].any()


@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
def test_a_segment_keeps_its_advantage_without_its_last_token(ratio: str) -> None:
    settings = {"name": "group_ppo", "loss": {"ratio": ratio}, "segments": {"group_max_size": 3}}
    whole, part = (credited(settings, counted=counted)[1] for counted in (None, MASK & (torch.arange(WIDTH) != 2)))
    assert whole.segments is not None and torch.equal(whole.advantages, part.advantages)
    for ids, advantages in zip(whole.segments, whole.advantages, strict=True):
        for segment in range(int(ids.max()) + 1):
            assert len(set(advantages[ids == segment].tolist())) == 1
    assert len(whole.advantages[MASK].unique()) > 3
    ends = torch.stack([ids != torch.cat([ids[1:], ids.new_tensor([-1])]) for ids in whole.segments]) & MASK
    assert torch.equal(whole.measured(), torch.where(ends, whole.advantages, 0))


def test_terms_of_tokens_have_the_advantage_of_their_segment() -> None:
    by_segment, by_token, sparse = (
        credited({"name": "group_ppo", "segments": {"group_max_size": 3}} | more)[1]
        for more in ({}, {"loss": {"ratio": "token"}}, {"sparse": True})
    )
    assert by_token.segments is None and torch.equal(by_token.advantages, by_segment.advantages)
    assert torch.equal(by_token.measured(), by_segment.measured())
    assert torch.equal(by_segment.measured(), sparse.advantages)
    assert not torch.equal(by_token.advantages, sparse.advantages)


def test_rewards_arrive_at_last_tokens_and_lengths_are_those_in_the_loss() -> None:
    returns = credited({"name": "ppo"}, torch.arange(12.0))[1].returns
    assert returns is not None
    torch.testing.assert_close(returns[torch.arange(12), LENGTHS - 1], torch.arange(12.0))
    counted = torch.arange(WIDTH) < torch.tensor([2, 0, 1, 2, 0, 3] * 2)[:, None]
    got = credited({"name": "opo"}, torch.tensor([1.0, 0, 0, 0, 0, 0] * 2), counted=counted)[1].advantages
    baseline = 2 / 8
    want = torch.tensor([1 - baseline, 0, -baseline, -baseline, 0, -baseline] * 2)
    assert torch.equal(got, want)
    ids = torch.tensor([[0, 0, -1, -1, 2, 3], [-1, -1, -1, -1, -1, -1], [-1, 5, 5, 6, -1, 6]])
    assert minibatch_counts(ids >= 0, ids) == {"tokens": 8, "rows": 3, "segments": 3 + 0 + 2}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 0.25, 0.01, 0.9])
@pytest.mark.parametrize("out", [0, 4])
def test_a_share_of_the_responses_in_the_loss_is_kept(per_token: bool, ratio: float, out: int) -> None:
    """Those with the largest advantages of each group, out of those that are in the loss already."""
    ones = torch.ones(40, 6, dtype=torch.bool)
    batch = Batch(torch.ones(5, 1), ones[:5, :1], torch.ones(40, 6), ones, torch.arange(40) // 8)
    rollout = Rollout([{}] * 5, batch, torch.zeros(40, 6), ~ones[:, 0], [""] * 40)
    advantages = torch.randn((40, 6) if per_token else (40,), generator=torch.Generator().manual_seed(4))
    before = ones.clone()
    before[:, 3:] = before[:out] = False
    credit = Credit(advantages, mask=before)
    _keep_largest(credit, rollout, ratio)
    assert credit.mask is not None
    keeps = credit.mask.any(1)
    assert torch.equal(credit.mask, before & keeps[:, None])
    size = advantages.abs().amax(1) if per_token else advantages.abs()
    for start in range(0, 40, 8):
        rows = [row for row in range(start, start + 8) if before[row].any()]
        count = max(1, round(ratio * len(rows)))
        assert {*rows} >= {*sorted(rows, key=lambda row: -size[row])[:count]} == {row for row in rows if keeps[row]}
    assert credit.metrics["train/kept_rows"] == keeps.sum()


# The gradient of a step

SHARES: dict[str, Callable[[int, int, int], float]] = {  # of a token, by the tokens, the rows and its row's tokens
    "token-mean": lambda tokens, rows, length: 1 / tokens,
    "seq-mean-token-mean": lambda tokens, rows, length: 1 / (rows * length),
    "seq-mean-token-sum-norm": lambda tokens, rows, length: 1 / (rows * 12),
}


def some_unscored_or_equal(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Equal rewards for the first prompt, and none for a response of each other one."""
    return [
        0.5 if i < 4 else None if i % 4 == 1 else len(text) % 3 / 4 + (i % 4) / 8 for i, text in enumerate(completions)
    ]


def counted_rows(rollout: Rollout, is_out: Tensor) -> dict[int, float]:
    """Advantages of Dr.GRPO of the rows that count, written apart."""
    rewards, counted = some_unscored_or_equal([], rollout.texts), dict[int, float]()
    for start in range(0, len(rewards), 4):
        rows = [row for row in range(start, start + 4) if rewards[row] is not None and not is_out[row]]
        scores = {row: float(rewards[row] or 0.0) for row in rows}
        if len({*scores.values()}) > 1:
            counted |= {row: score - sum(scores.values()) / len(scores) for row, score in scores.items()}
    return counted


def loss_of(
    rollout: Rollout,
    advantages: dict[int, float],
    policy: Any,
    reference: Any,
    share_of: Callable[[int, int, int], float],
) -> Tensor:
    """The policy term of ratios of 1, 0.3 times k3 and -0.2 times the entropy, from transformers' own forward pass."""
    rows, batch = [*advantages], rollout.batch
    tokens, mask, of = batch.tokens[rows], batch.mask[rows], batch.prompt_of[rows]
    ids, seen = torch.cat((batch.prompts[of], tokens), 1), torch.cat((batch.prompt_mask[of], mask), 1).long()
    inputs = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0)}
    place = slice(batch.prompts.shape[1] - 1, -1)
    logprobs, theirs = (model(ids, **inputs).logits[:, place].log_softmax(-1) for model in (policy, reference))
    of_tokens, of_theirs = (values.gather(2, tokens[..., None]).squeeze(2) for values in (logprobs, theirs.detach()))
    gap, entropy = of_theirs - of_tokens, -(logprobs.exp() * logprobs).sum(2)
    lengths = mask.sum(1).tolist()
    share = torch.tensor([[share_of(sum(lengths), len(rows), length)] for length in lengths], dtype=torch.float64)
    advantage = torch.tensor([*advantages.values()], dtype=torch.float64)[:, None]
    terms = share * (0.3 * (gap.exp() - gap - 1) - 0.2 * entropy - advantage * of_tokens)
    return terms[mask].sum()


@pytest.mark.pairs
@pytest.mark.parametrize("aggregation", SHARES)
@pytest.mark.parametrize("micro_batch", [1, 5, 64])
@pytest.mark.parametrize("truncated", ["vote", "leave_out"])
@pytest.mark.parametrize("is_rejecting", [False, True])
def test_a_step_divides_by_what_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    aggregation: str,
    micro_batch: int,
    truncated: str,
    is_rejecting: bool,
) -> None:
    """Against a float64 gradient; a ratio is 1 in a step's first minibatch.

    The mismatch of every third response is large, and rejects all of its tokens.
    """
    loss = f"{{entropy_coef: 0.2, aggregation: {aggregation}}}"
    more = (small.rewarded_by(f"{__name__}:some_unscored_or_equal"), f"rl.micro_batch={micro_batch}")
    more += (f"rl.rollout.truncated={truncated}", "rl.minibatches=1", "rl.num_iterations=1")
    run = small.ready(small.recipe(tmp_path, f"rl.algorithm={{name: dr_grpo, beta: 0.3, loss: {loss}}}", *more))
    lm, seen = run.policy.lm, dict[str, Any]()
    reference = copy.deepcopy(lm).double().eval()
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 10)
        lm.get_output_embeddings().weight[run.policy.eos_id] *= 12  # some responses end, others are truncated
    update = training.update

    def correct(run: Run, rollout: Rollout, mask: Tensor) -> gk.SamplingCorrection:
        seen.update(mask=mask)
        by_engine = rollout.logprobs.clone()
        by_engine[::3] -= 5
        config = gk.CorrectionConfig(rejections=(("seq_mean_k1", -1.0, 1.0),))
        return gk.sampling_correction(rollout.logprobs, by_engine, mask=mask, config=config)

    def spy(run: Run, rollout: Rollout, credit: Credit, *more: Any) -> dict[str, float]:
        seen.update(rollout=rollout, policy=copy.deepcopy(lm).double().eval())
        return update(run, rollout, credit, *more)

    def keep(*_: Any) -> float:
        seen["gradients"] = {name: weight.grad for name, weight in lm.named_parameters()}
        return 1.0

    monkeypatch.setattr(training, "update", spy)
    monkeypatch.setattr(training, "optimizer_step", keep)
    if is_rejecting:
        monkeypatch.setattr(training, "correct_sampling", correct)
    metrics = training.rl_step(run, run.items("train")[:6], 2)
    rollout, policy, cut = seen["rollout"], seen["policy"], seen["rollout"].truncated
    is_out = cut if truncated == "leave_out" else torch.zeros_like(cut)
    if is_rejecting:  # and those that are left out do not count in the statistics of the correction
        assert torch.equal(seen["mask"].any(1), ~is_out)
        is_out = is_out | (torch.arange(len(cut)) % 3 == 0)
    counted = counted_rows(rollout, is_out)
    assert 0 < int(cut[4:].sum()) < 20 and len(cut) - 4 > len(counted) > 3

    def by_hand() -> dict[str, Tensor]:
        loss = loss_of(rollout, counted, policy, reference, SHARES[aggregation])
        return dict(zip(seen["gradients"], torch.autograd.grad(loss, [*policy.parameters()]), strict=True))

    assert_close_to_rounding(seen["gradients"], by_hand(), by_hand, torch.float64)
    # rewards are reported either way
    assert metrics["train/skipped"] == 0 and metrics["rewards/unscored"] == 5
    assert metrics["rollout/truncated"] == pytest.approx(float(cut.float().mean()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_rewards_leave_nothing_to_update_where_the_page_says_so(name: str) -> None:
    is_updated = name in ("ppo", "group_ppo", "polychromic")
    uncentered = [{"advantage": {"center": "none", "scale": "none"}}] if name == "grpo" else []
    for more in ({},) if is_updated else ({}, {"drop_flat": False}, *uncentered):
        plan, credit = credited({"name": name} | more, rewards=torch.ones(12, 1))
        assert rows_in_loss(plan, credit, MASK, SIZE).tolist() == [is_updated or bool(more)] * 12, more


def test_reinforce_from_one_response_raises_what_was_rewarded() -> None:
    """The published loss has the other sign."""
    rl = load("dialogue-reinforce-single").rl
    assert rl is not None and (rl.num_iterations, rl.minibatches) == (1, 1)  # its loss has no ratio
    mask = torch.ones(4, 3, dtype=torch.bool)
    rollout: Any = SimpleNamespace(group_size=1, batch=SimpleNamespace(mask=mask), lengths=mask.sum(1))
    rewards = torch.tensor([0.2, 0.9, 0.0, 0.5])
    credit = assign_credit(Plan.of(rl), rollout, rewards[:, None], torch.ones(1), None, None)
    assert torch.equal(credit.advantages, rewards)
    logprobs = torch.full(mask.shape, -1.0, requires_grad=True)
    loss = gk.policy_loss(logprobs, logprobs.detach(), credit.advantages, mask=mask, config=Plan.of(rl).loss).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -rewards[:, None].expand(4, 3) / mask.sum())


def test_weights_of_an_engine_that_a_loss_cannot_use() -> None:
    segments, rows = gk.LossConfig(ratio="segment_mean"), gk.LossConfig("vespo")
    for loss, wrong, right in (
        (segments, "token", "sequence"),
        (rows, "geometric", "token"),
        (rows, "sequence", "none"),
    ):
        engine.check_loss("rl", loss, gk.CorrectionConfig(weights=right))
        with pytest.raises(ValueError, match=f"^rl.algorithm.correction: weights must be .*, got '{wrong}'; change it"):
            engine.check_loss("rl", loss, gk.CorrectionConfig(weights=wrong))
