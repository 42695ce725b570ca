"""Trackers: metrics, tables and histograms arrive with their steps, missing packages are reported, runs continue.

Faults they are there for: a step counted twice over SFT and RL; a resumed run that begins a second one; NaN drawn as 0.
"""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")  # imported before the stand-ins for packages that it looks for

from grpo_trainer.log import Log
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.small import lines, steps, stop_before

SHORT = ("sft.steps=2", "rl.steps=2", "rl.rollout.prompts=2", "checkpoints.every=1")


class Fake(types.ModuleType):
    """Stand-in for the parts of wandb and trackio that are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.media: list[tuple[int, dict[str, Any]]] = []  # tables and histograms
        self.finished = 0
        self.Table = lambda **kwargs: kwargs
        self.Histogram = histogram

    def init(self, **kwargs: Any) -> None:
        self.begun.append(kwargs)

    def log(self, values: dict[str, Any], step: int) -> None:
        is_media = any(isinstance(value, dict) for value in values.values())
        (self.media if is_media else self.logged).append((step, values))

    def seen(self, name: str) -> list[tuple[int, Any]]:
        return [(step, values[name]) for step, values in self.media if name in values]

    def finish(self) -> None:
        self.finished += 1


def histogram(values: Any, num_bins: int) -> dict[str, Any]:
    counts, edges = np.histogram(values, num_bins)
    return {"counts": counts, "edges": edges}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    modules = {name: Fake(name) for name in ("wandb", "trackio")}
    for name, fake in modules.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return modules


def test_everything_arrives_with_its_step(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    to = ("logging.to=[wandb, trackio]", "logging.project=mine", "logging.samples=3", "logging.watch=2")
    train(small.recipe(tmp_path, *SHORT, *to))
    header = ("kind", "phase", "step", "split", "time")
    expected = [
        (
            line["step"] + 2 * (line["phase"] == "rl"),
            {k: v for k, v in line.items() if k not in header and v is not None},
        )
        for line in lines(tmp_path)
    ]
    samples = lines(tmp_path, "samples")
    for name, fake in fakes.items():
        assert fake.logged == expected and fake.finished == 1
        (begun,) = fake.begun
        assert begun["project"] == "mine" and begun["name"].startswith("small") and begun["config"]["seed"] == 0
        tables = fake.seen("samples")
        assert [step for step, _ in tables] == [3, 4]
        table = tables[1][1]
        columns = list(table["dataframe"].columns) if name == "trackio" else table["columns"]
        rows = table["dataframe"].values.tolist() if name == "trackio" else table["data"]
        assert columns == ["prompt", "response", "rewards", "advantage"] and len(rows) == 3
        assert [row[1] for row in rows] == [sample["response"] for sample in samples[-3:]]
        assert [json.loads(row[2]) for row in rows] == [sample["rewards"] for sample in samples[-3:]]
        first, histogram = steps(tmp_path)[0], fake.seen("histograms/rewards")[0][1]
        assert [step for step, _ in fake.seen("histograms/rewards")] == [3, 4] and sum(histogram["counts"]) == 8
        assert histogram["edges"][0] == pytest.approx(first["rewards/min"])
        assert histogram["edges"][-1] == pytest.approx(first["rewards/max"])
        watched = {key: step for step, values in fake.media for key in values if key.startswith("gradients/")}
        assert "gradients/lm.model.layers.0.mlp.up_proj.weight" in watched and set(watched.values()) == {4}
        assert all(fake.seen(key.replace("gradients", "weights")) for key in watched)


def test_watching_sees_the_gradient_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: dict[str, Fake]
) -> None:
    """Plain gradient descent with a rate of 1 moves the weights by the gradients that are watched."""
    seen: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(Log, "histograms", lambda self, phase, step, values: seen.append(dict(values)))

    def descend(self: torch.optim.AdamW, closure: Any = None) -> None:
        with torch.no_grad():
            for weight in (weight for group in self.param_groups for weight in group["params"]):
                weight.sub_(weight.grad)

    monkeypatch.setattr(torch.optim.AdamW, "step", descend)
    train(small.recipe(tmp_path, "sft.steps=3", "rl=null", "logging.watch=1", "logging.to=[wandb]"))
    first, second = seen[:2]
    names = [name.removeprefix("weights/") for name in first if name.startswith("weights/")]
    for name in names:
        moved = first[f"weights/{name}"] - first[f"gradients/{name}"]
        assert torch.equal(moved, second[f"weights/{name}"]), name
    assert names and any(bool(first[f"gradients/{name}"].any()) for name in names)


def test_undefined_values_are_left_out(tmp_path: Path, fakes: dict[str, Fake]) -> None:
    log = Log(small.recipe(tmp_path, "logging.to=[wandb]"))
    log.metrics("rl", 3, {"a": math.nan, "b": 0.0, "c": math.inf})
    assert fakes["wandb"].logged == [(7, {"b": 0.0, "c": math.inf})]
    assert [lines(tmp_path)[0][name] for name in "abc"] == [None, 0.0, None]
    log.histograms("rl", 3, {"x": torch.tensor([[0.0, math.nan], [1.0, math.inf]]), "y": torch.tensor([math.nan])})
    ((step, values),) = fakes["wandb"].media
    assert step == 7 and [*values] == ["x"] and sum(values["x"]["counts"]) == 2


def test_a_resumed_run_continues_in_the_tracker(
    tmp_path: Path, fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small.recipe(tmp_path, *SHORT, "logging.to=[wandb, trackio]")
    stop_before(monkeypatch, recipe, "rl", 2)
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
    with pytest.raises(ValueError, match=rf"^logging.to: '{name}' needs the package {name}, .*: pip install {name}$"):
        set_up(small.recipe(tmp_path, f"logging.to=[{name}]"))
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_refuses_the_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def init(**_: Any) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    refused = r"^logging\.to: wandb refuses the run: No API key configured\. Use `wandb login` to log in\.$"
    with pytest.raises(ValueError, match=refused):
        train(small.recipe(tmp_path, *SHORT, "logging.to=[wandb]"))


@pytest.mark.full
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    summary, finish = {}, wandb.finish

    def finishing() -> None:
        names = wandb.run.summary.keys()
        summary.update({name: wandb.run.summary.get(name) for name in names})
        finish()

    monkeypatch.setattr(wandb, "finish", finishing)
    train(small.recipe(tmp_path / "run", *SHORT, "logging.to=[wandb]", "logging.watch=1"))
    assert sum(summary["histograms/rewards"]["values"]) == 8
    assert summary["rewards/mean"] in [step["rewards/mean"] for step in steps(tmp_path / "run")]
    assert summary["gradients/lm.model.layers.0.mlp.up_proj.weight"]["_type"] == "histogram"
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
    log.histograms("rl", 1, {"histograms/rewards": torch.tensor([0.0, 1.0, 1.0]), "constant": torch.full((3,), 2.0)})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.0), (5, 0.5)]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == "| 1 \\| 2 | a<br>b | [0.5] | 0.25 |"
    (histogram,) = events.Histograms("histograms/rewards")
    assert histogram.step == 5 and histogram.histogram_value.num == 3 and histogram.histogram_value.sum == 2
    assert events.Histograms("constant")[0].histogram_value.min == 2
