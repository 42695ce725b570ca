"""Runs of recipes with observations, for the cases of `key_cases`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from grpo_trainer import rollout
from grpo_trainer.phases import base
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Recipe
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from grpo_kernels import backends

Seen = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    value: Any  # {saved} and {data} are replaced by a folder with a model and a JSONL file
    seen: Seen  # observation of a Run or of a Recipe
    given: tuple[str, ...] = ()  # overrides for both values
    runs: bool = True


@dataclasses.dataclass
class Run:
    """A recipe that was run, and observations of it."""

    recipe: Recipe
    error: str = ""
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    printed: str = ""

    @classmethod
    def of(cls, recipe: Recipe) -> Run:
        run, printed = cls(recipe), io.StringIO()
        with contextlib.ExitStack() as stack:
            for where, name in (
                (Policy, "forward"),
                (Policy, "_run_after_shared_prompts"),
                (rollout, "_sample"),
                (base, "_weights_and_gradients"),
            ):
                stack.enter_context(mock.patch.object(where, name, run._counted(getattr(where, name), name)))
            select = backends.select
            stack.enter_context(mock.patch.object(backends, "select", lambda *a: run._chosen(select(*a))))
            stack.enter_context(mock.patch("os.fsync"))
            stack.enter_context(contextlib.redirect_stderr(printed))
            try:
                train(recipe)
            except Exception as error:
                run.error = f"{type(error).__name__}: {error}"
        run.printed = printed.getvalue()
        return run

    def _counted(self, function: Any, name: str) -> Any:
        def counted(*arguments: Any, **more: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments, **more)

        return counted

    def _chosen(self, backend: str) -> str:
        self.calls[f"backend {backend}"] += 1
        return backend

    def lines(self, kind: str | None = None, file: str = "metrics") -> list[dict[str, Any]]:
        path = self.recipe.folder / f"{file}.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in entries if kind is None or line.get("phase") == kind]

    def weights(self) -> dict[str, Any]:
        """Digests of the weights of the last checkpoint."""
        from safetensors.torch import load_file

        assert not self.error, self.error
        folder = sorted((self.recipe.folder / "checkpoints").iterdir())[-1] / "model"
        return {
            name: value.view(torch.uint8).sum(dtype=torch.int64).item()
            for file in sorted(folder.glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
