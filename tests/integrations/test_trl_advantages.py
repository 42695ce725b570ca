"""Advantages of FusedGRPOTrainer: of completions in the loss, within clusters of similar ones, and in segments.

The faults to notice: the reward of a completion that mask_truncated_completions or a tool mask empties is part of the
statistics of its group; a cluster, cut or threshold that is not that of the op; a log or a checkpoint without them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer
from grpo_kernels.integrations.trl import trainer as trl_side
from tests.harness import assert_close_to_rounding
from tests.integrations import tiny_trl
from tests.integrations.test_trl import figures
from tests.integrations.tiny_trl import letters
from tests.integrations.tiny_trl import trainer as made

REWARDS = torch.tensor([[100.0, 0.0], [3.0, 0.0], [1.0, 0.0], [60.0, 0.0]])
# the first is truncated, and the last has tokens of tools alone
OUTPUT = {
    "completion_mask": torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]),
    "tool_mask": torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 0, 1]]),
}
PLAIN = {"scale_rewards": "none"}
SEGMENTS = {"scale_rewards": "none", "use_bias_correction_kl": False}


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"advantages": gk.AdvantageConfig("rloo")}, [0, 2, -2, 0]),
        ({"advantages": gk.AdvantageConfig("opo")}, [0, 1, -1, 0]),  # lengths are two tokens of each of the two
        ({"changes": PLAIN}, [0, 1, -1, 0]),
        ({"changes": PLAIN, "masked_rows": "vote"}, [59, -38, -40, 19]),
    ],
    ids=str,
)
def test_a_baseline_is_of_completions_in_the_loss(
    tmp_path: Path, options: dict[str, Any], want: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tmp_path, **options)
    assert trainer.add_advantages(dict(OUTPUT), REWARDS, 4).tolist() == want
    # in a process that has the last two completions of the group
    first, last = ({name: mask[rows] for name, mask in OUTPUT.items()} for rows in (slice(2), slice(2, None)))
    of_others = (first["completion_mask"] * first["tool_mask"]).sum(1)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda counts: torch.cat([of_others, counts]))
    assert trainer.add_advantages(last, REWARDS, 4).tolist() == want


class Noted(FusedGRPOTrainer):
    """Keeps the outputs of generations, with the rewards and embeddings, and the inputs of the loss."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("generations", []).append((output, self._scored, getattr(self, "_embeddings", None)))
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self.__dict__.setdefault("inputs", []).append(inputs)
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    ("changes", "preset"),
    [
        ({}, "trl-group"),
        ({"scale_rewards": "batch"}, "trl-batch"),
        ({"scale_rewards": "none"}, "trl-none"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "trl-gdpo"),
    ],
    ids=str,
)
def test_settings_of_trl_name_a_preset(tmp_path: Path, changes: dict[str, Any], preset: str) -> None:
    """Each preset is compared with TRL's own statements in tests/ops/group_advantages."""
    trainer, rewards = made(tmp_path, changes=changes), torch.rand(8, 1) + torch.arange(8)[:, None] // 4
    rewards = torch.cat([rewards, rewards.flip(0) ** 2], 1)
    trainer.reward_weights = torch.tensor([1.0, 0.3])
    output = {"completion_mask": torch.ones(8, 3, dtype=torch.long)}
    config = dataclasses.replace(gk.AdvantageConfig.of(preset), reward_weights=(1.0, trainer.reward_weights[1].item()))
    want = gk.group_advantages(rewards, 4, config=config).advantages
    assert torch.equal(trainer.add_advantages(output, rewards, 4), want)


def test_truncated_completions_do_not_vote(tmp_path: Path) -> None:
    """Within training; the rewards that are logged are those of all completions, as in TRL."""
    changes = PLAIN | {"mask_truncated_completions": True, "max_steps": 2, "max_completion_length": 24}
    trainers = []
    for kind in (Noted, GRPOTrainer):  # which sets the seed
        trainers.append(made(tmp_path, kind, changes))
        trainers[-1].train()
    ours, theirs = trainers
    ((output, scored, _),) = ours.generations
    in_loss = output["completion_mask"].any(1)
    assert 0 < int(in_loss.sum()) < len(in_loss)
    totals = torch.where(in_loss, scored.nansum(1), torch.nan).view(-1, 4)

    def centered() -> Tensor:
        return (totals - totals.nanmean(1, keepdim=True)).nan_to_num().flatten()

    assert centered().any()
    assert_close_to_rounding(output["advantages"], centered(), centered)
    logs = figures(ours)[0], figures(theirs)[0]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/many_a/mean"):
        assert logs[0][name] == logs[1][name], name


