"""Tokens and the terms of the loss, as the specification of policy_loss sees them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """One entry per token, 0 for tokens that take no part."""

    valid: Tensor  # with a policy term
    kept: Tensor  # by their entropy
    lp: Tensor
    old: Tensor
    advantage: Tensor
    selected: Tensor  # by the losses of covariance


class Terms(NamedTuple):
    """Terms of the policy loss: at every token, or at the last token of a segment or row."""

    here: Tensor  # bool, one per token
    score: Tensor  # log-prob of what the ratio is of
    ratio: Tensor


class Correction(NamedTuple):
    """Weights for the mismatch between sampler and trainer, and what is measured of it; NaN where there is none."""

    of_tokens: Tensor
    of_rows: Tensor | None  # where all tokens of a row have one weight
    gap: Tensor  # absolute difference of log-probs of sampler and old policy
    dropped: Tensor  # tokens of rows that are too far from the policy
