"""Batches of linear_logprobs, linear_distillation_loss and linear_policy_loss, their definition, and a table of them.

A batch is drawn by the op, or the config of its loss, and by features: those of the head in heads.py, of a teacher in
teachers.py, of a policy loss in terms.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_within_budget, logprob_error, reach
from tests.ops.linear_head import heads, teachers, terms
from tests.ops.linear_head.heads import F32, F64, HEADS, OF_SUPPORT, SUPPORTS, leaves_of, noise
from tests.ops.linear_head.teachers import KINDS, TAILS, TEACHERS
from tests.ops.linear_head.terms import CONFIGS, takes_part, tokens_read
from tests.ops.promises import Inputs, Op, Results, Same, evaluated, placed, run
from tests.rounding import Moves

NAMES = ("logprobs", "entropy")
# Features of the ops that have no config.
OF_LOGPROBS = ("ignored", "steep", "zeros", "no logprobs", "no entropy", "positions", "positions mask", "support")
FEATURES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CONFIGS, terms.FEATURES),
    "logprobs": (*HEADS, *OF_LOGPROBS),
    "distillation": (*HEADS, *TEACHERS, "gaps", "whole"),
}


class Problem(NamedTuple):
    """A batch of an op, "logprobs", "distillation" or the policy loss of a config."""

    of: str
    inputs: Inputs
    frozen: tuple[str, ...] = ()

    @property
    def op(self) -> Op:
        supports = OF_SUPPORT if self.of == "logprobs" and "support" in self.inputs else SUPPORTS
        leaves = leaves_of(self.inputs, *self.frozen)
        return Op(lambda: self.inputs, functools.partial(call, of=self.of), supports, leaves)

    def run(self, backend: str | None, dtype: torch.dtype = F64, **changes: Any) -> Results:
        return run(self.op, self.inputs | changes, backend, dtype)

    def rounded(self, dtype: torch.dtype) -> Problem:
        return self._replace(inputs=heads.rounded(self.inputs, dtype))

    def but(self, **changes: Any) -> Problem:
        return self._replace(inputs=self.inputs | changes)

    def with_garbage(self) -> Problem:
        return self._replace(inputs=terms.with_garbage(self.inputs))

    def defined(self, offsets: Tensor | float = 0.0) -> Results:
        """The definition with its gradients, on the host; the offsets are added to the log-probs."""
        op = dataclasses.replace(self.op, call=lambda inputs, _: by_definition(inputs, self.of, offsets))
        return evaluated(op, placed(op, self.inputs, F64, lambda value: value), None)


def problem(
    of: str,
    *features: str,
    rows: int = 4,
    width: int = 7,
    columns: int = 31,
    shape: tuple[int, ...] | None = None,
    teacher: Inputs | None = None,
    sizes: list[int] | None = None,
    **options: Any,
) -> Problem:
    """A random batch with these features, and options of the op.

    Args:
        teacher: arguments of the draw of a teacher alone
        sizes: how many ids the support of each token has
    """
    wanted = set(features)
    if "support" in wanted:
        options = {name: value for name, value in options.items() if name not in ("memory", "compact", "chunk_size")}
    if of in CONFIGS:
        return Problem(of, terms.draw(CONFIGS[of], wanted, rows, width, columns, **teacher or {}) | options)
    if "support" in wanted:
        wanted -= {"lora"}
    shape = (rows, width) if shape is None else shape
    inputs = heads.draw_head(shape, *wanted, columns=columns, width=options.pop("hidden_width", 5))
    if of == "logprobs":
        inputs["weight"] *= 2  # logits that are larger than those of the losses
        inputs |= {f"by_{name}": noise(*shape) for name in NAMES if f"no {name}" not in wanted}
        if "zeros" in wanted:
            inputs |= {name: (torch.rand(shape) < 0.6) * inputs[name] for name in inputs if name.startswith("by_")}
        return Problem(of, inputs | terms.draw_places(inputs, wanted, sizes) | options)
    del inputs["targets"]
    inputs |= teachers.draw_teacher(inputs, *wanted, **teacher or {})
    if "sure student" in wanted and "bias" in wanted:
        inputs["bias"][heads.allowed_by(inputs)[:2]] += 60
    if "gaps" in wanted:
        inputs["mask"] = torch.rand(shape) < 0.7
    return Problem(of, inputs | options)


def certain(column: int, offset: float, rest: tuple[float, ...] = (1e-3, 1e-6, 1e-9, 1e-12)) -> Problem:
    """Log-probs of tokens for which one of 31 ids has all but the rest, which the others share equally.

    Up to where float64 has four digits of 1 - p left; logits are at least the offset.
    """
    weight = torch.tensor([[1.0, 0.0]], dtype=F64).repeat(31, 1)
    weight[column] = torch.tensor([0.0, 1.0])
    logit = (torch.tensor(rest, dtype=F64) / 30).log() + offset
    hidden = torch.stack([logit, torch.full_like(logit, offset)], 1).float().double()
    inputs = {"hidden": hidden, "targets": torch.full((4,), column), "weight": weight}
    return Problem("logprobs", inputs | dict.fromkeys(("by_logprobs", "by_entropy"), torch.ones(4, dtype=F64)))


def digits_of(case: Problem) -> Results:
    """Log-probs and entropies of `certain`, from the gap of the logits."""
    gap = case.inputs["hidden"].diff(dim=1)[:, 0]
    others = 30 * torch.exp(-gap)
    return {"logprobs": -torch.log1p(others), "entropy": torch.log1p(others) + others * gap / (1 + others)}


@st.composite
def problems(draw: st.DrawFn, of: str) -> Problem:
    """Any batch of an op, with garbage where nothing counts, some of its leaves frozen."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    torch.manual_seed(draw(st.integers(0, 1000)))
    wanted = draw(st.sets(st.sampled_from(FEATURES[of]), max_size=10))
    if {"no logprobs", "no entropy"} <= wanted:
        wanted -= {"no logprobs"}
    options = {"chunk_size": one(None, 1, 3, 8, 100), "columns": one(5, 31, 67)}
    if of in CONFIGS:
        options |= {"memory": one("fast", "fast", "low"), "compact": one(None, False)}
        options |= {"rows": draw(st.integers(1, 4)), "width": draw(st.integers(1, 7))}
    else:
        options["shape"] = one((11,), (3, 4), (1,), (2, 1, 3), (0,) if of == "distillation" else ())
    if of == "distillation":
        options["teacher"] = {"k": one(1, 4, 67), "kind": one(*KINDS), "tail": one(*TAILS)}
    case = problem(of, *wanted, **options)
    if of == "logprobs" and "temperature" in case.inputs:
        shape = case.inputs["hidden"].shape[:-1]
        case.inputs["temperature"] = one(case.inputs["temperature"], torch.rand(shape[:1], dtype=F64) + 0.5)
    kinds = torch.int64, torch.int32, torch.int16
    if "support" in case.inputs:
        case.inputs["support"] = tuple(value.to(one(*kinds)) for value in case.inputs["support"])
    if "targets" in case.inputs:
        case.inputs["targets"] = case.inputs["targets"].to(one(*kinds))
    frozen = draw(st.sets(st.sampled_from(heads.LEAVES), max_size=4))
    has_leaves = len(frozen & {*case.op.leaves}) < len(case.op.leaves)
    return case.with_garbage()._replace(frozen=tuple(frozen) if has_leaves else ())


