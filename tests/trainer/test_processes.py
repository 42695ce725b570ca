"""Two processes train as one does: with the same prompts, samples and rewards, and up to rounding the same weights.

Every recipe that two processes run is run in one launch, since a launch takes longer than a run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer import processes
from grpo_trainer.run_folder import number
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after, timeless, weights

HERE = "tests.trainer.in_processes"
# 15 responses: 8 and 7 for a process, so that a group spans two; micro-batches that come out uneven; several lengths.
ODD = ("phases.1.rl.rollout={prompts: 3, group_size: 5, max_new_tokens: 12, batch: 10}", "phases.1.rl.micro_batch=3",
       "phases.0.sft.batch=15", "phases.0.sft.micro_batch=4", "phases.0.sft.steps=2", "phases.1.rl.steps=2",
       "model.tiny.layers=2", "data.options.validation=3", "data.options.test=3", "evaluation.every=0",
       "checkpoints.every=1", "checkpoints.keep=9")  # fmt: skip
SAMPLES = ("evaluation.samples=3", "evaluation.embedder=hashed")
SEGMENTS = "phases.1.rl.algorithm={name: group_ppo, segments: {threshold_lr: 0.5}}"
CLUSTERS = "phases.1.rl.algorithm={name: similarity_group_grpo, similarity: {embedder: hashed, sharing: 0.5}}"
CRITIC = "phases.1.rl.algorithm={name: ppo, critic: {separate: true, warmup: 1}}"
SHARDED = "distributed=fsdp2"
ONE = ("phases.0.sft.batch=1", "data.options.test=1")  # too few rows for the second process to have one
RUNS = {
    "grpo": (*ODD, *SAMPLES),
    "group_ppo": (*ODD, SEGMENTS),
    "clusters": (*ODD, CLUSTERS),
    "critic": (*ODD, CRITIC),
    "one_prompt": (*ODD, *ONE, "phases.1.rl.rollout={prompts: 1, group_size: 2, max_new_tokens: 6}",
                   "phases.1.rl.minibatches=1"),
    "sharded": (*ODD, SHARDED),
    "sharded_values": (*ODD, SEGMENTS, SHARDED),
    "sharded_seq2seq": (*ODD, *ONE, "model.tiny.architecture=seq2seq", SHARDED),
}  # fmt: skip
# Stopped before this step of the RL phase, and gone on from by the other number of processes.
STOP = (1, 2)
RESUMED = ("group_ppo", "sharded_values")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one/NAME and two/NAME."""
    top = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = [
        {"folder": f"{top}/two/failing", "overrides": [f"phases.1.rl.rewards.0.name='{HERE}:fails_in_the_second'"]},
        {"folder": f"{top}/two/moody", "overrides": [
            *ODD, "phases.1.rl.steps=1", f"phases.1.rl.rewards.0.name='{HERE}:is_different_in_each'"]},
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, given in RUNS.items():
            train(small.recipe(top / "one" / name, *given))
            cases.append({"folder": f"{top}/two/{name}", "overrides": given})
            if name in RESUMED:
                stopped_after(patch, small.recipe(top / "one_then_two" / name, *given), STOP[0], STOP[1] - 1)
                cases += [
                    {"folder": f"{top}/one_then_two/{name}", "overrides": given, "resume": True},
                    {"folder": f"{top}/two_then_one/{name}", "overrides": given, "stop": STOP},
                ]
    (top / "cases.json").write_text(json.dumps(cases))
    done = launched("-m", HERE, str(top / "cases.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    return top


def launched(*command: str, limit: float = 400.0) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
              "--dynamo_backend=no", "--mixed_precision=no", f"--main_process_port={port}")  # fmt: skip
    return subprocess.run([sys.executable, "-m", *launch, *command], capture_output=True, text=True, timeout=limit,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})  # fmt: skip


def assert_same(one: Path, two: Path, rtol: float = 1e-4, atol: float = 2e-5) -> None:
    """Samples and rewards bit for bit, figures and weights up to the rounding of sums in another order, which AdamW
    makes larger where a gradient is all but 0: a step of the learning rate, 1e-3, is far beyond it."""
    assert [path.read_text() for path in two.parent.glob(f"{two.name}-error-*")] == []
    for a, b in zip(lines(one, "samples"), lines(two, "samples"), strict=True):
        assert (a["prompt"], a["response"], a["rewards"]) == (b["prompt"], b["response"], b["rewards"])
    for a, b in zip(timeless(lines(one)), timeless(lines(two)), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, str) or name.startswith(("rewards/", "rollout/", "group_stats/", "eval/")):
                assert value == b[name] or number(value) != number(value), (name, a["phase"], a["step"])
            else:
                assert b[name] == pytest.approx(value, rel=rtol, abs=atol, nan_ok=True), (name, a["phase"], a["step"])
    checkpoints = sorted(path.name for path in (one / "checkpoints").iterdir())
    assert checkpoints == sorted(path.name for path in (two / "checkpoints").iterdir())
    for checkpoint in checkpoints:
        a_weights, b_weights = weights(one, checkpoint), weights(two, checkpoint)
        assert a_weights.keys() == b_weights.keys()
        for name, weight in a_weights.items():
            torch.testing.assert_close(b_weights[name], weight, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one_does(folder: Path, name: str) -> None:
    assert_same(folder / "one" / name, folder / "two" / name)


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_another_number_of_processes(folder: Path, name: str) -> None:
    train(small.recipe(folder / "two_then_one" / name, *RUNS[name]), resume=True)
    assert_same(folder / "one" / name, folder / "two_then_one" / name)
    assert_same(folder / "one" / name, folder / "one_then_two" / name)
    started = [event["processes"] for event in lines(folder / "two_then_one" / name, "events") if "processes" in event]
    assert started == [2, 1]


def test_each_process_has_its_part_of_the_weights(folder: Path) -> None:
    def parts(name: str) -> list[dict[str, int]]:
        return [json.loads((folder / "two" / f"{name}-parts-{rank}").read_text()) for rank in range(2)]

    assert all(part["here"] == part["all"] for part in parts("grpo"))
    shards = parts("sharded")
    assert sum(part["here"] for part in shards) == shards[0]["all"]
    assert max(part["here"] for part in shards) < 0.6 * shards[0]["all"]


def test_the_threshold_of_segments_moves_alike(folder: Path) -> None:
    """And it does move, or nothing would be shown by it."""
    states = [
        [json.loads((at / "state.json").read_text())["threshold"] for at in sorted((path / "checkpoints").iterdir())]
        for path in (folder / "one" / "group_ppo", folder / "two" / "group_ppo")
    ]
    assert states[0] == states[1] and len({value for value in states[0] if value is not None}) > 1


def test_rewards_are_of_all_prompts_whoever_scored_them(folder: Path) -> None:
    """Of three prompts the first process has one and the second two."""
    expected = torch.tensor([0.1 * i for i in range(5)] + [1 + 0.1 * i for i in range(10)], dtype=torch.float32)
    (step,) = [line for line in lines(folder / "two" / "moody") if line["phase"] == "rl"]
    assert step["rewards/mean"] == pytest.approx(float(expected.mean()), rel=1e-6)
    assert step["rewards/group_std"] == pytest.approx(float(expected.view(3, 5).std(1).mean()), rel=1e-6)


def test_what_fails_in_one_process_fails_in_all(folder: Path) -> None:
    said = "reward 'tests.trainer.in_processes:fails_in_the_second' raised ValueError: no reward today"
    found = [(folder / "two" / f"failing-error-{rank}").read_text() for rank in range(2)]
    assert found == [f"ProcessError: process 1: RewardError: {said}", f"RewardError: {said}"]


def test_a_process_that_breaks_ends_the_others(tmp_path: Path) -> None:
    """Through the command, and where the others are waiting for it."""
    recipe = tmp_path / "recipe.yaml"
    given = small.values(tmp_path / "run") | {"phases": [{"rl": {
        "steps": 1, "rollout": {"prompts": 2, "group_size": 4, "max_new_tokens": 4},
        "rewards": [{"name": f"{HERE}:breaks_the_second_model"}]}}]}  # fmt: skip
    recipe.write_text(json.dumps(given))
    began = time.monotonic()
    done = launched("-m", "grpo_trainer", str(recipe), limit=200)
    assert done.returncode != 0
    assert "RuntimeError: the second model is broken" in done.stderr
    assert time.monotonic() - began < 150, "an end is not waited for: gloo gives up after half an hour"


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rank = [0]
    monkeypatch.setattr(processes, "world", lambda: 3)
    monkeypatch.setattr(processes, "rank", lambda: rank[0])
    return rank


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 12])
def test_shares_are_everything_once_and_alike_in_size(of_three: list[int], count: int) -> None:
    found = []
    for of_three[0] in range(3):
        found.append(processes.share(count))
    assert [i for some in found for i in some] == list(range(count))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(("count", "size"), [(1, 4), (7, 2), (12, 4), (12, 100), (13, 3)])
