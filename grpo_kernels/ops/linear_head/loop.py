"""The chunk loop of the LM head's ops, and its registration with torch.

The logits of one chunk of tokens are in memory at a time. An objective reads them, and where it knows their gradient at
once, the forward pass computes that of the head's factors, too: three matrix products instead of four.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.divergence import Distillation
from grpo_kernels.ops.linear_head.head import FACTORS, Head, Shard, Want
from grpo_kernels.ops.linear_head.objectives import Objective
from grpo_kernels.ops.linear_head.objectives.logprobs import Logprobs, LogprobsGradient
from grpo_kernels.ops.linear_head.objectives.policy import PolicyLossObjective, PolicyTerms
from grpo_kernels.ops.linear_head.objectives.top_k import TopK
from grpo_kernels.ops.linear_head.objectives.whole_teacher import WholeTeacherObjective
from grpo_kernels.ops.linear_head.products import (
    Chunk,
    Gradients,
    Known,
    Products,
    Tokens,
    Upstream,
    tokens_with_grad,
)
from grpo_kernels.ops.linear_head.sizes import chunks, tokens_per_chunk
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED

SUPPORTS = token_logprobs.SUPPORTS
_KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}


@op_inputs
class Plan:
    """Which tokens are computed, and how many at a time.

    Attributes:
        without_grad: tokens without a gradient, measured before all others
        with_grad: tokens with a gradient; None means all tokens, or on a CPU those that Call.factors_of_tokens tell
        ends: ends of the sequences among the tokens with a gradient, where chunks may end; None means anywhere
        chunk_tokens: tokens of a chunk; 0 means chosen from the shapes
        product_tokens: tokens of a product for the gradients in half precision; 0 likewise
    """

    without_grad: Tensor | None = None
    with_grad: Tensor | None = None
    ends: list[int] | None = None
    chunk_tokens: int = 0
    product_tokens: int = 0


@op_inputs
class Call:
    """The task of one run of the loop: log-probs, unless it has a loss, and the gradients of some factors.

    Attributes:
        policy: the policy loss
        teacher: a divergence from a teacher, perhaps beside the policy loss
        other: head of another model for the same tokens: the policy's reference, or a teacher whose ids are not given
        known: of log-probs whose gradient is computed
        needs: whether hidden states, weight, bias and the adapter's A and B need a gradient
    """

    head: Head
    policy: PolicyTerms | None = None
    teacher: Distillation | None = None
    other: Head | None = None
    known: Known | None = None
    want_entropy: bool = False
    want_squares: bool = False
    plan: Plan | None = None
    needs: list[bool] = dataclasses.field(default_factory=lambda: [False] * len(FACTORS))

    @property
    def want(self) -> Want:
        return Want(self.want_entropy, self.want_squares)

    @property
    def has_loss(self) -> bool:
        return self.policy is not None or self.teacher is not None

    @property
    def results(self) -> list[str]:
        """Names of what a run returns: a loss first, as it has the gradient, and [N] but for the first three.

        `distillation` is the part of the loss that is a divergence from a teacher; `normalizer` are log-sum-exps.
        """
        if self.known is not None:
            return []
        of_tokens = ["logprobs", *["entropy"] * self.want_entropy, *["sum_pi_squared"] * self.want_squares]
        if not self.has_loss:
            return [*of_tokens, "normalizer"]
        of_policy = [] if self.policy is None else ["metrics", *of_tokens]
        return ["loss", *of_policy, *([] if self.teacher is None else ["distillation", "divergence", "mass"])]

    def scaled(self, upstream: Tensor) -> Call:
        """A distillation whose loss is multiplied by that."""
        assert self.teacher is not None
        teacher = dataclasses.replace(self.teacher, shares=self.teacher.shares * upstream)
        return dataclasses.replace(self, teacher=teacher)

    @property
    def factors_of_tokens(self) -> list[Tensor | None]:
        """Without a policy loss: all that the gradient of a token is multiplied by."""
        if self.known is not None:
            return [self.known.by_logprobs, self.known.by_entropy]
        return [] if self.teacher is None else [self.teacher.shares]


def run(backend: str, call: Call, into: Tensor | None = None, shard: Shard | None = None) -> list[Tensor]:
    """Computes what the call names as its results, and the gradients of the head's factors if any is needed.

    Args:
        into: tensor that the weight's gradient is added to
    """
    head, plan = call.head if shard is None else shard.part(call.head), call.plan or Plan()
    with_grad, device = plan.with_grad, head.hidden.device
    if with_grad is None and call.policy is None:
        with_grad = tokens_with_grad(*call.factors_of_tokens)
    wants_grad = any(call.needs)
    if with_grad is None and wants_grad:
        head = head.without(head.targets == IGNORED)
    total = (head.targets if with_grad is None else with_grad).shape[0]
    before = 0 if plan.without_grad is None else plan.without_grad.shape[0]
    size = plan.chunk_tokens or tokens_per_chunk(total, head.weight.shape[0], device.type, head.weight.dtype)
    has_padding = shard is not None or (call.teacher is not None and call.teacher.ids is not None)
    # log-probs alone, and two heads' logits, are combined by their objective
    of_chunk = shard if call.policy is not None or (call.teacher is not None and call.teacher.ids is not None) else None
    products = Products(backend, head, min(size, max(total, before)), has_padding, of_chunk)
    policy = None
    if call.policy is not None:
        policy = PolicyLossObjective(products, call.policy, call.other, call.want)
    objective = _objective(products, call, policy, shard)
    gradients = None
    if wants_grad:
        is_sparse = device.type == "cpu" or with_grad is not None
        looks = call.policy is not None
        gradients = Gradients(products, call.needs, total, plan.product_tokens, into, is_sparse, looks)

    # of which the gradient by the logits is a multiple in every row if it is one by log-probs alone
    reads_logprobs = call.teacher is None and call.policy is not None and not call.policy.has_bonus
    takes_exponentials = products.has_exponentials and reads_logprobs

    def measure(tokens: Tokens, of: Objective, exponentials: Tensor | None = None) -> Chunk:
        ids = of.before(tokens)  # which may use the memory of the logits
        return products.measure(tokens, call.want, ids, call.known, exponentials)

    with torch.autocast(device.type, enabled=False):
        for part in chunks(before, size):
            others = cast(Tensor, plan.without_grad)[part]
            of_policy = cast(Objective, policy)  # alone, as these tokens have no share in a distillation
            of_policy.read(measure(others, of_policy), others, None)
        for part in chunks(total, size, plan.ends):
            tokens: Tokens = part if with_grad is None else with_grad[part]
            place = None if gradients is None else gradients.place(part.stop - part.start)
            chunk = measure(tokens, objective, place if takes_exponentials else None)
            upstream = None if gradients is None else Upstream(chunk.logits if place is None else place)
            upstream = objective.read(chunk, tokens, upstream)
            if gradients is not None and upstream is not None:
                gradients.add(chunk, upstream, tokens)
        found = objective.results()
        results = [found[name] for name in call.results]
        if gradients is None:
            return results
        by_factors = gradients.finish()
        if shard is not None:
            shard.complete(by_factors, call.needs)
    return [*results, *by_factors]


def _objective(products: Products, call: Call, policy: Objective | None, shard: Shard | None) -> Objective:
    if call.teacher is not None and call.teacher.ids is None:
        assert call.other is not None and policy is None
        return WholeTeacherObjective(products, call.teacher, call.other, shard)
    if call.teacher is not None:
        return TopK(products, call.head.targets, call.teacher, policy)
    if call.known is not None:
        return LogprobsGradient(call.known)
    return policy or Logprobs(products.head, call.want, shard)


def _fake_gradients(head: Head, needs: list[bool]) -> tuple[Tensor, ...]:
    """The layout of Gradients.finish: empty where no gradient is needed."""

    def gradient(factor: Tensor | None, is_needed: bool, dimensions: int) -> Tensor:
        if factor is None:
            return head.hidden.new_empty((0,) * dimensions, dtype=head.wide)
        return factor.new_empty(factor.shape if is_needed else (0,) * dimensions)

    return tuple(map(gradient, head.factors, needs, (1, 2, 1, 2, 2)))


def _fake(call: Call) -> list[Tensor]:
    head = call.head
    shapes: dict[str, tuple[int, ...]] = {"loss": (), "distillation": (), "metrics": (len(METRICS),)}
    wide = {"metrics": torch.float64, "normalizer": torch.float64}
    results = [
        head.hidden.new_empty(shapes.get(name, head.targets.shape), dtype=wide.get(name, head.wide))
        for name in call.results
    ]
    return [*results, *_fake_gradients(head, call.needs)] if any(call.needs) else results


RUN = registry.ComposedOp("linear_head", Call, "Tensor[]", _KERNELS, _fake, run)
