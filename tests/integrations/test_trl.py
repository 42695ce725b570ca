"""FusedGRPOTrainer with each head, and patch_trl, against GRPOTrainer: the same seed gives the same training.

Losses of micro-batches, metrics of steps, an evaluation that is larger than a generation, and the weights.
"""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from trl import GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests.harness import quick
from tests.integrations import tiny_trl
from tests.rounding import Moves

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


def figures(trainer: Any) -> list[dict[str, float]]:
    # Trainer logs NaN, such as the deviation of rewards that are None, as None
    entries = [
        {name: math.nan if value is None else value for name, value in entry.items()}
        for entry in trainer.state.log_history
    ]
    steps = [entry for entry in entries if "train_runtime" not in entry]
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMED)} for entry in steps
    ]


class Record(NamedTuple):
    """Losses of the micro-batches, the log of the steps, and the weights after them."""

    losses: list[float]
    figures: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def record(trainer: Any) -> Record:
    return Record(trainer.losses, figures(trainer), trainer.model.state_dict())


def assert_same_records(ours: Record, theirs: Record) -> None:
    assert len(ours.losses) == len(theirs.losses) > 0
    close = {kind: {"rel": 4 * move, "abs": 4 * move, "nan_ok": True} for kind, move in rounding().items()}
    assert ours.losses == pytest.approx(theirs.losses, **close["losses"])
    for got, expected in zip(ours.figures, theirs.figures, strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, **close["figures"]), name
    for name, weight in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=4 * rounding()["weights"])


ROWS: dict[str, dict[str, Any]] = {
    **{loss_type: {"loss_type": loss_type} for loss_type in TRL_LOSS_TYPES},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_high": 0.28},
    "gspo that clips": {
        **{"importance_sampling_level": "sequence", "loss_type": "grpo"},
        **{"epsilon": 3e-4, "epsilon_high": 4e-4},
    },
    "delta": {"beta": 0.0, "delta": 1.5, "num_iterations": 2, "reward_weights": [1.0, 0.3]},
    # 24 micro-batches an epoch: its last step accumulates fewer
    "plain KL": {"use_bias_correction_kl": False, "epsilon": 0.05, "gradient_accumulation_steps": 5},
    "high entropies": {
        **{"top_entropy_quantile": 0.4, "entropy_coef": 0.02, "temperature": 0.7},
        **{"off_policy_mask_threshold": 1e-3, "num_iterations": 3},
    },
    "entropy bonus": {"entropy_coef": 0.05, "loss_type": "bnpo"},
    "adaptive entropy": {
        **{"use_adaptive_entropy": True, "entropy_target": 2.2, "entropy_coef": 0.01, "entropy_coef_delta": 0.01},
        **{"entropy_coef_min": 0.0, "entropy_coef_max": 0.1, "max_steps": 20},
    },
    "off-policy rows": {"off_policy_mask_threshold": 1e-3, "num_iterations": 3, "beta": 0.0},
    "scaled by the batch": {"scale_rewards": "batch"},
    "not scaled": {"scale_rewards": "none", "reward_weights": [1.0, 0.3]},
    "normalized apart": {"multi_objective_aggregation": "normalize_then_sum"},
    "truncated": {"mask_truncated_completions": True},
    "adapters": {},
}
# without --all
BY_DEFAULT = ("vespo", "sapo", "gspo that clips", "delta", "plain KL", "high entropies", "adaptive entropy", "adapters")
KINDS = {"theirs": Theirs, "ours": Ours, "fused": functools.partial(Ours, head="fused")}
# With Adam, the rounding of a gradient that is almost 0 would move a weight by a part of the learning rate.
SGD = {"optim": "sgd", "learning_rate": 0.1}


def train(kind: str, row: str) -> Record:
    """Trains a kind of trainer with the settings of a row, and evaluates it."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    options = {}
    if row == "adapters":
        peft = pytest.importorskip("peft")
        options = {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])}
    changes = SGD | {"max_steps": 8, "per_device_eval_batch_size": 24} | ROWS[row]
    torch.manual_seed(0)
    trainer: Any = tiny_trl.trainer(folder, KINDS[kind], changes, eval_dataset=tiny_trl.prompts(), **options)
    trainer.losses = []
    trainer.train()
    trainer.evaluate()
    trained = record(trainer)
    logged = {f"advantage {i}": value for i, value in enumerate(trainer._logs["advantages"])}
    return trained._replace(figures=[*trained.figures, logged])


trained = functools.cache(train)


@functools.cache
def rounding() -> dict[str, float]:
    """How far rounding moves losses, figures and weights of TRL's own training, relative to numbers larger than 1.

    Two trainings may be four times as far apart. VESPO's, with exponentials of sums of log-ratios, moves the farthest.
    """
    moves = Moves(lambda: train("theirs", "vespo")._asdict(), trained("theirs", "vespo")._asdict(), torch.float32)
    result = dict.fromkeys(Record._fields, 0.0)
    for name, value in moves.want.items():
        kind = name.partition(".")[0]
        result[kind] = max(result[kind], moves[name] / max(1.0, float(value.nan_to_num().abs().max())))
    return result


@pytest.mark.parametrize("kind", ["ours", "fused"])
@pytest.mark.parametrize("row", quick(ROWS, *BY_DEFAULT))
def test_training_is_trls(row: str, kind: str) -> None:
    ours = trained(kind, row)
    assert_same_records(ours, trained("theirs", row))
    assert max(abs(loss) for loss in ours.losses) > 1e-3 and math.isfinite(ours.figures[-2]["eval_loss"])
    if row == "adapters":
        assert any("lora" in name and weight.any() for name, weight in ours.weights.items())
    elif "beta" not in ROWS[row]:
        assert any("kl" in entry for entry in ours.figures)


@pytest.mark.parametrize("kind", ["theirs", "fused"])
def test_training_with_patched_log_probs(kind: str) -> None:
    patch_trl()
    try:
        patched = train(kind, "dapo")
    finally:
        unpatch_trl()
    assert_same_records(patched, trained("theirs", "dapo"))


@pytest.mark.parametrize("options", [{"segments": gk.SegmentConfig()}, {"loss": gk.LossConfig(loss="topr")}], ids=str)
def test_both_heads_train_alike_without_a_peer(tmp_path: Path, options: dict[str, Any]) -> None:
    changes = SGD | {"scale_rewards": "none", "use_bias_correction_kl": False}
    records = []
    for head in ("logprobs", "fused"):
        trainer = tiny_trl.trainer(tmp_path, Ours, changes, head=head, **options)
        trainer.losses = []
        trainer.train()
        records.append(record(trainer))
    assert_same_records(*records)
