"""Writes folders of small synthetic runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from grpo_trainer.report.projection import map_line

Line = dict[str, Any]


def write(folder: Path, *, name: str = "made up", steps: int = 45, finished: bool = True, rich: bool = True) -> Path:
    """Writes a run; rich adds similarity groups, segments, several rewards, samples and maps."""
    rewards = [{"name": "exact"}, {"name": "short"}] if rich else []
    rl = {"steps": steps if finished else steps + 5, "algorithm": {"name": "similarity_group_grpo"}, "rewards": rewards}
    recipe = {
        "name": name,
        "seed": 3,
        "model": {"path": "tiny", "tiny": {"layers": 2, "hidden": 32}},
        "data": {"task": "arithmetic"},
        "evaluation": {"tracked": 2},
        "phases": [{"sft": {"steps": 3}, "rl": None}, {"sft": None, "rl": rl}],
    }
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    chosen = random.Random(0)
    lines: list[Line] = [{"phase": "sft", "step": i, "time": float(i), "train/loss": 3.0 / i} for i in (1, 2, 3)]
    lines += [rl_line(chosen, i, rich) for i in range(1, steps + 1)]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "events.jsonl", [{"event": "checkpoint", "time": 9.5, "phase": 0, "step": 3}] * 2)
    for phase, step, share in ((0, 0, 0.0), (1, 0, 0.3), (1, 20, 0.5), *([(1, steps, 0.8)] if finished else [])):
        write_evaluation(folder, "validation", phase, step, share, rich)
    if finished:
        write_evaluation(folder, "test", 2, 0, 0.8, rich)
    if rich:
        write_lines(folder / "maps.jsonl", [made_map(step) for step in (1, 20, steps)])
    return folder


def rl_line(chosen: random.Random, step: int, rich: bool) -> Line:
    def noisy(value: float) -> float:
        return value + chosen.gauss(0, 0.05)

    line: Line = {
        "phase": "rl",
        "step": step,
        "time": 3.0 + step,
        "rewards/mean": noisy(0.2 + step / 100),
        "rewards/std": 0.4,
        "rewards/group_std": noisy(0.3),
        "group_stats/num_groups": 16.0,
        "group_stats/avg_group_size": 8.0,
        "group_stats/flat_groups": float(chosen.randint(2, 6)),
        "train/kl_mean": abs(noisy(step / 500)),
        "train/kl_rollout": abs(noisy(step / 400)),
        "train/entropy": noisy(0.8 - step / 100),
        "train/clip_low": 0.01,
        "train/clip_high": 0.02,
        "train/ratio_min": 0.4,
        "train/ratio_max": noisy(1.8),
        "rollout/length_mean": noisy(20),
        "rollout/length_max": 28.0,
        "rollout/truncated": abs(noisy(0.1)),
        "train/grad_norm": noisy(0.7),
        "train/lr": 1e-4 * (1 - step / 100),
        "train/total_loss": noisy(0),
        "train/policy_loss": noisy(0),
        "train/nonzero_advantages": noisy(0.6),
        "train/advantages_std": noisy(0.8),
        "time/step": 2.0,
        "time/generate": 1.1,
        "time/model": 0.8,
        "time/reward": 0.05,
        "time/advantage": 0.01,
        "time/embed": 0.02,
        "rewards/skipped": 0.0,
        "train/skipped": 0.0,
    }
    if rich:
        line |= {"rewards/exact": noisy(0.3), "rewards/short": noisy(0.6)}
        line |= {
            "similarity_groups/avg_groups_per_prompt": noisy(2.5),
            "similarity_groups/avg_silhouette_score": noisy(0.5),
            "similarity_groups/share_clustered": noisy(0.6),
            "similarity_groups/share_all_same": noisy(0.2),
            "similarity_groups/share_all_different": noisy(0.1),
            "similarity_groups/share_unclear": noisy(0.1),
            "group/compression_ratio": noisy(0.7),
            "group/avg_endpoints_per_sequence": noisy(6),
            "group/threshold": noisy(0.4),
        }
    return line


def write_evaluation(folder: Path, split: str, phase: int, step: int, share: float, rich: bool) -> None:
    """Writes an evaluation of 20 prompts, of which the first `share` are solved."""
    prompts: list[Line] = []
    for i in range(20):
        prompt = f"Ann has {i} shells, wins 2. How many?"
        line: Line = {"prompt": prompt, "greedy": f"#### {i + 2}", "reward": float(i < 20 * share)}
        prompts.append(line | ({"samples": [f"#### {i}", "so"], "rewards": [line["reward"], 0.0]} if rich else {}))
    metrics: Line = {"exact": share, "reward": share, "truncated": 0.1, "length": 5.0, "prompts": 20.0}
    if rich:
        metrics |= {"pass@1": share / 2, "pass@2": share, "self_bleu": 0.3, "distinct_1": 0.6, "vendi": 1.5 + share}
    path = folder / "evaluations" / f"{split}-{phase}-{step:06d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"metrics": metrics, "prompts": prompts, "embedder": "hashed" if rich else None}))


def made_map(step: int, prompt: str = "Ann has 3 shells, wins 4. How many?") -> Line:
    generator = torch.Generator().manual_seed(step)
    labels = torch.tensor([0, 0, 1, 1, 2, -1, 0, 1])
    centres = torch.eye(3)[labels.clamp(min=0)]
    embeddings = centres + 0.2 * torch.randn(8, 3, generator=generator)
    embeddings[5] = math.nan
    texts = [f"3 + 4 = {6 + int(label)}. #### {6 + int(label)}" + " so" * (i % 2) for i, label in enumerate(labels)]
    return map_line(step, prompt, texts, embeddings, labels, torch.tensor([1.0, 0, 0, 1, 0, math.nan, 1, 0]))


def write_lines(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
