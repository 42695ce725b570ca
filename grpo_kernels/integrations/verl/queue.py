"""Further columns of verl's v1 trainer, which hands advantages a fixed list of those in its queue.

While patched, an estimator finds here what a reward function returned beside the score, and a loss finds
the segments that an estimator cut, and the lengths of sessions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
from torch import Tensor

from grpo_kernels.integrations.verl import advantages, sessions

# The KVBatchMeta of the batch whose advantages are being computed.
QUEUED: ContextVar[Any] = ContextVar("grpo_kernels_verl_queued", default=None)


def with_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _compute_advantage(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        token = QUEUED.set(batch)
        try:
            return original(self, batch, *arguments, **options)
        finally:
            QUEUED.reset(token)

    return _compute_advantage


def add_columns(data: Any, estimator: str, config: Any) -> None:
    """Adds the columns that an estimator needs to its DataProto, from the queue or what a reward function returned."""
    queued = QUEUED.get()
    names = [
        name for name in _needed(estimator, config) if name not in data.batch and name not in data.non_tensor_batch
    ]
    if queued is None or not names:
        return
    import transfer_queue

    # names that the queue does not hold are left out of its answer
    held = transfer_queue.kv_batch_get(
        keys=queued.keys, partition_id=queued.partition_id, select_fields=[*names, "extra_fields"]
    )
    extras = [_reward_extras(entry) for entry in held["extra_fields"]] if "extra_fields" in held else []
    for name in names:
        if name in held:
            data.non_tensor_batch[name] = _objects(list(held[name]))
        elif any(name in extra for extra in extras):
            data.non_tensor_batch[name] = _objects([extra.get(name) for extra in extras])


def put_columns(data: Any) -> None:
    """Puts the columns of segments and of sessions, if there are any, into the queue, which hands them to the actor."""
    queued = QUEUED.get()
    names = [name for name in (advantages.SEGMENTS, *sessions.COLUMNS) if name in data.batch]
    if queued is None or not names:
        return
    import transfer_queue
    from tensordict import TensorDict
    from verl.workers.utils.padding import response_to_nested

    key = {"keys": queued.keys, "partition_id": queued.partition_id}
    columns = {name: data.batch[name] for name in names}
    if advantages.SEGMENTS in columns:
        mask = transfer_queue.kv_batch_get(**key, select_fields=["response_mask"])["response_mask"]
        columns[advantages.SEGMENTS] = response_to_nested(columns[advantages.SEGMENTS], mask)
    transfer_queue.kv_batch_put(**key, fields=TensorDict(columns, batch_size=len(queued)))


def rollouts() -> Tensor | None:
    """Number of the session of each row of the batch in the queue, or None if each has one output."""
    queued = QUEUED.get()
    return None if queued is None else sessions.rollouts(queued.keys)


def _needed(estimator: str, config: Any) -> Sequence[str]:
    if estimator == "similarity_group_grpo":
        return (advantages.LABELS, advantages.EMBEDDINGS, advantages.NAMES)
    if estimator == "fused_gdpo":
        return tuple((None if config is None else config.get("gdpo_reward_keys", None)) or ())
    return ()


def _reward_extras(entry: Any) -> dict[str, Any]:
    extra = getattr(entry, "data", entry)
    return extra.get("reward_extra_info") or {} if isinstance(extra, dict) else {}


def _objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = [getattr(value, "data", value) if not hasattr(value, "tolist") else value.tolist() for value in values]
    return column
