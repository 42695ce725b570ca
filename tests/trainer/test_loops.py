"""The trainer takes the same step with the hot path of its predecessors, so the benchmark compares like with like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("fastcluster")

from grpo_trainer.train import train

from benchmarks.loops import instead_of_kernels
from tests.trainer import small

LOSS = "beta: 0.05"
# The loop runs in float32: at a threshold of 1, rounding would decide where equal advantages are cut.
SEGMENTS = "segments: {norm: none, adaptive_threshold: false, group_variance_threshold: 2.0, group_max_size: 4}"


def norms(folder: Path) -> list[float]:
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry["train/grad_norm"] for entry in entries if entry["kind"] == "train" and entry["phase"] == "rl"]


@pytest.mark.parametrize(
    "algorithm",
    [f"{{name: grpo, {LOSS}}}", f"{{name: group_ppo, sparse: true, critic: {{coef: 0.0}}, {SEGMENTS}}}"],
    ids=["grpo", "group_ppo"],
)
def test_loops_take_the_same_steps(tmp_path: Path, algorithm: str) -> None:
    def recipe(name: str) -> small.Recipe:
        return small.recipe(tmp_path / name, f"rl.algorithm={algorithm}", "rl.steps=2")

    train(recipe("kernels"))
    with instead_of_kernels():
        train(recipe("loops"))
    with_kernels = norms(tmp_path / "kernels")
    assert len(with_kernels) == 2 and min(with_kernels) > 0
    # float32, and the second step starts from weights that differ in their last digits
    assert norms(tmp_path / "loops") == pytest.approx(with_kernels, rel=1e-4)
