"""The invariants: whose reward counts and how often, and the weight of each token in a loss."""

from __future__ import annotations

import functools
import math
from typing import Any

from grpo_conformance.batch import PAD_GROUP, Batch, make, padded, part, split_first, spread, take
from grpo_conformance.run import METHODS, Invariant

NAN = math.nan
ROWS, SUMS = "seq-mean-token-mean", "seq-mean-token-sum"


_votes, _gae, _loss = (functools.partial(Invariant, method) for method in METHODS)


_loo, _std = (functools.partial(make, estimator=name) for name in ("leave-one-out", "mean-std"))

ADVANTAGES = (
    _votes("mean", "The baseline is a group's mean", make([2] * 4, [3, 1, 5, 9], [70, 70, 3, 3]), [1, -1, -2, 2]),
    _votes("leave-one-out", "The baseline is the mean of the others", _loo([2] * 3, [3, 1, 2]), [1.5, -1.5, 0]),
    _votes(
        "equal-rewards",
        "Equal rewards give exactly 0",
        _std([2] * 8, [0.7] * 8),
        [0] * 8,
        "NeMo-RL#4158",
        tolerance=0.0,
    ),
    _votes(
        "row-order",
        "The order of rows does not matter",
        _loo([2] * 6, [9, 3, 4, 2, 5, 1], [1, 0, 1, 0, 1, 0]),
        [4.5, 1.5, -3, 0, -1.5, -1.5],
    ),
    _votes(
        "uneven-groups",
        "Groups of different sizes have their own means",
        make([2] * 5, [3, 1, 2, 9, 5], [0, 0, 0, 1, 1]),
        [1, -1, 0, 2, -2],
        "slime#1414 slime#2230 slime#2204",
    ),
    _votes(
        "rollout-in-mean",
        "A rollout of three rows, anywhere in the batch, votes once",
        make([2, 1, 3, 2], [1, 0, 1, 1], rollouts=[7, 8, 7, 7]),
        [0.5, -0.5, 0.5, 0.5],
        "miles#2378 miles#1931 slime#2302 rllm#924",
    ),
    _votes(
        "rollout-leave-one-out",
        "A rollout of three rows is left out as a whole",
        _loo([2, 1, 3, 2], [1, 1, 1, 0], rollouts=[7, 7, 7, 8]),
        [1, 1, 1, -1],
        "verl#7580 agent-lightning#593",
    ),
    _votes(
        "rollout-in-std",
        "A rollout of three rows counts once in the standard deviation",
        split_first(_std([5, 2, 3], [3, 1, 0]), [2, 2, 1]),
        _std([5, 2, 3], [3, 1, 0]),
        "miles#1931",
        expected_rows=[0, 0, 0, 1, 2],
    ),
    _votes(
        "rollout-masked-end",
        "A rollout keeps its advantage if its last row has no token in the loss",
        make([2, 0, 2], [1, 1, 0], rollouts=[7, 7, 8]),
        [0.5, -0.5],
        rows=[0, 2],
    ),
    _votes(
        "masked-vote",
        "The reward of a row without a token in the loss moves no mean",
        make([0, 2, 2], [100, 3, 1]),
        [1, -1],
        "verl#6375 NeMo-RL#4061 NeMo-RL#3467",
        rows=[1, 2],
    ),
    _votes("unscored", "A row without a score (NaN) does not vote", make([2] * 3, [NAN, 3, 1]), [0, 1, -1], "trl#7068"),
    _votes(
        "pad-rows",
        "Rows that make a batch divisible change no advantage",
        make([2, 2, 0, 0, 0], [6, 0, 0, 0, 0], [0, 0] + [PAD_GROUP] * 3),
        [3, -3],
        "verl#7771",
        rows=[0, 1],
    ),
)

_KNOWN = make([2], token_rewards=[[0, 1]], values=[[0.5, 0.25]], gamma=0.5, lam=0.5)
_GAP = make([[1, 0, 1]], token_rewards=[[0, 0, 1]], values=[[0.5, 50, 0.25]], lam=0.5)
_NAN = make([[1, 0, 1]], token_rewards=[[0, NAN, 1]], values=[[0.5, NAN, 0.25]])
_AFTER = make([[1, 1, 0]], token_rewards=[[0, 0, 1]], values=[[0.5, 0.25, 0]])
_FOUR = make([4], token_rewards=[[0, 0, 0, 1]], values=[[0.5, 0.1, 0.3, 0.2]])
TOKEN_ADVANTAGES = (
    # 1 - 0.25 at the end; before it 0.5 * 0.25 - 0.5, and a quarter of what follows
    _gae("gae", "GAE of a known row", _KNOWN, [-0.1875, 0.75]),
    _gae("gae-gap", "The value at a tool's output enters no advantage", _GAP, [0.125, 0.75], "NeMo-RL#4156 verl#336"),
    _gae("gae-nan", "NaN in masked slots reaches no advantage", _NAN, [0.5, 0.75]),
    _gae("gae-masked-reward", "A reward at a masked token belongs to the last counting one", _AFTER, [0.5, 0.75]),
    _gae("gae-rollout", "GAE goes on across rows of a rollout", split_first(_FOUR, [2, 2]), [0.5, 0.9, 0.7, 0.8]),
)


def _ragged(**settings: Any) -> Batch:
    """Four rows with 4, 3, 1 and 2 tokens in the loss, in one of them after a gap."""
    return make([[1, 1, 1, 1], [1, 0, 1, 1], [1], [1, 1]], **settings)


def _parts(batch: Batch) -> list[Batch]:
    return [part(batch, rows, steps=2) for rows in ([0, 1], [2, 3])]


