"""linear_distillation_loss against its definition: whole distributions, a token at a time.

Faults that this is for: a tail that is in a divergence where it should not be, or left out; an unused slot that is
read; a divergence in the wrong direction or with the wrong mixture; a gradient of a column that was kept apart; digits
that a small remainder or a rounded log-sum-exp loses; a share of a token that does not count; a chunk whose tokens, or
rows of the teacher, are those of another; a teacher's scale, cap, adapter or bans left out; columns beyond the last
vector or block; a gradient that is written and not added, computed for nothing, or by the teacher.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import loop
from grpo_kernels.ops.linear_head.objectives import whole_teacher
from tests.harness import (
    INDUCTOR,
    assert_close_to_rounding,
    assert_within_budget,
    cpu_threads,
    examples,
    needs_cpu_kernels,
)
from tests.ops.linear_head import distillation_cases as cases
from tests.ops.linear_head import heads
from tests.ops.linear_head.distillation_cases import KINDS, TAILS, op_of
from tests.ops.linear_head.heads import BF16, EXACT, F32, F64, KERNELS, NAN, assert_close
from tests.ops.linear_head.policy_loss_cases import problem
from tests.ops.promises import Inputs, Results, run
from tests.rounding import Moves

on_exact = pytest.mark.parametrize("backend", EXACT)
on_kernels = pytest.mark.parametrize("backend", KERNELS)
every_tail = pytest.mark.parametrize("tail", TAILS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def assert_defined(inputs: Inputs, backend: str) -> None:
    """The bounds are roundings of sums over 40 columns of numbers below 10."""
    assert_close(run(op_of(inputs), inputs, backend, F64), cases.defined(inputs), rtol=1e-11, atol=1e-13)


@on_exact
def test_any_settings_give_the_definition(backend: str) -> None:
    settings(max_examples=examples(300))(given(cases.problems())(lambda inputs: assert_defined(inputs, backend)))()


@pytest.mark.pairs
@pytest.mark.parametrize("tail", [*TAILS, "whole"])
@every_kind
@on_kernels
def test_float32(backend: str, kind: str, tail: str) -> None:
    features = {"bucket": ("scaled", "lora"), "whole": ("scaled", "whole", "banned")}.get(tail, ("banned",))
    inputs = cases.draw("bias", "unused slots", "gaps", *features, shape=(11,), columns=40, kind=kind, tail=tail)
    inputs = heads.rounded(inputs, F32) | {"chunk_size": 4}
    gold, working = (run(op_of(inputs), inputs, "reference", dtype) for dtype in (F64, F32))
    moves = Moves(lambda: run(op_of(inputs), inputs, "reference", F64), gold)
    for name, value in run(op_of(inputs), inputs, backend, F32).items():
        assert_within_budget(value, working[name], gold[name], name, moves=moves)


@pytest.mark.pairs
@pytest.mark.parametrize("how", ["alone", "whole", "beside a loss"])
@on_kernels
def test_halves(backend: str, how: str) -> None:
    """Gradients by the logits are rounded to bfloat16 once, and what the products give another time."""
    if how == "beside a loss":
        case = problem("dapo", "bias", "teacher", rows=2)
        op, inputs = case.op, case.inputs
    else:
        inputs = cases.draw("bias", how, shape=(11,), columns=40)
        op = op_of(inputs)
    inputs = heads.rounded(inputs, BF16)

    def reference() -> Results:
        return run(op, inputs, "reference", F64)

    gold, got = reference(), run(op, inputs | {"chunk_size": 4}, backend, BF16)
    assert_close_to_rounding(got["loss"], gold["loss"], lambda: reference()["loss"], F64)
    for name in ("d_hidden", "d_weight", "d_bias"):
        # two roundings, of terms whose largest is that of the result; Triton's interpreter truncates
        allowed = 4 * torch.finfo(BF16).eps * float(gold[name].abs().max())
        assert got[name].dtype == BF16 and float((got[name].double() - gold[name]).abs().max()) <= allowed, name


@pytest.mark.pairs
@every_tail
@every_kind
@on_kernels
def test_float32_where_one_is_sure(backend: str, kind: str, tail: str) -> None:
    """Takes ids whose probabilities add up to 1, or nearly so: then little or nothing is known of the rest."""
    for sure in ("sure teacher", "sure student"):
        inputs = cases.draw("bias", sure, shape=(2,), columns=10, k=2, kind=kind, tail=tail)
        inputs = heads.rounded(inputs, F32)
        expected = {name: value.float() for name, value in cases.defined(inputs).items()}
        assert_close(run(op_of(inputs), inputs, backend, F32), expected, rtol=1e-5, atol=1e-5)


def one_token(k: int, **teacher: str) -> tuple[Inputs, list[int]]:
    """A token, and the columns that the teacher says nothing of."""
    inputs = cases.draw("bias", shape=(1,), columns=40, k=k, **teacher)
    return inputs, [column for column in range(40) if column not in inputs["teacher_ids"][0].tolist()]


@on_exact
def test_the_rest_is_exact_however_little_it_is(backend: str) -> None:
    """A student who is sure to one part in 10^20, where 1 minus the mass would be 0."""
    inputs, others = one_token(2, kind="forward_kl")
    inputs["bias"][inputs["teacher_ids"][0]] += 60
    rest = heads.distribution(inputs, torch.ones(1, dtype=torch.bool))[0, others]
    assert rest.logsumexp(0).exp() < 1e-20
    got = run(op_of(inputs), inputs, backend, F64)
    assert got["divergence"].item() > 5
    # each other column is pulled up by its share of what the teacher leaves
    left = 1 - inputs["teacher_logprobs"].exp().sum()
    pulls = -inputs["teacher_coef"] * left * (rest - rest.logsumexp(0)).exp()
    torch.testing.assert_close(got["d_bias"][others], pulls, rtol=1e-9, atol=1e-18)


@every_tail
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
@on_exact
def test_an_id_that_the_student_cannot_choose(backend: str, kind: str, tail: str) -> None:
    """A probability of 0 is what a very small one tends to."""
    small = cases.draw("bias", kind=kind, tail=tail)
    none, column = small | {"bias": small["bias"].clone()}, int(small["teacher_ids"][0, 0, 0])
    small["bias"][column], none["bias"][column] = -1e4, -math.inf
    want, got = (run(op_of(inputs), inputs, backend, F64) for inputs in (small, none))
    assert_close(got, want, rtol=1e-11, atol=1e-13)
    assert got["loss"].isfinite()


@pytest.mark.filterwarnings("ignore")  # of torch.compile about itself
def test_where_all_tokens_are_computed_those_that_do_not_count_hold_anything() -> None:
    """As on a GPU: a graph does not choose its tokens by their values."""
    torch.compiler.reset()
    inputs = cases.draw("bias", "lora", "temperatures", "gaps")
    want = run(op_of(inputs), inputs, None, F64)
    junk = cases.with_garbage(inputs)
    assert junk["hidden"].isnan().any()
    compiled = torch.compile(cases.call, fullgraph=True, backend=INDUCTOR)
    op = cases.Op(lambda: junk, compiled, heads.SUPPORTS, op_of(inputs).leaves)
    assert_close(run(op, junk, None, F64), want)


@pytest.mark.parametrize("features", [(), ("whole",)])
@on_kernels
def test_kernels_that_compute_all_tokens(
    backend: str, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a temperature, hidden states and ids of tokens that do not count that are no numbers."""
    inputs = cases.draw("bias", "lora", "temperatures", "gaps", "teacher weights", *features)
    inputs["teacher_weights"] = torch.where(inputs["mask"], inputs["teacher_weights"], 0)

    def reference() -> Results:
        return run(op_of(inputs), inputs, "reference", F32)

    want = reference()
    del inputs["mask"]  # only the weights tell
    junk = inputs | {"temperature": torch.where(inputs["teacher_weights"] == 0, NAN, inputs["temperature"])}
    monkeypatch.setattr(loop, "tokens_with_grad", lambda *_: None)
    monkeypatch.setattr(loop, "tokens_per_chunk", lambda *_: 6)
    assert_close_to_rounding(run(op_of(inputs), junk, backend, F32), want, reference)


