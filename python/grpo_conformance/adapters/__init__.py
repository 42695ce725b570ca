"""The adapters that come with the package, and how one of yours is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_conformance.batch import Batch, NotOffered
from grpo_conformance.run import METHODS

# by name: the module here, the class in it, and the packages that it needs
BUILT_IN = {
    "grpo_kernels": ("ops", "Ops", ("grpo_kernels",)),
    "grpo_trainer": ("bundled", "BundledTrainer", ("grpo_trainer", "transformers", "accelerate")),
    "trl": ("trl_trainer", "Trl", ("trl", "transformers", "datasets")),
    "fused_trl": ("trl_trainer", "FusedTrl", ("grpo_kernels", "trl", "transformers", "datasets")),
    "verl": ("verl_trainer", "Verl", ("verl", "tensordict")),
    "fused_verl": ("verl_trainer", "FusedVerl", ("grpo_kernels", "verl", "tensordict")),
}


class AdapterError(Exception):
    """An adapter that cannot be loaded, in one sentence."""


def missing(name: str) -> list[str]:
    """Packages that an adapter of this name needs and that are not installed."""
    return [package for package in BUILT_IN[name][2] if importlib.util.find_spec(package) is None]


def load(name: str) -> Any:
    """Loads an adapter by its name here, or from a Python file that defines `adapter`."""
    if name.endswith(".py"):
        return _of_file(Path(name))
    if name not in BUILT_IN:
        raise AdapterError(f"adapter must be one of {', '.join(BUILT_IN)} or the path of a .py file, got {name!r}")
    absent = missing(name)
    if absent:
        raise AdapterError(f"adapter {name!r} needs packages that are not installed: {', '.join(absent)}")
    module, kind, _ = BUILT_IN[name]
    return getattr(importlib.import_module(f"grpo_conformance.adapters.{module}"), kind)()


def _of_file(path: Path) -> Any:
    if not path.is_file():
        raise AdapterError(f"adapter must be the path of a file, got {str(path)!r}, which is none")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # for modules beside it, as Python does for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise AdapterError(f"adapter {str(path)!r} cannot be imported: {type(error).__name__}: {error}") from error
    adapter = getattr(module, "adapter", None)
    if adapter is None or not isinstance(getattr(adapter, "name", None), str):
        raise AdapterError(f"adapter {str(path)!r} must define `adapter`, an object with a name, got {adapter!r}")
    if not any(callable(getattr(adapter, method, None)) for method in METHODS):
        raise AdapterError(f"adapter {adapter.name!r} must have one of the methods {', '.join(METHODS)}, got none")
    return adapter


def in_groups(batch: Batch) -> tuple[Tensor, int]:
    """Order of the rows by group and the size of the groups, for trainers whose groups are given by position."""
    one_row_a_rollout(batch)
    sizes = set(Counter(batch.groups.tolist()).values())
    if len(sizes) > 1:
        raise NotOffered("groups have one size")
    return batch.groups.argsort(stable=True), sizes.pop()


def one_row_a_rollout(batch: Batch) -> None:
    ids = batch.total.rollouts.tolist()
    if len(set(ids)) < len(ids):
        raise NotOffered("a rollout is one row")


def whole_rows(batch: Batch) -> None:
    if batch.packed or batch.columns is not None:
        raise NotOffered("the loss gets whole, padded rows")
