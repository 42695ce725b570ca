"""Choices on which trainers differ and neither is wrong: they are reported."""

from __future__ import annotations

import math

from grpo_conformance.batch import make, spread
from grpo_conformance.run import Asked, Convention


def _chosen(value: float, choices: dict[str, float]) -> str:
    if math.isnan(value):
        return "NaN"
    near = [name for name, choice in choices.items() if math.isclose(value, choice, rel_tol=0.01, abs_tol=0.01)]
    return near[0] if near else f"{value:.4g}"


def _voters(asked: Asked) -> str:
    masked = float(asked.advantages(make([0, 2, 2], [100, 3, 1]))[1])
    unscored = float(asked.advantages(make([2, 2, 2], [math.nan, 3, 1]))[1])
    by_reward = _chosen(masked, {"masked do not": 1.0, "masked do": 3 - 104 / 3})
    return f"{by_reward}; {_chosen(unscored, {'unscored do not': 1.0, 'unscored do, as 0': 3 - 4 / 3})}"


def _lone(asked: Asked) -> str:
    values = [float(asked.advantages(make([2], [5], estimator=of))[0]) for of in ("mean-std", "leave-one-out")]
    return "; ".join(_chosen(value, {"0": 0.0, "its reward": 5.0}) for value in values)


def _std(asked: Asked) -> str:
    value = float(asked.advantages(make([2, 2], [1, 0], estimator="mean-std"))[0])
    return _chosen(value, {"n - 1": math.sqrt(0.5), "n": 1.0})


def _epsilon(asked: Asked) -> str:
    large, small = (float(asked.advantages(make([2, 2], [r, 0], estimator="mean-std"))[0]) for r in (1, 2**-10))
    # a = r / 2 / (s r + eps), of which s is the same in both
    epsilon = (0.5 / small - 0.5 / large) / (2**10 - 1)
    return "nothing" if abs(epsilon) < 1e-9 else f"{epsilon:.0e}"


def _siblings(asked: Asked) -> str:
    first, second, _ = asked.advantages(make([2, 2, 2], [1, 0, 0.5], rollouts=[7, 7, 8])).tolist()
    if not math.isclose(first, second, abs_tol=1e-4):
        return "each row has its own"
    return _chosen(first * 2 + 0.5, {"the last counts": 0.0, "the first counts": 1.0, "their mean counts": 0.5})


def _discount(asked: Asked) -> str:
    value = float(asked.token_advantages(spread(make([2], token_rewards=[[0, 1]], gamma=0.5)))[0])
    return _chosen(value, {"skips it": 0.5, "counts its tokens": 0.25})


def _aggregation(asked: Asked) -> str:
    """By the weight of each token in rows of 3 and 1."""
    first, *_, last = (-asked.loss(make([3, 1], advantages=[1, 1], aggregation=None).of_ratio(1))[2:]).tolist()
    if math.isclose(first, last):
        return _chosen(first, {"mean over tokens": 0.25, "mean over rows of sums": 0.5, "sum over tokens": 1.0})
    return _chosen(last / first, {"mean over rows": 3.0})


def _empty_row(asked: Asked) -> str:
    batch = make([1, 0], advantages=[1, 1], aggregation="seq-mean-token-mean").of_ratio(1)
    return _chosen(float(asked.loss(batch)[0]), {"is left out": -1.0, "counts": -0.5})


def _dual_clip(asked: Asked) -> str:
    value = float(asked.loss(make([1], advantages=[-1]).of_ratio(100))[0])
    return _chosen(value, {"100, unbounded": 100.0})


CONVENTIONS = (
    Convention("voters", "Members without a token in the loss, and without a score, vote in a mean", _voters),
    Convention("lone", "The advantage of the only member of a group: divided by the std; leave-one-out", _lone),
    Convention("std", "The standard deviation divides by", _std),
    Convention("epsilon", "What is added to the standard deviation", _epsilon),
    Convention("siblings", "Rows of one rollout that state different rewards", _siblings, "miles#2498"),
    Convention("discount", "The discount across an output of a tool", _discount, "NeMo-RL#4156"),
    Convention("aggregation", "The mean of the loss, by default", _aggregation),
    Convention("empty-row", "A row without a token, in the mean over rows", _empty_row),
    Convention("dual-clip", "The loss of advantage -1 at a ratio of 100", _dual_clip),
)