@pytest.mark.parametrize("of", ["hidden", "teacher_hidden"])
@every_kind
@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_a_token_of_no_numbers_is_seen(backend: str, kind: str, of: str) -> None:
    features = {"teacher_hidden": ("whole",)}.get(of, ())
    inputs = cases.draw("bias", *features, kind=kind)
    inputs[of][0, 1] = NAN
    got = run(op_of(inputs), inputs, backend, F32)
    assert got["loss"].isnan()
    assert torch.equal(got["divergence"].isnan().nonzero(), torch.tensor([[0, 1]]))
    assert torch.equal(got["d_hidden"].isnan().any(-1).nonzero(), torch.tensor([[0, 1]]))


def test_log_probs_of_bfloat16_are_those_of_probabilities() -> None:
    """Although some, such as a hundred of log 0.01, are rounded up and add up to more than 1."""
    hidden, weight = torch.randn(1, 3), torch.randn(4096, 3, requires_grad=True)
    for count in (2, 4, 100, 4096):
        logprobs = torch.full((1, count), -math.log(count)).bfloat16()
        for rounded in (logprobs, logprobs.float()):
            teacher = gk.Teacher(torch.arange(count)[None], rounded)
            assert gk.linear_distillation_loss(hidden, weight, teacher).loss.isfinite()


