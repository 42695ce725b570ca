"""Two processes match a single one: equal prompts, samples and rewards, and equal weights up to rounding.

All recipes run in one launch, since a launch takes longer than a run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_trainer import distributed
from grpo_trainer.train import train
from safetensors.torch import load_file
from torch import Tensor

from tests.harness import quick
from tests.trainer import small
from tests.trainer.small import lines, steps, stop_before, timeless

HERE = "tests.trainer.distributed_cases"
# 15 responses, 8 and 7 per process, so that a group spans both; uneven micro-batches; several lengths. With an epsilon
# as large as gradients, AdamW does not amplify their rounding where they are almost 0.
ODD = (
    "rl.rollout={prompts: 3, num_generations: 5, max_completion_length: 12, batch: 10}",
    "rl.micro_batch=4",
    "rl.steps=2",
    "sft={steps: 2, batch: 15, micro_batch: 6, optimizer: {lr: 0.1, eps: 0.1}}",
    "rl.optimizer={lr: 0.01, eps: 0.1}",
    "model.tiny.layers=2",
    "data.options={demonstrations: 64, train: 24, validation: 3, test: 3, boxes: 0.0}",
    "evaluation.every=0",
    "checkpoints={every: 1, keep: 9}",
)
SAMPLES = ("evaluation.samples=3", "evaluation.embedder=hashed")
SEGMENTS = "rl.algorithm={name: group_ppo, segments: {threshold_lr: 0.5}}"
CLUSTERS = "rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, sharing: 0.5}}"
CRITIC = "rl.algorithm={name: ppo, critic: {separate: true, warmup: 1}}"
SHARDED = "distributed=fsdp2"
SHORT = "rl.rollout={prompts: 1, num_generations: 2, max_completion_length: 6}"
ONE = ("sft.batch=1", "data.options.test=1")  # too few rows for the second process to have one
RUNS = {
    "grpo": (*ODD, *SAMPLES),
    "kept_tokens": (*ODD, *SAMPLES, "rl.rollout.keep_support=true", "rl.rollout.top_k=5"),
    "group_ppo": (*ODD, SEGMENTS),
    "clusters": (*ODD, CLUSTERS),
    "critic": (*ODD, CRITIC),
    "one_prompt": (*ODD, *ONE, SHORT, "rl.minibatches=1"),
    "sharded": (*ODD, SHARDED),
    "sharded_banned": (*ODD, "model.banned=[0, a, s, '#', Ġman, '=']", SHARDED),
    "sharded_values": (*ODD, SEGMENTS, SHARDED),
    "sharded_critic": (*ODD, CRITIC, SHARDED),
    "sharded_seq2seq": (*ODD, *ONE, "model.tiny.architecture=seq2seq", SHARDED),
}
# Stopped before this step of the RL phase, and resumed with the other number of processes.
STOP = ("rl", 2)
VALUE_HEAD = 32 + 1  # weights and bias; in every process whole
RESUMED = ("group_ppo", "sharded_values", "sharded_critic")
# Without --all.
QUICK = ("grpo", "sharded", "sharded_critic")
QUICK_RESUMED = ("sharded_critic",)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs of one process, one/NAME, and of two processes, two/NAME."""
    top = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = [
        {"folder": f"{top}/two/{reward}", "overrides": [*ODD, "rl.steps=1", f"rl.rewards.0.name='{HERE}:{reward}'"]}
        for reward in ("fails_in_the_second", "is_different_in_each")
    ]
    is_quick = not request.config.getoption("--all")
    with pytest.MonkeyPatch.context() as patch:
        for name in QUICK if is_quick else RUNS:
            overrides = RUNS[name]
            train(small.recipe(top / "one" / name, *overrides))
            cases.append({"folder": f"{top}/two/{name}", "overrides": overrides})
            if name in (QUICK_RESUMED if is_quick else RESUMED):
                stop_before(patch, small.recipe(top / "one_then_two" / name, *overrides), *STOP)
                cases += [
                    {"folder": f"{top}/one_then_two/{name}", "overrides": overrides, "resume": True},
                    {"folder": f"{top}/two_then_one/{name}", "overrides": overrides, "stop": STOP},
                ]
    (top / "cases.json").write_text(json.dumps(cases))
    done = launched("-m", HERE, str(top / "cases.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    return top


def launched(*command: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}")
    return subprocess.run(
        [sys.executable, "-m", *launch, *command],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )


def assert_same(one: Path, two: Path) -> None:
    """Samples and rewards are equal bit for bit, metrics and weights up to rounding.

    RandomRounding moves the weights of these runs by up to 1.5e-6, ratios by 1e-5 and other metrics by 4e-6. Two runs
    may be four times as far apart.
    """
    assert [path.read_text() for path in two.parent.glob(f"{two.name}-error-*")] == []
    for a, b in zip(lines(one, "samples"), lines(two, "samples"), strict=True):
        assert (a["prompt"], a["response"], a["rewards"]) == (b["prompt"], b["response"], b["rewards"])
    for a, b in zip(timeless(lines(one)), timeless(lines(two)), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, str) or name.startswith(("rewards/", "rollout/", "group_stats/", "eval/")):
                assert value == b[name], (name, a["phase"], a["step"])
            else:
                close = None if value is None else pytest.approx(value, rel=4e-5, abs=2e-5)  # None: undefined
                assert b[name] == close, (name, a["phase"], a["step"])
    checkpoints = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert checkpoints == sorted(path.name for path in (two / "checkpoints").iterdir())
    for checkpoint in checkpoints:
        a_weights, b_weights = (saved_weights(folder / "checkpoints" / checkpoint) for folder in (one, two))
        assert a_weights.keys() == b_weights.keys()
        for name, weight in a_weights.items():
            torch.testing.assert_close(b_weights[name], weight, rtol=0, atol=6e-6)


def saved_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of the policy, a separate critic and a value head."""
    files = sorted((checkpoint / "model").glob("*.safetensors"))
    return {f"{path.stem}.{name}": value for path in files for name, value in load_file(path).items()}


@pytest.mark.parametrize("name", quick(RUNS, *QUICK))
def test_two_processes_match_a_single_one(folder: Path, name: str) -> None:
    assert_same(folder / "one" / name, folder / "two" / name)
    files = [sorted((folder / kind / name / "checkpoints").glob("*/state.json")) for kind in ("one", "two")]
    thresholds = [[json.loads(file.read_text())["threshold"] for file in of_kind] for of_kind in files]
    assert thresholds[0] == thresholds[1] and (name != "group_ppo" or len({*thresholds[0]} - {None}) > 1)


@pytest.mark.parametrize("name", quick(RESUMED, *QUICK_RESUMED))
def test_runs_resume_with_another_number_of_processes(folder: Path, name: str) -> None:
    train(small.recipe(folder / "two_then_one" / name, *RUNS[name]), resume=True)
    assert_same(folder / "one" / name, folder / "two_then_one" / name)
    assert_same(folder / "one" / name, folder / "one_then_two" / name)
    started = [event["processes"] for event in lines(folder / "two_then_one" / name, "events") if "processes" in event]
    assert started == [2, 1]


def test_each_process_has_its_part_of_the_weights(folder: Path) -> None:
    def parts(name: str) -> list[dict[str, int]]:
        return [json.loads((folder / "two" / f"{name}-parts-{rank}").read_text()) for rank in range(2)]

    assert all(part["here"] == part["all"] for part in parts("grpo"))
    for name in ("sharded", "sharded_critic"):
        shards = parts(name)
        replicated = 0 if name == "sharded" else VALUE_HEAD
        assert sum(part["here"] for part in shards) == shards[0]["all"] + replicated
        assert max(part["here"] for part in shards) < 0.6 * shards[0]["all"]
    assert parts("sharded_critic")[0]["all"] == 2 * parts("sharded")[0]["all"] + VALUE_HEAD


def test_rewards_are_gathered_and_failures_in_one_process_end_all(folder: Path) -> None:
    """The first process scores one of three prompts, the second two."""
    expected = torch.tensor([0.1 * i for i in range(5)] + [1 + 0.1 * i for i in range(10)], dtype=torch.float32)
    (step,) = steps(folder / "two" / "is_different_in_each")
    assert step["rewards/mean"] == pytest.approx(float(expected.mean()), rel=1e-6)
    assert step["rewards/group_std"] == pytest.approx(float(expected.view(3, 5).std(1).mean()), rel=1e-6)
    said = "reward 'tests.trainer.distributed_cases:fails_in_the_second' raised ValueError: no reward today"
    said += " (distributed_cases.py, line 20; GRPO_TRACEBACK=1 shows the rest)"
    errors = [(folder / "two" / f"fails_in_the_second-error-{rank}").read_text() for rank in range(2)]
    assert errors == [f"ProcessError: process 1: RewardError: {said}", f"RewardError: {said}"]


def test_rows_are_divided_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(13)

    def split(count: int, size: int) -> Sequence[Tensor]:
        return torch.arange(count).split(distributed.MicroBatches.size(count, size))

    pieces = distributed.MicroBatches(split(13, 5))
    assert [(piece.tolist(), counts) for piece, counts in pieces] == [(piece.tolist(), True) for piece in rows.split(5)]
    assert torch.equal(pieces.all_gather([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    for count, size in ((0, 0), (1, 4), (2, 2), (7, 2), (12, 4), (12, 100), (13, 3)):
        ranges, dealt = [], []
        for rank in range(3):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            ranges.append(distributed.local_range(count))
            if size:
                dealt.append(list(distributed.MicroBatches(split(count, size), equal_count=True)))
        assert [i for local in ranges for i in local] == list(range(count))
        assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
        assert len({len(parts) for parts in dealt}) <= 1, "all wait for each other as often"
        counted = sorted(i for parts in dealt for piece, counts in parts if counts for i in piece.tolist())
        assert counted == (list(range(count)) if size else []) and all(len(parts) for parts in dealt)
        assert all(len(piece) <= size for parts in dealt for piece, _ in parts)
    for value in (torch.randn(6), torch.randn(6, 3), torch.randn(6, 2, 2).bfloat16(), torch.arange(6) > 2):
        assert distributed._digest(value) == distributed._digest(value.clone())
        assert distributed._digest(value) != distributed._digest(value.flip(0))  # in another order
    assert distributed._digest(torch.zeros(0, 3)) == distributed._digest(torch.zeros(0, 3))
