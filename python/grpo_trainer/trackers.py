"""Where metrics go besides metrics.jsonl. Steps are counted over all phases: a tracker draws one axis, and wandb drops
what comes at a step before the last. What is NaN is not passed on: it has no value, and a chart shows a gap."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from grpo_trainer.recipe import Recipe
from grpo_trainer.settings import plain


class Tracker(Protocol):
    """Made before anything is computed, so that what is missing is said then; a run begins with open()."""

    def open(self) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    def __init__(self, recipe: Recipe) -> None:
        self.folder = recipe.folder / "tensorboard"
        self.module = _package("tensorboard", "torch.utils.tensorboard")

    def open(self) -> None:
        self.writer = self.module.SummaryWriter(str(self.folder))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.module = recipe, _package("wandb", "wandb")

    def open(self) -> None:
        recipe = self.recipe
        self.module.init(
            project=recipe.logging.project, name=recipe.name, config=plain(recipe), id=_id(recipe), resume="allow"
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


class Trackio:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.module = recipe, _package("trackio", "trackio")

    def open(self) -> None:
        recipe = self.recipe
        # a run is known by its name
        name = f"{recipe.name}-{_id(recipe)}"
        self.module.init(project=recipe.logging.project, name=name, config=plain(recipe), resume="allow")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


TRACKERS: dict[str, Callable[[Recipe], Tracker]] = {"tensorboard": Tensorboard, "wandb": Wandb, "trackio": Trackio}


def _package(kind: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"logging.to: {kind!r} needs the package {kind}, which cannot be imported ({error})"
        ) from error


def _id(recipe: Recipe) -> str:
    """The same for the run and for what goes on from it."""
    path = recipe.folder / "tracker-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text()
