"""Reads a run's folder, also of a run that was killed or is still running; anything in it may be missing or damaged."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from grpo_trainer.evaluate import estimate_pass_at_k, is_solved
from grpo_trainer.messages import nearest_file
from grpo_trainer.recipe import EVALUATED_TOKENS

Line = dict[str, Any]


def number(value: Any) -> float:
    """The value as a float; NaN for None, by which JSON lines say NaN."""
    return math.nan if value is None else float(value)


class Evaluated:
    """An evaluation: a line of evaluations.jsonl, or the JSON of a result.

    `solved` is the reward from which a response is correct, unless the content says so itself.
    """

    def __init__(self, content: Mapping[str, Any], solved: float = 1.0) -> None:
        self.content = content
        self.split, self.phase = str(content.get("split")), str(content.get("phase"))
        self.step = number(content.get("step"))
        self.metrics = {name: number(value) for name, value in content["metrics"].items()}
        self.prompts: list[Line] = content["prompts"]
        self.solved = solved if content.get("solved") is None else content["solved"]

    @functools.cached_property
    def table(self) -> pd.DataFrame:
        """Measures of each prompt; rows are named by the prompt and its place among equal prompts."""
        prompts = pd.Series([str(line.get("prompt")) for line in self.prompts], dtype=object)
        rows = [self._measures(line) for line in self.prompts]
        table = pd.DataFrame(rows, columns=None if rows else ["reward", "exact"], dtype=float)
        table.index = pd.MultiIndex.from_arrays([prompts, prompts.groupby(prompts).cumcount()])
        return table

    def _measures(self, line: Line) -> dict[str, float]:
        reward = number(line.get("reward"))
        correct = number(line["correct"]) if "correct" in line else self._is_correct(reward)
        measures = {"reward": reward, "exact": correct}
        if rewards := [number(value) for value in line.get("rewards", [])]:
            marks = [number(mark) for mark in line.get("right", [])] or [*map(self._is_correct, rewards)]
            known = [value for value in rewards if math.isfinite(value)]
            measures["sampled_reward"] = sum(known) / len(known) if known else math.nan
            measures["sampled_exact"] = estimate_pass_at_k(marks, 1)
            measures |= {f"pass@{k}": estimate_pass_at_k(marks, k) for k in range(1, len(marks) + 1)}
        return measures | {name: number(value) for name, value in line.get("measures", {}).items()}

    def _is_correct(self, reward: float) -> float:
        return math.nan if math.isnan(reward) else float(is_solved(reward, self.solved))


class RunFolder:
    """Contents of a run's folder, which must have a recipe.yaml or metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        if not (self.path / "recipe.yaml").exists() and not (self.path / "metrics.jsonl").exists():
            inside = sorted(str(file.parent) for file in self.path.glob("*/recipe.yaml"))
            way_out = f"; there are {', '.join(inside)}" if inside else ""
            rule = "have a recipe.yaml or metrics.jsonl" if self.path.exists() else "exist"
            raise FileNotFoundError(f"report: folder must {rule}, got {path}{way_out or nearest_file(path)}")
        self.unreadable: list[str] = []
        try:
            self.recipe: Line = yaml.safe_load((self.path / "recipe.yaml").read_text("utf-8")) or {}
        except (OSError, yaml.YAMLError):
            self.recipe = {}
            self.unreadable.append("recipe.yaml")
        self.metrics, self.events = self._read_lines("metrics"), self._read_lines("events")
        solved = self.setting("evaluation.solved")
        evaluations = [Evaluated(line, 1.0 if solved is None else solved) for line in self._read_lines("evaluations")]
        self.evaluations = sorted(evaluations, key=lambda e: (e.phase == "rl", e.step))

    def _read_lines(self, name: str) -> list[Line]:
        file = self.path / f"{name}.jsonl"
        lines = []
        for i, text in enumerate(file.read_text("utf-8", "replace").split("\n") if file.exists() else [], 1):
            try:
                lines += [json.loads(text)] if text else []
            except ValueError:
                self.unreadable.append(f"{file.name} line {i}")
        return lines

    def setting(self, key: str) -> Any:
        """A value of the recipe by its key, such as rl.steps; None if it does not exist."""
        value: Any = self.recipe
        for name in key.split("."):
            value = (value or {}).get(name)
        return value

    @property
    def name(self) -> str:
        return str(self.setting("name") or self.path.name)

    @property
    def reports_correctness(self) -> bool:
        """Whether a reward decides correctness, so that no threshold of `evaluation.solved` does."""
        rewards = self.setting("evaluation.rewards") or self.setting("rl.rewards") or []
        names = [reward["name"] for reward in rewards]
        parts = {name for e in self.evaluations for name in e.metrics if name.startswith("components/")}
        # exact, the default, reported no component in version 0.1.0; another reward beside it made the total unclear
        is_exact_alone = names in ([], ["exact"]) and not parts
        return is_exact_alone or any(re.split(r"[/.]", name)[-1] == "correct" for name in parts)

    @property
    def phase(self) -> str:
        """The last phase; without any, that of the evaluation before the first step."""
        return "sft" if self.recipe and not self.setting("rl") else "rl"

    @property
    def steps(self) -> float:
        """Number of steps of the last phase, 0 without any."""
        is_untrained = self.recipe and not self.setting(self.phase)
        return 0.0 if is_untrained else number(self.setting(f"{self.phase}.steps"))

    @property
    def longest_evaluated(self) -> int:
        """The longest response of an evaluation, in tokens."""
        own, of_rl = self.setting("evaluation.max_completion_length"), self.setting("rl.rollout.max_completion_length")
        return int(own or of_rl or EVALUATED_TOKENS)

    def training(self, phase: str, step: float) -> str:
        return f"{step:.0f} steps of {'SFT' if phase == 'sft' else self.setting('rl.algorithm.name') or 'RL'}"

    def frame(self, source: str) -> pd.DataFrame:
        """Numbers by step: those logged in the phase sft or rl, or the evaluations of validation in the last phase."""
        if source == "validation":
            rows = [{"step": e.step} | e.metrics for e in self.evaluations_of(source)]
        else:
            lines = [line for line in self.metrics if (line["kind"], line["phase"]) == ("train", source)]
            rows = [{name: number(line[name]) for name in line if "/" in name or name == "step"} for line in lines]
        return pd.DataFrame(rows, columns=None if rows else ["step"], dtype=float).set_index("step")

    def series(self, source: str, name: str) -> pd.Series:
        """One of these numbers; NaN where it is missing."""
        return self.frame(source).reindex(columns=[name])[name]

    def evaluations_of(self, split: str) -> list[Evaluated]:
        """Evaluations of a split in the last phase."""
        return [e for e in self.evaluations if (e.split, e.phase) == (split, self.phase)]

    def before_and_after(self) -> tuple[Evaluated, Evaluated] | None:
        """First and last evaluation of the last phase, of the test split if possible; None without a step between."""
        for split in ("test", "validation"):
            evaluations = self.evaluations_of(split)
            if evaluations and evaluations[0].step == 0 < evaluations[-1].step:
                return evaluations[0], evaluations[-1]
        return None

    def final_evaluation(self) -> Evaluated | None:
        """Evaluation after the last step, of the validation split only if no test split was evaluated."""
        split = "test" if any(e.split == "test" for e in self.evaluations) else "validation"
        return next((e for e in reversed(self.evaluations_of(split)) if e.step == self.steps), None)
