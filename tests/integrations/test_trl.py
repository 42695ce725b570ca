"""FusedGRPOTrainer against GRPOTrainer: the same seed and data give the same losses, gradients and metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOConfig, GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.harness import quick
from tests.integrations import tiny_trl

# Metrics that depend on the wall clock or on Trainer's own counters.
TIMED = ("runtime", "per_second", "step_time")


class _Recorded:
    """Mixin that records the loss of each micro-batch."""

    losses: list[float]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        self.losses.append(loss.item())
        return loss


class Theirs(_Recorded, GRPOTrainer):  # type: ignore[misc]
    pass


class Ours(_Recorded, FusedGRPOTrainer):
    """With TRL's numbers where a completion is masked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **({} if "segments" in options else {"masked_rows": "vote"}), **options)


def trained(kind: type, folder: Path, **changes: Any) -> Any:
    trainer = kind(
        tiny_trl.model(),
        [tiny_trl.many_a, tiny_trl.few_b],
        GRPOConfig(**tiny_trl.settings(folder, **changes)),
        tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
    )
    trainer.losses = []
    trainer.train()
    return trainer


def figures(trainer: Any) -> list[dict[str, float]]:
    # Trainer logs NaN, such as the deviation of rewards that are None, as None
    return [
        {
            name: math.nan if value is None else value
            for name, value in entry.items()
            if not any(part in name for part in TIMED)
        }
        for entry in trainer.state.log_history[:-1]
    ]


class Record(NamedTuple):
    """Losses of the micro-batches, the log of the steps, and the weights after them."""

    losses: list[float]
    figures: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def record(trainer: Any) -> Record:
    return Record(trainer.losses, figures(trainer), trainer.model.state_dict())


def assert_same(ours: Any, theirs: Any) -> None:
    assert_same_records(record(ours), record(theirs))


def assert_same_records(ours: Record, theirs: Record) -> None:
    assert len(ours.losses) == len(theirs.losses) > 0
    # float32 over twenty steps, with terms that cancel in the loss
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-4, abs=2e-5)
    for got, expected in zip(ours.figures, theirs.figures, strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=2e-4, abs=2e-5, nan_ok=True), name
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("loss_type", quick(TRL_LOSS_TYPES, "vespo"))
def test_twenty_steps_of_every_loss(tmp_path: Path, loss_type: str) -> None:
    ours, theirs = (trained(kind, tmp_path, loss_type=loss_type) for kind in (Ours, Theirs))
    assert_same(ours, theirs)
    assert max(abs(loss) for loss in ours.losses) > 1e-3 and any("kl" in entry for entry in figures(ours))


OPTIONS: list[dict[str, Any]] = [
    {"importance_sampling_level": "sequence", "epsilon_high": 0.28},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"beta": 0.0, "delta": 1.5, "num_iterations": 2},
    {"use_bias_correction_kl": False, "epsilon": 0.05},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.02},
    {"entropy_coef": 0.05, "loss_type": "bnpo"},
    {
        "use_adaptive_entropy": True,
        "entropy_target": 2.2,
        "entropy_coef": 0.01,
        "entropy_coef_delta": 0.01,
        "entropy_coef_min": 0.0,
        "entropy_coef_max": 0.1,
    },
    {"off_policy_mask_threshold": 1e-3, "num_iterations": 3, "beta": 0.0},
    {"scale_rewards": "batch"},
    {"scale_rewards": "none", "reward_weights": [1.0, 0.3]},
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"mask_truncated_completions": True},
]


@pytest.mark.parametrize("options", quick(OPTIONS, *OPTIONS[::3]), ids=lambda options: ",".join(options))
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, theirs = (trained(kind, tmp_path, max_steps=8, **options) for kind in (Ours, Theirs))
    assert_same(ours, theirs)


def test_evaluation(tmp_path: Path) -> None:
    result = []
    for kind in (Ours, Theirs):
        trainer = kind(
            tiny_trl.model(),
            [tiny_trl.many_a],
            GRPOConfig(**tiny_trl.settings(tmp_path, per_device_eval_batch_size=8)),
            tiny_trl.prompts(),
            tiny_trl.prompts(),
            processing_class=tiny_trl.tokenizer(),
        )
        trainer.losses = []
        result.append({k: v for k, v in trainer.evaluate().items() if not any(part in k for part in TIMED)})
    assert result[0].keys() == result[1].keys()
    assert result[0] == pytest.approx(result[1], rel=1e-4, abs=1e-5, nan_ok=True)
    assert math.isfinite(result[0]["eval_loss"])


def test_patched_head_and_log_probs(tmp_path: Path) -> None:
    theirs = trained(Theirs, tmp_path, max_steps=6)
    patch_trl()
    try:
        ours = trained(Theirs, tmp_path, max_steps=6)
    finally:
        unpatch_trl()
    assert_same(ours, theirs)
