"""TRL's and our trainer with weights that DeepSpeed's ZeRO-3 partitions, in two processes, against whole weights.

Faults that this is for: a head that is read after its memory was taken; hooks of the model's outputs that the loss goes
past, so that the backward finds no weight; a gradient of one process alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from tests.engine import zero3_run as worker
from tests.integrations.test_trl import rounding


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, path = tmp_path_factory.mktemp("ranks"), Path(worker.__file__)
    root = path.parents[2]
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "python"), os.environ.get("PYTHONPATH", "")])
    command = [*launch, str(path), str(folder)]
    done = subprocess.run(command, timeout=600, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", [*worker.KINDS, "TRL, patched"])
def test_it_trains_as_with_whole_weights(ranks: list[dict[str, Any]], kind: str) -> None:
    close = 4 * rounding()["figures"]
    for rank in ranks:
        assert len(rank[kind]) == 4 and all(entry["grad_norm"] > 0 for entry in rank["whole"])
        for got, want in zip(rank[kind], rank["whole"], strict=True):
            assert got == pytest.approx(want, rel=close, abs=close)
