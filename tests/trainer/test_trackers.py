"""Trackers: metrics, tables and histograms arrive with their steps, and resumed runs continue.

Faults they are there for: a step counted twice over SFT and RL; a resumed run that begins a second one; NaN drawn as 0.
"""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo_trainer.log import Log
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.small import lines, steps, stop_before

SHORT = ("sft.steps=2", "rl.steps=2", "rl.rollout.prompts=2", "checkpoints.every=1")


class Fake(types.ModuleType):
    """Stand-in for the parts of wandb and trackio that are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)  # which other packages look for
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.Table = lambda dataframe: {"columns": list(dataframe.columns), "rows": dataframe.values.tolist()}
        self.Histogram = lambda values, num_bins: np.histogram(values, num_bins)

    def init(self, **kwargs: Any) -> None:
        self.begun.append(kwargs)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def seen(self, name: str) -> list[tuple[int, Any]]:
        return [(step, values[name]) for step, values in self.logged if name in values]

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    modules = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, fake in modules.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return modules


def test_everything_arrives_with_its_step_and_a_resumed_run_continues(
    tmp_path: Path, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("logging.to=[wandb, trackio]", "logging.project=mine", "logging.samples=3")
    recipe = small.recipe(tmp_path, *SHORT, *to)
    stop_before(monkeypatch, recipe, "rl", 2)
    with pytest.raises(FileExistsError):
        train(recipe)  # refused before a tracker is opened
    train(recipe, resume=True)
    header = ("kind", "phase", "step", "split", "time")
    expected = [
        (e["step"] + 2 * (e["phase"] == "rl"), {k: v for k, v in e.items() if k not in header and v is not None})
        for e in lines(tmp_path)
    ]
    samples, first = lines(tmp_path, "samples"), steps(tmp_path)[0]
    for fake in fakes.values():
        assert all(entry in fake.logged for entry in expected) and fake.finished == 2
        begun = fake.begun[0]
        assert begun["project"] == "mine" and begun["name"].startswith("small") and begun["config"]["seed"] == 0
        assert len(fake.begun) == 2 and begun == fake.begun[1] and begun["resume"] == "allow"
        tables = fake.seen("samples")
        assert [step for step, _ in tables] == [3, 4]
        assert tables[1][1]["columns"] == ["prompt", "response", "rewards", "advantage"]
        rows = tables[1][1]["rows"]
        assert [row[1] for row in rows] == [sample["response"] for sample in samples[-3:]]
        assert [json.loads(row[2]) for row in rows] == [sample["rewards"] for sample in samples[-3:]]
        histograms = fake.seen("histograms/rewards")
        assert [step for step, _ in histograms] == [3, 4] and sum(histograms[0][1][0]) == 8
        ends = histograms[0][1][1][[0, -1]].tolist()
        assert ends == pytest.approx([first["rewards/min"], first["rewards/max"]])
    Log(small.recipe(tmp_path / "other", "logging.to=[wandb, trackio]")).open()
    for name, key in (("wandb", "id"), ("trackio", "name")):
        assert fakes[name].begun[-1][key] != fakes[name].begun[0][key]


def test_the_progress_line_of_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log = Log(small.recipe(tmp_path, "logging.progress=true"))
    log.progress("rl", 1, 100, {"rewards/mean": 0.4567, "train/kl_mean": 0.0012, "speed/tokens_per_second": 12345.6})
    log.line("a line above")
    log.close()
    printed = capsys.readouterr().err
    assert "1/100" in printed and "reward 0.457, KL 0.001, tokens/s 12,346" in printed and "\ra line above\n" in printed


def test_undefined_values_are_left_out(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    log = Log(small.recipe(tmp_path, "logging.to=[wandb]"))
    log.metrics("rl", 3, {"a": math.nan, "b": 0.0, "c": math.inf})
    assert [lines(tmp_path)[0][name] for name in "abc"] == [None, 0.0, None]
    log.histograms("rl", 3, {"x": torch.tensor([[0.0, math.nan], [1.0, math.inf]]), "y": torch.tensor([math.nan])})
    metrics, (step, values) = fakes["wandb"].logged
    assert metrics == (7, {"b": 0.0, "c": math.inf})
    assert step == 7 and [*values] == ["x"] and sum(values["x"][0]) == 2


def test_a_tracker_that_refuses_the_run_is_named(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    class Error(Exception):
        pass

    def init(**_: Any) -> None:
        raise Error("No API key configured.\nUse `wandb login` to log in.")

    fakes["wandb"].Error, fakes["wandb"].init = Error, init  # type: ignore[attr-defined,method-assign]
    refused = r"^logging\.to: wandb refuses the run: No API key configured\. Use `wandb login` to log in\.$"
    with pytest.raises(ValueError, match=refused):
        Log(small.recipe(tmp_path, "logging.to=[wandb]")).open()


@pytest.mark.full
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    train(small.recipe(tmp_path / "run", *SHORT, "logging.to=[wandb]"))
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    samples = lines(tmp_path / "run", "samples")
    assert sorted(row[1] for table in tables for row in table["data"]) == sorted(line["response"] for line in samples)


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(small.recipe(tmp_path, "logging.to=[tensorboard]"))
    log.open()
    log.metrics("sft", 4, {"train/loss": 2.0})
    log.metrics("rl", 1, {"train/loss": 0.5, "train/kl_mean": math.nan})
    log.samples("rl", 1, [{"prompt": "1 | 2", "response": "a\nb", "rewards": [0.5], "advantage": 0.25}])
    log.histograms("rl", 1, {"histograms/rewards": torch.tensor([0.0, 1.0, 1.0])})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.0), (5, 0.5)]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == "| 1 \\| 2 | a<br>b | [0.5] | 0.25 |"
    (histogram,) = events.Histograms("histograms/rewards")
    assert histogram.step == 5 and histogram.histogram_value.num == 3 and histogram.histogram_value.sum == 2
