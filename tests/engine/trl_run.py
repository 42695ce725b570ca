"""Trains a few steps with TRL and vLLM and writes losses, log, weights and completions to a file.

python tests/engine/trl_run.py theirs|patched|ours|fused DTYPE MODEL FILE GRPO_CONFIG_AS_JSON
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from grpo_kernels.integrations.trl import patch_trl
from tests.engine import trl_on_cpu
from tests.integrations import tiny_trl
from tests.integrations.test_trl import Ours, Record, Theirs, record

KINDS: dict[str, tuple[type, dict[str, str]]] = {
    "theirs": (Theirs, {}),
    "patched": (Theirs, {}),
    "ours": (Ours, {}),
    "fused": (Ours, {"head": "fused"}),
}


class Run(NamedTuple):
    """The file's content, which is a plain tuple, as this module has another name when it is run."""

    record: Record
    tokens: list[list[int]]  # of all completions, in the order in which they were sampled


def main(kind: str, dtype: str, model: str, file: str, config: str) -> None:
    trl_on_cpu.stand_in(dtype)
    if kind == "patched":
        patch_trl()
    trainer_type, options = KINDS[kind]
    changes = {"use_vllm": True, **json.loads(config)}
    trainer = tiny_trl.trainer(Path(tempfile.mkdtemp()), trainer_type, changes, model=model, **options)
    trainer.losses = []
    generate, tokens = trainer.vllm_generation.generate, []

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        result = generate(*arguments, **keywords)
        tokens.extend(result[1])
        return result

    trainer.vllm_generation.generate = recorded
    trainer.train()
    torch.save((record(trainer), tokens), file)


if __name__ == "__main__":
    main(*sys.argv[1:])
