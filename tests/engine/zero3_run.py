"""Trains with TRL in each of two processes, some of the kinds with weights that DeepSpeed's ZeRO-3 partitions.

DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node=2 zero3_run.py FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from trl import GRPOTrainer

import grpo_kernels as gk
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
from tests.integrations import tiny_trl

ZERO = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def loss_of_ours(*arguments: Any, **options: Any) -> gk.PolicyLoss:
    return gk.policy_loss(*arguments, **options)


# The last needs the weight of the head in the backward pass.
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "TRL": (GRPOTrainer, {}),
    "log-probs": (FusedGRPOTrainer, {}),
    "fused": (FusedGRPOTrainer, {"head": "fused"}),
    "fused, by length": (FusedGRPOTrainer, {"head": "fused", "batching": "by_length"}),
    "fused, a function": (FusedGRPOTrainer, {"head": "fused", "loss": loss_of_ours}),
}


def logs(kind: type, options: dict[str, Any], **changes: Any) -> list[dict[str, float]]:
    changes = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "num_generations": 8} | changes
    trainer = tiny_trl.trainer(Path(tempfile.mkdtemp()), kind, changes, **options)
    trainer.train()
    kept = ("loss", "grad_norm", "kl", "entropy")
    return [{name: entry[name] for name in kept} for entry in trainer.state.log_history[:-1]]


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    whole = {name: logs(kind, options) for name, (kind, options) in KINDS.items() if name == "TRL"}
    results = {name: logs(kind, options, deepspeed=ZERO) for name, (kind, options) in KINDS.items()}
    patch_trl()
    results["TRL, patched"] = logs(GRPOTrainer, {}, deepspeed=ZERO)
    unpatch_trl()
    torch.save({"whole": whole["TRL"]} | results, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
