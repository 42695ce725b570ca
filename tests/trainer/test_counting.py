"""Responses without a token in the loss, because they were truncated or rejected.

The faults to notice: their rewards are part of what the other responses to the prompt are compared with; they, or
unscored responses and groups of equal rewards, count in a divisor, or in the KL and the entropy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from grpo_trainer import train as training
from grpo_trainer.algorithm import ALGORITHMS, Credit, Plan, _keep_largest, assign_credit
from grpo_trainer.recipe import Algorithm, Rl
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.recipes import validated
from grpo_trainer.rollout import Rollout
from grpo_trainer.setup import Run

import grpo_kernels as gk
from tests.trainer import small
from tests.trainer.test_rollout import captured, ending, fake_rollout

HERE = "tests.trainer.test_counting"
RLOO = ("rl.algorithm.name=rloo", f"rl.rewards=[{{name: '{HERE}:best_if_truncated'}}]")
SIZE, WIDTH = 6, 5
LENGTHS = torch.tensor([3, 5, 1, 2, 4, 3, 5, 5, 2, 1, 3, 4])
# a prompt with two such responses, and one with three
LEFT_OUT = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0], dtype=torch.bool)


def best_if_truncated(prompts: list[str], completions: list[str], truncated: list[bool], **_: Any) -> list[float]:
    """A reward of 100 for truncated responses, and a small one that varies for the others."""
    return [
        100.0 if is_cut else len(text) % 7 / 8 for text, is_cut in zip(completions, truncated, strict=True)
    ]  # multiples of 1/8 have exact means


def credited(settings: dict[str, Any], rewards: Tensor, embeddings: Tensor, counted: Tensor | None) -> Credit:
    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    random = torch.Generator().manual_seed(5)
    logprobs, values = (-torch.rand(len(LENGTHS), WIDTH, generator=random) for _ in range(2))
    batch = SimpleNamespace(mask=mask)
    rollout = cast(Rollout, SimpleNamespace(group_size=SIZE, batch=batch, lengths=mask.sum(1), logprobs=logprobs))
    sampling = Sampling(max_completion_length=WIDTH, num_generations=SIZE)
    plan = Plan.of(Rl(algorithm=validated(Algorithm, settings), rollout=sampling))
    return assign_credit(plan, rollout, rewards[:, None], torch.ones(1), embeddings, values, counted)


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
    counted = (torch.arange(WIDTH) < LENGTHS[:, None]) & ~LEFT_OUT[:, None]
    credits = []
    for scale in (1.0, -100.0):
        rewards = torch.randn(12, generator=random) * scale
        embeddings = torch.randn(12, 4, generator=random)
        rewards[~LEFT_OUT] = torch.tensor([0.5, 1.0, 0.0, 0.75, 0.25, 1.0, 0.0])
        embeddings[~LEFT_OUT] = torch.eye(4)[[0, 0, 1, 2, 3, 3, 1]]
        credits.append(credited(settings, rewards, embeddings, counted))
    first, second = credits
    assert first.mask is not None and second.mask is not None
    assert torch.equal(first.mask, second.mask) and not first.mask[LEFT_OUT].any()
    assert first.mask[~LEFT_OUT].any(1).all()
    assert first.advantages.any() and torch.equal(first.advantages, second.advantages)
    assert not first.advantages[LEFT_OUT].any()


def test_the_reward_arrives_at_the_last_token() -> None:
    rewards = torch.arange(12.0)
    returns = credited({"name": "ppo"}, rewards, torch.zeros(12, 4), None).returns
    assert returns is not None
    torch.testing.assert_close(returns[torch.arange(12), LENGTHS - 1], rewards)


def test_statistics_are_those_of_the_others() -> None:
    rewards = torch.tensor([1.0, 9, 2, 4, 9, 1, 9, 0, 9, 9, 3, 0])
    counted = (torch.arange(WIDTH) < LENGTHS[:, None]) & ~LEFT_OUT[:, None]
    got = credited({"name": "rloo"}, rewards, torch.zeros(12, 1), counted).advantages
    want = [1 - 7 / 3, 0, 2 - 2, 4 - 4 / 3, 0, 1 - 7 / 3, 0, -1.5, 0, 0, 3, -1.5]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=1e-6)


def test_lengths_are_those_of_tokens_in_the_loss() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 0, 0] * 2)
    counted = torch.arange(WIDTH) < torch.tensor([2, 0, 1, 2, 0, 3] * 2)[:, None]
    got = credited({"name": "opo"}, rewards, torch.zeros(12, 1), counted).advantages
    baseline = 2 / 8
    want = torch.tensor([1 - baseline, 0, -baseline, -baseline, 0, -baseline] * 2)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_share_of_the_responses_in_the_loss_is_kept() -> None:
    rollout = fake_rollout(8, 8, 3)
    credit = Credit(torch.tensor([5.0, 4, 3, 2, 1, 0.5, 0.2, 0.1]), rollout.batch.mask.clone())
    assert credit.mask is not None
    credit.mask[:4] = False
    _keep_largest(credit, rollout, 0.5)
    assert credit.mask.any(1).tolist() == [False] * 4 + [True, True, False, False]
    assert credit.metrics["train/kept_rows"] == 2


def expected_of(arguments: dict[str, Any], rewards: Tensor, left_out: Tensor) -> Tensor:
    """RLOO over the responses that are not left out, prompt by prompt."""
    size = arguments["rollout"].group_size
    want = torch.zeros_like(rewards)
    for start in range(0, len(rewards), size):
        rows = [row for row in range(start, start + size) if not left_out[row]]
        for row in rows if len(rows) > 1 else []:
            others = [float(rewards[other]) for other in rows if other != row]
            want[row] = float(rewards[row]) - sum(others) / len(others)
    return want


def rewards_of(arguments: dict[str, Any]) -> Tensor:
    rollout = arguments["rollout"]
    return torch.tensor(best_if_truncated([], rollout.texts, rollout.truncated.tolist()))


@pytest.mark.parametrize("truncated", ["vote", "leave_out"])
def test_truncated_responses_vote_unless_they_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncated: str
) -> None:
    """Their rewards are reported either way."""
    run = small.ready(small.recipe(tmp_path, *RLOO, f"rl.rollout.truncated={truncated}"))
    ending(run.policy, 2.0)
    arguments = captured(run, monkeypatch)
    cut, credit, metrics = arguments["rollout"].truncated, arguments["credit"], arguments["metrics"]
    assert 0 < int(cut.sum()) < len(cut)
    want = expected_of(arguments, rewards_of(arguments), cut if truncated == "leave_out" else torch.zeros_like(cut))
    assert want.any()
    torch.testing.assert_close(credit.advantages, want, rtol=1e-5, atol=1e-4)
    assert (credit.mask is None) == (truncated == "vote")
    assert metrics["rewards/max"] == 100 and metrics["rewards/unscored"] == 0 < metrics["rollout/truncated"] < 1


@pytest.mark.parametrize("truncated", ["vote", "leave_out"])
def test_rejected_responses_do_not_vote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncated: str) -> None:
    """The mismatch of every third response is large, and rejects all of its tokens."""
    masks: list[Tensor] = []

    def correct(run: Run, rollout: Rollout, mask: Tensor) -> gk.SamplingCorrection:
        masks.append(mask)
        by_engine = rollout.logprobs.clone()
        by_engine[::3] -= 5
        config = gk.CorrectionConfig(rejections=(("seq_mean_k1", -1.0, 1.0),))
        return gk.sampling_correction(rollout.logprobs, by_engine, mask=mask, config=config)

    monkeypatch.setattr(training, "correct_sampling", correct)
    run = small.ready(small.recipe(tmp_path, *RLOO, f"rl.rollout.truncated={truncated}"))
    ending(run.policy, 2.0)
    arguments = captured(run, monkeypatch)
    rollout, credit = arguments["rollout"], arguments["credit"]
    left_out = torch.arange(len(rollout.texts)) % 3 == 0
    if truncated == "leave_out":
        left_out |= rollout.truncated
        assert not masks[0][rollout.truncated].any()  # nor do they count in the statistics of the correction
    assert not credit.mask[left_out].any() and credit.mask[~left_out].any(1).all()
    want = expected_of(arguments, rewards_of(arguments), left_out)
    torch.testing.assert_close(credit.advantages, want, rtol=1e-5, atol=1e-4)


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


def counted_rows(rollout: Rollout) -> dict[int, float]:
    """Advantages of Dr.GRPO of the rows that count, written apart."""
    rewards = some_unscored_or_equal([], rollout.texts)
    advantages: dict[int, float] = {}
    for start in range(0, len(rewards), 4):
        scores = {
            row: score
            for row in range(start, start + 4)
            if (score := rewards[row]) is not None and not rollout.truncated[row]
        }
        if len({*scores.values()}) > 1:
            mean = sum(scores.values()) / len(scores)
            advantages |= {row: score - mean for row, score in scores.items()}
    return advantages


def loss_of(
    rollout: Rollout,
    advantages: dict[int, float],
    policy: Any,
    reference: Any,
    share_of: Callable[[int, int, int], float],
) -> Tensor:
    """The policy term of ratios of 1, 0.3 times k3 and -0.2 times the entropy, from transformers' own forward pass."""
    want, tokens = torch.zeros((), dtype=torch.float64), int(rollout.lengths[[*advantages]].sum())
    for row, advantage in advantages.items():
        response = rollout.batch.tokens[row][rollout.batch.mask[row]]
        prompt = torch.tensor(rollout.items[row // 4]["prompt_ids"])
        whole = torch.cat((prompt, response))[None]
        place = slice(len(prompt) - 1, -1)
        logprobs, theirs = (model(whole).logits[0, place].log_softmax(-1) for model in (policy, reference))
        of_tokens = logprobs.gather(1, response[:, None]).squeeze(1)
        gap = theirs.detach().gather(1, response[:, None]).squeeze(1) - of_tokens
        entropy = -(logprobs.exp() * logprobs).sum(1)
        share = share_of(tokens, len(advantages), len(response))
        want = want + share * (0.3 * (gap.exp() - gap - 1) - 0.2 * entropy - advantage * of_tokens).sum()
    return want


@pytest.mark.parametrize("aggregation", SHARES)
@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_a_step_divides_by_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregation: str, micro_batch: int
) -> None:
    """Against a float64 gradient; a ratio is 1 in a step's first minibatch."""
    loss = f"{{entropy_coef: 0.2, aggregation: {aggregation}}}"
    recipe = small.recipe(
        tmp_path,
        f"rl.algorithm={{name: dr_grpo, beta: 0.3, loss: {loss}}}",
        f"rl.rewards=[{{name: '{HERE}:some_unscored_or_equal'}}]",
        "rl.rollout.truncated=leave_out",
        "rl.minibatches=1",
        "rl.num_iterations=1",
        f"rl.micro_batch={micro_batch}",
    )
    run = small.ready(recipe)
    lm, seen = run.policy.lm, dict[str, Any]()
    reference = copy.deepcopy(lm).double().eval()
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 10)
        lm.get_output_embeddings().weight[run.policy.eos_id] *= 12  # some responses end, others are truncated
    update = training.update

    def spy(run: Run, rollout: Rollout, credit: Credit, *more: Any) -> dict[str, float]:
        seen.update(rollout=rollout, policy=copy.deepcopy(lm).double().eval())
        return update(run, rollout, credit, *more)

    def keep(*_: Any) -> float:
        seen["gradients"] = {name: weight.grad for name, weight in lm.named_parameters()}
        return 1.0

    monkeypatch.setattr(training, "update", spy)
    monkeypatch.setattr(training, "optimizer_step", keep)
    metrics = training.rl_step(run, run.items("train")[:6], 2)
    rollout, policy = seen["rollout"], seen["policy"]
    advantages = counted_rows(rollout)
    left_out = len(rollout.texts) - len(advantages)
    assert left_out > 6 and len(advantages) > 4 and rollout.truncated[4:].any()
    assert any(row % 4 == 1 and not rollout.truncated[row] and row - 1 in advantages for row in range(4, 24))
    want = loss_of(rollout, advantages, policy, reference, SHARES[aggregation])
    want.backward()
    for name, weight in policy.named_parameters():
        gradient = weight.grad
        scale = float(gradient.abs().max())
        torch.testing.assert_close(seen["gradients"][name].double(), gradient, rtol=1e-3, atol=1e-4 * scale)
    assert metrics["train/skipped"] == 0
