"""verl's correction of the mismatch between rollout and training, once per batch, with our kernel."""

from __future__ import annotations

from typing import Any

import torch
from verl.protocol import DataProto

import grpo_kernels as gk

# The fields that verl reads here, and what it takes for those that are missing.
_FIELDS: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
}


def rollout_correction(batch: DataProto, rollout_corr_config: Any) -> tuple[DataProto, dict[str, float]]:
    """Adds rollout_is_weights to the batch if the config asks for them, and replaces its response_mask.

    As verl's compute_rollout_correction_and_add_to_batch, but weights are 0 where a rejection dropped the token.
    """
    fields = {name: rollout_corr_config.get(name, default) for name, default in _FIELDS.items()}
    config = gk.CorrectionConfig.verl(**fields)
    mask = batch.batch["response_mask"]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    result = gk.sampling_correction(
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        mask=mask,
        config=config,
        group=torch.distributed.group.WORLD if distributed and config.batch_normalize else None,
    )
    metrics = result.metrics.to_dict("verl")
    if not metrics:
        raise ValueError("compute_rollout_correction_and_add_to_batch: response_mask must hold a token, got none")
    batch.batch["response_mask"] = result.mask.to(mask.dtype)
    if config.weights != "none":
        batch = batch.union(DataProto.from_dict(tensors={"rollout_is_weights": result.weights}))
    return batch, metrics
