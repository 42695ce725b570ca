"""Several runs as rows of one comparison: a recipe with its seeds, and intervals over seeds or prompts."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_trainer.diversity_measures import collapse_point
from grpo_trainer.report.compare import bootstrap_interval, paired
from grpo_trainer.report.run_folder import Evaluated, RunFolder, mean, number

# keys that may differ between runs of one row
_PER_RUN = ("seed", "output", "threads", "backend", "distributed", "logging", "checkpoints")
_DATA = (
    "task",
    "options",
    "validation",
    "test",
    "prompt",
    "template",
)  # keys that determine the prompts of an evaluation
_EVALUATION = ("samples", "temperature", "pass_k", "max_new_tokens", "solved", "solved_quantile")
SHARES = ("exact", "sampled_exact", "truncated")  # and pass@k
_RESAMPLES = 10_000


class Estimate(NamedTuple):
    """A mean with a 95 % interval; `kind` says over what, and is empty without an interval."""

    mean: float
    low: float
    high: float
    kind: str

    @property
    def excludes_0(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclasses.dataclass
class Row:
    """Runs of one recipe, one per seed."""

    number: int
    runs: list[RunFolder]
    evaluated: list[Evaluated]  # the final evaluation of each run

    @property
    def name(self) -> str:
        return str(self.runs[0].setting("name") or self.runs[0].path.name)

    @property
    def label(self) -> str:
        return f"{self.number} {self.name}"

    @property
    def seeds(self) -> list[Any]:
        return [run.setting("seed") for run in self.runs]

    def estimate(self, name: str) -> Estimate:
        """A metric of the final evaluations: over seeds if there are several, or else over the prompts."""
        values = [number(evaluated.metrics.get(name)) for evaluated in self.evaluated]
        if len(values) > 1:
            low, high = t_interval(values)
            return Estimate(mean(values), low, high, "" if math.isnan(low) else f"t, {_known(values)} seeds")
        by_prompt = [value for line in self.evaluated[0].prompts if math.isfinite(value := value_of(line, name))]
        low, high = bootstrap_interval(torch.tensor(by_prompt, dtype=torch.float64), _RESAMPLES, 0)
        return Estimate(values[0], low, high, "" if math.isnan(low) else f"bootstrap, {len(by_prompt)} prompts")

    def minus(self, other: Row, name: str) -> Estimate:
        """Difference of a metric to another row's, paired: by seeds if both have several, or else by prompts."""
        theirs = dict(zip(other.seeds, other.evaluated, strict=True))
        pairs = [(e, theirs[seed]) for seed, e in zip(self.seeds, self.evaluated, strict=True) if seed in theirs]
        gaps = [number(a.metrics.get(name)) - number(b.metrics.get(name)) for a, b in pairs]
        if len(gaps) > 1:
            low, high = t_interval(gaps)
            return Estimate(mean(gaps), low, high, "" if math.isnan(low) else f"t, {_known(gaps)} seeds")
        if not pairs:
            return Estimate(math.nan, math.nan, math.nan, "")
        lines = paired(pairs[0][1].prompts, pairs[0][0].prompts)
        by_prompt = [gap for b, a in lines if math.isfinite(gap := value_of(a, name) - value_of(b, name))]
        low, high = bootstrap_interval(torch.tensor(by_prompt, dtype=torch.float64), _RESAMPLES, 0)
        return Estimate(gaps[0], low, high, "" if math.isnan(low) else f"bootstrap, {len(by_prompt)} prompts")

    def collapse(self, name: str, share: float) -> list[float]:
        """Collapse point of each run by its evaluations of the validation split during RL; NaN if there is none."""
        points = []
        for run in self.runs:
            steps, values = validation_series(run, name)
            points.append(collapse_point(steps, values, share))
        return points


def select(folders: Sequence[Path]) -> tuple[list[Row], list[tuple[Path, str]]]:
    """Groups runs into rows.

    Returns:
        Rows in the order of the folders; and the folders that were left out, with the reason.
    """
    rows: dict[str, Row] = {}
    left_out: list[tuple[Path, str]] = []
    first: tuple[RunFolder, Evaluated] | None = None
    for folder in folders:
        try:
            run = RunFolder.read(Path(folder))
        except OSError as error:
            left_out.append((Path(folder), str(error).removeprefix(f"{folder}: ")))
            continue
        evaluated = final_evaluation(run)
        if evaluated is None:
            left_out.append((run.path, "has no evaluation after its last phase; finish it with grpo-train --resume"))
            continue
        first = first or (run, evaluated)
        reason = _mismatch(run, evaluated, *first)
        key = json.dumps({name: v for name, v in run.recipe.items() if name not in _PER_RUN}, sort_keys=True)
        row = rows.get(key)
        if reason is None and row is not None and run.setting("seed") in row.seeds:
            twin = row.runs[row.seeds.index(run.setting("seed"))].path
            reason = f"has the recipe and the seed, {run.setting('seed')}, of {twin}"
        if reason is not None:
            left_out.append((run.path, reason))
        elif row is None:
            rows[key] = Row(len(rows) + 1, [run], [evaluated])
        else:
            row.runs.append(run)
            row.evaluated.append(evaluated)
    return list(rows.values()), left_out