# The definition


def by_definition(inputs: Inputs, of: str, offsets: Tensor | float = 0.0) -> Results:
    """From whole logits; the offsets are added to the log-probs, as the errors of a kernel."""
    read = tokens_read(inputs)
    if of == "distillation":
        return teachers.divergences(inputs, read)
    targets = torch.where(read, inputs["targets"].long(), 0).reshape(-1, 1)
    log_q = heads.distribution(inputs, read)
    logprobs, entropy = log_q.gather(1, targets)[:, 0] + offsets, heads.entropy_of(log_q)
    if of == "logprobs":
        at = inputs.get("positions")
        results = [torch.where(read, value.view(read.shape), 0) for value in (logprobs, entropy)]
        results = [value if at is None or at.dtype == torch.bool else value.flatten()[at] for value in results]
        return with_loss(dict(zip(NAMES, results, strict=True)), inputs)

    def by_term(values: Tensor) -> Tensor:
        index = inputs.get("term_index")
        return values.view(read.shape) if index is None else values[index.clamp(min=0)]

    others = {name: inputs[name] for name in (*heads.OF_TERMS, "normalizer", "cu_seqlens") if name in inputs}
    if "ref_hidden" in inputs:
        with torch.no_grad():
            of_reference = heads.distribution(inputs, read, "ref_").gather(1, targets)[:, 0]
        others["ref_logprobs"] = by_term(of_reference)
    has_entropy = CONFIGS[of].entropy_coef != 0 or "return_entropy" in inputs
    others |= {"mask": takes_part(inputs), "entropy": by_term(entropy) if has_entropy else None, "config": CONFIGS[of]}
    loss, metrics = gk.policy_loss(by_term(logprobs), **others, backend="reference")
    results = {"loss": loss + 0 * logprobs.clamp(min=-1e30).sum(), "metrics": metrics.tensor}
    if "teacher_kind" in inputs:
        part, divergence, mass = teachers.divergences(inputs, read).values()
        results |= {"divergence": divergence, "mass": mass, "part": part.detach(), "loss": results["loss"] + part}
    return results


