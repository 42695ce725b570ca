"""Heads and batches of linear_distillation_loss, and its definition: whole logits, and a loop over the tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.logprobs_op import SUPPORTS
from tests.harness import runnable_backends
from tests.ops.promises import Inputs, Op, Results, Same, run

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NAN, INF = math.nan, math.inf
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
EXACT = [name for name in runnable_backends(SUPPORTS, F64) if name in ("cpu", "reference")]
KINDS, TAILS = ("forward_kl", "reverse_kl", "jsd"), ("bucket", "ignore", "renormalise")
LORA_SCALE = 0.7
# Fields of a head, under which names inputs have them; those of the reference model's head begin with "ref_".
FIELDS = ("weight", "bias", "lora_a", "lora_b", "softcap", "logit_scale", "banned", "vocab_start", "process_group")
LEAVES = ("hidden", "weight", "bias", "lora_a", "lora_b")
HEADS = ("bias", "lora", "scaled", "temperatures", "banned")
TEACHERS = ("unused slots", "teacher mask", "teacher weights", "teacher normalizer", "sure student", "sure teacher")


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def draw_head(shape: tuple[int, ...], features: set[str], columns: int = 31, width: int = 5) -> tuple[Inputs, Tensor]:
    """Hidden states, targets and a head with these features, and the columns that it does not ban."""
    inputs: Inputs = {"hidden": noise(*shape, width), "weight": noise(columns, width)}
    allowed = torch.randperm(columns)
    if "bias" in features:
        inputs["bias"] = noise(columns)
    if "lora" in features:
        inputs |= {"lora_a": noise(2, width), "lora_b": 0.3 * noise(columns, 2)}
    if "scaled" in features:
        inputs |= {"softcap": 5.0, "logit_scale": 1.3, "temperature": 0.7}
    if "temperatures" in features:
        inputs["temperature"] = torch.rand(shape, dtype=F64) + 0.5
    if "banned" in features:
        inputs["banned"], allowed = allowed[: columns // 4], allowed[columns // 4 :]
    inputs["targets"] = allowed[torch.randint(len(allowed), shape)]
    return inputs, allowed


def draw_teacher(
    shape: tuple[int, ...], allowed: Tensor, features: set[str], k: int = 4, kind: str = "jsd", tail: str = "bucket"
) -> Inputs:
    """A teacher's fields; some tokens may have fewer ids than others, or none."""
    logprobs, places = (2 * noise(*shape, len(allowed))).log_softmax(-1).topk(min(k, len(allowed)), -1)
    inputs: Inputs = {"teacher_ids": allowed[places], "teacher_logprobs": logprobs, "teacher_coef": -0.7}
    inputs |= {"teacher_kind": kind, "teacher_tail": tail}
    if kind == "jsd":
        inputs["teacher_beta"] = 0.3
    if "sure teacher" in features:  # of one id, all that float32 knows of the rest
        inputs["teacher_ids"], inputs["teacher_logprobs"] = inputs["teacher_ids"][..., :1], 0 * logprobs[..., :1]
    if "unused slots" in features:
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


def draw(features: set[str], shape: tuple[int, ...] = (5, 4), columns: int = 31, **teacher: Any) -> Inputs:
    inputs, allowed = draw_head(shape, features, columns)
    del inputs["targets"]
    inputs |= draw_teacher(shape, allowed, features, **teacher)
    if "sure student" in features and "bias" in features:
        inputs["bias"][allowed[:2]] += 60
    if "gaps" in features:
        inputs["mask"] = torch.rand(shape) < 0.7
    return inputs


def with_garbage(inputs: Inputs) -> Inputs:
    """Tokens that do not count hold no numbers, and ids that there are not."""
    is_out = ~counted(inputs, inputs["hidden"].shape[:-1])
    filled = dict(inputs)
    for name in ("hidden", "teacher_logprobs", "teacher_weights", "temperature", "teacher_ids"):
        if isinstance(value := inputs.get(name), Tensor):
            junk = NAN if value.is_floating_point() else 10**6
            filled[name] = torch.where(is_out.view(is_out.shape + (1,) * (value.dim() - is_out.dim())), junk, value)
    return filled


