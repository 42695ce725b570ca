"""Answers of several rows from a rollout_func, and a program that trains on them in each of several processes.

python -m torch.distributed.run --nproc-per-node=2 two_rollouts.py FILE
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from tests.integrations import tiny_trl

# Four rows for each of four prompts. The second row of c has no token in the loss, nor has k; i is alone.
ROLLOUTS = (*"aaab", *"cdck", *"efgh", *"iiii")
LENGTHS = (7, 1, 4, 5, 3, 6, 2, 4, 1, 7, 3, 2, 5, 5, 1, 6)
MASKED = (6, 7)
# in the last row of each rollout, the others state none
REWARDS = (None, None, 1.0, 0.0, None, 1.0, 2.0, 100.0, 1.0, 0.25, 0.0, 0.75, None, None, None, 1.0)
ADVANTAGES = (0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.5, 0, 0.5, -0.25, -0.5, 0.25, 0, 0, 0, 0)


def mask() -> Tensor:
    lengths = torch.tensor([0 if row in MASKED else length for row, length in enumerate(LENGTHS)])
    return torch.arange(max(LENGTHS)) < lengths[:, None]


def rollouts_of(names: Sequence[Any] | None, rewards: Sequence[float | None] = REWARDS) -> Callable[..., Any]:
    """A rollout_func. Prompts are numbered within a process, so that other processes have the same ids."""

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        first = trainer.accelerator.process_index * count
        rows = [row % 16 for row in range(first, first + count)]
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, len(tiny_trl.WORDS), (16, max(LENGTHS)), generator=random).tolist()
        output: dict[str, Any] = {
            "prompt_ids": [tiny_trl.tokenizer()(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [tokens[row][: LENGTHS[row]] for row in rows],
            "logprobs": None,
            "env_mask": [[int(row not in MASKED)] * LENGTHS[row] for row in rows],
            "score": [rewards[row] for row in rows],
        }
        if names is not None:
            output["rollout"] = [(place // 4, names[row]) for place, row in enumerate(rows)]
        return output

    return rollouts


def scores(completions: Any, score: list[float | None], **_: Any) -> list[float | None]:
    return score


def trainer_of(folder: Path, names: Sequence[Any] | None = ROLLOUTS, changes: Any = None, **options: Any) -> Any:
    """A trainer of generation batches of these 16 rows."""
    settings = {"scale_rewards": "none", "use_bias_correction_kl": False, "optim": "sgd", **(changes or {})}
    rewards = options.pop("rewards", REWARDS)
    return FusedGRPOTrainer(
        tiny_trl.model(),
        [scores],
        args=GRPOConfig(**tiny_trl.settings(folder, **settings)),
        train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
        rollout_func=rollouts_of(names, rewards),
        **options,
    )


def trained(per_device: int) -> list[list[dict[str, Any]]]:
    """The logs of two steps of each kind of loss; the last leaves flat groups out."""
    torch.set_num_threads(1)
    logs = []
    for loss_type, flat_groups in (("grpo", "keep"), ("dapo", "keep"), ("dr_grpo", "leave_out")):
        changes = {
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": 4,
            "max_steps": 2,
            "loss_type": loss_type,
            "entropy_coef": 0.1,
        }
        trainer = trainer_of(Path(tempfile.mkdtemp()), changes=changes, flat_groups=flat_groups, entropy_mean="batch")
        trainer.train()
        kept = ("loss", "grad_norm")  # the others are means over micro-batches, as TRL's
        logs.append([{name: entry[name] for name in kept} for entry in trainer.state.log_history[:-1]])
        del trainer
        gc.collect()
    return logs


if __name__ == "__main__":
    logs = trained(2)
    gc.collect()  # as in two_trl.py
    assert torch.distributed.get_world_size() == 2
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(logs))
    torch.distributed.destroy_process_group()