@pytest.mark.parametrize("own", [None, gk.AdvantageConfig("dr_grpo", singleton="parent", shrinkage=2.0)])
def test_advantages_within_clusters_of_similar_completions(tmp_path: Path, own: gk.AdvantageConfig | None) -> None:
    trainer = made(tmp_path, Noted, similarity=gk.SimilarityConfig(), embedder=letters, advantages=own)
    trainer.train()
    assert len(trainer.generations) == 2
    for output, scored, embeddings in trainer.generations:
        labels = gk.similarity_groups(embeddings, 4, config=gk.SimilarityConfig()).labels
        config = own or gk.AdvantageConfig.of("trl-group")
        expected = gk.group_advantages(scored, 4, subgroups=labels, config=config).advantages
        assert torch.equal(output["advantages"], expected.float())
        assert not torch.equal(expected, gk.group_advantages(scored, 4, config="trl-group").advantages)
    assert list(trainer._logs["advantages"])[-len(expected) :] == expected.tolist()
    assert any(name.startswith("similarity_groups/") for name in trainer.state.log_history[0])


def test_masked_completions_join_no_cluster(tmp_path: Path) -> None:
    config = gk.SimilarityConfig()
    trainer = made(tmp_path, similarity=config, embedder=letters, advantages=gk.AdvantageConfig("dr_grpo"))
    random = torch.Generator().manual_seed(0)
    trainer._embeddings = torch.randn(8, 5, generator=random)
    rewards = torch.randn(8, 2, generator=random)
    mask = torch.tensor([[1], [0], [1], [1], [0], [1], [1], [1]])
    got = trainer.add_advantages({"completion_mask": mask}, rewards, 8)
    rows = mask[:, 0] > 0
    labels = gk.similarity_groups(trainer._embeddings[rows], 6, config=config).labels
    want = gk.group_advantages(rewards[rows], 6, subgroups=labels, config="dr_grpo").advantages
    assert want.any() and torch.equal(got[rows], want) and not got[~rows].any()


@pytest.mark.parametrize("shape", [(15, 8), (16,)])
def test_embedder_that_gives_something_else(tmp_path: Path, shape: tuple[int, ...]) -> None:
    trainer = made(tmp_path, similarity=gk.SimilarityConfig(), embedder=lambda texts: torch.ones(shape).numpy())
    with pytest.raises(ValueError, match=rf"embedder must give a vector for each of 16 texts, got shape \[{shape[0]}"):
        trainer.train()


def test_text_of_a_conversation() -> None:
    parts = [{"type": "text", "text": "an "}, {"type": "image", "image": object()}, {"type": "text", "text": "end"}]
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    for conversation, text in (
        ("plain", "plain"),
        ([], ""),
        ([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": parts}], "an end"),
        ([{"role": "assistant", "content": "said"}, {"role": "tool", "content": "9"}], "said"),
        ([call], ""),
        ([{"role": "assistant", "content": None}], ""),
    ):
        assert trl_side._text(conversation) == text


# ------------------------------------------------------------------------------------------------------------ segments


def test_tokens_in_segments_share_an_advantage(tmp_path: Path) -> None:
    changes = SEGMENTS | {"save_strategy": "steps", "save_steps": 4}
    config = gk.SegmentConfig(group_variance_threshold=0.5, group_max_size=3, adaptive_threshold=True, lam=0.9)
    trainer = made(tmp_path, Noted, changes, segments=config)
    trainer.train()
    for inputs in trainer.inputs:
        segments, advantages = inputs["segment_ids"], inputs["advantages"]
        assert advantages.shape == segments.shape == inputs["completion_mask"].shape
        assert torch.equal(segments >= 0, inputs["completion_mask"].bool())
        ends = torch.cat([segments[:, 1:] != segments[:, :-1], torch.ones(len(segments), 1, dtype=torch.bool)], 1)
        assert advantages.any() and not advantages[~ends].any()
    assert max(int(inputs["segment_ids"].max()) for inputs in trainer.inputs) >= 1
    assert any(name.startswith("group/") for name in trainer.state.log_history[0])
    assert trainer.threshold.value != 0.5
    # four micro-batches per generation, in a different order than in the log
    of_last = torch.cat([inputs["advantages"].sum(1) for inputs in trainer.inputs[-4:]])
    assert sorted(trainer._logs["advantages"]) == pytest.approx(sorted(of_last.tolist()))
    again = made(tmp_path, changes=changes, segments=config)
    again.create_optimizer_and_scheduler(4)
    again._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))
    assert again.threshold.value == trainer.threshold.value
    (tmp_path / "checkpoint-4" / "segment_threshold.json").unlink()
    with pytest.raises(ValueError, match="resume_from_checkpoint must hold segment_threshold"):
        again._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))