def _ranks(batch: Batch) -> list[Batch]:
    return [part(batch, rows, ranks=2) for rows in ([0, 3], [1, 2])]


def _slices(batch: Batch) -> list[Batch]:
    return [part(batch, range(4), columns) for columns in ((0, 3), (3, 4))]


def _known(aggregation: str) -> Batch:
    return make([2, 1], advantages=[1, -2], aggregation=aggregation).of_ratio(1)


_TOKENS, _ROWS = _ragged(kl_coef=0.1), _ragged(aggregation=ROWS, kl_coef=0.1)
_KL, _ENTROPY = _ragged(kl_coef=0.5, advantages=[0] * 4), _ragged(entropy_coef=0.5)
_ROLLOUTS, _SUMS = make([5, 2, 3], aggregation=ROWS), make([5, 2, 3], aggregation=SUMS)
_SIGNS = make([1, 1], advantages=[1, -1]).of_ratio(1.5)
_RATIO = make([5, 2, 3], aggregation=ROWS, ratio="sequence", clip=10.0)
_IN_TWO, _EQUAL = split_first(_ROLLOUTS, [3, 2]), make([2, 2, 2], aggregation=ROWS)
_EMPTY = _parts(make([2, 3, 0, 0], kl_coef=0.1, entropy_coef=0.1))
_PADS = make([2, 3, 0, 0], groups=[0, 0, PAD_GROUP, PAD_GROUP])
_SCORED = ("logprobs", "old_logprobs", "ref_logprobs")

LOSSES = (
    _loss("token-mean", "A known mean over tokens", _known("token-mean"), [0, 0, -1 / 3, -1 / 3, 2 / 3]),
    _loss("row-mean", "A known mean over rows", _known(ROWS), [0.5, 0, -1 / 4, -1 / 4, 1]),
    _loss("row-sum", "A known mean over rows of sums over tokens", _known(SUMS), [0, 0, -1 / 2, -1 / 2, 1]),
    _loss("clip", "A ratio of 1.5 is clipped for advantage 1, and not for -1", _SIGNS, [0.15, 0, 0, 0.75]),
    _loss("padding", "Padding on either side, of any width, changes nothing", padded(_ROWS, 3, 2), _ROWS),
    _loss("gaps", "Outputs of tools between the tokens change nothing", spread(_ROWS), _ROWS),
    _loss("packing", "The packed layout has the loss of the padded one", _ROWS.replace(packed=True), _ROWS),
    _loss("nan-masked", "NaN in masked slots reaches no gradient", _TOKENS.over(NAN, *_SCORED), _TOKENS),
    _loss("inf-masked", "-inf in masked slots reaches no gradient", _TOKENS.over(-math.inf, *_SCORED), _TOKENS),
    _loss(
        "row-order-loss",
        "The order of rows does not matter to the loss",
        take(_EQUAL, [2, 0, 1]),
        _EQUAL,
        expected_rows=[0, 1, 6, 7, 2, 3, 4, 5],
    ),
    _loss(
        "parts-tokens", "Micro-batches add up to the mean over tokens", _parts(_TOKENS), _TOKENS, "trl#5619 SkyRL#794"
    ),
    _loss("parts-rows", "Micro-batches add up to the mean over rows", _parts(_ROWS), _ROWS, "verl#6609"),
    _loss("ranks-tokens", "Ranks add up to the mean over tokens", _ranks(_TOKENS), _TOKENS, "SkyRL#1751 AReaL#1730"),
    _loss("ranks-rows", "Ranks add up to the mean over rows", _ranks(_ROWS), _ROWS, "verl#7200"),
    _loss("slices-tokens", "Slices of the context add up to the mean over tokens", _slices(_TOKENS), _TOKENS),
    _loss("slices-rows", "Slices of the context add up to the mean over rows", _slices(_ROWS), _ROWS, "verl#7200"),
    _loss("kl-share", "A micro-batch's KL is divided as the batch's", _parts(_KL), _KL, "verl#6609"),
    _loss("entropy-share", "A micro-batch's entropy is divided as the batch's", _parts(_ENTROPY), _ENTROPY),
    _loss("entropy-of-ranks", "A rank's entropy is divided as the batch's", _ranks(_ENTROPY), _ENTROPY),
    _loss(
        "rollout-mean",
        "A rollout of three rows counts once in the mean over rollouts",
        split_first(_ROLLOUTS, [2, 2, 1]),
        _ROLLOUTS,
        "verl#7580 rllm#924 miles#2378",
    ),
    _loss(
        "rollout-sum",
        "A rollout of three rows counts once in the mean of sums",
        split_first(_SUMS, [2, 2, 1]),
        _SUMS,
        "slime#2302",
    ),
    _loss("rollout-ratio", "A rollout of three rows has one ratio (GSPO)", split_first(_RATIO, [2, 2, 1]), _RATIO),
    _loss(
        "rollout-in-parts",
        "Rows of a rollout may be in different micro-batches",
        [part(_IN_TWO, rows, steps=2) for rows in ([0, 2], [1, 3])],
        _ROLLOUTS,
        "miles#2378",
    ),
    _loss(
        "pad-rows-loss", "Rows that make a batch divisible change no mean over tokens", _PADS, make([2, 3]), "verl#7771"
    ),
    _loss("empty-part", "A micro-batch without a token in the loss adds 0, not NaN", _EMPTY, _EMPTY[:1]),
)

INVARIANTS = (*ADVANTAGES, *TOKEN_ADVANTAGES, *LOSSES)
