"""Trackers that receive metrics, tables of samples and histograms in addition to the run's own files.

A tracker is created before the run, so that a missing package is reported at once, and `open` starts the run.
Histograms are of finite vectors on the CPU. Steps are counted over SFT and RL, as a tracker draws a single axis and
wandb drops values of earlier steps. NaN is not passed on, so that a chart shows a gap.
accelerate's trackers have neither histograms nor, for two of the three, tables.
"""

from __future__ import annotations

import functools
import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas
from torch import Tensor

from grpo_trainer.recipe import Recipe

BINS = 64  # of a histogram


class Tensorboard:
    def __init__(self, recipe: Recipe) -> None:
        self.folder = recipe.folder / "tensorboard"
        self.module = _import("tensorboard", "torch.utils.tensorboard")

    def open(self, step: int) -> None:
        # what a killed run has logged after its last checkpoint comes again
        self.writer = self.module.SummaryWriter(str(self.folder), purge_step=step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def histograms(self, values: Mapping[str, Tensor], step: int) -> None:
        for name, value in values.items():
            self.writer.add_histogram(name, value, step, bins=BINS)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """wandb, and trackio, which has its functions but identifies a run by its name."""

    def __init__(self, recipe: Recipe, package: str = "wandb") -> None:
        self.recipe, self.package, self.module = recipe, package, _import(package, package)

    def open(self, step: int) -> None:
        recipe, run_id = self.recipe, _run_id(self.recipe)
        run = {"project": recipe.logging.project, "config": recipe.model_dump(), "resume": "allow"}
        run |= {"name": f"{recipe.name}-{run_id}"} if self.package == "trackio" else {"name": recipe.name, "id": run_id}
        try:
            self.module.init(**run)
        except getattr(self.module, "Error", ()) as error:  # such as that nobody has logged in
            raise ValueError(f"logging.to: {self.package} refuses the run: {' '.join(str(error).split())}") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log(dict(values), step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.module.log({name: self.module.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)

    def histograms(self, values: Mapping[str, Tensor], step: int) -> None:
        kind = self.module.Histogram
        self.module.log({name: kind(value.numpy(), num_bins=BINS) for name, value in values.items()}, step=step)

    def close(self) -> None:
        self.module.finish()


TRACKERS: dict[str, Callable[[Recipe], Tensorboard | Wandb]] = {
    "tensorboard": Tensorboard,
    "wandb": Wandb,
    "trackio": functools.partial(Wandb, package="trackio"),
}


def _cell(value: Any) -> str:
    """A value in a cell of a Markdown table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def _import(kind: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"logging.to: {kind!r} needs the package {kind}, which cannot be imported ({error}): pip install {kind}"
        ) from error


def _run_id(recipe: Recipe) -> str:
    """Identifier that a resumed run shares with the original."""
    path = recipe.folder / "tracker-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
