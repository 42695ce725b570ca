"""Run in each of several processes: trains a few steps, and the first writes what was logged.

python -m torch.distributed.run --nproc-per-node=2 two_trl.py ours|theirs FILE
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from grpo_kernels.integrations.trl import FusedGRPOTrainer
from tests.integrations import tiny_trl

TIMED = ("runtime", "per_second", "step_time")


def main() -> None:
    kind = {"ours": FusedGRPOTrainer, "theirs": GRPOTrainer}[sys.argv[1]]
    torch.set_num_threads(1)
    changes = {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_coef": 0.01, "max_steps": 6}
    trainer = kind(
        tiny_trl.model(), [tiny_trl.many_a, tiny_trl.few_b],
        args=GRPOConfig(**tiny_trl.settings(Path(tempfile.mkdtemp()), num_generations=8, **changes)),
        train_dataset=tiny_trl.prompts(), processing_class=tiny_trl.tokenizer(),
    )  # fmt: skip
    assert trainer.accelerator.num_processes == 2
    trainer.train()
    if trainer.accelerator.is_main_process:
        kept = [
            {name: value for name, value in entry.items() if not any(part in name for part in TIMED)}
            for entry in trainer.state.log_history[:-1]
        ]
        Path(sys.argv[2]).write_text(json.dumps(kept))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
