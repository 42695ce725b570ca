"""Tokens and the terms of the loss, as the specification of policy_loss sees them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """One entry per token, 0 for tokens that take no part."""

    valid: Tensor
    kept: Tensor  # by the policy mask
    lp: Tensor
    old: Tensor
    advantage: Tensor


class Terms(NamedTuple):
    """Terms of the policy loss: at every token, or at the last token of a segment or row."""

    here: Tensor  # bool, one per token
    score: Tensor  # log-prob of what the ratio is of
    ratio: Tensor


class Weights(NamedTuple):
    """Importance weights; None where there are none."""

    of_tokens: Tensor | None
    of_rows: Tensor | None  # where all tokens of a row have one weight; NaN for rows without tokens
