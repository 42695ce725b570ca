"""The table of all cases and sweeps: one file an op, `benchmarks/cases/<op>.py`, with CASES and SWEEPS."""

from __future__ import annotations

import importlib

from benchmarks.case import Case, Sweep

# In the order of their share of a training step.
OPS = (
    "linear_policy_loss",
    "linear_logprobs",
    "token_logprobs",
    "policy_loss",
    "linear_distillation_loss",
    "token_advantages",
    "group_advantages",
    "endpoint_segments",
    "sampling_correction",
    "similarity_groups",
    "sampled_support",
)


def cases(op: str = "", name: str = "", device: str = "") -> list[Case]:
    """Cases of an op whose names contain `name`, for a device; an empty argument matches all."""
    tables = [importlib.import_module(f"{__name__}.{op}").CASES for op in ([op] if op else OPS)]
    return [case for table in tables for case in table if name in case.name and (not device or device in case.devices)]


def sweeps(op: str = "") -> list[Sweep]:
    return [sweep for op in ([op] if op else OPS) for sweep in importlib.import_module(f"{__name__}.{op}").SWEEPS]
