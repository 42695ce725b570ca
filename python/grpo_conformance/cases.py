"""The cases: whose reward counts and how often, and the weight of each token in a loss.

Numbers are computed by hand for a few tokens. Where every row has one token, the means over tokens, rows, and rows of
sums are the same, so that a case can be asked under any of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grpo_conformance.batch import PAD_GROUP, Batch, Logits, NotOffered, make, packed, padded, part, split_first, spread
from grpo_conformance.run import METHODS, ROBUSTNESS, Asked, Convention, Invariant

NAN, INF = math.nan, math.inf
ROWS, SUMS = "seq-mean-token-mean", "seq-mean-token-sum"
Setting = Mapping[str, Any]
ESTIMATORS: list[Setting] = [
    {"estimator": name} for name in ("mean", "mean-std", "leave-one-out", "leave-one-out-std", None)
]
SCALED: list[Setting] = [{"estimator": name} for name in ("mean-std", "leave-one-out-std", None)]
MEANS: list[Setting] = [{"aggregation": name} for name in ("token-mean", ROWS, SUMS, None)]
FORMS: list[Setting] = [{"kl_coef": 0.5, "kl": name} for name in ("k2", "k1", None)]
LOW, HIGH = (-INF, -1e-3), (1e-3, INF)  # a sign

_votes, _gae, _loss, _logprobs = (functools.partial(Invariant, method) for method in METHODS)
_loo, _std = (functools.partial(make, estimator=name) for name in ("leave-one-out", "mean-std"))


def _with(first: Sequence[Setting], *others: Setting) -> list[Setting]:
    """Every setting of the first beside every one of the others."""
    return [{**other, **setting} for other in others for setting in first]


_MIXED, _SORTED = make([2] * 6, [9, 3, 4, 2, 5, 1], [1, 0] * 3), make([2] * 6, [3, 2, 1, 9, 4, 5], [0, 0, 0, 1, 1, 1])
_SORTED_AT = [3, 0, 4, 1, 5, 2]
_UNEVEN = make([2] * 5, [3, 1, 2, 9, 5], [0, 0, 0, 1, 1])
_SPREAD = make([2] * 6, [3, 1, 2, 90, 50, 10], [0, 0, 0, 1, 1, 1])
# rollouts of three rows, one of which may be masked, beside two of one row, and the same in one row each
_APART = make([2, 1, 3, 2, 2], [3, 1, 3, 3, 0], rollouts=[7, 8, 7, 7, 9])
_CUT = make([2, 1, 0, 1, 2], [3, 3, 3, 1, 0], rollouts=[7, 7, 7, 8, 9])
_ONE_ROW = make([2, 1, 2], [3, 1, 0])
_PADDED = make([2, 2, 2, 0, 0], [6, 0, 3, 0, 0], [0] * 3 + [PAD_GROUP] * 2)
# groups of 16, as whether float32 leaves a residue depends on the number and on the machine
_OUTLIERS = [reward for common in (0.95, 0.3, 0.35) for reward in [0] + [common] * 15]
_OUTLIER = make([1] * 48, _OUTLIERS, [row // 16 for row in range(48)], estimator="leave-one-out-std")
_FLAT = make([2] * 8, [1, 0, 0, 0] + [0.5] * 4, [0] * 4 + [1] * 4, filter_groups=True)
_EQUAL_REWARDS = _std([2] * 8, [0.7] * 8)
_ONE, _MORE = (0.99, 1.23), (1.4, 3.01)  # divided by a deviation with n or n - 1, or by that of the others
_MINUS_ONE, _ZERO = (-1.23, -0.99), (-1e-3, 1e-3)


def _apart(batch: Batch) -> list[Batch]:
    """Each group in a batch of its own."""
    return [part(batch, rows).replace(whole=None, rows=None) for rows in ([0, 1, 2], range(3, len(batch.mask)))]


ADVANTAGES = (
    _votes("mean", "The baseline is a group's mean", make([2] * 4, [3, 1, 5, 9], [70, 70, 3, 3]), [1, -1, -2, 2]),
    _votes("mean-std", "And divided by a deviation", _std([2] * 3, [3, 1, 2]), [_ONE, _MINUS_ONE, _ZERO]),
    _votes("leave-one-out", "The baseline is the mean of the others", _loo([2] * 3, [3, 1, 2]), [1.5, -1.5, 0]),
    _votes(
        "leave-one-out-std",
        "And divided by a deviation",
        make([2] * 3, [3, 1, 2], estimator="leave-one-out-std"),
        [_MORE, (-3.01, -1.4), _ZERO],
    ),
    _votes(
        "default-advantages",
        "By default, a reward above the others' has a positive advantage",
        make([2] * 6, [3, 1, 2, 5, 9, 6], [70, 70, 70, 3, 3, 3], estimator=None),
        [HIGH, LOW, None, LOW, HIGH, LOW],
    ),
    _votes("equal-rewards", "Equal rewards give nothing to learn", _EQUAL_REWARDS, [(-0.1, 0.1)] * 8, SCALED),
    _votes(
        "loo-std-outlier",
        "One reward apart from equal others stays in bounds",
        _OUTLIER,
        [None if row % 16 else (-5, -0.2) for row in range(48)],
    ),
    _votes("row-order", "The order of rows does not matter", _MIXED, _SORTED, ESTIMATORS, places=_SORTED_AT),
    _votes("uneven-groups", "Groups of different sizes have their own means", _UNEVEN, _apart(_UNEVEN), ESTIMATORS),
    _votes("groups-std", "Each group has its own deviation", _SPREAD, _apart(_SPREAD), ESTIMATORS),
    *(
        _votes(name, title, _APART, _ONE_ROW, settings, places=[0, 1, 0, 0, 2])
        for name, title, settings in (
            ("rollout-in-mean", "A rollout of three rows votes once, wherever they are", ESTIMATORS[:1]),
            ("rollout-leave-one-out", "A rollout of three rows is left out as a whole", ESTIMATORS[2:4]),
            ("rollout-in-std", "A rollout of three rows counts once in the std", [ESTIMATORS[1], ESTIMATORS[4]]),
        )
    ),
    _votes(
        "rollout-masked-end",
        "A rollout whose last row is masked keeps its advantage",
        _CUT,
        _ONE_ROW,
        ESTIMATORS,
        places=[0, 0, None, 1, 2],
    ),
    _votes(
        "pad-rows",
        "Rows that make a batch divisible change no advantage",
        _PADDED,
        make([2] * 3, [6, 0, 3]),
        ESTIMATORS,
        places=[0, 1, 2, None, None],
    ),
    _votes(
        "filter-whole-groups",
        "A filter of equal rewards keeps or leaves out whole groups",
        _FLAT,
        [HIGH, LOW, LOW, LOW] + [NAN] * 4,
        ESTIMATORS,
    ),
    _votes(
        "equal-rewards-exact",
        "Equal rewards give exactly 0",
        _EQUAL_REWARDS,
        [0] * 8,
        SCALED,
        tolerance=0.0,
        kind=ROBUSTNESS,
    ),
)

_KNOWN = make([2], token_rewards=[[0, 1]], values=[[0.5, 0.25]], gamma=0.5, lam=0.5)
_GAP = make([[1, 0, 1]], token_rewards=[[0, 0, 1]], values=[[0.5, 50, 0.25]], lam=0)  # whatever decays by position
_NAN = make([[1, 0, 1]], token_rewards=[[0, NAN, 1]], values=[[0.5, NAN, 0.25]])
_AFTER = make([[1, 1, 0]], token_rewards=[[0, 0, 1]], values=[[0.5, 0.25, 0]], gamma=0.5, lam=0.5)
_FOUR = make([4], token_rewards=[[0, 0, 0, 1]], values=[[0.5, 0.1, 0.3, 0.2]], gamma=0.5, lam=0.5)
_WHITE = make([[1, 0, 0]] * 3, token_rewards=[[1, 0, 0], [5, 0, 0], [3, 0, 0]], values=[[0.5, 9, 9]] * 3, whiten=True)
TOKEN_ADVANTAGES = (
    # 1 - 0.25 at the end; before it 0.5 * 0.25 - 0.5, and a quarter of what follows
    _gae("gae", "GAE of a known row", _KNOWN, [-0.1875, 0.75]),
    _gae("gae-gap", "The value at a tool's output enters no advantage", _GAP, [-0.25, 0.75]),
    _gae("gae-masked-reward", "A reward at a masked token belongs to the last counting one", _AFTER, [-0.1875, 0.75]),
    # from the end 0.8; 0.1 - 0.3, and a quarter of 0.8; 0.15 - 0.1; 0.05 - 0.5, and a quarter of 0.05
    _gae("gae-rollout", "GAE goes on across rows of a rollout", split_first(_FOUR, [2, 2]), [-0.4375, 0.05, 0, 0.8]),
    _gae("whiten-masked", "Masked tokens are in no mean of a whitening", _WHITE, [_MINUS_ONE, _ONE, _ZERO]),
    _gae("gae-nan", "NaN in masked slots reaches no advantage", _NAN, [0.5, 0.75], kind=ROBUSTNESS),
)


def _parts(batch: Batch, **counts: Any) -> list[Batch]:
    return [part(batch, rows, **counts) for rows in ([0, 3], [1, 2])]


def _unequal(batch: Batch, **counts: Any) -> list[Batch]:
    return [part(batch, rows, **counts) for rows in ([0, 1, 3], [2])]


def _alone(batch: Batch) -> list[Batch]:
    """Each row on one of two ranks, in one of two steps."""
    return [part(batch, [row], ranks=2, steps=2) for row in range(4)]


def _four_at_first(batch: Batch) -> Batch:
    """The batch with a ratio of 4 at its first token, and of 1 at all others."""
    same = batch.of_ratio(1)
    old = same.old_logprobs - math.log(4)
    logprobs = old.clone()
    logprobs[0, 0] += math.log(4)
    return same.replace(old_logprobs=old, logprobs=logprobs)


# of 4, 3, 1 and 2 tokens in the loss, in one row after a gap
_RAGGED = make([[1, 1, 1, 1], [1, 0, 1, 1], [1], [1, 1]])
_NO_POLICY = _RAGGED.replace(advantages=torch.zeros(4, dtype=torch.float64))
_SLICES = [part(_RAGGED, range(4), cut) for cut in ((0, 3), (3, 4))]
_ROLLOUTS = make([5, 2, 3])
_KNOWN_MEAN = make([2, 1], advantages=[1, -2]).of_ratio(1)
# of two tokens in a row, and one in another
_WEIGHTS = {"token-mean": (1 / 3, 1 / 3, 1 / 3), ROWS: (1 / 4, 1 / 4, 1 / 2), SUMS: (1 / 2, 1 / 2, 1 / 2)}
_SIGNS = make([1, 1], advantages=[1, -1])
_KL_TERM: Setting = {"kl_coef": 0.5}
_ENTROPY: Setting = {"entropy_coef": 0.5}
# a ratio of 2, the geometric mean of 4 and 1
_GSPO = _four_at_first(make([[1, 1, 0], [1, 1, 0]], advantages=[1, -1], ratio="sequence", clip=10.0))
_NONE, _TARGETS = torch.zeros(2).double(), torch.tensor([[1.0], [4.0]]).double()
_EQUAL = make([2, 2, 2])
_DEALT = [part(split_first(_ROLLOUTS, [3, 2]), rows, steps=2) for rows in ([0, 2], [1, 3])]
_THREE = [2, 2, 1]  # rows of a rollout of five tokens
_EMPTY = _parts(make([2, 0, 0, 3]), steps=2)
_PADS = make([2, 3, 0, 0], groups=[0, 0, PAD_GROUP, PAD_GROUP])
_SCORED = ("logprobs", "old_logprobs", "ref_logprobs")
_CRITIC = _RAGGED.replace(value_coef=0.5, values=torch.arange(16).view(4, 4).double().sin())
_MODEL = make([2] * 4, auxiliary=2.0, auxiliary_coef=0.5)
_LONG = make([2, 1], advantages=[1, -2], truncated=[False, True], mask_truncated=True).of_ratio(1)


_LN2 = math.log(2)


def _kl(name: str, loss: float, *gradients: float) -> Invariant:
    """Rows of one token with ratio 1, and twice and four times as probable for the reference."""
    batch = _SIGNS.of_ratio(1, torch.tensor([[2.0], [4.0]])).replace(kl=name, kl_coef=0.5)
    policy = zip((-0.5, 0.5), gradients, strict=True)
    expected = [0.5 * loss, 0, *(own + 0.25 * gradient for own, gradient in policy)]
    return _loss(f"kl-{name}", f"A known KL of form {name}, and its gradient", batch, expected, MEANS)


def _known_means(aggregation: str, a: float, b: float, c: float) -> tuple[Invariant, Invariant, Invariant]:
    """The loss, the KL and the entropy of two tokens in a row and one in another, by the weights of the tokens."""
    policy = make([2, 1], advantages=[1, -2], aggregation=aggregation).of_ratio(1)
    others = policy.of_ratio(1, torch.tensor([[2.0], [4.0]])).replace(advantages=torch.zeros(2).double())
    entropy = others.replace(entropy_coef=0.5, entropy=torch.tensor([[1.0, 2.0], [4.0, 0.0]]).double())
    bonus = (a + 2 * b + 4 * c) / 2
    kl = (1 - _LN2) * (a + b) + (3 - 2 * _LN2) * c
    pulls = [-a / 2, -b / 2, -3 * c / 2]
    return (
        _loss(aggregation, "A known mean, by its name", policy, [-a - b + 2 * c, 0, -a, -b, 2 * c]),
        _loss(
            f"kl-{aggregation}",
            f"The KL has the loss's {aggregation}",
            others.replace(kl_coef=0.5),
            [kl / 2, 0, *pulls],
        ),
        _loss(f"entropy-{aggregation}", f"The entropy has the loss's {aggregation}", entropy, [-bonus, 0, 0, 0, 0]),
    )


_BY_MEAN = [_known_means(name, *weights) for name, weights in _WEIGHTS.items()]
_means = functools.partial(_loss, variants=MEANS)
_tokens, _rows, _default = (functools.partial(_loss, variants=means) for means in (MEANS[:1], MEANS[1:3], MEANS[3:]))
LOSSES = (
    *(policy for policy, _, _ in _BY_MEAN),
    _default(
        "default-loss", "By default, the loss pulls by the advantage's sign", _KNOWN_MEAN, [None, 0, LOW, LOW, HIGH]
    ),
    _means(
        "clip", "A ratio of 1.5 is clipped for advantage 1, and not for -1", _SIGNS.of_ratio(1.5), [0.15, 0, 0, 0.75]
    ),
    _means(
        "clip-low", "A ratio of 0.5 is clipped for advantage -1, not for 1", _SIGNS.of_ratio(0.5), [0.15, 0, -0.25, 0]
    ),
    _kl("k3", (1 - _LN2 + 3 - 2 * _LN2) / 2, -1, -3),
    _kl("k2", (_LN2**2 + 4 * _LN2**2) / 4, -_LN2, -2 * _LN2),
    _kl("k1", -1.5 * _LN2, 1, 1),
    _means(
        "entropy",
        "A known entropy bonus is subtracted",
        _SIGNS.of_ratio(1).replace(entropy_coef=0.5, entropy=torch.tensor([[1.0], [2.0]]).double()),
        [-0.75, 0, -0.5, 0.5],
    ),
    _means(
        "teacher",
        "Distillation lowers the log-prob of a token that the teacher finds less probable",
        _SIGNS.of_ratio(1).replace(teacher_coef=0.5, advantages=_NONE, teacher_logprobs=_SIGNS.logprobs - 3),
        [None, 0, HIGH, HIGH],
    ),
    _means(
        "value",
        "A critic's loss is of the errors of its values",
        _SIGNS.of_ratio(1).replace(value_coef=0.5, values=torch.tensor([[1.0], [2.0]]).double(), returns=_TARGETS),
        [(0.2, 1.1), 0, -0.5, 0.5],  # of an error of 2, squared or half of that
    ),
    _means(
        "auxiliary",
        "A model's further loss is added",
        _SIGNS.of_ratio(1).replace(auxiliary_coef=0.5, auxiliary=2.0),
        [1, 0, -0.5, 0.5],
    ),
    *(case for _, *cases in _BY_MEAN for case in cases),
    _loss(
        "gspo",
        "The ratio of a sequence is the geometric mean of its tokens' (GSPO)",
        _GSPO,
        [-0.5, 0, -0.5, -0.5, 0.25, 0.25],
        MEANS[:2],
    ),
    _means("padding", "Padding on either side, of any width, changes nothing", padded(_RAGGED, 3, 2), _RAGGED),
    _means("gaps", "Outputs of tools between the tokens change nothing", spread(_RAGGED), _RAGGED),
    _loss(
        "filter-mask",
        "The KL and the entropy of a token outside the mask count neither above nor below the line",
        spread(_RAGGED, is_noisy=True),
        _RAGGED,
        _with(MEANS, _KL_TERM, _ENTROPY),
    ),
    _means("packing", "The packed layout has the loss of the padded one", packed(_RAGGED), _RAGGED),
    _means("row-order-loss", "The order of rows does not matter to the loss", [part(_EQUAL, [2, 0, 1])], _EQUAL),
    _tokens("parts-tokens", "Micro-batches add up to the mean over tokens", _parts(_RAGGED, steps=2), _RAGGED),
    _rows("parts-rows", "Micro-batches add up to the mean over rows", _parts(_RAGGED, steps=2), _RAGGED),
    _default("parts-default", "Micro-batches add up, by default", _parts(_RAGGED, steps=2), _RAGGED),
    _rows("parts-sizes", "Micro-batches of unequal size add up", _unequal(_RAGGED, steps=2), _RAGGED),
    _tokens("ranks-tokens", "Ranks add up to the mean over tokens", _parts(_RAGGED, ranks=2), _RAGGED),
    _rows("ranks-rows", "Ranks add up to the mean over rows", _parts(_RAGGED, ranks=2), _RAGGED),
    _rows("ranks-sizes", "Ranks of unequal size add up", _unequal(_RAGGED, ranks=2), _RAGGED),
    _means("ranks-steps", "Micro-batches of several ranks add up", _alone(_RAGGED), _RAGGED),
    _tokens("slices-tokens", "Slices of the context add up to the mean over tokens", _SLICES, _RAGGED),
    _rows("slices-rows", "Slices of the context add up to the mean over rows", _SLICES, _RAGGED),
    _loss(
        "kl-share",
        "A micro-batch's KL is divided as the batch's",
        _parts(_NO_POLICY, steps=2),
        _NO_POLICY,
        [*_with(MEANS, _KL_TERM), *_with(FORMS, *MEANS[3:])],
    ),
    _loss(
        "entropy-share",
        "A micro-batch's entropy is divided as the batch's",
        _parts(_NO_POLICY, steps=2),
        _NO_POLICY,
        _with(MEANS, _ENTROPY),
    ),
    _loss(
        "entropy-of-ranks",
        "A rank's entropy is divided as the batch's",
        _parts(_NO_POLICY, ranks=2),
        _NO_POLICY,
        _with(MEANS, _ENTROPY),
    ),
    _loss(
        "teacher-share",
        "A micro-batch's distillation is divided as the batch's",
        _parts(_NO_POLICY, steps=2),
        _NO_POLICY,
        _with(MEANS, {"teacher_coef": 0.5}),
    ),
    _means(
        "value-share", "A micro-batch's loss of a critic is divided as the batch's", _parts(_CRITIC, steps=2), _CRITIC
    ),
    _means("auxiliary-share", "A model's further loss is a mean over micro-batches", _parts(_MODEL, steps=2), _MODEL),
    _means("auxiliary-of-ranks", "A model's further loss is a mean over ranks", _parts(_MODEL, ranks=2), _MODEL),
    _rows("rollout-mean", "Three rows count once in the mean over rollouts", split_first(_ROLLOUTS, _THREE), _ROLLOUTS),
    _rows("rollout-in-parts", "Rows of a rollout may be in different micro-batches", _DEALT, _ROLLOUTS),
    _tokens("pad-rows-tokens", "Rows that make a batch divisible change no mean over tokens", _PADS, make([2, 3])),
    _rows("pad-rows-means", "Rows that make a batch divisible change no mean over rows", _PADS, make([2, 3])),
    _tokens("truncated-denominator", "Truncated rows leave both sides of the mean", _LONG, [-1, 0, -1 / 2, -1 / 2, 0]),
    _means("empty-part", "A micro-batch without a token in the loss adds 0, not NaN", _EMPTY, _EMPTY[0]),
    *(
        _loss(
            f"{name}-masked",
            f"{value:g} in masked slots reaches no gradient",
            _RAGGED.over(value, *_SCORED),
            _RAGGED,
            [*MEANS, *_with(MEANS, _KL_TERM)],
            kind=ROBUSTNESS,
        )
        for name, value in (("nan", NAN), ("inf", -INF))
    ),
)

_LOGITS = torch.tensor([[[0.0, 3.0], [1.0, 4.0], [16.0, 1.0], [5.0, 5.0]]]).double().log().nan_to_num(neginf=-50.0)
_PROMPT = Logits(_LOGITS, torch.tensor([[1, 1, 0, 1]]))  # the first two are the prompt
LOGPROBS = (
    _logprobs(
        "temperature",
        "Logits are divided by the temperature",
        _PROMPT.replace(temperature=2.0),
        # 4 to 1 becomes 2 to 1, and 16 to 1 becomes 4 to 1
        [None, math.log(1 / 3), math.log(1 / 5)],
    ),
    _logprobs(
        "alignment",
        "A token has the log-prob that the position before it gives",
        _PROMPT,
        [None, math.log(1 / 5), math.log(1 / 17)],
    ),
)

INVARIANTS = (*ADVANTAGES, *TOKEN_ADVANTAGES, *LOSSES, *LOGPROBS)

Choice = float | tuple[float, float]


def _choices(
    *questions: tuple[str, Batch, int, Mapping[str, Choice]], estimators: Any = ({},)
) -> Callable[[Asked], str]:
    """Names the choices that a trainer makes: by the number at a place of a method's result, or its bounds."""

    def answer(asked: Asked, method: str, batch: Batch, place: int, choices: Mapping[str, Choice]) -> str:
        value = float(asked.numbers(method, batch)[place])
        for name, choice in choices.items():
            low, high = choice if isinstance(choice, tuple) else (choice - 0.01, choice + 0.01)
            if low <= value <= high:
                return name
        return "NaN" if math.isnan(value) else f"{value:.4g}"

    def ask(asked: Asked) -> str:
        for setting in estimators:
            try:
                said = [answer(asked, of, batch.replace(**setting), at, names) for of, batch, at, names in questions]
                return "; ".join(said)
            except NotOffered as reason:
                absent = reason
        raise absent

    return ask


