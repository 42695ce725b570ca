"""Writes and edits folders of small synthetic runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.trainer.small import lines

Line = dict[str, Any]

# metrics of a step: the value at the start, and its growth a step
METRICS = {
    "rewards/mean": (0.2, 0.01),
    "train/kl_mean": (0, 0.002),
    "train/kl_rollout": (0, 0.003),
    "train/entropy": (0.8, -0.01),
    "rollout/length_mean": (20, 0),
    "time/step": (2, 0.01),
    "time/generate": (1.1, 0),
    "time/model": (0.8, 0),
}


def write(folder: Path, *shares: float, name: str = "made up", seed: int = 3, steps: int = 45, left: int = 0) -> Path:
    """Writes a run.

    Args:
        folder: the run's folder.
        shares: fractions of prompts that are solved before RL, after 20 steps, and after the last step.
        name: name of the recipe.
        seed: its seed.
        steps: logged steps of RL.
        left: steps that are missing; then there is no evaluation after the last one.
    """
    shares = shares or (0.3, 0.5, 0.8)
    recipe = {
        "name": name,
        "seed": seed,
        "model": {"path": "tiny"},
        "data": {"task": "arithmetic"},
        "evaluation": {"solved": 1.0},
        "sft": {"steps": 3},
        "rl": {"steps": steps + left, "algorithm": {"name": "grpo"}},
    }
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    metrics: list[Line] = [{"kind": "train", "phase": "sft", "step": i, "time": i, "train/loss": 3 / i} for i in (1, 2)]
    for step in range(1, steps + 1):
        values = {name: start + step * growth for name, (start, growth) in METRICS.items()}
        metrics.append({"kind": "train", "phase": "rl", "step": step, "time": 2 + step} | values)
    write_lines(folder, "metrics", metrics)
    started = {"event": "started", "time": 0.1, "date": "2026-01-02", "algorithm": "std_floor 0.1"}
    write_lines(folder, "events", [started, *[{"event": "checkpoint", "time": 9.5, "phase": "sft"}] * 2])
    places = [("validation", 0, shares[0]), ("test", 0, shares[0]), ("validation", 20, shares[1])][: 2 + (steps > 20)]
    places += [] if left else [("validation", steps, shares[-1]), ("test", steps, shares[-1])]
    write_lines(folder, "evaluations", [evaluation(*place) for place in places])
    return folder


def evaluation(split: str, step: int, share: float) -> Line:
    """A line of evaluations.jsonl with 20 prompts, of which the first `share` are solved."""
    prompts: list[Line] = []
    for i in range(20):
        solved = float(i < 20 * share)
        line: Line = {"prompt": f"Ann has {i} shells, wins 2.", "greedy": f"#### {i + step}", "reward": solved}
        line |= {"samples": [f"#### {i}", "so"], "rewards": [solved, 0.0], "measures": {"vendi": 1.5 + solved}}
        prompts.append(line)
    metrics: Line = {"exact": share, "reward": share, "truncated": 0.1, "length": 5.0, "prompts": 20.0}
    metrics |= {"sampled_reward": share / 2, "pass@1": share / 2, "pass@2": share, "vendi": 1.5 + share}
    return {"phase": "rl", "step": step, "split": split, "metrics": metrics, "prompts": prompts, "embedder": "hashed"}


def write_lines(folder: Path, name: str, entries: list[Line]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in entries))


def change(folder: Path, edit: Callable[[Line], object], name: str = "evaluations") -> None:
    """Edits each line of a file of the run."""
    entries = lines(folder, name)
    for line in entries:
        edit(line)
    write_lines(folder, name, entries)


def keep(folder: Path, condition: Callable[[Line], bool]) -> None:
    """Keeps the evaluations that meet a condition."""
    write_lines(folder, "evaluations", [line for line in lines(folder, "evaluations") if condition(line)])


def change_recipe(folder: Path, key: str, value: object) -> None:
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    *sections, last = key.split(".")
    section = recipe
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
