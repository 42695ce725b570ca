"""Completions without a token in the loss, which TRL compares the others with.

The fault to notice: the reward of a completion that mask_truncated_completions or a tool mask empties is part of the
statistics of its group.
"""

from __future__ import annotations

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
from tests.integrations.test_trl import figures
from tests.integrations.test_trl_parts import letters, made

REWARDS = torch.tensor([[100.0, 0.0], [3.0, 0.0], [1.0, 0.0], [60.0, 0.0]])
# the first is truncated, and the last has tokens of tools alone
OUTPUT = {
    "completion_mask": torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]),
    "tool_mask": torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 0, 1]]),
}


def compared(trainer: Any, output: dict[str, Tensor] = OUTPUT, rewards: Tensor = REWARDS) -> list[float]:
    """Advantages of a group of these completions."""
    values: list[float] = trainer.add_advantages(dict(output), rewards, len(rewards)).tolist()
    return values


def test_a_baseline_is_of_completions_in_the_loss(tmp_path: Path) -> None:
    assert compared(made(tmp_path, advantages=gk.AdvantageConfig("rloo"))) == [0, 2, -2, 0]
    assert compared(made(tmp_path, changes={"scale_rewards": "none"})) == [0, 1, -1, 0]


def test_all_completions_vote_where_asked(tmp_path: Path) -> None:
    trainer = made(tmp_path, changes={"scale_rewards": "none"}, masked_rows="vote")
    assert compared(trainer) == [59, -38, -40, 19]


def test_lengths_are_those_of_completions_in_the_loss(tmp_path: Path) -> None:
    trainer = made(tmp_path, advantages=gk.AdvantageConfig("opo"))
    # two tokens of each of the two
    assert compared(trainer) == [0, 1, -1, 0]


def test_masked_completions_join_no_cluster(tmp_path: Path) -> None:
    config = gk.SimilarityConfig()
    options = {"similarity": config, "embedder": letters, "advantages": gk.AdvantageConfig("dr_grpo")}
    trainer = made(tmp_path, **options)
    random = torch.Generator().manual_seed(0)
    trainer._embeddings = torch.randn(8, 5, generator=random)
    rewards = torch.randn(8, 2, generator=random)
    mask = torch.tensor([[1], [0], [1], [1], [0], [1], [1], [1]])
    got = trainer.add_advantages({"completion_mask": mask}, rewards, 8)
    rows = mask[:, 0] > 0
    labels = gk.similarity_groups(trainer._embeddings[rows], 6, config=config).labels
    want = gk.group_advantages(rewards[rows], 6, subgroups=labels, config="dr_grpo").advantages
    assert want.any() and torch.equal(got[rows], want) and not got[~rows].any()


def test_completions_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the last two completions of a group of four."""
    trainer = made(tmp_path, advantages=gk.AdvantageConfig("rloo"))
    first, last = ({name: mask[rows] for name, mask in OUTPUT.items()} for rows in (slice(2), slice(2, None)))
    of_others = (first["completion_mask"] * first["tool_mask"]).sum(1)
    monkeypatch.setattr(trainer.accelerator, "gather", lambda counts: torch.cat([of_others, counts]))
    assert compared(trainer, last) == [0, 2, -2, 0]


def test_masked_completions_have_no_segments(tmp_path: Path) -> None:
    changes = {"scale_rewards": "none", "use_bias_correction_kl": False}
    trainer = made(tmp_path, changes=changes, segments=gk.SegmentConfig(group_max_size=1, adaptive_threshold=False))
    results = []
    for reward in (100.0, -5.0):
        trainer._scored = torch.cat([torch.tensor([[reward, 0.0]]), REWARDS[1:]])
        output = OUTPUT | {"old_per_token_logps": torch.full((4, 3), -1.0)}
        trainer._add_segments(output, 4, "train")
        results.append(output["advantages"])
    assert results[0].any() and torch.equal(*results)


def test_truncated_completions_do_not_vote(tmp_path: Path) -> None:
    """Within training; the rewards that are logged are those of all completions, as in TRL."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    class Noted(FusedGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            seen.append((output["completion_mask"].any(1), self._scored, output["advantages"]))
            return output

    changes = {"mask_truncated_completions": True, "scale_rewards": "none", "max_steps": 2}
    trainer = made(tmp_path, Noted, changes)
    trainer.train()
    theirs = made(tmp_path, GRPOTrainer, changes)
    theirs.train()
    ((in_loss, scored, advantages),) = seen
    assert 0 < int(in_loss.sum()) < len(in_loss)
    totals = torch.where(in_loss, scored.nansum(1), torch.nan).view(-1, 4)
    want = (totals - totals.nanmean(1, keepdim=True)).nan_to_num().flatten()
    torch.testing.assert_close(advantages, want, rtol=1e-5, atol=1e-5)
    ours, own = figures(trainer)[0], figures(theirs)[0]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "rewards/many_a/mean"):
        assert ours[name] == own[name], name