def _epsilon(asked: Asked) -> str:
    large, small = (float(asked.advantages(_std([2, 2], [reward, 0]))[0]) for reward in (1, 2**-10))
    if math.isclose(large, 2**10 * small):
        return "no division by it"
    # a = r / 2 / (s r + eps), of which s is the same in both
    epsilon = (0.5 / small - 0.5 / large) / (2**10 - 1)
    return "nothing" if abs(epsilon) < 1e-9 else f"{epsilon:.0e}"


_MASKED, _UNSCORED = make([0, 2, 2], [100, 3, 1]), make([2, 2, 2], [NAN, 3, 2])
_VOTERS = _choices(("advantages", _MASKED, 1, {"masked do not": HIGH, "masked do": LOW}), estimators=ESTIMATORS)
_SCORED_VOTERS = _choices(
    ("advantages", _UNSCORED, 2, {"unscored do not": LOW, "unscored do, as 0": HIGH}), estimators=ESTIMATORS
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
# ratios of 4 and 1 in two rows of a rollout
_TWO_ROWS = _four_at_first(
    make([1, 1], advantages=[1, 1], rollouts=[7, 7], ratio="sequence", clip=10.0, aggregation=ROWS)
)
_RATIO = _choices(("loss", _TWO_ROWS, 0, {"the rollout's": -2, "each row's": -2.5}))
_FAR = make([1], advantages=[0], kl=None, kl_coef=1.0).of_ratio(2, 2.0)
_WEIGHED = {"nothing": 1 - _LN2, "the ratio": 2 - 2 * _LN2}
_KL_RATIO = _choices(("loss", _FAR, 0, _WEIGHED))


def _empty_row(asked: Asked) -> str:
    asked.assert_reads("loss", {"aggregation": ROWS})
    return _OF_EMPTY_ROW(asked)


def _of_sequences(asked: Asked) -> str:
    asked.assert_reads("loss", {"aggregation": ROWS, "ratio": "sequence"})
    return _RATIO(asked)


CONVENTIONS = (
    Convention("voters", "Rows without a token in the loss vote in a mean", _VOTERS),
    Convention("scored-voters", "Rows without a score (NaN) vote in a mean", _SCORED_VOTERS),
    Convention("lone", "The advantage of the only member of a group: divided by the std; leave-one-out", _LONE),
    Convention("std", "The standard deviation divides by", _DENOMINATOR),
    Convention("epsilon", "What is added to the standard deviation", _epsilon),
    Convention("siblings", "Rows of one rollout that state different rewards", _SIBLINGS),
    Convention("discount", "The discount across an output of a tool", _DISCOUNT),
    Convention("aggregation", "The mean of the loss, by default", _MEAN),
    Convention("empty-row", "A row without a token, in the mean over rows", _empty_row),
    Convention("dual-clip", "The loss of advantage -1 at a ratio of 100", _DUAL_CLIP),
    Convention("rollout-ratio", "The ratio of sequences (GSPO), in a rollout of several rows", _of_sequences),
    Convention("kl-weight", "What the KL of a token is multiplied by, by default", _KL_RATIO),
)
