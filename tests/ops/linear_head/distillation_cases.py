"""Batches of linear_distillation_loss, and its definition: whole logits, and a loop over the tokens.

A teacher has a few ids of each token, or with the feature "whole" hidden states and a head.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.ops.linear_head import heads
from tests.ops.linear_head.heads import F64, HEADS, INF, NAN, SUPPORTS, leaves_of, noise
from tests.ops.promises import Inputs, Op, Results, Same, run

KINDS, TAILS = ("forward_kl", "reverse_kl", "jsd"), ("bucket", "ignore", "renormalise")
TEACHERS = ("unused slots", "teacher mask", "teacher weights", "teacher normalizer", "sure student", "sure teacher")


def draw_teacher(head: Inputs, *features: str, k: int = 4, kind: str = "jsd", tail: str = "bucket") -> Inputs:
    """A teacher's fields; some tokens may have fewer ids than others, or none."""
    shape, allowed = head["hidden"].shape[:-1], heads.allowed_by(head)
    logprobs, places = (2 * noise(*shape, len(allowed))).log_softmax(-1).topk(min(k, len(allowed)), -1)
    inputs: Inputs = {"teacher_kind": kind, "teacher_coef": -0.7} | ({"teacher_beta": 0.3} if kind == "jsd" else {})
    if "whole" in features:
        inputs |= draw_whole(head, *features)
    else:
        inputs |= {"teacher_ids": allowed[places], "teacher_logprobs": logprobs, "teacher_tail": tail}
    if "whole" not in features and "sure teacher" in features:  # of one id, all that float32 knows of the rest
        inputs["teacher_ids"], inputs["teacher_logprobs"] = inputs["teacher_ids"][..., :1], 0 * logprobs[..., :1]
    if "whole" not in features and "unused slots" in features:
        is_unused = torch.rand(inputs["teacher_ids"].shape) < 0.4
        inputs["teacher_ids"] = torch.where(is_unused, -1, inputs["teacher_ids"])
        inputs["teacher_logprobs"] = torch.where(is_unused, NAN, inputs["teacher_logprobs"])
    if "teacher mask" in features:
        inputs["teacher_mask"] = torch.randint(3, shape)
    if "teacher weights" in features:
        inputs["teacher_weights"] = noise(*shape)
    if "teacher normalizer" in features:
        inputs["teacher_normalizer"] = 7.0 if "gaps" in features else torch.tensor([7.0], dtype=F64)
    return inputs


def draw_whole(head: Inputs, *features: str) -> Inputs:
    """Hidden states of another width, and a head with a bias and the features of the student's."""
    width, columns = 3, len(head["weight"])
    inputs: Inputs = {"teacher_hidden": noise(*head["hidden"].shape[:-1], width)}
    inputs |= {"teacher_weight": noise(columns, width), "teacher_bias": noise(columns)}
    if "lora" in features:
        inputs |= {"teacher_lora_a": noise(2, width), "teacher_lora_b": noise(columns, 2)}
    if "scaled" in features:
        inputs |= {"teacher_softcap": 20.0, "teacher_logit_scale": 0.75}
    if "banned" in features:
        inputs["teacher_banned"] = torch.cat([head["banned"][:1], heads.allowed_by(head)[:1]])
    return inputs


def draw(*features: str, shape: tuple[int, ...] = (5, 4), columns: int = 31, **teacher: Any) -> Inputs:
    inputs = heads.draw_head(shape, *features, columns=columns)
    del inputs["targets"]
    inputs |= draw_teacher(inputs, *features, **teacher)
    if "sure student" in features and "bias" in features:
        inputs["bias"][heads.allowed_by(inputs)[:2]] += 60
    if "gaps" in features:
        inputs["mask"] = torch.rand(shape) < 0.7
    return inputs


def with_garbage(inputs: Inputs) -> Inputs:
    """Tokens that do not count hold no numbers, and ids that there are not."""
    is_out = ~counted(inputs, inputs["hidden"].shape[:-1])
    filled = dict(inputs)
    for name in ("hidden", "teacher_hidden", "teacher_logprobs", "teacher_weights", "temperature", "teacher_ids"):
        if isinstance(value := inputs.get(name), Tensor):
            junk = NAN if value.is_floating_point() else 10**6
            filled[name] = torch.where(is_out.view(is_out.shape + (1,) * (value.dim() - is_out.dim())), junk, value)
    return filled