@pytest.mark.parametrize(("dtype", "columns"), [(torch.uint8, 256), (torch.uint8, 1023), (torch.int8, 128)], ids=str)
def test_ids_of_few_bits(dtype: torch.dtype, columns: int) -> None:
    """-1, an unused slot, is 255 in a byte, and numbers of columns are beyond their range."""
    hidden, weight = torch.randn(1, 3), torch.randn(columns, 3, requires_grad=True)
    ids, logprobs = torch.tensor([[min(columns, 256) - 1, 3]]), torch.tensor([[-1.0, -2.0]])
    losses = [gk.linear_distillation_loss(hidden, weight, gk.Teacher(of, logprobs)).loss for of in (ids, ids.to(dtype))]
    assert torch.equal(*losses)


@pytest.mark.parametrize("normalizer", [torch.tensor(0), torch.tensor(1.0)], ids=str)
def test_a_count_of_0_counts_as_1(normalizer: torch.Tensor) -> None:
    hidden, weight = torch.randn(1, 3), torch.randn(5, 3, requires_grad=True)
    teacher = gk.Teacher(torch.tensor([[0, 1]]), torch.tensor([[-1.0, -2.0]]), normalizer=normalizer)
    loss = gk.linear_distillation_loss(hidden, weight, teacher).loss
    want = gk.linear_distillation_loss(hidden, weight, dataclasses.replace(teacher, normalizer=None)).loss
    assert torch.equal(loss, want)


def test_defaults_of_a_teacher() -> None:
    """Forward KL with a bucket, the mean of it, and a mixture of halves."""
    inputs = cases.draw("bias", kind="forward_kl")
    hidden, head = inputs["hidden"], heads.head_of(inputs)
    ids, logprobs = inputs["teacher_ids"], inputs["teacher_logprobs"]
    got = gk.linear_distillation_loss(hidden, head, gk.Teacher(ids, logprobs))
    torch.testing.assert_close(got.loss, cases.by_definition(inputs | {"teacher_coef": 1.0})["loss"])
    halves = cases.by_definition(inputs | {"teacher_coef": 1.0, "teacher_kind": "jsd", "teacher_beta": 0.5})
    got = gk.linear_distillation_loss(hidden, head, gk.Teacher(ids, logprobs, kind="jsd"))
    torch.testing.assert_close(got.loss, halves["loss"])
    assert got.divergence.shape == got.mass.shape == hidden.shape[:-1]


