"""The policy loss straight from hidden states: neither logits nor their gradient are ever whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels import checks, dispatch
from grpo_kernels.config import LossConfig
from grpo_kernels.functional.linear_head import LinearHead, check_chunk_size, check_head, check_positions, check_targets
from grpo_kernels.functional.linear_logprobs import linear_logprobs
from grpo_kernels.functional.policy_loss import Inputs, Normalizer, PolicyLoss, Prepared, policy_loss_of, prepare
from grpo_kernels.functional.policy_loss_metrics import PolicyLossMetrics
from grpo_kernels.ops import linear_policy_loss as op
from grpo_kernels.ops.token_logprobs import IGNORED

_OP = "linear_policy_loss"


def linear_policy_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, old_logprobs: Tensor | None, advantages: Tensor, *,
    bias: Tensor | None = None, temperature: float | Tensor = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, positions: Tensor | None = None, mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None, segments: Tensor | None = None, ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None, is_weights: Tensor | None = None, weights: Tensor | None = None,
    normalizer: Normalizer | None = None, return_entropy: bool = False, config: LossConfig | str = "grpo",
    memory: str = "fast", compact: bool | None = None, chunk_size: int | None = None,
    weight_grad: Tensor | None = None, backend: str | None = None,
) -> PolicyLoss:  # fmt: skip
    """policy_loss(linear_logprobs(hidden, weight, targets).logprobs, ...), in three matrix products instead of four.

    hidden        [B, T, H] with targets [B, T], or packed [M, H] with targets [M] and cu_seqlens
    targets       -100: the token takes no part, whatever the mask says
    weight, bias, temperature, softcap, logit_scale, chunk_size, backend: as in linear_logprobs
    old_logprobs, advantages, mask, cu_seqlens, segments, ref_logprobs, sampling_logprobs, is_weights, weights,
                  normalizer, config: as in policy_loss
    positions     only these tokens take part: a mask, or integers [P] into the flat targets
    return_entropy  measure the entropy even if the config does not need it
    memory        "fast": the gradient is computed with the loss, and backward runs once. "low": the logits are computed
                  again in the backward. "low" runs also where a sequence's ratio needs more tokens at a time than a
                  chunk has rows, and with top_entropy_quantile, where the end tells which tokens are kept
    compact       leave tokens that take no part out of everything, and those without a gradient out of two products
                  in three; None: on the CPU, and with integer positions. On a GPU it waits for the device once
    weight_grad   the weight's gradient is added to this tensor in the forward pass, and weight gets none of its own;
                  for accumulation over micro-batches. The loss must then be given to backward() as it is
    """
    settings = LossConfig.of(config, _OP)
    head = check_head(_OP, hidden, weight, targets, bias, temperature, softcap, logit_scale)
    size = check_chunk_size(_OP, chunk_size)
    _check_form(hidden, cu_seqlens, memory)
    takes_part = _participants(mask, check_positions(_OP, positions, targets), targets, cu_seqlens, segments)
    head = head._replace(targets=torch.where(takes_part.reshape(-1), head.targets, IGNORED))
    want_entropy = return_entropy or settings.entropy_coef != 0 or settings.top_entropy_quantile < 1
    unknown = torch.zeros(head.shape, dtype=head.wide, device=head.hidden.device)
    given = Inputs(
        unknown, old_logprobs, advantages, takes_part, cu_seqlens, segments, ref_logprobs, sampling_logprobs,
        is_weights, unknown if want_entropy else None, None, weights,
    )  # fmt: skip
    prepared = prepare(_OP, given, normalizer, settings)
    chosen = dispatch.select(_OP, backend, hidden.device.type, head.hidden.dtype, op.SUPPORTS, hidden.device.index)
    check_targets(_OP, head, chosen)
    compact = _compacts(compact, positions, head)
    is_fast = memory == "fast" and chosen != "reference" and _is_differentiable(head)
    chunking = _chunking(head, prepared.inputs, settings, compact, size) if is_fast else None
    _check_weight_grad(weight_grad, head, chunking)
    if chunking is None:
        found = linear_logprobs(
            hidden, weight, head.targets.view(head.shape), bias=bias, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, positions=takes_part if compact else None, return_entropy=want_entropy,
            chunk_size=size, backend=chosen,
        )  # fmt: skip
        given = given._replace(logprobs=found.logprobs, entropy=found.entropy)
        return policy_loss_of(_OP, given, normalizer, settings, chosen)
    needs = [tensor is not None and tensor.requires_grad for tensor in head[:3]]
    policy = _policy(prepared, settings)
    loss, metrics = op.apply(chosen, weight_grad, *head.arguments(), *policy, *chunking, needs)
    by_row = advantages.shape != head.shape
    return PolicyLoss(loss, PolicyLossMetrics(metrics, settings, by_row, want_entropy))


def _check_form(hidden: Tensor, cu_seqlens: Tensor | None, memory: str) -> None:
    if hidden.dim() != (3 if cu_seqlens is None else 2):
        raise ValueError(
            f"{_OP}: hidden must have shape [B, T, H], or [M, H] with cu_seqlens, got {list(hidden.shape)}"
        )
    if memory not in ("fast", "low"):
        raise ValueError(f"{_OP}: memory must be 'fast' or 'low', got {memory!r}")


def _is_differentiable(head: LinearHead) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in head[:3])


def _compacts(compact: bool | None, positions: Tensor | None, head: LinearHead) -> bool:
    if compact is None:
        compact = head.hidden.device.type == "cpu" or (positions is not None and positions.dtype != torch.bool)
    return compact and not torch.compiler.is_compiling()


def _participants(
    mask: Tensor | None, places: Tensor | None, targets: Tensor, cu_seqlens: Tensor | None, segments: Tensor | None
) -> Tensor:  # fmt: skip
    takes_part = targets != IGNORED
    if cu_seqlens is not None and cu_seqlens.dim() == 1 and len(cu_seqlens) > 0:
        takes_part = takes_part & (torch.arange(len(targets), device=targets.device) < cu_seqlens[-1])
    if segments is not None and segments.shape == targets.shape:
        takes_part = takes_part & (segments >= 0)
    if mask is not None:
        checks.tensor(_OP, "mask", mask, (torch.bool, *checks.INTEGERS, *checks.FLOATS))
        if mask.shape != targets.shape:
            raise ValueError(
                f"{_OP}: mask must have the shape of targets, {list(targets.shape)}, got {list(mask.shape)}"
            )
        takes_part = takes_part & (mask != 0)
    if places is not None:
        chosen = torch.zeros(targets.numel(), dtype=torch.bool, device=targets.device)
        takes_part = takes_part & chosen.index_fill(0, places, True).view(targets.shape)
    return takes_part


def _check_weight_grad(weight_grad: Tensor | None, head: LinearHead, chunking: op.Chunking | None) -> None:
    if weight_grad is None:
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{_OP}: weight_grad must be None under torch.compile, got a tensor")
    checks.tensor(_OP, "weight_grad", weight_grad, (head.wide, head.weight.dtype))
    checks.same_device(_OP, "weight_grad", weight_grad, head.hidden.device)
    if weight_grad.shape != head.weight.shape:
        raise ValueError(
            f"{_OP}: weight_grad must have the shape of weight, {list(head.weight.shape)}, "
            f"got {list(weight_grad.shape)}"
        )
    if weight_grad.requires_grad or not head.weight.requires_grad:
        raise ValueError(f"{_OP}: weight_grad must be a plain tensor for a weight that requires grad, got otherwise")
    if chunking is None:
        raise ValueError(
            f"{_OP}: weight_grad must be None where memory='low' runs (see memory; the reference and a call "
            "without gradient do, too), got a tensor"
        )


def _policy(prepared: Prepared, settings: LossConfig) -> op.Policy:
    i = prepared.inputs
    return op.Policy(
        i.old_logprobs, i.advantages, i.mask, i.cu_seqlens, i.segments, i.ref_logprobs, i.sampling_logprobs,
        i.is_weights, i.weights, prepared.normalizers, prepared.counts, settings.modes, settings.coefficients,
    )  # fmt: skip


def _chunking(
    head: LinearHead, inputs: Inputs, settings: LossConfig, compact: bool, chunk_size: int | None
) -> op.Chunking | None:
    """None where a chunk's gradient cannot be known before the others are."""
    if settings.top_entropy_quantile < 1:
        return None
    total, columns = len(head.targets), head.weight.shape[0]
    ahead = places = None
    if compact:
        ahead, places = _order(inputs, settings)
    rows = total if places is None else len(places)
    size = chunk_size or op.rows_per_chunk(rows, columns, head.hidden.device.type)
    ends = None
    if _is_of_rows(settings) and rows > size:
        if places is None and inputs.cu_seqlens is None:
            width = head.shape[1]
            longest, size = width, size // max(width, 1) * width
        else:
            ends = _ends(inputs, head.shape, places)
            longest = max(end - start for start, end in zip([0, *ends], ends, strict=False))
        if longest > size or size == 0:
            return None
    gradient = inputs.entropy is not None and settings.entropy_coef != 0
    return op.Chunking(list(head.shape), inputs.entropy is not None, gradient, ahead, places, ends, size)