@st.composite
def problems(draw_: st.DrawFn) -> Inputs:
    torch.manual_seed(draw_(st.integers(0, 1000)))
    shape = draw_(st.sampled_from(((11,), (3, 4), (1,), (0,), (2, 1, 3))))
    columns = draw_(st.sampled_from((5, 31, 40)))
    features = draw_(st.sets(st.sampled_from((*HEADS, *TEACHERS, "gaps", "whole"))))
    k = draw_(st.sampled_from((1, 4, columns)))
    kind, tail = draw_(st.sampled_from(KINDS)), draw_(st.sampled_from(TAILS))
    inputs = draw(*features, shape=shape, columns=columns, k=k, kind=kind, tail=tail)
    return with_garbage(inputs) | {"chunk_size": draw_(st.sampled_from((None, 1, 4, 100)))}


# The definition


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(log_p == -INF, 0, log_p.exp() * (log_p.clamp(min=-1e300) - log_q)).sum()


def divergence_of_token(log_q: Tensor, ids: list[int], log_p: list[float], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Divergence and the student's mass, from the log-probabilities of its whole vocabulary."""
    used = [(i, value) for i, value in zip(ids, log_p, strict=True) if i != -1]
    chosen = [i for i, _ in used]
    others = [i for i in range(len(log_q)) if i not in chosen and log_q[i] > -INF]
    student, teacher = [log_q[i] for i in chosen], [value for _, value in used]
    mass = log_q[chosen].exp().sum()
    tail = inputs.get("teacher_tail")
    if tail == "renormalise" and student:
        student = [value - torch.stack(student).logsumexp(0) for value in student]
        teacher = [value - math.log(sum(map(math.exp, teacher))) for value in teacher]
    if tail == "bucket" and others:
        student.append(log_q[others].logsumexp(0))
        teacher.append(math.log(max(1 - sum(map(math.exp, teacher)), 2.0**-24)))
    if not student:
        return log_q.new_zeros(()), mass
    q, p = torch.stack(student), torch.tensor(teacher, dtype=log_q.dtype)
    if inputs["teacher_kind"] != "jsd":
        return kl(p, q) if inputs["teacher_kind"] == "forward_kl" else kl(q, p), mass
    beta = inputs["teacher_beta"]
    mixture = torch.logaddexp(p + math.log(beta), q + math.log(1 - beta))
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture), mass


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


def counted(inputs: Inputs, shape: torch.Size) -> Tensor:
    counts = inputs["mask"] if "mask" in inputs else torch.ones(shape, dtype=torch.bool)
    return counts & (inputs["teacher_mask"] != 0) if "teacher_mask" in inputs else counts


def by_definition(inputs: Inputs) -> Results:
    return divergences(inputs, counted(inputs, inputs["hidden"].shape[:-1]))


# The op


def teacher_of(inputs: Inputs) -> gk.Teacher | None:
    fields = {name.removeprefix("teacher_"): value for name, value in inputs.items() if name.startswith("teacher_")}
    fields = {name: value for name, value in fields.items() if name not in heads.FIELDS}
    return gk.Teacher(**fields, head=heads.head_of(inputs, "teacher_")) if fields else None


def call(inputs: Inputs, backend: str | None) -> Results:
    arguments = heads.arguments_of(inputs) | {"teacher": teacher_of(inputs)}
    return gk.linear_distillation_loss(**arguments, backend=backend)._asdict()


def op_of(inputs: Inputs) -> Op:
    return Op(lambda: inputs, call, SUPPORTS, leaves_of(inputs))


def defined(inputs: Inputs) -> Results:
    """The definition with its gradients."""
    op = dataclasses.replace(op_of(inputs), call=lambda given, backend: by_definition(given))
    return run(op, inputs, "reference", F64)


# For test_promises.py


def in_micro_batches(inputs: Inputs) -> Same:
    """Rows apart, divided by the number of tokens of all."""
    return heads.in_micro_batches(inputs, of_rows=True, teacher_normalizer=float(inputs["mask"].sum()))


def described(teacher: tuple[str, ...], *features: str) -> Op:
    return Op(
        lambda: draw("bias", "lora", "temperatures", "gaps", *features),
        call,
        SUPPORTS,
        heads.LEAVES,
        ignored=lambda inputs: dict.fromkeys(("hidden", *teacher), ~inputs["mask"]),
        rewrites={"micro-batches": in_micro_batches},
        adds_in_any_order=True,
        multiplies=True,
    )


OPS = {
    "linear_distillation_loss": described(("teacher_ids", "teacher_logprobs"), "banned"),
    "linear_distillation_loss from hidden states": described(("teacher_hidden",), "whole"),
}
