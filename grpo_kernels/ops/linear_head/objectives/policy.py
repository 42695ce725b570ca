"""The policy loss, whose gradient is known as soon as the log-probs of a chunk are.

The gradient of a token depends on its own log-prob, and on those of its sequence if the ratio does, so a chunk can be
finished while its logits are in memory: policy_loss is called for the whole batch, of which the log-probs of the chunks
so far are known, and the part of its gradient that belongs to the chunk is final. That costs a thousandth of a product,
and the last call gives the loss.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_kernels import shared_positions
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.head import Head, Measurements, Want
from grpo_kernels.ops.linear_head.products import Chunk, Products, Tokens, Upstream
from grpo_kernels.ops.policy_loss import registration as policy_loss
from grpo_kernels.ops.policy_loss.reference import Policy, PolicyInputs


@op_inputs
class PolicyTerms:
    """The terms of a policy loss.

    Attributes:
        shape: of the terms
        term_index: the token of every term, -1 for padding; None means that they are the tokens
        has_bonus: the loss has an entropy bonus
    """

    policy: Policy
    shape: list[int]
    term_index: Tensor | None
    has_bonus: bool

    def by_term(self, values: Tensor) -> Tensor:
        """The value of each term's token."""
        return (values if self.term_index is None else shared_positions.gather(values, self.term_index)).view(
            self.shape
        )

    def by_token(self, by_term: Tensor, tokens: int) -> Tensor:
        """The sum over the terms of each token."""
        if self.term_index is None:
            return by_term
        return shared_positions.add_up(by_term, self.term_index, tokens)


class PolicyLossObjective:
    """`reference` is the reference model's head, instead of its log-probs."""

    def __init__(self, products: Products, terms: PolicyTerms, reference: Head | None, want: Want) -> None:
        self.products, self.terms, self.want = products, terms, want
        self.measured = Measurements.zeros(products.head, want, with_normalizer=False)
        self.loss: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.reference = None if reference is None else products.beside(reference)
        if self.reference is not None:
            self.ref_logprobs = torch.zeros_like(self.measured.logprobs)

    def before(self, tokens: Tokens) -> None:
        """Measures the reference model, whose logits are overwritten by the policy's."""
        if self.reference is not None:
            self.ref_logprobs[tokens] = self.reference.measure(tokens).measured.logprobs

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> Upstream | None:
        self.measured.keep(chunk.measured, tokens)
        if upstream is None:
            return None
        self.loss = self._loss()
        by_logprob, by_entropy = self.loss[2:]
        return upstream._replace(
            by_logprob=by_logprob[tokens], by_entropy=by_entropy[tokens] if self.terms.has_bonus else None
        )

    def results(self) -> dict[str, Tensor]:
        loss, metrics, *_ = self.loss or self._loss()
        return {"loss": loss, "metrics": metrics, **self.measured._asdict()}

    def _loss(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, metrics, and the gradients by log-prob and entropy of every token."""
        terms, policy, (logprobs, entropies, *_) = self.terms, self.terms.policy, self.measured
        if self.reference is not None:
            policy = dataclasses.replace(policy, ref_logprobs=terms.by_term(self.ref_logprobs))
        entropy = terms.by_term(entropies) if self.want.entropy else None
        backend = policy_loss.beside(self.products.backend, logprobs.device, logprobs.dtype)
        inputs = PolicyInputs(terms.by_term(logprobs), entropy, policy, terms.has_bonus)
        loss, metrics, by_logprob, by_entropy = policy_loss.apply_with_gradients(backend, inputs)
        by_entropy = terms.by_token(by_entropy, len(logprobs)) if terms.has_bonus else by_entropy
        return loss, metrics, terms.by_token(by_logprob, len(logprobs)), by_entropy
