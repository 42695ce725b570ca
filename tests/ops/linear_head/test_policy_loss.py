"""linear_policy_loss: policy_loss of the log-probs of whole logits, in value and gradient, however it is computed.

Faults that this is for: a chunk that is written elsewhere, or ends within a sequence; a gradient that is kept before
its sequence is known; tokens left out that have a gradient by one term only; a mask, position or target of -100 that
one of the ways does not see; an option of the head, of the reference's head or of the loss that is lost on the way; a
term of a shared position that counts once; digits that a certain target loses beside a teacher.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import grpo_kernels as gk
from grpo_kernels import backends
from tests.harness import assert_within_budget, examples, needs_cpu_kernels
from tests.ops.linear_head import distillation_cases as distillation
from tests.ops.linear_head import policy_loss_cases as cases
from tests.ops.linear_head.heads import BF16, EXACT, F32, F64, INF, KERNELS, assert_close
from tests.ops.linear_head.policy_loss_cases import Problem, problem
from tests.ops.promises import Results
from tests.rounding import Moves

on_exact = pytest.mark.parametrize("backend", EXACT)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
both_memories = pytest.mark.parametrize("memory", ["fast", "low"])


# By whether the gradient of a token depends on others, which chunks are about.
@pytest.mark.parametrize("name", cases.CONFIGS)
@on_exact
def test_any_problem_gives_the_policy_loss_of_the_log_probs(backend: str, name: str) -> None:
    def check(case: Problem) -> None:
        assert_close(case.run(backend), case.defined())

    check(problem(name, "zeros"))  # tokens that most losses, but not all, may leave out
    settings(max_examples=examples(90 if backend == "cpu" else 15))(given(cases.problems(name))(check))()


# in one of them the reference in a half may be exact by chance
BATCHES = 12


def together(batches: list[Problem], backend: str, dtype: torch.dtype = F64) -> Results:
    """The results of several batches, joined."""
    runs = [case.run(backend, dtype) for case in batches]
    return {name: torch.cat([each[name].view(-1) for each in runs]) for name in runs[0]}


def assert_within_budgets(backend: str, dtype: torch.dtype, name: str, *features: str, **options: Any) -> None:
    torch.manual_seed(0)
    batches = [problem(name, *features, rows=2, **options).rounded(dtype) for _ in range(BATCHES)]
    gold, working = together(batches, "reference"), together(batches, "reference", dtype)
    moves = Moves(lambda: together(batches, "reference"), gold)
    inherited = [cases.inherited_errors(case, backend) if dtype == F32 else {} for case in batches]
    got = together([cases.with_garbage(case) for case in batches], backend, dtype)
    for what in got.keys() - {"metrics"}:
        assert got[what].dtype == (dtype if what.startswith("d_") else F32)
        most = max(each.get(what, 0.0) for each in inherited)
        assert_within_budget(got[what], working[what], gold[what], what, most, moves=moves)


def budgets_of_float32() -> list[Any]:
    """Every config with every set of features.

    Without --all, the slow interpreter has each config with one of them: no kernel of Triton's sees the config.
    """
    sets = [("bias", "gaps"), ("lora", "teacher"), ("scaled", "shared"), ("support", "ref_head")]
    result = []
    for backend, (at, name), (place, features) in itertools.product(KERNELS, enumerate(cases.CONFIGS), enumerate(sets)):
        is_left_out = backend == "triton" and place != at % len(sets)
        result.append(pytest.param(backend, name, features, marks=pytest.mark.full if is_left_out else ()))
    return result


@pytest.mark.pairs
@pytest.mark.parametrize(("backend", "name", "features"), budgets_of_float32())
def test_float32_loses_no_more_than_torch_does(backend: str, name: str, features: tuple[str, ...]) -> None:
    assert_within_budgets(backend, F32, name, *features, chunk_size=14)


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
    assert_within_budgets("triton", F32, name, *features, chunk_size=14)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dapo", "sequence"])
@on_kernels
def test_halves_lose_no_more_than_torch_does(backend: str, name: str, dtype: torch.dtype) -> None:
    assert_within_budgets(backend, dtype, name, "bias", "gaps", "ignored", chunk_size=8)


# Nothing to compute, and extremes


@both_memories
@pytest.mark.parametrize("name", cases.CONFIGS)
@on_exact
def test_no_token_takes_part(backend: str, name: str, memory: str) -> None:
    case = problem(name, "bias", "teacher", memory=memory, chunk_size=9)
    shape = case.inputs["mask"].shape
    for changes in ({"mask": torch.zeros(shape)}, {"targets": torch.full(shape, -100)}):
        got = case.run(backend, **changes)
        assert got["loss"] == 0 and not any(got[f"d_{leaf}"].any() for leaf in case.op.leaves)


@both_memories
@pytest.mark.parametrize("name", ["grpo", "entropy"])
@on_exact
def test_no_term_of_some_positions(backend: str, name: str, memory: str) -> None:
    case = problem(name, "bias", "shared", memory=memory)
    per_term = ("advantages", "old_logprobs", "mask", "term_index")
    empty = {key: case.inputs[key][:0] for key in per_term}
    got = case.run(backend, **empty, compact=False)
    assert got["loss"] == 0 and not any(got[f"d_{leaf}"].any() for leaf in case.op.leaves)


def test_targets_of_bytes_may_be_any_id() -> None:
    """-100, which is ignored, would be 156 among them."""
    hidden, weight = torch.randn(1, 4, 3), torch.randn(256, 3, requires_grad=True)
    targets, old = torch.tensor([[156, 3, 5, 9]]), torch.zeros(1, 4)
    losses = [
        gk.linear_policy_loss(hidden, weight, of, old, torch.ones(1)).loss for of in (targets, targets.to(torch.uint8))
    ]
    assert torch.equal(*losses)


@needs_cpu_kernels
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", ["grpo", "sequence"])
def test_no_rows_before_tokens_that_belong_to_none(name: str, compact: bool) -> None:
    """A micro-batch padded to a length can have tokens without rows, as for policy_loss."""
    case = problem(name, "packed")
    none = {"cu_seqlens": torch.tensor([0]), "advantages": torch.zeros(0).double()}
    case = case._replace(inputs=case.inputs | none | {"mask": torch.zeros_like(case.inputs["mask"])})
    assert_close(case.run("cpu", compact=compact, chunk_size=4), case.defined())


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["dapo", "entropy"])
@pytest.mark.parametrize("kept", [31, 30])
def test_ids_may_be_the_whole_vocabulary(name: str, kept: int) -> None:
    """Nothing is left for the kernels; or one column, which is the target of a token and not of another."""
    case = problem(name, "bias")
    inputs = case.inputs | distillation.draw_teacher(case.inputs, k=kept)
    missing = {*range(31)} - {*inputs["teacher_ids"][0, 0].tolist()}
    inputs["targets"][0, 0] = next(iter(missing), 3)
    case = case._replace(inputs=inputs)
    assert_close(case.run("cpu"), case.defined())
    # nothing is left but the logit of a column that no model may choose, as in the padding of a vocabulary
    inputs["teacher_ids"][inputs["teacher_ids"] == 30] = -1
    inputs["bias"][30], inputs["targets"] = -INF, inputs["targets"].clamp(max=29)
    case = case._replace(inputs=inputs)
    fast = case.run("cpu")
    assert_close(fast, case.run("cpu", memory="low"))
    assert fast["d_weight"].isfinite().all() and not fast["d_weight"][30].any() and fast["loss"].isfinite()


def certain(name: str, **changes: Any) -> Problem:
    """A student that is sure of every target."""
    case = problem(name, "bias", "teacher")
    case.inputs["bias"][5] += 60
    same = {"targets": torch.full((4, 7), 5), "old_logprobs": torch.zeros(4, 7, dtype=F64), "mask": torch.ones(4, 7)}
    forward = {"teacher_kind": "forward_kl", "teacher_beta": None}
    return case._replace(inputs=case.inputs | same | forward | changes)


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


@pytest.mark.parametrize("target", [31, 32, -1])
@pytest.mark.parametrize("features", [(), ("teacher",)])
@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cpu"])
def test_a_wrong_target_is_nan_on_a_gpu(backend: str, features: tuple[str, ...], target: int) -> None:
    """Its values are not looked at before the kernels run."""
    case = problem("grpo", *features, rows=2)
    case.inputs["targets"][0, 1] = target
    assert case.run(backend, F32)["loss"].isnan()
