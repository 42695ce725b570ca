"""Writes folders of small synthetic runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from grpo_trainer.monitor import map_of

Line = dict[str, Any]

# metrics of a step: the value at the start, and its growth a step
METRICS = {
    "rewards/mean": (0.2, 0.01),
    "rewards/group_std": (0.3, 0),
    "train/kl_mean": (0, 0.002),
    "train/kl_rollout": (0, 0.003),
    "train/entropy": (0.8, -0.01),
    "train/lr": (1e-4, 0),
    "rollout/length_mean": (20, 0),
    "rollout/length_max": (28, 0),
    "time/step": (2, 0),
    "time/generate": (1.1, 0),
    "time/model": (0.8, 0),
}
RICH = {
    "rewards/components/format": (0.3, 0),
    "similarity_groups/avg_silhouette_score": (0.5, 0),
    "similarity_groups/share_clustered": (0.6, 0),
    "similarity_groups/share_unclear": (0.4, 0),
    "group/compression_ratio": (0.7, 0),
}


def write(
    folder: Path,
    shares: tuple[float, ...] = (0.3, 0.5, 0.8),
    *,
    name: str = "made up",
    seed: int = 3,
    steps: int = 45,
    finished: bool = True,
    rich: bool = True,
) -> Path:
    """Writes a run.

    Args:
        folder: the run's folder.
        shares: fractions of prompts that are solved before RL, after 20 steps, and after the last step.
        name: name of the recipe.
        seed: its seed.
        steps: logged steps of RL.
        finished: whether these are all steps, with an evaluation after them.
        rich: whether to add similarity groups, segments, samples and maps.
    """
    recipe = {
        "name": name,
        "seed": seed,
        "model": {"path": "tiny"},
        "data": {"task": "arithmetic"},
        "evaluation": {"tracked": 2, "solved": 1.0},
        "sft": {"steps": 3},
        "rl": {"steps": steps if finished else steps + 5, "algorithm": {"name": "grpo"}},
    }
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    chosen = random.Random(0)
    lines: list[Line] = [{"kind": "train", "phase": "sft", "step": i, "time": i, "train/loss": 3 / i} for i in (1, 2)]
    for step in range(1, steps + 1):
        values = {k: v + step * slope + v * chosen.gauss(0, 0.05) for k, (v, slope) in METRICS.items()}
        values |= {k: v + chosen.gauss(0, 0.05) for k, (v, _) in RICH.items() if rich}
        lines.append({"kind": "train", "phase": "rl", "step": step, "time": 2 + step} | values)
    write_lines(folder / "metrics.jsonl", lines)
    started = {"event": "started", "time": 0.1, "date": "2026-01-02", "algorithm": "std_floor 0.1"}
    write_lines(folder / "events.jsonl", [started, *[{"event": "checkpoint", "time": 9.5, "phase": "sft"}] * 2])
    evaluations = [evaluation("validation", 0, shares[0], rich), evaluation("test", 0, shares[0], rich)]
    evaluations += [evaluation("validation", 20, shares[1], rich)] if steps > 20 else []
    if finished:
        evaluations += [evaluation(split, steps, shares[-1], rich) for split in ("validation", "test")]
    write_lines(folder / "evaluations.jsonl", evaluations)
    return folder


def evaluation(split: str, step: int, share: float, rich: bool) -> Line:
    """A line of evaluations.jsonl with 20 prompts, of which the first `share` are solved."""
    prompts: list[Line] = []
    for i in range(20):
        solved = float(i < 20 * share)
        line: Line = {
            "prompt": f"Ann has {i} shells, wins 2. How many?",
            "greedy": f"#### {i + step}",
            "reward": solved,
        }
        if rich:
            line |= {"samples": [f"#### {i}", "so"], "rewards": [solved, 0.0], "measures": {"vendi": 1.5 + solved}}
        prompts.append(line)
    metrics: Line = {"exact": share, "reward": share, "truncated": 0.1, "length": 5.0, "prompts": 20.0}
    if rich:
        metrics |= {"sampled_reward": share / 2, "pass@1": share / 2, "pass@2": share, "vendi": 1.5 + share}
    content: Line = {"phase": "rl", "step": step, "split": split, "metrics": metrics, "prompts": prompts}
    return content | ({"embedder": "hashed", "map": made_map(step)} if rich and split == "validation" else {})


def made_map(step: int, prompt: str = "Ann has 3 shells, wins 4. How many?") -> Line:
    generator = torch.Generator().manual_seed(step)
    labels = torch.tensor([0, 0, 1, 1, 2, -1, 0, 1])
    embeddings = torch.eye(3)[labels.clamp(min=0)] + 0.2 * torch.randn(8, 3, generator=generator)
    embeddings[5] = math.nan
    texts = [f"3 + 4 = {6 + int(label)}" + " so" * (i % 2) for i, label in enumerate(labels)]
    return map_of(prompt, texts, embeddings, labels, torch.tensor([1.0, 0, 0, 1, 0, math.nan, 1, 0]))


def change(folder: Path, edit: Callable[[Line], object], name: str = "evaluations") -> None:
    """Edits each line of a file of the run."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    for line in lines:
        edit(line)
    write_lines(folder / f"{name}.jsonl", lines)


def change_recipe(folder: Path, key: str, value: object) -> None:
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    *sections, last = key.split(".")
    section = recipe
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def write_lines(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