def test_segments_are_those_of_the_op(tmp_path: Path) -> None:
    """Cut where the sampler differs, whose NaN are the policy's log-probs; with the rewards of rows in the loss."""
    random = torch.Generator().manual_seed(0)
    changes = SEGMENTS | {"reward_weights": [1.0, 0.5]}
    config = gk.SegmentConfig(group_max_size=2, adaptive_threshold=False)
    trainer = made(tmp_path, changes=changes, segments=config)
    old, sampled = -torch.rand(2, 8, 3, generator=random)
    sampled[1, 1] = float("nan")
    output = {name: torch.cat([mask, mask.roll(1, 0)]) for name, mask in OUTPUT.items()}
    mask = (output["completion_mask"] * output["tool_mask"]).bool()
    rewards = torch.cat([REWARDS, REWARDS.flip(0) + 1])
    rewards[6, 1] = 150.0  # the better of two responses if rewards had equal weights
    rewards[2] = float("nan")  # of a completion without a reward
    trainer._scored = rewards
    placed = torch.zeros(8, 3)
    for row in range(8):
        ends = mask[row].nonzero().flatten().tolist()
        placed[row, ends[-1] if ends else 0] = rewards[row, 0].nan_to_num() + 0.5 * rewards[row, 1].nan_to_num()
    sampler = torch.where(sampled.isnan(), old, sampled)
    scored = mask & (torch.arange(8) != 2)[:, None]
    want = gk.endpoint_segments(placed, old, sampler, scored, groups=4, config=config)
    output |= {"old_per_token_logps": old, "sampling_per_token_logps": sampled}
    trainer._add_segments(output, 4, "train")
    assert want.advantages.any() and want.segment_ids.max() > 0
    assert torch.equal(output["advantages"], want.advantages)
    assert torch.equal(output["segment_ids"], want.segment_ids)
    assert output["num_items_in_batch"] == scored.sum() < mask.sum()


@pytest.mark.full
def test_micro_batches_of_segments_add_up_to_the_batch(tmp_path: Path) -> None:
    """With SGD and without clipping, so that the size of a gradient matters."""

    def moved(rows: int, steps: int, backend: str | None = None) -> dict[str, Tensor]:
        split = {"gradient_accumulation_steps": steps, "steps_per_generation": steps, "max_steps": 3}
        sgd = {"optim": "sgd", "learning_rate": 0.2, "max_grad_norm": 0.0}
        changes = SEGMENTS | split | sgd | {"per_device_train_batch_size": rows}
        trainer = made(tmp_path, changes=changes, segments=gk.SegmentConfig(group_max_size=3), backend=backend)
        before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        trainer.train()
        return {name: weight.detach() - before[name] for name, weight in trainer.model.named_parameters()}

    whole = moved(8, 1)
    assert max(change.abs().max() for change in whole.values()) > 1e-3
    others = [moved(4, 2), moved(2, 4)]
    assert_close_to_rounding(others, [whole, whole], lambda: [moved(8, 1, "reference")] * 2)


def test_the_evaluation_of_a_generation(tmp_path: Path) -> None:
    """Groups of another size than in training."""
    changes = {"num_generations_eval": 2, "per_device_eval_batch_size": 4, "eval_strategy": "steps"} | PLAIN
    trainer = made(tmp_path, Noted, changes, eval_dataset=tiny_trl.prompts())
    trainer.evaluate()
    output, scored, _ = trainer.generations[0]
    totals = scored.nansum(1).view(-1, 2)
    in_loss = output["completion_mask"].any(1)
    assert in_loss.all()
    torch.testing.assert_close(output["advantages"], (totals - totals.mean(1, keepdim=True)).flatten())
