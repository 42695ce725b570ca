"""The adapters that come with the package, how one of yours is loaded, and what several of them need."""

from __future__ import annotations

import difflib
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_conformance.batch import Batch, NotOffered
from grpo_conformance.run import LACKS, METHODS

BUILT_IN = {  # by name: the module beside this file, and the class in it
    "grpo_kernels": ("grpo_kernels", "Ops"),
    "grpo_trainer": ("grpo_trainer", "BundledTrainer"),
    "trl": ("trl", "Trl"),
    "fused_trl": ("trl", "FusedTrl"),
    "verl": ("verl", "Verl"),
    "fused_verl": ("verl", "FusedVerl"),
}
ESTIMATORS = {  # of grpo_kernels
    "mean": "dr_grpo",
    "mean-std": "grpo",
    "leave-one-out": "rloo",
    "leave-one-out-std": "nemo-grpo",
    None: "grpo",
}


class AdapterError(Exception):
    """An adapter that cannot be loaded, in one sentence."""


def load(name: str) -> Any:
    """Loads an adapter by its name here, or from a Python file that defines `adapter`."""
    is_file = name.endswith(".py")
    if name not in BUILT_IN and not (is_file and Path(name).is_file()):
        raise AdapterError(f"adapter must be one of {', '.join(BUILT_IN)} or the path of a .py file, got {name!r}")
    try:
        if not is_file:
            module, kind = BUILT_IN[name]
            return getattr(importlib.import_module(f"grpo_conformance.adapters.{module}"), kind)()
        sys.path.insert(0, str(Path(name).parent.resolve()))  # for modules beside it, as Python does for a script
        adapter = runpy.run_path(name).get("adapter")
    except Exception as error:
        raise AdapterError(f"adapter {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(adapter, "name", None), str):
        raise AdapterError(f"adapter {name!r} must define `adapter`, an object with a name, got {adapter!r}")
    for method, value in vars(type(adapter)).items():
        if inspect.isfunction(value) and not method.startswith("_") and method not in METHODS:
            (near,) = difflib.get_close_matches(method, METHODS, n=1, cutoff=0)
            rule = f"{', '.join(METHODS)}, or others that start with an underscore"
            raise AdapterError(f"adapter {name!r} may have the methods {rule}, got {method!r} (did you mean {near!r}?)")
    if not any(callable(getattr(adapter, method, None)) for method in METHODS):
        raise AdapterError(f"adapter {name!r} must have one of the methods {', '.join(METHODS)}, got none")
    unknown = sorted(set(getattr(adapter, "lacks", ())) - set(LACKS))
    if unknown:
        raise AdapterError(f"adapter {name!r} may lack {', '.join(LACKS)}, got {', '.join(map(repr, unknown))}")
    return adapter


def in_groups(batch: Batch) -> tuple[Tensor, int]:
    """Order of the rows by group and the size of the groups, for trainers whose groups are given by position."""
    return batch.groups.argsort(stable=True), int((batch.groups == batch.groups[0]).sum())


def where(function: Any) -> str:
    """File and line of an installed function, from its package on."""
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename.rpartition('site-packages/')[2]}:{code.co_firstlineno}"


def loss_fields(batch: Batch) -> dict[str, Any]:
    """Fields of a LossConfig, without those that the batch leaves to the trainer's default."""
    fields: dict[str, Any] = {"clip_low": batch.clip, "clip_high": batch.clip, "entropy_coef": batch.entropy_coef}
    fields |= {"kl": batch.kl or "k3", "kl_coef": batch.kl_coef} if batch.kl_coef else {"kl": "none"}
    return fields | ({"aggregation": batch.aggregation} if batch.aggregation else {})


def refuse(batch: Batch, *names: str) -> None:
    """Raises NotOffered if the batch asks for one of these terms of the loss."""
    for name in names:
        if getattr(batch, name):
            raise NotOffered(f"no {name}")


def loss_tokens(batch: Batch) -> dict[str, Any]:
    """Values of tokens that policy_loss takes beside the log-probs."""
    tokens = {"old_logprobs": batch.old_logprobs, "entropy": batch.entropy}
    return tokens | ({"ref_logprobs": batch.ref_logprobs} if batch.kl_coef else {})