def _is_of_rows(settings: LossConfig) -> bool:
    """Whether a token's gradient depends on other tokens of its sequence."""
    of_loss = settings.loss in ("vespo", "geo_mean") or settings.ratio != "token"
    return of_loss or settings.correction.startswith("sequence") or settings.off_policy_threshold is not None


def _order(inputs: Inputs, settings: LossConfig) -> tuple[Tensor, Tensor]:
    """The tokens that take part without a gradient, and those with one: known before anything is computed."""
    shape = inputs.logprobs.shape
    takes_part = inputs.mask
    assert takes_part is not None
    moves = takes_part
    has_more = settings.kl_coef != 0 or settings.entropy_coef != 0 or settings.loss == "dro"
    of_token = inputs.advantages.shape == shape
    # a sequence's ratio brings every token the gradients of all of its terms
    if not has_more and not (of_token and _is_of_rows(settings)):
        advantages = inputs.advantages if of_token else _spread(inputs.advantages, inputs)
        moves = takes_part & (advantages != 0)
    kind = torch.where(moves, 1, torch.where(takes_part, 0, 2)).reshape(-1)
    order = kind.argsort(stable=True)
    before, moving, _ = torch.bincount(kind, minlength=3).tolist()
    return order[:before], order[before : before + moving]


def _spread(of_rows: Tensor, inputs: Inputs) -> Tensor:
    shape = inputs.logprobs.shape
    if len(of_rows) == 0:
        return of_rows.new_zeros(shape)
    return of_rows[:, None].expand(shape) if inputs.cu_seqlens is None else of_rows[_rows_of(inputs, shape)]


def _rows_of(inputs: Inputs, shape: torch.Size) -> Tensor:
    """The row of every token; of those behind the last one, the last."""
    count = math.prod(shape)
    place = torch.arange(count, device=inputs.logprobs.device)
    if inputs.cu_seqlens is None:
        return place // max(shape[1], 1)
    rows = torch.searchsorted(inputs.cu_seqlens[1:].contiguous(), place, right=True)
    return rows.clamp(max=max(len(inputs.cu_seqlens) - 2, 0))


def _ends(inputs: Inputs, shape: torch.Size, places: Tensor | None) -> list[int]:
    """Where sequences end, counted in the rows that are computed."""
    rows = _rows_of(inputs, shape)
    rows = rows if places is None else rows[places]
    count = shape[0] if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
    ends = torch.bincount(rows, minlength=count).cumsum(0)
    return [int(end) for end in ends.tolist()]
