"""Trains a few steps in each of several processes; the first one writes its log to a file.

python -m torch.distributed.run --nproc-per-node=2 two_trl.py ours|theirs|fused|default FILE

The last two compare the heads of our trainer, without the entropy quantile, which the fused one refuses here.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from tests.integrations import tiny_trl

TIMED = ("runtime", "per_second", "step_time")


def main() -> None:
    torch.set_num_threads(1)
    logged = trained(sys.argv[1])
    # The trainer's DistributedDataParallel must be freed before its process group: if its reducer is the last owner of
    # the group, torch joins gloo's threads with the GIL held, and a thread that still has to free a tensor deadlocks.
    gc.collect()
    assert not any(type(each) is DistributedDataParallel for each in gc.get_objects())
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(logged))
    torch.distributed.destroy_process_group()


def trained(name: str) -> list[dict[str, Any]]:
    """Trains and returns the log of each step without timings."""
    kind = GRPOTrainer if name == "theirs" else FusedGRPOTrainer
    heads = {"fused": {"head": "fused"}, "default": {"head": "logprobs"}}
    changes: dict[str, Any] = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "max_steps": 6}
    if name not in heads:
        changes["top_entropy_quantile"] = 0.5
    trainer = kind(
        tiny_trl.model(),
        [tiny_trl.many_a, tiny_trl.few_b],
        args=GRPOConfig(**tiny_trl.settings(Path(tempfile.mkdtemp()), num_generations=8, **changes)),
        train_dataset=tiny_trl.prompts(),
        processing_class=tiny_trl.tokenizer(),
        **heads.get(name, {}),
    )
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMED)}
        for entry in trainer.state.log_history[:-1]
    ]


if __name__ == "__main__":
    main()
