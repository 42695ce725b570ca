"""Small versions of verl's data: the batch of a trainer, the micro-batch of an actor, the output of a model."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.protocol import DataProto
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.v1 import utils as v1
    from verl.utils import tensordict_utils

LENGTHS = (10, 7, 1, 9, 4, 8)
WIDTH = 6  # of responses in `data_of`
PAD = f"pad{0x5EED:032x}"  # a uid, as verl's v1 trainer gives it to the rows that make a batch divisible
_PROMPTS = (1, 3, 2, 1, 3, 2)


def trainer_batch(tokens: Tensor, mask: Tensor, uids: Any, **columns: Any) -> DataProto:
    """A trainer's batch; tensors in `columns` become verl's tensors, and NumPy arrays its non-tensors."""
    tensors = {"token_level_rewards": tokens, "response_mask": mask, "attention_mask": _attention(mask)}
    tensors |= {"prompts": torch.ones(len(mask), 2, dtype=torch.long)}
    tensors |= {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in columns.items() if isinstance(value, np.ndarray)}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids} | others)


def _attention(mask: Tensor) -> Tensor:
    return torch.cat([torch.ones(len(mask), 2, dtype=mask.dtype), mask], 1)


def data_of(rewards: Any, lengths: Any, uids: Any, **columns: Any) -> DataProto:
    """A trainer's batch with the reward at the last token of each response, whether or not it is in the loss."""
    tokens = torch.zeros(len(uids), WIDTH)
    tokens[:, -1] = torch.as_tensor(rewards, dtype=torch.float32)
    mask = (torch.arange(WIDTH) < torch.as_tensor(lengths)[:, None]).long()
    return trainer_batch(tokens, mask, np.array(uids, dtype=object), **columns)


def computed(name: Any, data: DataProto, config: Any = None, keys: Any = None, **options: Any) -> Any:
    """The tensors of the batch after verl's trainer has computed advantages; with keys, its v1 trainer."""
    config = {} if config is None else config
    if keys is not None:
        return v1.compute_advantage_for_multi_trajectories(data, keys, name, config=config, **options).batch
    return ray_trainer.compute_advantage(data, name, config=config, **options).batch


def model_output(values: Tensor, nested: bool) -> Tensor:
    """Values [B, T] in the model's layout: each position holds the next token's value, or NaN outside of responses."""
    nan = values.new_full((1,), float("nan"))
    rows = [
        torch.cat([nan.expand(before - 1), row[:length], nan])
        for row, length, before in zip(values, LENGTHS, _PROMPTS, strict=True)
    ]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged) if nested else torch.cat(rows)


def micro_batch(columns: dict[str, Tensor], nested: bool, **info: Any) -> Any:
    """An actor's micro-batch; columns [B, T] by verl's names become nested, as in v1, or stay padded."""
    width = max(LENGTHS)
    responses = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    prompts = torch.arange(3).flip(0) < torch.tensor(_PROMPTS)[:, None]
    tensors: dict[str, Any] = {"prompts": prompts.long(), "responses": responses.long(), **columns}
    if nested:
        tensors["prompts"] = _nested(tensors["prompts"], _PROMPTS)
        tensors |= {name: _nested(tensors[name], LENGTHS) for name in ("responses", *columns)}
    else:
        tensors["attention_mask"] = torch.cat([prompts, responses], 1).long()
    arguments = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None} | info
    return tensordict_utils.get_tensordict(tensors, arguments)


def _nested(values: Tensor, lengths: tuple[int, ...]) -> Tensor:
    rows = [row[:length] for row, length in zip(values, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def as_nested(values: Tensor) -> Tensor:
    return _nested(values, LENGTHS)


def response_part(values: Tensor) -> Tensor:
    """Slices the responses out of the model's nested output."""
    firsts = zip(values.unbind(), LENGTHS, _PROMPTS, strict=True)
    rows = [row[before - 1 : before - 1 + length] for row, length, before in firsts]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
