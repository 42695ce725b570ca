"""Plots of the README: the bars of the summary, and a run's learning curve.

Faults they are there for: a peer that was not chosen, a case that is not the first, steps of another phase.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from benchmarks import plot


def test_the_summary_has_its_peers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "SUMMARY", {"sum": ("mean", "absent"), "unmeasured": ("mean",)})
    peers = {name: {"agrees": name != "twice", "ratio": 2.0} for name in ("mean", "other", "twice")}
    cases = [{"op": "sum", "name": name, "providers": peers} for name in ("first", "second")]
    (case,) = plot.summary_cases([{"cases": cases}])
    assert case["name"] == "first" and list(case["providers"]) == ["mean"]


def test_the_curve_has_the_steps_of_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"kind": "train", "phase": "sft", "step": 1, "rewards/mean": 0.1},
        {"kind": "eval", "phase": "rl", "step": 0, "eval/validation_exact": 0.4},
        {"kind": "train", "phase": "rl", "step": 1, "rewards/mean": 0.5},
        {"kind": "train", "phase": "rl", "step": 2, "rewards/mean": None},
        {"kind": "eval", "phase": "rl", "step": 2, "eval/validation_exact": 0.6},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    drawn: list[Any] = []
    monkeypatch.setattr(Axes, "plot", lambda self, *points, **look: drawn.append(points))
    written = plot.write_all([plot.load(file)], tmp_path)
    assert [path.name for path in written] == ["curve_light.png", "curve_dark.png"]
    assert drawn == [((1,), (0.5,)), ((0, 2), (0.4, 0.6))] * 2
