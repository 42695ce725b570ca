"""The cases: whose reward counts and how often, and the weight of each token in a loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_conformance.batch import PAD_GROUP, Batch, make, padded, part, split_first, spread
from grpo_conformance.run import METHODS, Asked, Convention, Invariant

NAN = math.nan
ROWS, SUMS = "seq-mean-token-mean", "seq-mean-token-sum"
_votes, _gae, _loss = (functools.partial(Invariant, method) for method in METHODS)
_loo, _std = (functools.partial(make, estimator=name) for name in ("leave-one-out", "mean-std"))

_MIXED = _loo([2] * 6, [9, 3, 4, 2, 5, 1], [1, 0, 1, 0, 1, 0])
_UNEVEN = make([2] * 5, [3, 1, 2, 9, 5], [0, 0, 0, 1, 1])
_APART = make([2, 1, 3, 2], [1, 0, 1, 1], rollouts=[7, 8, 7, 7])
_LEFT_OUT = _loo([2, 1, 3, 2], [1, 1, 1, 0], rollouts=[7, 7, 7, 8])
_OF_STD = _std([5, 2, 3], [3, 1, 0])
_CUT = make([2, 0, 2], [1, 1, 0], rollouts=[7, 7, 8])
_PADDED = make([2, 2, 0, 0, 0], [6, 0, 0, 0, 0], [0, 0] + [PAD_GROUP] * 3)
ADVANTAGES = (
    _votes("mean", "The baseline is a group's mean", make([2] * 4, [3, 1, 5, 9], [70, 70, 3, 3]), [1, -1, -2, 2]),
    _votes("leave-one-out", "The baseline is the mean of the others", _loo([2] * 3, [3, 1, 2]), [1.5, -1.5, 0]),
    _votes("equal-rewards", "Equal rewards give exactly 0", _std([2] * 8, [0.7] * 8), [0] * 8, tolerance=0.0),
    _votes("row-order", "The order of rows does not matter", _MIXED, [4.5, 1.5, -3, 0, -1.5, -1.5]),
    _votes("uneven-groups", "Groups of different sizes have their own means", _UNEVEN, [1, -1, 0, 2, -2]),
    _votes("rollout-in-mean", "A rollout of three rows votes once, wherever they are", _APART, [0.5, -0.5, 0.5, 0.5]),
    _votes("rollout-leave-one-out", "A rollout of three rows is left out as a whole", _LEFT_OUT, [1, 1, 1, -1]),
    _votes(
        "rollout-in-std",
        "A rollout of three rows counts once in the std",
        split_first(_OF_STD, [2, 2, 1]),
        _OF_STD,  # whatever the std divides by, and is added to it
        places=[0, 0, 0, 1, 2],
    ),
    _votes("rollout-masked-end", "A rollout whose last row is masked keeps its advantage", _CUT, [0.5, None, -0.5]),
    _votes("masked-vote", "The reward of a masked row moves no mean", make([0, 2, 2], [100, 3, 1]), [None, 1, -1]),
    _votes("unscored", "A row without a score (NaN) does not vote", make([2] * 3, [NAN, 3, 1]), [0, 1, -1]),
    _votes("pad-rows", "Rows that make a batch divisible change no advantage", _PADDED, [3, -3, None, None, None]),
)

_KNOWN = make([2], token_rewards=[[0, 1]], values=[[0.5, 0.25]], gamma=0.5, lam=0.5)
_GAP = make([[1, 0, 1]], token_rewards=[[0, 0, 1]], values=[[0.5, 50, 0.25]], lam=0)  # whatever decays by position
_NAN = make([[1, 0, 1]], token_rewards=[[0, NAN, 1]], values=[[0.5, NAN, 0.25]])
_AFTER = make([[1, 1, 0]], token_rewards=[[0, 0, 1]], values=[[0.5, 0.25, 0]])
_FOUR = make([4], token_rewards=[[0, 0, 0, 1]], values=[[0.5, 0.1, 0.3, 0.2]])
TOKEN_ADVANTAGES = (
    # 1 - 0.25 at the end; before it 0.5 * 0.25 - 0.5, and a quarter of what follows
    _gae("gae", "GAE of a known row", _KNOWN, [-0.1875, 0.75]),
    _gae("gae-gap", "The value at a tool's output enters no advantage", _GAP, [-0.25, 0.75]),
    _gae("gae-nan", "NaN in masked slots reaches no advantage", _NAN, [0.5, 0.75]),
    _gae("gae-masked-reward", "A reward at a masked token belongs to the last counting one", _AFTER, [0.5, 0.75]),
    _gae("gae-rollout", "GAE goes on across rows of a rollout", split_first(_FOUR, [2, 2]), [0.5, 0.9, 0.7, 0.8]),
)


def _parts(batch: Batch, **counts: Any) -> list[Batch]:
    return [part(batch, rows, **counts) for rows in ([0, 3], [1, 2])]


def _unequal(batch: Batch, **counts: Any) -> list[Batch]:
    return [part(batch, rows, **counts) for rows in ([0, 1, 3], [2])]


# of 4, 3, 1 and 2 tokens in the loss, in one row after a gap
_ragged = functools.partial(make, [[1, 1, 1, 1], [1, 0, 1, 1], [1], [1, 1]])
_TOKENS, _ROWS = _ragged(kl_coef=0.1), _ragged(aggregation=ROWS, kl_coef=0.1)
_CUTS = (0, 3), (3, 4)
_TOKEN_SLICES, _ROW_SLICES = ([part(batch, range(4), cut) for cut in _CUTS] for batch in (_TOKENS, _ROWS))
_KL, _ENTROPY = _ragged(kl_coef=0.5, advantages=[0] * 4), _ragged(entropy_coef=0.5)
_ROLLOUTS, _SUMS = make([5, 2, 3], aggregation=ROWS), make([5, 2, 3], aggregation=SUMS)
_KNOWN_MEAN = make([2, 1], advantages=[1, -2]).of_ratio(1)
_KNOWN_ROWS, _KNOWN_SUMS = (_KNOWN_MEAN.replace(aggregation=name) for name in (ROWS, SUMS))
_SIGNS = make([1, 1], advantages=[1, -1]).of_ratio(1.5)
_RATIO = make([5, 2, 3], aggregation=ROWS, ratio="sequence", clip=10.0)
_EQUAL = make([2, 2, 2], aggregation=ROWS)
_DEALT = [part(split_first(_ROLLOUTS, [3, 2]), rows, steps=2) for rows in ([0, 2], [1, 3])]
_THREE = [2, 2, 1]  # rows of a rollout of five tokens
_EMPTY = _parts(make([2, 0, 0, 3], kl_coef=0.1, entropy_coef=0.1), steps=2)
_PADS = make([2, 3, 0, 0], groups=[0, 0, PAD_GROUP, PAD_GROUP])
_SCORED = ("logprobs", "old_logprobs", "ref_logprobs")

_mean, _kl, _bonus, _ratio = (
    functools.partial(_loss, about=name) for name in ("aggregation", "kl_coef", "entropy_coef", "ratio")
)
LOSSES = (
    _loss("token-mean", "A known mean over tokens", _KNOWN_MEAN, [0, 0, -1 / 3, -1 / 3, 2 / 3]),
    _mean("row-mean", "A known mean over rows", _KNOWN_ROWS, [0.5, 0, -1 / 4, -1 / 4, 1]),
    _mean("row-sum", "A known mean over rows of sums over tokens", _KNOWN_SUMS, [0, 0, -1 / 2, -1 / 2, 1]),
    _loss("clip", "A ratio of 1.5 is clipped for advantage 1, and not for -1", _SIGNS, [0.15, 0, 0, 0.75]),
    _loss("padding", "Padding on either side, of any width, changes nothing", padded(_ROWS, 3, 2), _ROWS),
    _loss("gaps", "Outputs of tools between the tokens change nothing", spread(_ROWS), _ROWS),
    _loss("packing", "The packed layout has the loss of the padded one", _ROWS.replace(packed=True), _ROWS),
    _loss("nan-masked", "NaN in masked slots reaches no gradient", _TOKENS.over(NAN, *_SCORED), _TOKENS),
    _loss("inf-masked", "-inf in masked slots reaches no gradient", _TOKENS.over(-math.inf, *_SCORED), _TOKENS),
    _loss("row-order-loss", "The order of rows does not matter to the loss", [part(_EQUAL, [2, 0, 1])], _EQUAL),
    _loss("parts-tokens", "Micro-batches add up to the mean over tokens", _parts(_TOKENS, steps=2), _TOKENS),
    _mean("parts-rows", "Micro-batches add up to the mean over rows", _parts(_ROWS, steps=2), _ROWS),
    _mean("parts-sizes", "Micro-batches of unequal size add up to the mean over rows", _unequal(_ROWS, steps=2), _ROWS),
    _loss("ranks-tokens", "Ranks add up to the mean over tokens", _parts(_TOKENS, ranks=2), _TOKENS),
    _mean("ranks-rows", "Ranks add up to the mean over rows", _parts(_ROWS, ranks=2), _ROWS),
    _mean("ranks-sizes", "Ranks of unequal size add up to the mean over rows", _unequal(_ROWS, ranks=2), _ROWS),
    _loss("slices-tokens", "Slices of the context add up to the mean over tokens", _TOKEN_SLICES, _TOKENS),
    _mean("slices-rows", "Slices of the context add up to the mean over rows", _ROW_SLICES, _ROWS),
    _kl("kl-share", "A micro-batch's KL is divided as the batch's", _parts(_KL, steps=2), _KL),
    _bonus("entropy-share", "A micro-batch's entropy is divided as the batch's", _parts(_ENTROPY, steps=2), _ENTROPY),
    _bonus("entropy-of-ranks", "A rank's entropy is divided as the batch's", _parts(_ENTROPY, ranks=2), _ENTROPY),
    _mean("rollout-mean", "Three rows count once in the mean over rollouts", split_first(_ROLLOUTS, _THREE), _ROLLOUTS),
    _mean("rollout-sum", "Three rows count once in the mean of sums", split_first(_SUMS, _THREE), _SUMS),
    _ratio("rollout-ratio", "A rollout of three rows has one ratio (GSPO)", split_first(_RATIO, _THREE), _RATIO),
    _mean("rollout-in-parts", "Rows of a rollout may be in different micro-batches", _DEALT, _ROLLOUTS),
    _loss("pad-rows-loss", "Rows that make a batch divisible change no mean over tokens", _PADS, make([2, 3])),
    _loss("empty-part", "A micro-batch without a token in the loss adds 0, not NaN", _EMPTY, _EMPTY[0]),
)

INVARIANTS = (*ADVANTAGES, *TOKEN_ADVANTAGES, *LOSSES)


def _choices(*questions: tuple[str, Batch, int, Mapping[str, float]]) -> Callable[[Asked], str]:
    """Names the choices that a trainer makes: by the number at a place of a method's result."""

    def ask(asked: Asked) -> str:
        said = []
        for method, batch, place, choices in questions:
            value = float(getattr(asked, method)(batch)[place])
            near = [name for name, choice in choices.items() if math.isclose(value, choice, rel_tol=0.01, abs_tol=0.01)]
            said.append(near[0] if near else "NaN" if math.isnan(value) else f"{value:.4g}")
        return "; ".join(said)

    return ask


