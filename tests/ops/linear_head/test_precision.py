"""Errors of the kernels against the float64 reference, in every dtype, and digits that are easily lost.

Faults that this is for: logits that are rounded to half precision; digits that a small remainder, a certain target
beside a teacher or a rounded log-sum-exp loses; columns beyond the last vector or block.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from grpo_kernels import backends
from tests.harness import assert_close_to_rounding, cpu_threads, needs_cpu_kernels, runnable_backends
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import CPU, Problem, Row, assert_within_budgets, problem
from tests.ops.linear_head.heads import BF16, EXACT, F32, F64, KERNELS, SUPPORTS, assert_close
from tests.ops.linear_head.teachers import KINDS, TAILS
from tests.ops.linear_head.terms import CONFIGS

F16 = torch.float16
on_exact = pytest.mark.parametrize("backend", EXACT)
every_kind = pytest.mark.parametrize("kind", KINDS)
# What no kernel of Triton's sees, with each of which a config has its turn.
SETS = ("bias, gaps", "lora, teacher", "scaled, shared", "support, ref_head")
OF_TAILS = {"bucket": "scaled, lora", "whole": "scaled, whole, banned"}
SMALL = {"shape": (2,), "columns": 10}
# Beside the table, whose rows test_promises.py holds to the same budgets in float32.
ROWS = {
    "log-probs": Row(
        "every option of the head, and upstream gradients of 0",
        "logprobs, bias, lora, scaled, temperatures, banned, zeros",
        {},
    ),
    "log-probs alone": Row("no entropy", "logprobs, no entropy, bias, positions mask", {"chunk_size": 8}),
    "log-probs with entropies alone": Row(
        "no log-probs", "logprobs, no logprobs, lora, steep, ignored", {"is_wide": True}
    ),
    "log-probs over a support": Row("another op", "logprobs, bias, scaled, zeros, support", {}),
}
for kind, tail in itertools.product(KINDS, (*TAILS, "whole")):
    ROWS[f"{kind}, {tail}"] = Row(
        "every divergence with every tail",
        f"distillation, bias, unused slots, gaps, {OF_TAILS.get(tail, 'banned')}",
        {"shape": (11,), "chunk_size": 4, "teacher": {"kind": kind, "tail": tail}},
    )
for kind, tail, who in itertools.product(KINDS, TAILS, ("sure student", "sure teacher")):
    ROWS[f"{kind}, {tail}, {who}"] = Row(
        "a rest of nearly nothing, or of less than a rounding",
        f"distillation, bias, {who}",
        {**SMALL, "teacher": {"k": 2, "kind": kind, "tail": tail}},
    )
for (at, config), (place, features) in itertools.product(enumerate(CONFIGS), enumerate(SETS)):
    ROWS[f"{config}, {features}"] = Row(
        "every config, in an interpreter with one set",
        f"{config}, {features}",
        {"rows": 2, "chunk_size": 14},
        backends=tuple(SUPPORTS) if place == at % len(SETS) else CPU,
    )
# of log-probs on a GPU, where the gradient by the logits is rounded, in test_halves.py
HALVES = {"dapo, bias, gaps", "sequence, bias, gaps"}
BUDGETS = [
    (backend, dtype, name)
    for name, each in ROWS.items()
    for backend in runnable_backends(each.draw().op.supports)
    for dtype in (F32, BF16, F16)
    if backend in each.backends and backend != "reference"
    if dtype == F32 or name in HALVES or (name.startswith("log-probs") and (backend == "cpu" or "support" in name))
]


@pytest.mark.pairs
@pytest.mark.parametrize(("backend", "dtype", "name"), BUDGETS, ids=str)
def test_kernels_lose_no_more_than_torch_does(backend: str, dtype: torch.dtype, name: str) -> None:
    count = 12 if backend == "cpu" or dtype != F32 else 4
    assert_within_budgets(backend, dtype, [ROWS[name].draw() for _ in range(count)])


@pytest.mark.gpu
@pytest.mark.skipif("triton" not in KERNELS, reason="needs Triton")
@pytest.mark.parametrize("features", [("bias", "gaps"), ("teacher",), ("support",)])
@pytest.mark.parametrize("name", ["dapo", "entropy", "sequence"])
def test_float32_without_the_cuda_kernel_of_the_loss(
    name: str, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk takes the loss and its gradient from the reference."""
    monkeypatch.setattr(backends, "_emulated", set())
    monkeypatch.setattr(backends, "cuda_error", "not built")
    assert_within_budgets("triton", F32, [problem(name, *features, rows=2, chunk_size=14) for _ in range(4)])


