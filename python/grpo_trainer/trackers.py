"""Trackers that receive metrics in addition to metrics.jsonl.

Steps are counted over all phases, as a tracker draws a single axis and wandb drops values of earlier steps. NaN is
not passed on, so that a chart shows a gap.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from grpo_trainer.recipe import Recipe
from grpo_trainer.settings import plain


class Tracker(Protocol):
    """Created before the run, so that a missing package is reported at once; `open` starts the run."""

    def open(self) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    def __init__(self, recipe: Recipe) -> None:
        self.folder = recipe.folder / "tensorboard"
        self.module = _import("tensorboard", "torch.utils.tensorboard")

    def open(self) -> None:
        self.writer = self.module.SummaryWriter(str(self.folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    name = "wandb"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.module = recipe, _import(self.name, self.name)

    def open(self) -> None:
        recipe = self.recipe
        self.module.init(
            project=recipe.logging.project, config=plain(recipe), resume="allow", **self.identity(_run_id(recipe))
        )

    def identity(self, run_id: str) -> dict[str, str]:
        return {"name": self.recipe.name, "id": run_id}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


class Trackio(Wandb):
    """trackio has the functions of wandb, but identifies a run by its name."""

    name = "trackio"

    def identity(self, run_id: str) -> dict[str, str]:
        return {"name": f"{self.recipe.name}-{run_id}"}


TRACKERS: dict[str, Callable[[Recipe], Tracker]] = {"tensorboard": Tensorboard, "wandb": Wandb, "trackio": Trackio}


def _import(kind: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"logging.to: {kind!r} needs the package {kind}, which cannot be imported ({error})"
        ) from error


def _run_id(recipe: Recipe) -> str:
    """Identifier that a resumed run shares with the original."""
    path = recipe.folder / "tracker-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