def _epsilon(asked: Asked) -> str:
    large, small = (float(asked.advantages(_std([2, 2], [reward, 0]))[0]) for reward in (1, 2**-10))
    if math.isclose(large, 2**10 * small):
        return "no division by it"
    # a = r / 2 / (s r + eps), of which s is the same in both
    epsilon = (0.5 / small - 0.5 / large) / (2**10 - 1)
    return "nothing" if abs(epsilon) < 1e-9 else f"{epsilon:.0e}"


_VOTERS = _choices(
    ("advantages", make([0, 2, 2], [100, 3, 1]), 1, {"masked do not": 1, "masked do": 3 - 104 / 3}),
    ("advantages", make([2, 2, 2], [NAN, 3, 1]), 1, {"unscored do not": 1, "unscored do, as 0": 3 - 4 / 3}),
)
_LONE = _choices(*(("advantages", of([2], [5]), 0, {"0": 0, "its reward": 5}) for of in (_std, _loo)))
_DENOMINATOR = _choices(("advantages", _std([2, 2], [1, 0]), 0, {"n - 1": math.sqrt(0.5), "n": 1}))
_OF_SIBLINGS = {"each row has its own": 0.5, "the last counts": -0.25, "the first counts": 0.25, "their mean counts": 0}
_SIBLINGS = _choices(("advantages", make([2, 2, 2], [1, 0, 0.5], rollouts=[7, 7, 8]), 0, _OF_SIBLINGS))
_DISCOUNTED = spread(make([2], token_rewards=[[0, 1]], gamma=0.5))
_DISCOUNT = _choices(("token_advantages", _DISCOUNTED, 0, {"skips it": 0.5, "counts its tokens": 0.25}))
# by the weight of the first of four tokens
_MEANS = {"mean over tokens": -1 / 4, "mean over rows": -1 / 6, "mean over rows of sums": -1 / 2, "sum over tokens": -1}
_MEAN = _choices(("loss", make([3, 1], advantages=[1, 1], aggregation=None).of_ratio(1), 2, _MEANS))
_ONE_EMPTY = make([1, 0], advantages=[1, 1], aggregation=ROWS).of_ratio(1)
_OF_EMPTY_ROW = _choices(("loss", _ONE_EMPTY, 0, {"is left out": -1, "counts": -0.5}))
_DUAL_CLIP = _choices(("loss", make([1], advantages=[-1]).of_ratio(100), 0, {"100, unbounded": 100}))


def _empty_row(asked: Asked) -> str:
    asked.assert_depends("aggregation", _ROWS)
    return _OF_EMPTY_ROW(asked)


CONVENTIONS = (
    Convention("voters", "Members without a token in the loss, and without a score, vote in a mean", _VOTERS),
    Convention("lone", "The advantage of the only member of a group: divided by the std; leave-one-out", _LONE),
    Convention("std", "The standard deviation divides by", _DENOMINATOR),
    Convention("epsilon", "What is added to the standard deviation", _epsilon),
    Convention("siblings", "Rows of one rollout that state different rewards", _SIBLINGS),
    Convention("discount", "The discount across an output of a tool", _DISCOUNT),
    Convention("aggregation", "The mean of the loss, by default", _MEAN),
    Convention("empty-row", "A row without a token, in the mean over rows", _empty_row),
    Convention("dual-clip", "The loss of advantage -1 at a ratio of 100", _DUAL_CLIP),
)
