"""Adaptive thresholds in verl's checkpoints, in a file beside the state of the data loader."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpo_kernels as gk
from grpo_kernels.integrations.verl import advantages

FILE = "grpo_kernels.json"
_log = logging.getLogger(__name__)


def with_thresholds_saved(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _save_checkpoint(self: Any, *arguments: Any, **options: Any) -> Any:
        if advantages.thresholds:  # first, because verl then declares the checkpoint complete
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json.dumps(_state(), indent=1))
        return original(self, *arguments, **options)

    return _save_checkpoint


def with_thresholds_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load_checkpoint(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        trainer = self.config.trainer
        if self.global_steps > 0:
            by_path = trainer.resume_mode == "resume_path"
            folder = trainer.default_local_dir if not by_path else trainer.resume_from_path
            _load(Path(folder) / ("" if by_path else f"global_step_{self.global_steps}") / FILE, self.config.algorithm)
        return result

    return _load_checkpoint


def _state() -> list[dict[str, Any]]:
    return [
        {"config": _fields(config), "threshold": threshold.state_dict()}
        for config, threshold in advantages.thresholds.items()
    ]


def _fields(config: gk.SegmentConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}


def _load(path: Path, algorithm: Any) -> None:
    if not path.exists():
        if str(getattr(algorithm.adv_estimator, "value", algorithm.adv_estimator)) == "group_ppo":
            _log.warning("%s does not exist: adaptive thresholds of group_ppo start from their settings", path)
        return
    for entry in json.loads(path.read_text()):
        config = gk.SegmentConfig.of(entry["config"], f"the checkpoint {path}")
        threshold = gk.SegmentThreshold(config)
        threshold.load_state_dict(entry["threshold"])
        advantages.thresholds[config] = threshold
