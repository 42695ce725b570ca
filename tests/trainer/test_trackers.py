"""Trackers: every metric arrives with its step, missing packages are reported, resumed runs continue."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer.log import Log
from grpo_trainer.trackers import Tensorboard
from grpo_trainer.train import Trainer, train

from tests.trainer import small
from tests.trainer.test_train import lines, stopped_after

SHORT = ("phases.0.sft.steps=2", "phases.1.rl.steps=2", "phases.1.rl.rollout.prompts=2", "checkpoints.every=1")


class Fake(types.ModuleType):
    """Stand-in for the parts of wandb and trackio that are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **kwargs: Any) -> None:
        self.begun.append(kwargs)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    modules = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, fake in modules.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return modules


def expected(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Metrics from metrics.jsonl, with steps counted over both phases of two steps each."""
    logged = []
    for line in lines(folder):
        values = {k: v for k, v in line.items() if k not in ("phase", "number", "step", "time") and not math.isnan(v)}
        logged.append((2 * line["number"] + line["step"], values))
    return logged


def test_every_metric_arrives_with_its_step(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    train(small.recipe(tmp_path, *SHORT, "logging.to=[wandb, trackio]", "logging.project=mine"))
    for fake in fakes.values():
        assert fake.logged == expected(tmp_path) and fake.finished == 1
        steps = [step for step, _ in fake.logged]
        assert steps == sorted(steps) and steps[-1] == 4
        (begun,) = fake.begun
        assert begun["project"] == "mine" and begun["name"].startswith("small") and begun["config"]["seed"] == 0


def test_undefined_values_are_left_out(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    log = Log(small.recipe(tmp_path, "logging.to=[wandb]"))
    log.metrics("rl", 1, 3, {"a": math.nan, "b": 0.0, "c": math.inf})
    assert fakes["wandb"].logged == [(7, {"b": 0.0, "c": math.inf})]
    assert math.isnan(lines(tmp_path)[0]["a"])


def test_a_resumed_run_continues_in_the_tracker(
    tmp_path: Path, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small.recipe(tmp_path, *SHORT, "logging.to=[wandb, trackio]")
    stopped_after(monkeypatch, recipe, 1, 1)
    with pytest.raises(FileExistsError):
        train(recipe)  # refused before a tracker is opened
    assert [fake.finished for fake in fakes.values()] == [1, 1]
    train(recipe, resume=True)
    first, second = fakes["wandb"].begun
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    first, second = fakes["trackio"].begun
    assert first["name"] == second["name"]
    train(small.recipe(tmp_path / "other", *SHORT, "logging.to=[wandb]"))
    assert fakes["wandb"].begun[-1]["id"] != fakes["wandb"].begun[0]["id"]


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_missing_packages_are_reported_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ValueError, match=rf"^logging.to: '{name}' needs the package {name}, which cannot be imported"):
        Trainer(small.recipe(tmp_path, f"logging.to=[{name}]"))
    assert not list(tmp_path.iterdir())


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(small.recipe(tmp_path, "logging.to=[tensorboard]"))
    log.open()
    log.metrics("sft", 0, 4, {"train/loss": 2.0})
    log.metrics("rl", 1, 1, {"train/loss": 0.5, "train/kl_mean": math.nan})
    (tracker,) = log.trackers
    log.close()
    assert isinstance(tracker, Tensorboard) and tracker.writer.file_writer is None  # pending values are flushed
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.0), (5, 0.5)]