@st.composite
def problems(draw_: st.DrawFn) -> Inputs:
    torch.manual_seed(draw_(st.integers(0, 1000)))
    shape = draw_(st.sampled_from(((11,), (3, 4), (1,), (0,), (2, 1, 3))))
    columns = draw_(st.sampled_from((5, 31, 40)))
    features = draw_(st.sets(st.sampled_from((*HEADS, *TEACHERS, "gaps"))))
    k = draw_(st.sampled_from((1, 4, columns)))
    inputs = draw(features, shape, columns, k=k, kind=draw_(st.sampled_from(KINDS)), tail=draw_(st.sampled_from(TAILS)))
    return with_garbage(inputs) | {"chunk_size": draw_(st.sampled_from((None, 1, 4, 100)))}


# The definition


def fields_of(inputs: Inputs, prefix: str) -> Inputs:
    """Fields of the policy's head, or of the reference model's by the rules of ref_head."""
    fields = {name: inputs[name] for name in FIELDS if name in inputs}
    others = {name: inputs[prefix + name] for name in FIELDS if prefix + name in inputs}
    if not prefix or len(others) > 1:
        return others
    lost = ("lora_a", "lora_b", "bias") if others else ("lora_a", "lora_b")
    return {name: value for name, value in fields.items() if name not in lost} | others


