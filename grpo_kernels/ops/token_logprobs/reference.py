"""The specification of token_logprobs in plain torch; exact enough in float64 to be every other backend's gold.

Logits are [A, B, V], targets and everything else that belongs to a row [A, B].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.token_logprobs.config import IGNORED


class Scaling(NamedTuple):
    """z = softcap(logit_scale * x) / temperature."""

    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float

    def divisor(self, like: Tensor) -> Tensor:
        """NaN where the temperature is not positive and finite."""
        temperature = (
            like.new_full((), self.temperature) if self.row_temperature is None else self.row_temperature[..., None]
        )
        return torch.where((temperature > 0) & (temperature < math.inf), temperature, math.nan)

    def apply(self, logits: Tensor) -> Tensor:
        x = logits * self.logit_scale
        if self.softcap is not None:  # infinite logits are what they are: masked, or an overflow to be seen
            x = torch.where(x.isinf(), x, self.softcap * torch.tanh(x / self.softcap))
        return x / self.divisor(x)

    def slope(self, logits: Tensor) -> Tensor:
        """dz/dx."""
        factor = self.logit_scale / self.divisor(logits)
        if self.softcap is None:
            return factor.expand_as(logits)
        return factor * (1 - torch.tanh(logits * self.logit_scale / self.softcap) ** 2)


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def distribution(z: Tensor, targets: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probability, entropy and log-sum-exp (in float64) of every row; targets are columns."""
    top = z.amax(-1, keepdim=True)
    is_empty = top[..., 0] == -math.inf
    top = torch.where(top.isinf(), math.nan, top)  # no number at all, or an overflow
    is_top = z == top
    below = torch.where(is_top, 0, torch.exp(z - top))
    # The sum without one of the largest: what log1p needs to be exact where the sum is nearly 1.
    others = is_top.sum(-1) - 1 + below.sum(-1)
    top = top[..., 0]
    log_sum = torch.log1p(others)
    logprobs = (z.gather(-1, targets[..., None])[..., 0] - top) - log_sum
    entropy = None
    if want_entropy:
        gap = torch.where(below == 0, 0, top[..., None] - z)  # by itself, or torch's gradient of it is 0 times infinity
        spread = (below * gap).sum(-1)
        entropy = log_sum + spread / (1 + others)
    # of no numbers at all it is what another part of the vocabulary may be added to
    return logprobs, entropy, torch.where(is_empty, -math.inf, top.double() + log_sum.double())


@op_inputs
class LogitRows:
    """Checked arguments of token_logprobs.

    Logits [A, B, V] have contiguous columns; targets and row_temperature are [A, B]. Without the latter, `temperature`
    is that of all rows.
    """

    logits: Tensor
    targets: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.row_temperature, self.temperature, self.softcap, self.logit_scale)


@op_inputs
class Measured:
    """Rows to measure, and whether entropies are wanted."""

    rows: LogitRows
    want_entropy: bool


@op_inputs
class Gradient:
    """Upstream gradients, results of the forward pass, and the rows to differentiate by, all [A, B] but the logits.

    The log-sum-exps are float64: rounded to float32 they would be what limits the gradient.
    """

    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    normalizer: Tensor
    entropy: Tensor | None
    rows: LogitRows


@op_inputs
class GradientInto:
    """The tensor that a gradient is written to, which may be that of the logits."""

    gradient: Tensor
    inputs: Gradient


def forward(inputs: Measured) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies (empty unless wanted), and for the backward the log-sum-exp of every row."""
    logits, targets = inputs.rows.logits, inputs.rows.targets
    kept, columns = columns_of(logits, targets)
    z = inputs.rows.scaling.apply(wide(logits))
    logprobs, entropy, normalizer = distribution(z, columns, inputs.want_entropy)
    wrong = kept & (columns != targets)

    def finished(result: Tensor) -> Tensor:
        return torch.where(wrong, math.nan, torch.where(kept, result, 0))

    return finished(logprobs), z.new_empty(0) if entropy is None else finished(entropy), finished(normalizer)


def backward(inputs: Gradient) -> Tensor:
    logits, scaling = inputs.rows.logits, inputs.rows.scaling
    grad_logprobs, grad_entropy, normalizer = inputs.grad_logprobs, inputs.grad_entropy, inputs.normalizer
    x = wide(logits)
    kept, columns = columns_of(logits, inputs.rows.targets)
    high = normalizer.to(x.dtype)
    low = (normalizer - high.double()).to(x.dtype)
    log_p = (scaling.apply(x) - high[..., None]) - low[..., None]
    p = torch.exp(log_p)
    gradient = torch.zeros_like(x)
    moves = torch.zeros_like(kept)
    if grad_logprobs is not None:
        is_target = torch.arange(x.shape[-1], device=x.device) == columns[..., None]
        gradient = grad_logprobs[..., None] * torch.where(is_target, -torch.expm1(log_p), -p)
        moves = moves | (grad_logprobs != 0)
    if grad_entropy is not None:
        surprise = torch.where(p == 0, 0, p * (log_p + inputs.entropy[..., None]))
        gradient = gradient - grad_entropy[..., None] * surprise
        moves = moves | (grad_entropy != 0)
    # Rows that nothing depends on get 0, whatever they hold.
    gradient = torch.where((kept & moves)[..., None], gradient * scaling.slope(x), 0)
    return gradient.to(logits.dtype)


def backward_into(inputs: GradientInto) -> None:
    inputs.gradient.copy_(backward(inputs.inputs))


def columns_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mask of rows that count, and targets with a valid column in place of an invalid one."""
    kept = targets != IGNORED
    vocabulary = logits.shape[-1]
    columns = targets.clamp(0, vocabulary - 1)
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = targets[kept & (columns != targets)]
        if wrong.numel() > 0:
            raise RuntimeError(
                f"token_logprobs: targets must be in [0, {vocabulary}) or {IGNORED}, got {int(wrong[0])}"
            )
    return kept, columns
