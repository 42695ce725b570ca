"""linear_distillation_loss against its definition: whole distributions, a token at a time.

Faults that this is for: a tail that is in a divergence where it should not be, or left out; an unused slot that is
read; a divergence in the wrong direction or with the wrong mixture; a gradient of a column that was kept apart; digits
that a small remainder loses; a share of a token that does not count; a chunk whose tokens are those of another; a
gradient that is written and not added, or computed for nothing.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

import grpo_kernels as gk
from tests.harness import INDUCTOR, assert_within_budget, examples
from tests.ops.linear_head import distillation_cases as cases
from tests.ops.linear_head.distillation_cases import BF16, F32, F64, KINDS, LEAVES, TAILS, assert_close, op_of
from tests.ops.promises import Inputs, run

on_exact = pytest.mark.parametrize("backend", cases.EXACT)
on_kernels = pytest.mark.parametrize("backend", cases.KERNELS)
every_tail = pytest.mark.parametrize("tail", TAILS)


def assert_defined(inputs: Inputs, backend: str) -> None:
    """The bounds are roundings of sums over 40 columns of numbers below 10."""
    assert_close(run(op_of(inputs), inputs, backend, F64), cases.defined(inputs), rtol=1e-11, atol=1e-13)


@on_exact
def test_any_settings_give_the_definition(backend: str) -> None:
    settings(max_examples=examples(300))(given(cases.problems())(lambda inputs: assert_defined(inputs, backend)))()


@pytest.mark.pairs
@every_tail
@pytest.mark.parametrize("kind", KINDS)
@on_kernels
def test_float32(backend: str, kind: str, tail: str) -> None:
    features = {"bias", "unused slots", "gaps"} | ({"scaled", "lora"} if tail == "bucket" else {"banned"})
    inputs = cases.rounded(cases.draw(features, (11,), 40, kind=kind, tail=tail), F32) | {"chunk_size": 4}
    gold, working = (run(op_of(inputs), inputs, "reference", dtype) for dtype in (F64, F32))
    for name, value in run(op_of(inputs), inputs, backend, F32).items():
        assert_within_budget(value, working[name], gold[name], name)


@on_kernels
def test_halves(backend: str) -> None:
    """Gradients by the logits are rounded to bfloat16 once, and what the products give another time."""
    inputs = cases.rounded(cases.draw({"bias"}, (11,), 40), BF16)
    gold = run(op_of(inputs), inputs, "reference", F64)
    got = run(op_of(inputs), inputs | {"chunk_size": 4}, backend, BF16)
    torch.testing.assert_close(got["loss"].double(), gold["loss"], rtol=1e-5, atol=1e-6)
    for name in ("d_hidden", "d_weight", "d_bias"):
        # two roundings, of terms whose largest is that of the result; Triton's interpreter truncates
        allowed = 4 * torch.finfo(BF16).eps * float(gold[name].abs().max())
        assert got[name].dtype == BF16 and float((got[name].double() - gold[name]).abs().max()) <= allowed, name


def one_token(k: int, **teacher: str) -> tuple[Inputs, list[int]]:
    """A token, and the columns that the teacher says nothing of."""
    inputs = cases.draw({"bias"}, (1,), 40, k=k, **teacher)
    return inputs, [column for column in range(40) if column not in inputs["teacher_ids"][0].tolist()]


@on_exact
def test_the_rest_is_exact_however_little_it_is(backend: str) -> None:
    """A student who is sure to one part in 10^20, where 1 minus the mass would be 0."""
    inputs, others = one_token(2, kind="forward_kl")
    inputs["bias"][inputs["teacher_ids"][0]] += 60
    rest = cases.distribution(inputs, torch.ones(1, dtype=torch.bool))[0, others]
    assert rest.logsumexp(0).exp() < 1e-20
    got = run(op_of(inputs), inputs, backend, F64)
    assert got["divergence"].item() > 5
    # each other column is pulled up by its share of what the teacher leaves
    left = 1 - inputs["teacher_logprobs"].exp().sum()
    pulls = -inputs["teacher_coef"] * left * (rest - rest.logsumexp(0)).exp()
    torch.testing.assert_close(got["d_bias"][others], pulls, rtol=1e-9, atol=1e-18)


@on_exact
def test_a_sure_teacher_leaves_a_rounding_to_the_rest(backend: str) -> None:
    """In the reverse direction nothing at all would be infinite."""
    inputs, others = one_token(1, kind="reverse_kl")
    inputs["teacher_logprobs"][:] = 0
    log_q = cases.distribution(inputs, torch.ones(1, dtype=torch.bool))[0]
    left = log_q[others].exp().sum()
    want = (1 - left) * torch.log1p(-left) + left * (left.log() + 24 * math.log(2))
    got = run(op_of(inputs), inputs, backend, F64)
    torch.testing.assert_close(got["divergence"][0], want, rtol=1e-11, atol=1e-13)


@every_tail
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
@on_exact
def test_an_id_that_the_student_cannot_choose(backend: str, kind: str, tail: str) -> None:
    """A probability of 0 is what a very small one tends to."""
    small = cases.draw({"bias"}, kind=kind, tail=tail)
    none, column = small | {"bias": small["bias"].clone()}, int(small["teacher_ids"][0, 0, 0])
    small["bias"][column], none["bias"][column] = -1e4, -math.inf
    want, got = (run(op_of(inputs), inputs, backend, F64) for inputs in (small, none))
    assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert got["loss"].isfinite()


@on_kernels
def test_only_asked_for_gradients_are_computed(backend: str) -> None:
    """None at all, those of the hidden states, and that of the weight in a tensor that has something already."""
    inputs = cases.rounded(cases.draw({"bias", "lora"}), F32)
    whole = run(op_of(inputs), inputs, backend, F32)
    tensors = {name: value.float() if value.dtype == F64 else value for name, value in inputs.items() if name in LEAVES}
    plain = cases.call(inputs | tensors, backend)
    assert not plain["loss"].requires_grad and torch.equal(plain["divergence"], whole["divergence"])
    tensors["hidden"].requires_grad_()
    (gradient,) = torch.autograd.grad(cases.call(inputs | tensors, backend)["loss"], tensors["hidden"])
    assert torch.equal(gradient, whole["d_hidden"])
    weight, into = tensors["weight"].requires_grad_(), torch.ones_like(tensors["weight"])
    for _ in range(2):
        results = cases.call(inputs | tensors | {"weight_grad": into, "chunk_size": 7}, backend)
        assert not any(results[name].requires_grad for name in ("divergence", "mass"))
        results["loss"].backward()
    assert weight.grad is None
    torch.testing.assert_close(into - 1, 2 * whole["d_weight"], rtol=1e-4, atol=1e-6)


@on_kernels
def test_backward_runs_once(backend: str) -> None:
    inputs = cases.rounded(cases.draw(set()), F64)
    tensors = {name: inputs[name].float().requires_grad_() for name in ("hidden", "weight")}
    loss = cases.call(inputs | tensors, backend)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^linear_distillation_loss: backward must run once, got a second call"):
        loss.backward()


@on_exact
def test_the_gradient_of_the_loss_is_passed_on(backend: str) -> None:
    inputs = cases.draw({"bias"})
    whole = run(op_of(inputs), inputs, backend, F64)
    weight = inputs["weight"].requires_grad_()
    (-2.5 * cases.call(inputs, backend)["loss"]).backward()
    torch.testing.assert_close(weight.grad, -2.5 * whole["d_weight"], rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
def test_where_all_tokens_are_computed_those_that_do_not_count_hold_anything() -> None:
    """As on a GPU: a graph does not choose its tokens by their values."""
    torch.compiler.reset()
    inputs = cases.draw({"bias", "lora", "temperatures", "gaps"})
    want = run(op_of(inputs), inputs, None, F64)
    junk = cases.with_garbage(inputs)
    assert junk["hidden"].isnan().any()
    compiled = torch.compile(cases.call, fullgraph=True, backend=INDUCTOR)
    op = cases.Op(lambda: junk, compiled, cases.SUPPORTS, op_of(inputs).leaves)
    assert_close(run(op, junk, None, F64), want)


def test_defaults_of_a_teacher() -> None:
    """Forward KL with a bucket, the mean of it, and a mixture of halves."""
    inputs = cases.draw({"bias"}, kind="forward_kl")
    hidden, head = inputs["hidden"], cases.head_of(inputs)
    ids, logprobs = inputs["teacher_ids"], inputs["teacher_logprobs"]
    got = gk.linear_distillation_loss(hidden, head, gk.Teacher(ids, logprobs))
    torch.testing.assert_close(got.loss, cases.by_definition(inputs | {"teacher_coef": 1.0})["loss"])
    halves = cases.by_definition(inputs | {"teacher_coef": 1.0, "teacher_kind": "jsd", "teacher_beta": 0.5})
    got = gk.linear_distillation_loss(hidden, head, gk.Teacher(ids, logprobs, kind="jsd"))
    torch.testing.assert_close(got.loss, halves["loss"])
    assert got.divergence.shape == got.mass.shape == hidden.shape[:-1]