# In float64


@on_exact
def test_the_rest_is_exact_however_little_it_is(backend: str) -> None:
    """A student who is sure to one part in 10^20, where 1 minus the mass would be 0."""
    case = problem("distillation", "bias", shape=(1,), columns=40, teacher={"k": 2, "kind": "forward_kl"})
    inputs, ids = case.inputs, case.inputs["teacher_ids"][0]
    others = [column for column in range(40) if column not in ids.tolist()]
    inputs["bias"][ids] += 60
    rest = heads.distribution(inputs, torch.ones(1, dtype=torch.bool))[0, others]
    assert rest.logsumexp(0).exp() < 1e-20
    got = case.run(backend)
    assert got["divergence"].item() > 5
    # each other column is pulled up by its share of what the teacher leaves
    left = 1 - inputs["teacher_logprobs"].exp().sum()
    pulls = -inputs["teacher_coef"] * left * (rest - rest.logsumexp(0)).exp()
    torch.testing.assert_close(got["d_bias"][others], pulls, rtol=1e-9, atol=1e-18)


def certain(name: str, **changes: Any) -> Problem:
    """A student that is sure of every target."""
    case = problem(name, "bias", "teacher", teacher={"kind": "forward_kl"})
    case.inputs["bias"][5] += 60
    same = {"targets": torch.full((4, 7), 5), "old_logprobs": torch.zeros(4, 7, dtype=F64), "mask": torch.ones(4, 7)}
    return case.but(**same, **changes)


@needs_cpu_kernels
def test_a_certain_target_is_exact_beside_a_teacher() -> None:
    case = certain("entropy")
    assert_close(case.run("cpu"), case.run("cpu", memory="low"), rtol=1e-8, atol=0)


@needs_cpu_kernels
def test_the_gradient_of_a_certain_target_is_exact_beside_a_teacher() -> None:
    """Its logit's is 1 minus a probability of nearly 1."""
    case = certain("grpo", teacher_mask=(torch.arange(4) > 0)[:, None].expand(4, 7))
    inputs = case.inputs
    logits = torch.nn.functional.linear(inputs["hidden"], inputs["weight"], inputs["bias"])[0]
    others = (logits - logits[:, 5:6]).exp().index_fill(1, torch.tensor(5), 0)
    assert others.sum(1).max() < 1e-15
    pulls = (others[..., None] * (inputs["weight"][5] - inputs["weight"])).sum(1)
    # others has an error of 60 times a rounding
    got = case.run("cpu")["d_hidden"][0]
    torch.testing.assert_close(got, -inputs["advantages"][0] / 28 * pulls, rtol=1e-12, atol=0)


# A teacher's whole distribution, for which the CPU has a kernel


@pytest.mark.pairs  # every divergence has sums of its own over the blocks of 2048 columns
@pytest.mark.parametrize("how", [1, 7, 16, 33, 2049, 5000, "certain", "large"])
@every_kind
@needs_cpu_kernels
def test_logits_of_two_heads(kind: str, how: int | str) -> None:
    """Any number of columns; models that are certain of different ids; logits whose log-sum-exps are rounded a lot."""
    columns = how if isinstance(how, int) else 53
    case = problem("distillation", "bias", "whole", columns=columns, teacher={"kind": kind})
    inputs = case.inputs
    if how == "certain":  # beyond what float32 has of a probability
        inputs["bias"][2] += 150
        inputs["teacher_bias"][5] += 150
    if how == "large":  # float32 has them exactly: the reference's log-sum-exp is off by up to 1e-3
        for name in ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias"):
            inputs[name] = (4 * inputs[name]).round() / 4
        inputs["bias"], inputs["teacher_bias"] = inputs["bias"] + 2.0**14, inputs["teacher_bias"] - 2.0**14
    case = case.rounded(F32)
    with cpu_threads(2):
        got = case.run("cpu", F32)
        with torch.no_grad():
            alone = case.op.call(heads.cast(case.inputs, F32), "cpu")["divergence"]
    gold = case.run("reference")
    for results in (got, got | {"divergence": alone}):
        assert_close_to_rounding(results, gold, lambda: case.run("reference"), F64)