def test_micro_batches_are_everything_once(of_three: list[int], count: int, size: int) -> None:
    rows = torch.arange(count)
    found = []
    for of_three[0] in range(3):
        found.append(list(processes.Pieces(rows, size, in_step=True)))
    assert len({len(some) for some in found}) == 1, "all wait for each other as often"
    counted = sorted(i for some in found for piece, counts in some if counts for i in piece.tolist())
    assert counted == list(range(count)) and max(len(piece) for some in found for piece, _ in some) <= size
    assert all(len(some) for some in found)


def test_one_process_has_the_micro_batches_it_always_had() -> None:
    rows = torch.arange(13)
    pieces = processes.Pieces(rows, 5)
    assert [(piece.tolist(), counts) for piece, counts in pieces] == [(piece.tolist(), True) for piece in rows.split(5)]
    assert torch.equal(pieces.whole([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))


def test_rows_in_another_order_are_not_the_same() -> None:
    for value in (torch.randn(6), torch.randn(6, 3), torch.randn(6, 2, 2).bfloat16(), torch.arange(6) > 2):
        assert processes._digest(value) == processes._digest(value.clone())
        assert processes._digest(value) != processes._digest(value.flip(0))
    assert processes._digest(torch.zeros(0, 3)) == processes._digest(torch.zeros(0, 3))