def distribution(inputs: Inputs, counts: Tensor, prefix: str = "") -> Tensor:
    """Log-probabilities [N, V] of all columns, from the whole logits; those of tokens that do not count are numbers."""
    head, hidden = fields_of(inputs, prefix), inputs[prefix + "hidden"]
    hidden = torch.where(counts[..., None], hidden, 0).flatten(0, -2)
    x = hidden @ head["weight"].T
    if "lora_a" in head:
        x = x + LORA_SCALE * (hidden @ head["lora_a"].T @ head["lora_b"].T)
    x = (x + head.get("bias", 0)) * head.get("logit_scale", 1.0)
    if "softcap" in head:
        x = head["softcap"] * torch.tanh(x / head["softcap"])
    temperature = inputs.get("temperature", 1.0)
    if isinstance(temperature, Tensor):
        temperature = torch.where(counts, temperature.expand_as(counts), 1).reshape(-1, 1)
    x = x / temperature
    if "banned" in head:
        x = x.index_fill(1, head["banned"], -INF)
    if "support" in inputs:
        ids, bounds = inputs["support"]
        kept = torch.zeros(x.shape, dtype=torch.bool)
        kept[torch.repeat_interleave(torch.arange(len(x)), bounds.diff()), ids] = True
        x = torch.where(kept | ~counts.reshape(-1, 1), x, -INF)
    return x.log_softmax(1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.where(log_p == -INF, 0, log_p.exp() * (log_p.clamp(min=-1e300) - log_q)).sum()


def divergence_of_token(log_q: Tensor, ids: list[int], log_p: list[float], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Divergence and the student's mass, from the log-probabilities of its whole vocabulary."""
    used = [(i, value) for i, value in zip(ids, log_p, strict=True) if i != -1]
    chosen = [i for i, _ in used]
    others = [i for i in range(len(log_q)) if i not in chosen and log_q[i] > -INF]
    student, teacher = [log_q[i] for i in chosen], [value for _, value in used]
    mass = log_q[chosen].exp().sum()
    if inputs["teacher_tail"] == "renormalise" and student:
        student = [value - torch.stack(student).logsumexp(0) for value in student]
        teacher = [value - math.log(sum(map(math.exp, teacher))) for value in teacher]
    if inputs["teacher_tail"] == "bucket" and others:
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
    log_q = distribution({name: value for name, value in inputs.items() if name != "support"}, counts)
    ids, log_p = (inputs[f"teacher_{name}"].flatten(0, -2).tolist() for name in ("ids", "logprobs"))
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


def head_of(inputs: Inputs, prefix: str = "") -> gk.LMHead | Tensor | None:
    """The head of these fields: an LMHead, its weight if there is nothing else, or None."""
    fields = {name: inputs[prefix + name] for name in FIELDS if prefix + name in inputs}
    if len(fields) <= 1:
        return fields.get("weight")
    if "lora_a" in fields:
        fields["lora"] = (fields.pop("lora_a"), fields.pop("lora_b"), LORA_SCALE)
    return gk.LMHead(**fields)


def teacher_of(inputs: Inputs) -> gk.Teacher | None:
    fields = {name.removeprefix("teacher_"): value for name, value in inputs.items() if name.startswith("teacher_")}
    return gk.Teacher(**fields) if fields else None


def without_fields(inputs: Inputs) -> Inputs:
    """Inputs that are arguments of the op themselves."""
    fields = {*FIELDS, *(f"ref_{name}" for name in FIELDS)}
    return {name: value for name, value in inputs.items() if name not in fields and not name.startswith("teacher_")}


def call(inputs: Inputs, backend: str | None) -> Results:
    arguments = without_fields(inputs)
    hidden, head, teacher = arguments.pop("hidden"), head_of(inputs), teacher_of(inputs)
    return gk.linear_distillation_loss(hidden, head, teacher, **arguments, backend=backend)._asdict()


def op_of(inputs: Inputs) -> Op:
    return Op(lambda: inputs, call, SUPPORTS, tuple(name for name in LEAVES if name in inputs))


def defined(inputs: Inputs) -> Results:
    """The definition with its gradients."""
    op = dataclasses.replace(op_of(inputs), call=lambda given, backend: by_definition(given))
    return run(op, inputs, "reference", F64)


def rounded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same numbers as the dtype holds them."""
    return {
        name: value.to(dtype).double() if isinstance(value, Tensor) and value.dtype == F64 else value
        for name, value in inputs.items()
    }


def assert_close(got: Results, expected: Results, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, of=name: f"{of}: {text}"
        )


# For test_promises.py


PER_TOKEN = ("hidden", "teacher_ids", "teacher_logprobs", "mask", "temperature")
OF_TOKEN = ("d_hidden", "divergence", "mass")  # results


def of_tokens(
    inputs: Inputs, change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], **more: Any
) -> Same:
    """Tokens in another form."""
    moved = inputs | {name: change(inputs[name]) for name in PER_TOKEN} | more
    return Same([moved], lambda results: {n: back(v) if n in OF_TOKEN else v for n, v in results[0].items()})


def in_another_order(inputs: Inputs) -> Same:
    order = torch.randperm(len(inputs["hidden"]))
    return of_tokens(inputs, lambda value: value[order], lambda value: value[order.argsort()])


def in_one_dimension(inputs: Inputs) -> Same:
    shape = inputs["hidden"].shape[:-1]
    return of_tokens(inputs, lambda value: value.flatten(0, 1), lambda value: value.unflatten(0, shape), chunk_size=3)


def in_micro_batches(inputs: Inputs) -> Same:
    """Rows apart, divided by the number of tokens of all."""
    count = float(inputs["mask"].sum())
    parts = [
        inputs | {name: inputs[name][part] for name in PER_TOKEN} | {"teacher_normalizer": count}
        for part in (slice(0, 2), slice(2, None))
    ]
    return Same(parts, added)


def added(results: list[Results]) -> Results:
    """Results of all micro-batches together; metrics are those of a call."""
    names = [name for name in results[0] if name != "metrics"]
    return {n: torch.cat([r[n] for r in results]) if n in OF_TOKEN else sum(r[n] for r in results) for n in names}


OPS = {
    "linear_distillation_loss": Op(
        lambda: draw({"bias", "lora", "temperatures", "gaps", "banned"}),
        call,
        SUPPORTS,
        LEAVES,
        ignored=lambda inputs: dict.fromkeys(("hidden", "teacher_ids", "teacher_logprobs"), ~inputs["mask"]),
        rewrites={"another order": in_another_order, "chunks": in_one_dimension, "micro-batches": in_micro_batches},
        adds_in_any_order=True,
    ),
}