# A teacher's whole distribution


def assert_near(got: Results, inputs: Inputs) -> None:
    def reference() -> Results:
        return run(op_of(inputs), inputs, "reference", F64)

    assert_close_to_rounding(got, reference(), reference, F64)


@pytest.mark.pairs  # every divergence has sums of its own over the blocks of 2048 columns
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 2049, 5000])
@every_kind
@needs_cpu_kernels
def test_any_number_of_columns(kind: str, columns: int) -> None:
    inputs = cases.draw("bias", "whole", columns=columns, kind=kind)
    inputs = heads.rounded(inputs, F32)
    with cpu_threads(2):
        got = run(op_of(inputs), inputs, "cpu", F32)
        with torch.no_grad():
            alone = cases.call(heads.cast(inputs, F32), "cpu")["divergence"]
    assert_near(got, inputs)
    assert_near(got | {"divergence": alone}, inputs)


@every_kind
@on_kernels
def test_equal_heads_have_no_divergence(backend: str, kind: str) -> None:
    inputs = cases.draw("bias", "scaled", "whole", columns=300, kind=kind)
    same = {f"teacher_{name}": inputs[name] for name in ("hidden", "weight", "bias", "softcap", "logit_scale")}
    got = run(op_of(inputs), inputs | same, backend, F32)
    assert got["divergence"].abs().max() < 2e-7 and got["d_hidden"].abs().max() < 1e-6


@every_kind
@on_exact
def test_ids_that_the_teacher_never_chooses_count(backend: str, kind: str) -> None:
    """A probability of 0 is the limit of small ones, whose reverse KL is infinite."""
    small = cases.draw("bias", "whole", columns=40, kind=kind)
    none = small | {"teacher_bias": small["teacher_bias"].clone()}
    small["teacher_bias"][3:5], none["teacher_bias"][3:5] = -1e3, -math.inf
    want, got = (run(op_of(inputs), inputs, backend, F64) for inputs in (small, none))
    neither = none | {"bias": none["bias"].clone()}
    neither["bias"][3:5] = -1e4  # as padding of a vocabulary
    padded = run(op_of(neither), neither, backend, F64)
    assert padded["loss"].isfinite() and padded["d_hidden"].isfinite().all()
    if kind == "reverse_kl":
        assert (got["divergence"] == math.inf).any()
    else:
        assert_close(got, want, rtol=1e-11, atol=1e-13)


@every_kind
@on_kernels
def test_certain_distributions(backend: str, kind: str) -> None:
    """A student and a teacher that are certain of different ids, beyond what float32 has of a probability."""
    inputs = cases.draw("bias", "whole", columns=40, kind=kind)
    inputs["bias"][2] += 150
    inputs["teacher_bias"][5] += 150
    inputs = heads.rounded(inputs, F32)
    inputs = heads.rounded(inputs, F32)
    assert_near(run(op_of(inputs), inputs, backend, F32), inputs)


@needs_cpu_kernels
@every_kind
def test_large_logits(kind: str) -> None:
    """Logits near 2**14 that float32 has exactly: the log-sum-exp as the reference rounds it is off by up to 1e-3."""
    inputs = cases.draw("bias", "whole", columns=53, kind=kind)
    names = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias")
    inputs |= {name: (4 * inputs[name]).round() / 4 for name in names}
    inputs["bias"], inputs["teacher_bias"] = inputs["bias"] + 2.0**14, inputs["teacher_bias"] - 2.0**14
    inputs = heads.rounded(inputs, F32)
    assert_near(run(op_of(inputs), inputs, "cpu", F32), inputs)


@needs_cpu_kernels
@every_kind
def test_plain_torch_takes_some_rows_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.draw("bias", "gaps", "temperatures", "whole", kind=kind)
    whole = run(op_of(inputs), inputs, "cpu", F64)
    monkeypatch.setattr(whole_teacher, "_BLOCK", 4 * 31)
    assert_close(run(op_of(inputs), inputs, "cpu", F64), whole, rtol=0, atol=0)
