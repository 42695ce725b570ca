"""A teacher of the head's tests: what it holds, and the divergence from it by a loop over the tokens.

It has a few ids of each token, or with the feature "whole" hidden states and a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.linear_head import heads
from tests.ops.linear_head.heads import F64, INF, NAN, noise
from tests.ops.promises import Inputs, Results

KINDS, TAILS = ("forward_kl", "reverse_kl", "jsd"), ("bucket", "ignore", "renormalise")
# Features that `draw_teacher` gives a teacher.
TEACHERS = ("unused slots", "teacher mask", "teacher weights", "teacher normalizer", "sure student", "sure teacher")


def draw_teacher(head: Inputs, *features: str, k: int = 4, kind: str = "jsd", tail: str = "bucket") -> Inputs:
    """A teacher's fields; some tokens may have fewer ids than others, or none."""
    shape, allowed = head["hidden"].shape[:-1], heads.allowed_by(head)
    logprobs, places = (2 * noise(*shape, len(allowed))).log_softmax(-1).topk(min(k, len(allowed)), -1)
    inputs: Inputs = {"teacher_kind": kind, "teacher_coef": -0.7} | ({"teacher_beta": 0.3} if kind == "jsd" else {})
    if "whole" in features:
        inputs |= heads.draw_other("teacher_", head, *features)
    else:
        ids = allowed[places]
        if "sure teacher" in features:  # of one id, all that float32 knows of the rest
            ids, logprobs = ids[..., :1], 0 * logprobs[..., :1]
        if "unused slots" in features:
            is_unused = torch.rand(ids.shape) < 0.4
            ids, logprobs = torch.where(is_unused, -1, ids), torch.where(is_unused, NAN, logprobs)
        inputs |= {"teacher_ids": ids, "teacher_logprobs": logprobs, "teacher_tail": tail}
    if "teacher mask" in features:
        inputs["teacher_mask"] = torch.randint(3, shape)
    if "teacher weights" in features:
        inputs["teacher_weights"] = noise(*shape)
    if "teacher normalizer" in features:
        inputs["teacher_normalizer"] = 7.0 if "gaps" in features else torch.tensor([7.0], dtype=F64)
    return inputs


def teacher_of(inputs: Inputs) -> gk.Teacher | None:
    fields = {name.removeprefix("teacher_"): value for name, value in inputs.items() if name.startswith("teacher_")}
    fields = {name: value for name, value in fields.items() if name not in heads.FIELDS}
    return gk.Teacher(**fields, head=heads.head_of(inputs, "teacher_")) if fields else None


# The definition


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(log_p == -INF, 0, log_p.exp() * (log_p.clamp(min=-1e300) - log_q)).sum()


def divergence_of_token(log_q: Tensor, ids: list[int], log_p: list[float], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Divergence and the student's mass, from the log-probabilities of its whole vocabulary."""
    said = {i: value for i, value in zip(ids, log_p, strict=True) if i != -1}
    others = [i for i in range(len(log_q)) if i not in said and log_q[i] > -INF]
    student, teacher = log_q[[*said]], torch.tensor([*said.values()], dtype=log_q.dtype)
    mass = student.exp().sum()
    tail = inputs.get("teacher_tail")
    if tail == "renormalise":
        student, teacher = student - student.logsumexp(0), teacher - teacher.logsumexp(0)
    if tail == "bucket" and others:
        rest = (1 - teacher.exp().sum()).clamp(min=2.0**-24).log()
        student, teacher = torch.cat([student, log_q[others].logsumexp(0)[None]]), torch.cat([teacher, rest[None]])
    if inputs["teacher_kind"] != "jsd":
        pair = (teacher, student) if inputs["teacher_kind"] == "forward_kl" else (student, teacher)
        return kl(*pair), mass
    beta = inputs["teacher_beta"]
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture), mass


def divergences(inputs: Inputs, counts: Tensor) -> Results:
    """The loss of a teacher, coef included, divergences and masses of tokens of which only some count."""
    if "teacher_mask" in inputs:
        counts = counts & (inputs["teacher_mask"] != 0)
    shares = torch.where(counts, inputs.get("teacher_weights", 1.0), 0.0).double()
    if "teacher_normalizer" in inputs:
        shares = shares / inputs["teacher_normalizer"]
    elif "teacher_weights" not in inputs:
        shares = shares / counts.sum().clamp(min=1)
    own = {name: value for name, value in inputs.items() if name != "support"}
    if "teacher_hidden" in inputs:  # all ids that neither head bans
        if "banned" in own:
            own |= dict.fromkeys(("banned", "teacher_banned"), torch.cat([own["banned"], own["teacher_banned"]]))
        log_p = heads.distribution(own, counts, "teacher_").detach().tolist()
        ids = [heads.allowed_by(own).tolist()] * len(log_p)
        log_p = [[of_token[i] for i in kept] for of_token, kept in zip(log_p, ids, strict=True)]
    else:
        ids, log_p = (inputs[f"teacher_{name}"].flatten(0, -2).tolist() for name in ("ids", "logprobs"))
    log_q = heads.distribution(own, counts)
    pairs = [(log_q.new_zeros(()), log_q.new_zeros(()))] * counts.numel()
    for token in counts.reshape(-1).nonzero()[:, 0].tolist():
        pairs[token] = divergence_of_token(log_q[token], ids[token], log_p[token], inputs)
    values = torch.stack([torch.stack(pair) for pair in pairs]) if pairs else log_q.new_zeros(0, 2)
    divergence, mass = values.view(*counts.shape, 2).unbind(-1)
    loss = inputs["teacher_coef"] * (shares * divergence).sum() + 0 * log_q.clamp(min=-1e30).sum()
    return {"loss": loss, "divergence": divergence.detach(), "mass": mass.detach()}