def with_loss(results: dict[str, Any], inputs: Inputs) -> Results:
    """Log-probs, entropies if their upstream gradient is given, and the loss of both upstream gradients."""
    at, losses = inputs.get("positions"), []
    present = {name: results[name] for name in NAMES[: 1 + ("by_entropy" in inputs)]}
    for name, value in present.items():
        if (by := inputs.get(f"by_{name}")) is not None:
            losses.append((value * (by if at is None or at.dtype == torch.bool else by.flatten()[at])).sum())
    return {"loss": sum(losses[1:], losses[0])} | present


# The ops


def call(inputs: Inputs, backend: str | None, of: str) -> Results:
    arguments = heads.arguments_of(inputs) | {"backend": backend}
    if of == "logprobs":
        return with_loss(gk.linear_logprobs(**arguments, return_entropy="by_entropy" in inputs)._asdict(), inputs)
    arguments["teacher"] = teachers.teacher_of(inputs)
    if of == "distillation":
        return gk.linear_distillation_loss(**arguments)._asdict()
    ref_head = heads.head_of(inputs, "ref_")
    loss, metrics = gk.linear_policy_loss(**arguments, ref_head=ref_head, config=CONFIGS[of])
    results = {"loss": loss, "metrics": metrics.tensor.to(loss.dtype)}  # whose errors those of the sums are
    if "return_sum_pi_squared" in inputs:
        results["squares"] = metrics.sum_pi_squared
    if (part := metrics.distillation) is not None:
        assert not any(value.requires_grad for value in part)
        results |= {"divergence": part.divergence, "mass": part.mass, "part": part.loss}
    return results


def inherited_errors(case: Problem, backend: str) -> dict[str, float]:
    """Errors of a policy loss on a GPU from those of the kernel's log-probs; those of divergences are not known."""
    working, gold = (terms.logprobs_of(heads.cast(case.inputs, dtype)) for dtype in (F32, F64))
    error = logprob_error(backend, working, gold, case.inputs.get("softcap", 0.0))
    return reach(lambda offsets: case.defined(offsets), case.inputs["targets"].flatten().shape, error)


