"""linear_distillation_loss where numbers are extreme or none, and where nothing counts.

Faults that this is for: a probability of 0 that is NaN, or counts; a token that does not count and is read where all
are computed; a NaN that is not seen, or in another token; ids and normalizers whose dtype or value is a special case.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.linear_head import loop
from grpo_kernels.ops.linear_head.objectives import whole_teacher
from tests.harness import assert_close_to_rounding, needs_cpu_kernels
from tests.ops.linear_head import heads
from tests.ops.linear_head.cases import Problem, by_definition, problem
from tests.ops.linear_head.heads import EXACT, F32, KERNELS, NAN, assert_close
from tests.ops.linear_head.teachers import KINDS, TAILS
from tests.ops.promises import Results

on_kernels = pytest.mark.parametrize("backend", KERNELS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def draw(*features: str, **teacher: object) -> Problem:
    return problem("distillation", "bias", *features, teacher=teacher)


def with_logit(case: Problem, name: str, column: int, value: float) -> Problem:
    return case.but(**{name: case.inputs[name].index_fill(0, torch.tensor([column]), value)})


@pytest.mark.pairs
@pytest.mark.parametrize("tail", [*TAILS, "whole"])
@every_kind
@pytest.mark.parametrize("backend", EXACT)
def test_a_probability_of_0_is_what_a_very_small_one_tends_to(backend: str, kind: str, tail: str) -> None:
    """Takes an id that the student cannot choose, or of a whole distribution one that the teacher never chooses."""
    if tail == "whole":
        name, column, case = "teacher_bias", 3, draw("whole", kind=kind)
    else:
        case = draw(kind=kind, tail=tail)
        name, column = "bias", int(case.inputs["teacher_ids"][0, 0, 0])
    none = with_logit(case, name, column, -math.inf)
    got = none.run(backend)
    if tail == "whole":  # neither may choose it, as padding of a vocabulary
        padded = with_logit(none, "bias", column, -1e4).run(backend)
        assert padded["loss"].isfinite() and padded["d_hidden"].isfinite().all()
    if kind == ("reverse_kl" if tail == "whole" else "forward_kl"):
        assert (got["divergence"] == math.inf).any()
    else:
        assert_close(got, with_logit(case, name, column, -1e4).run(backend), rtol=1e-11, atol=1e-13)
        assert got["loss"].isfinite()


@pytest.mark.parametrize("features", [(), ("whole",)])
@on_kernels
def test_kernels_that_compute_all_tokens(
    backend: str, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with a temperature, hidden states and ids of tokens that do not count that are no numbers."""
    inputs = draw("lora", "temperatures", "gaps", "teacher weights", *features).inputs
    inputs["teacher_weights"] = torch.where(inputs["mask"], inputs["teacher_weights"], 0)
    counts = inputs.pop("mask")  # only the weights tell
    case = Problem("distillation", inputs)

    def reference() -> Results:
        return case.run("reference", F32)

    monkeypatch.setattr(loop, "tokens_with_grad", lambda *_: None)
    monkeypatch.setattr(loop, "tokens_per_chunk", lambda *_: 6)
    got = case.run(backend, F32, temperature=torch.where(counts, inputs["temperature"], NAN))
    assert_close_to_rounding(got, reference(), reference)


@pytest.mark.parametrize("of", ["hidden", "teacher_hidden"])
@every_kind
@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_a_token_of_no_numbers_is_seen(backend: str, kind: str, of: str) -> None:
    case = draw(*(("whole",) if of == "teacher_hidden" else ()), kind=kind)
    case.inputs[of][0, 1] = NAN
    got = case.run(backend, F32)
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
    case = problem("distillation", shape=(1,), columns=columns, teacher={"k": 2})
    ids = torch.tensor([[min(columns, 256) - 1, 3]])
    losses = [case.run(None, F32, teacher_ids=of)["loss"] for of in (ids, ids.to(dtype))]
    assert torch.equal(*losses)


def test_defaults_of_a_teacher() -> None:
    """Forward KL with a bucket, the mean of it, and a mixture of halves; a count of 0 counts as 1."""
    inputs = draw().inputs | {"teacher_coef": 1.0}
    teacher, head = gk.Teacher(inputs["teacher_ids"], inputs["teacher_logprobs"]), heads.head_of(inputs)
    for kind in ("forward_kl", "jsd"):
        got = gk.linear_distillation_loss(inputs["hidden"], head, dataclasses.replace(teacher, kind=kind))
        want = by_definition(inputs | {"teacher_kind": kind, "teacher_beta": 0.5}, "distillation")
        torch.testing.assert_close(got.loss, want["loss"])
        sums = [
            gk.linear_distillation_loss(inputs["hidden"], head, dataclasses.replace(teacher, normalizer=count)).loss
            for count in (torch.tensor(0), torch.tensor(1.0))
        ]
        assert torch.equal(*sums)


@needs_cpu_kernels
@every_kind
def test_plain_torch_takes_some_rows_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw("gaps", "temperatures", "whole", kind=kind)
    whole = case.run("cpu")
    monkeypatch.setattr(whole_teacher, "_BLOCK", 4 * 31)
    assert_close(case.run("cpu"), whole, rtol=0, atol=0)
