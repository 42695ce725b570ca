"""verl's correction of the mismatch between rollout and training, once per batch, with our kernel."""

from __future__ import annotations

from typing import Any

import torch
from verl.protocol import DataProto

import grpo_kernels as gk
from grpo_kernels.integrations.verl import queue
from grpo_kernels.integrations.verl.advantages import is_pad

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

    As verl's compute_rollout_correction_and_add_to_batch, but weights are 0 where a rejection dropped the token, no
    metric includes the rows that verl's v1 trainer appends to make a batch divisible, and statistics of sequences are
    those of sessions where the batch is in its queue.
    """
    fields = {name: rollout_corr_config.get(name, default) for name, default in _FIELDS.items()}
    config = gk.CorrectionConfig.verl(**fields)
    mask, rows = batch.batch["response_mask"], _rows(batch)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    sessions = queue.rollouts()
    result = gk.sampling_correction(
        batch.batch["old_log_probs"][rows],
        batch.batch["rollout_log_probs"][rows],
        mask=mask[rows],
        rollouts=None if sessions is None else sessions.to(mask.device)[rows],
        config=config,
        process_group=torch.distributed.group.WORLD if distributed and config.batch_normalize else None,
    )
    metrics = result.metrics.verl()
    if not metrics:
        raise ValueError("compute_rollout_correction_and_add_to_batch: response_mask must hold a token, got none")
    kept = torch.zeros_like(mask)
    kept[rows] = result.mask.to(mask.dtype)
    batch.batch["response_mask"] = kept
    if config.weights != "none":
        weights = result.weights.new_zeros(mask.shape)
        weights[rows] = torch.where(result.mask, result.weights, 0)
        batch = batch.union(DataProto.from_dict(tensors={"rollout_is_weights": weights}))
    return batch, metrics


def _rows(batch: DataProto) -> slice | torch.Tensor:
    """Rows that are not the trainer's padding."""
    uids = batch.non_tensor_batch.get("uid")
    if uids is None:
        return slice(None)
    return ~is_pad(uids, batch.batch["response_mask"].sum(-1))