def assert_within_budgets(backend: str, dtype: torch.dtype, batches: list[Problem]) -> None:
    """Compares several batches, joined, with the float64 reference: a single one may be exact by chance."""
    batches = [case.rounded(dtype) for case in batches]

    def together(backend: str, dtype: torch.dtype, batches: list[Problem] = batches) -> Results:
        runs = [case.run(backend, dtype) for case in batches]
        return {name: torch.cat([each[name].view(-1) for each in runs]) for name in runs[0]}

    gold, working = together("reference", F64), together("reference", dtype)
    moves = Moves(lambda: together("reference", F64), gold)
    has_config = batches[0].of in CONFIGS and dtype == F32
    inherited = [inherited_errors(case, backend) for case in batches if has_config]
    got = together(backend, dtype, [case.with_garbage() for case in batches])
    assert got.keys() == gold.keys()
    for name in got.keys() - {"metrics"}:
        assert got[name].dtype == working[name].dtype
        most = max((each.get(name, 0.0) for each in inherited), default=0.0)
        assert_within_budget(got[name], working[name], gold[name], name, most, moves=moves)


# The table


class Row(NamedTuple):
    """A batch, and why it is in the table.

    Attributes:
        why: what of the op this batch alone reaches
        words: the op or config, and features
        options: of `problem`
        in_parts: rows in calls of their own have the same results; otherwise something counts in the whole batch
        backends: implementations that it is run on; interpreters are slow
    """

    why: str
    words: str
    options: dict[str, Any]
    in_parts: bool = False
    backends: tuple[str, ...] = tuple(SUPPORTS)

    def draw(self) -> Problem:
        of, *features = self.words.split(", ")
        return problem(of, *features, **self.options)


TOKENS = {"rows": 4, "width": 5, "hidden_width": 6}
# draws keep as many ids, as graphs are replayed with other values alone
KEPT = TOKENS | {"columns": 101, "sizes": [place % 9 + 1 for place in range(20)]}
LARGE = {"rows": 5, "width": 12}
LOSS = "bias, gaps, is_weights"
CPU = ("cpu",)
# By the name of the function that test_promises.py finds in it.
TABLE = {
    "linear_logprobs": Row(
        "a temperature of each token",
        "logprobs, ignored, temperatures",
        TOKENS | {"columns": 37},
        in_parts=True,
    ),
    "LMHead with all options": Row(
        "options of the head, in chunks",
        "logprobs, ignored, bias, lora, scaled, temperatures, banned",
        TOKENS | {"chunk_size": 8},
        in_parts=True,
    ),
    "linear_logprobs at positions": Row(
        "results of other shapes than the tokens",
        "logprobs, ignored, bias, positions",
        TOKENS,
    ),
    "linear_logprobs over a support": Row(
        "another op",
        "logprobs, ignored, temperatures, bias, scaled, support",
        KEPT,
        in_parts=True,
    ),
    "linear_distillation_loss": Row(
        "a teacher's ids, which are kept apart",
        "distillation, bias, lora, temperatures, banned, gaps",
        {},
        in_parts=True,
    ),
    "linear_distillation_loss from hidden states": Row(
        "logits of two heads",
        "distillation, bias, lora, temperatures, gaps, whole",
        {},
        in_parts=True,
    ),
    "linear_policy_loss": Row(
        "a gradient of each token alone, some of them without one",
        f"dapo, {LOSS}, ignored, by token, zeros, policy_mask, temperatures",
        LARGE,
        in_parts=True,
    ),
    "linear_policy_loss of sequences": Row(
        "whole sequences in each chunk",
        f"sequence, {LOSS}, lora, scaled, ref_head",
        LARGE | {"chunk_size": 24},
        in_parts=True,
        backends=CPU,
    ),
    "linear_policy_loss in low memory": Row(
        "a gradient by the backward",
        f"entropy, {LOSS}, lora, ignored, banned",
        LARGE | {"memory": "low"},
        backends=CPU,
    ),
    "linear_policy_loss with a teacher": Row(
        "two losses of one chunk",
        f"entropy, {LOSS}, zeros, teacher",
        LARGE,
        backends=("cpu", "triton"),
    ),
    "linear_policy_loss of shared positions": Row(
        "several terms of a token",
        f"grpo, {LOSS}, lora, shared, return_entropy",
        LARGE,
        backends=CPU,
    ),
    "linear_policy_loss of packed segments": Row(
        "lengths, where chunks may end, are values, which no graph has",
        f"segment, {LOSS}, packed, weights, positions mask",
        LARGE | {"chunk_size": 24},
        backends=CPU,
    ),
    "linear_policy_loss over a support": Row(
        "another op beside the loss",
        f"dapo, {LOSS}, ignored, support, ref_weight",
        LARGE,
        backends=CPU,
    ),
}


