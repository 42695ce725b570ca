"""Tables of tools/experiments.py, and which runs are compared.

Faults they are there for: a gain in bold that may be 0 or has no interval; a seed without a value that counts; a mean
over seeds that were measured in different ways, or a difference of other prompts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
from grpo_trainer.report.comparison import select

from tests.trainer.run_folders import write
from tools import experiments


def test_gains_of_seeds_are_in_bold_where_their_intervals_exclude_zero() -> None:
    seeds = [(0.1, 0.4, 0.3, True), (0.2, 0.4, 0.2, True), (0.3, 0.4, 0.1, False)]
    rows = [
        {"": "own", "measure": "exact"} | dict(zip(("before", "after", "gain", "clear"), seed, strict=True))
        for seed in seeds
    ]
    (row,) = experiments.summary_of_gains(pd.DataFrame(rows))
    assert row["before"] == "0.200 +- 0.248" and row["after"] == "0.400 +- 0.000"  # 4.3027 * 0.1 / sqrt(3)
    assert row["each seed"] == "**+0.300**, **+0.200**, +0.100"
    (row,) = experiments.summary_of_gains(pd.DataFrame([rows[0], rows[1] | {"gain": math.nan}]))  # counts nowhere
    assert row["gain"] == "+0.300"
    assert [experiments.is_clear(ends) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (0.0, 0.1))] == [1, 1, 0, 0]
    assert not experiments.is_clear((math.nan, math.nan))


def changed(folder: Path, old: str, new: str) -> Path:
    path = folder / "evaluations.jsonl"
    path.write_text(path.read_text().replace(old, new))
    return folder


def test_runs_of_a_recipe_are_measured_alike_on_the_prompts_of_their_seed(tmp_path: Path) -> None:
    first, second = (write(tmp_path / f"a-{seed}", seed=seed) for seed in (0, 1))
    assert len(select([first, second])[0]) == 1
    entries = [json.loads(line) for line in (first / "evaluations.jsonl").read_text().splitlines()]
    with_embedder = ["\n".join(json.dumps(line | {"embedder": name}) for line in entries) for name in ("x", "y")]
    for folder, text in zip((first, second), with_embedder, strict=True):
        (folder / "evaluations.jsonl").write_text(text + "\n")
    rows, left_out = select([first, second])
    assert len(rows[0].runs) == 1 and "embedder is 'y', not 'x' as in 1 made up" in left_out[second]
    one, two = (write(tmp_path / f"b-{seed}", name="other", seed=seed) for seed in (0, 1))
    prompt = entries[-1]["prompts"][0]["prompt"]
    changed(two, json.dumps(prompt), json.dumps("another prompt"))
    first, second = (write(tmp_path / f"c-{seed}", name="third", seed=seed) for seed in (0, 1))
    rows, left_out = select([first, second, one, two])
    assert [len(row.runs) for row in rows] == [2, 1] and "it was evaluated on other data: prompts of" in left_out[two]
