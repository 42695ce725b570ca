"""ART: its advantages and the weights of their tokens, and its loss, as its Megatron backend calls it."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from cutter import Source
from grpo_conformance import Batch, NotOffered
from grpo_conformance.adapters import refuse
from torch import Tensor

SOURCE = Source("openpipe-art", "0.5.18")
LOSS, TOKENIZE, PACK = "art/loss.py", "art/preprocessing/tokenize.py", "art/preprocessing/pack.py"
aggregate = SOURCE.cut("art/utils/group_aggregate.py", "group_aggregate", torch=torch)
losses = SOURCE.cut(
    LOSS, "loss_fn", "shift_tensor", torch=torch, group_aggregate=aggregate.group_aggregate, Loss=SimpleNamespace
)
tokenize = SOURCE.cut(
    TOKENIZE,
    "tokenize_trajectory_groups",
    math=math,
    random=random,
    takewhile=itertools.takewhile,
    History=SimpleNamespace,
    tokenize_trajectory=lambda tokenizer, images, history, advantage, *others, **options: SimpleNamespace(
        row=history.tools,
        advantage=advantage,
        assistant_mask=history.messages_and_choices,
        token_ids=[0],
        logprobs=[0.0],
    ),
)
weigh = SOURCE.statements(
    PACK,
    "packed_tensors_from_tokenized_results",
    "weights_tensor = torch.where",
    "weights_tensor[assistant_mask_tensor] /=",
    "weights_tensor, assistant_mask_tensor",
    "weights_tensor",
    torch=torch,
)


class Art:
    """It also scales the advantages of a batch by their mean magnitude, which is left out here."""

    name = f"ART {SOURCE.version}"
    lacks = ("rows that pad a batch", "slices of the context")
    where: ClassVar = {
        "advantages": SOURCE.where(TOKENIZE, "reward_mean = sum("),
        "loss": SOURCE.where(LOSS, "policy_loss = policy_loss * weights"),
        **dict.fromkeys(
            ("kl-share", "filter-mask"),
            SOURCE.where(LOSS, "kl_penalty = kl_penalty_coef * (avg_kl - kl_per_token)"),
        ),
    }

    def advantages(self, batch: Batch) -> Tensor:
        if batch.estimator not in ("mean", "mean-std", None):
            raise NotOffered("no mean of the others")
        result = torch.full((len(batch.groups),), torch.nan if batch.filter_groups else 0.0)
        for row in self._rows(batch, batch.estimator != "mean", batch.filter_groups):
            result[row.row] = row.advantage
        return result

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "entropy_coef", "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.aggregation not in ("seq-mean-token-mean", None):
            raise NotOffered("a mean over trajectories alone")
        if batch.kl_coef and batch.kl:
            raise NotOffered(f"no KL of form {batch.kl} in the loss, but a penalty in the advantages")
        total = batch.total
        by_row = total if total.lengths is None else total.replace(mask=_by_row(total.mask, total.lengths))
        of_rows = torch.zeros(len(by_row.mask), dtype=torch.float64)
        flat = by_row.replace(rewards=torch.zeros(len(of_rows)), groups=torch.zeros(len(of_rows), dtype=torch.long))
        for row in self._rows(flat, False, False):
            of_rows[row.row] = row.weight
        ids = torch.arange(1, len(of_rows) + 1)
        if total.lengths is not None:
            of_rows, ids, advantages = (
                values.repeat_interleave(total.lengths)[None] for values in (of_rows, ids, batch.advantages)
            )
        else:
            of_rows, ids, advantages = (
                values[:, None].expand(total.mask.shape) for values in (of_rows, ids, total.advantages)
            )
            advantages = batch.of_total(advantages)
        weights = weigh(of_rows.clone(), total.mask)
        inputs = {
            "logprobs": batch.old_logprobs.masked_fill(~batch.mask, math.nan),
            "advantages": advantages.masked_fill(~batch.mask, 0),
            "assistant_mask": batch.mask,
            "weights": batch.of_total(weights),
            "group_ids": batch.of_total(ids),
        }
        inputs = {
            name: F.pad(values, (1, 0), value=0) for name, values in inputs.items()
        }  # the first token has no loss
        config = {"ppo": True, "epsilon": batch.clip, "importance_sampling_level": batch.ratio}
        config |= {"kl_penalty_coef": batch.kl_coef}
        logprobs, reference = (F.pad(values, (0, 1)) for values in (batch.logprobs, batch.ref_logprobs))
        loss = losses.loss_fn(inputs, logprobs, reference, None, config, reduction="sum").policy_loss
        return loss / total.mask.sum()  # by the tokens of all sequences of the step

    def _rows(self, batch: Batch, scale: bool, drop: bool) -> Any:
        groups: dict[int, dict[int, list[int]]] = {}
        for row, (group, rollout) in enumerate(zip(batch.groups.tolist(), batch.rollouts.tolist(), strict=True)):
            groups.setdefault(group, {}).setdefault(rollout, []).append(row)
        histories = [
            SimpleNamespace(messages_and_choices=mask.long().tolist(), tools=row) for row, mask in enumerate(batch.mask)
        ]
        made = [
            [
                SimpleNamespace(
                    reward=batch.rewards[rows[-1]].item(),
                    additional_histories=[histories[row] for row in rows[1:]],
                    **vars(histories[rows[0]]),
                )
                for rows in rollouts.values()
            ]
            for rollouts in groups.values()
        ]
        options = {"shuffle_group_trajectories": False, "drop_zero_advantage_trajectories": drop}
        return tokenize.tokenize_trajectory_groups(None, made, True, scale, **options)


def _by_row(mask: Tensor, lengths: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(mask[0], lengths.tolist())), batch_first=True)


adapter = Art()