def final_evaluation(run: RunFolder) -> Evaluated | None:
    """Evaluation of the test split after the last phase, or of the validation split where no test split exists."""
    phases = run.phases
    tested = [e for e in run.evaluations if e.split == "test" and e.phase == len(phases)]
    if tested:
        return tested[-1]
    if any(e.split == "test" for e in run.evaluations) or not phases:
        return None
    last = len(phases) - 1
    steps = number(run.setting("phases", last, phases[last], "steps"))
    done = [e for e in run.evaluations if e.split == "validation" and e.phase == last and e.step == steps]
    return done[-1] if done else None


def _rewards(run: RunFolder) -> str:
    """The rewards of the evaluations of a run: their own, or those of its first RL phase."""
    first_rl = run.phases.index("rl") if "rl" in run.phases else 0
    rewards = run.setting("evaluation", "rewards") or run.setting("phases", first_rl, "rl", "rewards")
    if not isinstance(rewards, list) or not rewards:
        return "the reward of its task"
    return " + ".join(_described(reward) for reward in rewards if isinstance(reward, dict))


def _described(reward: dict[str, Any]) -> str:
    weight = reward.get("weight", 1.0)
    options = json.dumps(reward["options"]) if reward.get("options") else ""
    return f"{'' if weight == 1 else f'{weight} '}{reward.get('name')}{options}"


def differences(rows: Sequence[Row]) -> list[str]:
    """Settings of the evaluations in which rows differ from the first, which make their numbers compare less."""
    notes = []
    for row in rows[1:]:
        for name in _EVALUATION:
            ours, theirs = (each.runs[0].setting("evaluation", name) for each in (row, rows[0]))
            if ours != theirs:
                notes.append(f"{row.label}: evaluation.{name} is {ours!r}, not {theirs!r} as in {rows[0].label}")
        ours, theirs = (_rewards(each.runs[0]) for each in (row, rows[0]))
        if ours != theirs:
            notes.append(
                f"{row.label}: its responses are scored by {ours}, not by {theirs} as in {rows[0].label}; "
                "evaluation.rewards can name the same for both"
            )
        ours, theirs = (each.evaluated[0].content.get("embedder") for each in (row, rows[0]))
        if ours != theirs:
            notes.append(f"{row.label}: its embeddings are by {ours}, not by {theirs} as in {rows[0].label}")
    return notes


def value_of(line: Mapping[str, Any], name: str) -> float:
    """A metric of one prompt's line in an evaluation; NaN if it is not a mean over prompts, or was not written."""
    if name in ("reward", "exact"):
        return number(line.get("correct" if name == "exact" else name))
    if name in ("sampled_reward", "sampled_exact"):
        values = line.get("rewards" if name == "sampled_reward" else "right")
        return mean([number(value) for value in values]) if isinstance(values, list) else math.nan
    if name.startswith("pass@") and name[5:].isdigit() and isinstance(line.get("right"), list):
        from grpo_trainer.evaluate import estimate_pass_at_k

        return estimate_pass_at_k([number(value) for value in line["right"]], int(name[5:]))
    measures = line.get("measures")
    return number(measures.get(name)) if isinstance(measures, dict) else math.nan


def validation_series(run: RunFolder, name: str) -> tuple[list[float], list[float]]:
    """RL steps and values of a metric of the validation split, from the start of RL on."""
    if "rl" not in run.phases:
        return [], []
    first_rl = run.phases.index("rl")
    evaluations = [e for e in run.evaluations if e.split == "validation" and e.phase >= first_rl]
    steps = [run.rl_offset(e.phase) + e.step for e in evaluations]
    return steps, [number(e.metrics.get(name)) for e in evaluations]


def t_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the mean; NaN below two finite values."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return math.nan, math.nan
    centre = mean(known)
    deviation = math.sqrt(sum((value - centre) ** 2 for value in known) / (len(known) - 1))
    reach = t_quantile(level, len(known) - 1) * deviation / math.sqrt(len(known))
    return centre - reach, centre + reach


def t_quantile(level: float, freedom: int) -> float:
    """The t for which |T| < t has this probability, for T of Student's distribution."""
    low, high = 0.0, 1.0
    while _probability_within(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _probability_within(t: float, freedom: int) -> float:
    """P(|T| < t) in closed form: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if is_odd else (1.0, 0.0)
    for i in range(2 if is_odd else 1, freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * i / (i + 1)
    return (angle + math.sin(angle) * total) * 2 / math.pi if is_odd else math.sin(angle) * total


def _known(values: Sequence[float]) -> int:
    return sum(map(math.isfinite, values))


def _mismatch(run: RunFolder, evaluated: Evaluated, first: RunFolder, first_evaluated: Evaluated) -> str | None:
    """Reason why a run's final evaluation is of other data than the first one's."""
    for name in _DATA:
        ours, theirs = run.setting("data", name), first.setting("data", name)
        if ours != theirs:
            return f"is of another data set: data.{name} is {ours!r}, not {theirs!r} as in {first.path}"
    if evaluated.split != first_evaluated.split:
        return f"is evaluated on the {evaluated.split} split, not on the {first_evaluated.split} split of {first.path}"
    if run.setting("seed") == first.setting("seed"):
        prompts, others = ([str(line.get("prompt")) for line in e.prompts] for e in (evaluated, first_evaluated))
        if sorted(prompts) != sorted(others):
            return f"is evaluated on other prompts ({len(prompts)}) than {first.path} ({len(others)})"
    elif len(evaluated.prompts) != len(first_evaluated.prompts):
        counts = len(evaluated.prompts), len(first_evaluated.prompts)
        return f"is evaluated on {counts[0]} prompts, not on {counts[1]} as in {first.path}"
    return None