# For test_promises.py


def in_micro_batches(inputs: Inputs) -> Same:
    """Two calls for half of the rows each, divided by what all have.

    The loss of log-probs is a sum of their other results, in another order. Metrics are those of a call.
    """
    counts, others = takes_part(inputs), Inputs()
    numbers = {"tokens": counts.sum().double(), "rows": counts.any(1).sum().double()}
    if "advantages" in inputs:
        others["normalizer"] = numbers
    if "teacher_kind" in inputs:
        others["teacher_normalizer"] = numbers["tokens"]
    tokens = torch.arange(counts.numel()).view(counts.shape)
    names = [name for name in (*heads.OF_TOKENS, *heads.OF_TERMS) if isinstance(inputs.get(name), Tensor)]

    def part(at: Tensor) -> Inputs:
        picked = {name: inputs[name][at] for name in names}
        if "support" in inputs:
            kept = heads.kept_by(inputs)
            picked["support"] = heads.support_of([kept[place] for place in tokens[at].flatten().tolist()])
        return inputs | picked | others

    def joined(results: list[Results]) -> Results:
        first, second = results
        lost = {"metrics", "loss"} if "logprobs" in first else {"metrics"}
        return {
            name: torch.cat([first[name], second[name]]) if name in heads.OF_TOKEN else first[name] + second[name]
            for name in first.keys() - lost
        }

    return Same([part(at) for at in torch.arange(len(counts)).tensor_split(2)], joined)


def of_a_mask(inputs: Inputs) -> Same:
    banned = torch.zeros(len(inputs["weight"]), dtype=torch.bool).index_fill(0, inputs["banned"], True)
    return Same([inputs | {"banned": banned}], lambda results: results[0], is_exact=True)


def unread(inputs: Inputs) -> dict[str, Tensor]:
    """With a support of log-probs also tokens that keep one id, and ids that none keeps."""
    slots = terms.unread(inputs)
    if "support" in inputs and "by_logprobs" in inputs:
        ids, offsets = inputs["support"]
        is_unkept = torch.ones(len(inputs["weight"]), dtype=torch.bool).index_fill(0, ids, False)
        slots["hidden"] = slots["hidden"] | (offsets.diff() == 1).view(slots["hidden"].shape)
        slots |= {"weight": is_unkept, "bias": is_unkept}
    return slots


def described(row: Row) -> Op:
    op = row.draw().op
    rewrites = {"micro-batches": in_micro_batches} if row.in_parts else {}
    if row.words.startswith("logprobs") and "banned" in row.words:
        rewrites["banned ids as a mask"] = of_a_mask
    return dataclasses.replace(
        op,
        draw=lambda: row.draw().inputs,
        supports={name: dtypes for name, dtypes in op.supports.items() if name in row.backends},
        ignored=unread,
        rewrites=rewrites,
        adds_in_any_order=op.supports is SUPPORTS,
        multiplies=True,
    )


OPS = {name: described(row) for name, row in TABLE.items()}
