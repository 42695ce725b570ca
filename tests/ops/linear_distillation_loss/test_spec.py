"""linear_distillation_loss in float64, against its definition and the installed peers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import runnable_backends
from tests.ops.linear_distillation_loss.batch import COLUMNS, F64, KINDS, ROWS, TAILS, K, batch, oracle, run

BACKENDS = [backend for backend in runnable_backends(SUPPORTS, F64) if backend in ("cpu", "reference")]
# products of sums over 40 columns of numbers below 10, in float64
NEAR: dict[str, float] = {"rtol": 1e-11, "atol": 1e-13}


def check(arguments: dict[str, Any], backend: str, kind: str, tail: str, **more: Any) -> None:
    loss, divergences, masses, gradients = oracle(
        arguments, kind, tail, more.get("beta", 0.5), more.get("logit_scale", 1.0), more.get("softcap")
    )
    result, got = run(arguments, kind=kind, tail=tail, backend=backend, **more)
    torch.testing.assert_close(result.loss.detach(), loss, **NEAR)
    torch.testing.assert_close(result.divergence, divergences, **NEAR)
    torch.testing.assert_close(result.mass, masses, **NEAR)
    for name, gradient in gradients.items():
        torch.testing.assert_close(got[name], gradient, **NEAR)
        assert gradient.any(), name


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_definition(backend: str, kind: str, tail: str) -> None:
    """Chunks of four rows, of which the last is shorter."""
    more = {"beta": 0.3} if kind == "jsd" else {}
    check(batch(), backend, kind, tail, **more, chunk_size=4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scaling_of_the_head(backend: str, kind: str, softcap: float | None) -> None:
    arguments = batch() | {"temperature": torch.linspace(0.5, 2, ROWS, dtype=F64)}
    check(arguments, backend, kind, "bucket", softcap=softcap, logit_scale=1.5)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unused_slots(backend: str, tail: str) -> None:
    """Rows of one, two, ... ids, and one without any, which has no divergence."""
    arguments = batch()
    for row in range(K):
        arguments["teacher_ids"][row, row + 1 :] = -1
    arguments["teacher_ids"][K] = -1
    arguments["teacher_logprobs"][arguments["teacher_ids"] == -1] = torch.nan
    check(arguments, backend, "forward_kl", tail)
    result, _ = run(arguments, tail=tail, backend=backend)
    assert result.divergence[K] == 0 and result.mass[K] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_hides_what_is_not_a_number(backend: str) -> None:
    arguments = batch() | {"mask": torch.ones(ROWS)}
    arguments["mask"][[2, 7]] = 0
    want = oracle(arguments, "forward_kl", "bucket")
    for name in ("hidden", "teacher_logprobs"):
        arguments[name][[2, 7]] = torch.nan
    arguments["teacher_ids"][[2, 7]] = 10**6
    result, gradients = run(arguments, backend=backend)
    torch.testing.assert_close(result.loss.detach(), want[0], **NEAR)
    for name, gradient in want[3].items():
        torch.testing.assert_close(gradients[name], gradient, **NEAR)
    assert not gradients["hidden"][[2, 7]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_and_normalizer(backend: str) -> None:
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(ROWS, generator=random, dtype=F64)
    weights[3] = 0
    check(batch() | {"weights": weights}, backend, "reverse_kl", "bucket")
    summed, _ = run(batch(), weights=torch.ones(ROWS), backend=backend)
    for normalizer in (4.0, torch.tensor([4.0])):
        divided, _ = run(batch(), normalizer=normalizer, backend=backend)
        torch.testing.assert_close(divided.loss * 4, summed.loss, **NEAR)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_the_whole_vocabulary_every_tail_is_the_dense_divergence(backend: str, kind: str, tail: str) -> None:
    arguments = batch(k=COLUMNS)
    leaf = arguments["hidden"].clone().requires_grad_()
    log_q = (leaf @ arguments["weight"].T + arguments["bias"]).log_softmax(1)
    log_p = torch.empty_like(log_q).scatter(1, arguments["teacher_ids"], arguments["teacher_logprobs"])
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0, dtype=F64).log()
    kl = {
        "forward_kl": lambda: (log_p.exp() * (log_p - log_q)).sum(1),
        "reverse_kl": lambda: (log_q.exp() * (log_q - log_p)).sum(1),
        "jsd": lambda: (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(1) / 2,
    }[kind]()
    (want,) = torch.autograd.grad(kl.mean(), leaf)
    result, gradients = run(arguments, kind=kind, tail=tail, backend=backend)
    torch.testing.assert_close(result.divergence, kl.detach(), **NEAR)
    torch.testing.assert_close(gradients["hidden"], want, **NEAR)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rest_is_exact_however_little_it_is(backend: str) -> None:
    """A student who is sure to one part in 10^20, where 1 minus the mass would be 0."""
    arguments = batch(rows=1, k=2)
    arguments["bias"][arguments["teacher_ids"][0]] += 60
    log_q = (arguments["hidden"] @ arguments["weight"].T + arguments["bias"]).log_softmax(1)[0]
    rest = log_q[[i for i in range(COLUMNS) if i not in arguments["teacher_ids"][0].tolist()]]
    assert rest.logsumexp(0).exp() < 1e-20
    result, gradients = run(arguments, backend=backend)
    check(arguments, backend, "forward_kl", "bucket")
    assert result.divergence.item() > 5
    # each other column is pulled up by its share of what the teacher leaves
    left = 1 - arguments["teacher_logprobs"].exp().sum()
    shares = (rest - rest.logsumexp(0)).exp()
    others = [i for i in range(COLUMNS) if i not in arguments["teacher_ids"][0].tolist()]
    torch.testing.assert_close(gradients["bias"][others], -left * shares, rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sure_teacher_leaves_a_rounding_to_the_rest(backend: str) -> None:
    """In the reverse direction nothing at all would be infinite."""
    arguments = batch(rows=1, k=1)
    arguments["teacher_logprobs"][:] = 0
    log_q = (arguments["hidden"] @ arguments["weight"].T + arguments["bias"]).log_softmax(1)[0]
    q = log_q[arguments["teacher_ids"][0, 0]].exp()
    result, _ = run(arguments, kind="reverse_kl", backend=backend)
    want = q * q.log() + (1 - q) * ((1 - q).log() - math.log(2.0**-24))
    torch.testing.assert_close(result.divergence[0], want, **NEAR)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", ["reverse_kl", "jsd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_id_that_the_student_cannot_choose(backend: str, kind: str, tail: str) -> None:
    """A probability of 0 is what a very small one tends to."""
    small, none = batch(), batch()
    column = int(small["teacher_ids"][0, 0])
    small["bias"][column], none["bias"][column] = -1e4, -math.inf
    (want, gradients), (got, others) = (run(b, kind=kind, tail=tail, backend=backend) for b in (small, none))
    torch.testing.assert_close(got.divergence, want.divergence, **NEAR)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, **NEAR)
    assert got.loss.isfinite()


def sparse(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The student's log-probs of the teacher's ids, as peers take them, with the leaf that they depend on."""
    leaf = arguments["hidden"].clone().requires_grad_()
    log_q = (leaf @ arguments["weight"].T + arguments["bias"]).log_softmax(1)
    return leaf, log_q.gather(1, arguments["teacher_ids"]), log_q


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize(("kind", "alpha"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_trl(backend: str, kind: str, alpha: float, tail: str) -> None:
    pytest.importorskip("trl")
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    arguments = batch()
    leaf, student, _ = sparse(arguments)
    teacher = arguments["teacher_logprobs"]
    if tail == "bucket":
        student, teacher = add_tail_bucket(student), add_tail_bucket(teacher)
    else:
        student, teacher = student.log_softmax(1), teacher.log_softmax(1)
    theirs = compute_divergence(student, teacher, alpha)
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    beta = alpha if kind == "jsd" else None  # the others do not take it
    result, gradients = run(arguments, kind=kind, tail=tail, beta=beta, backend=backend)
    torch.testing.assert_close(result.divergence, theirs.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients["hidden"], want, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_verl(backend: str) -> None:
    """verl's forward KL over the teacher's top k leaves the tail out. It computes in float32."""
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
    arguments = batch()
    leaf, student, _ = sparse(arguments)
    theirs = losses.kl_divergence(log_q=student, log_p=arguments["teacher_logprobs"])
    (want,) = torch.autograd.grad(theirs.mean(), leaf)
    result, gradients = run(arguments, tail="ignore", backend=backend)
    # sums of five terms below 10
    torch.testing.assert_close(result.divergence.float(), theirs.detach().float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients["hidden"].float(), want.float(), rtol=1e-5, atol=1e-6)
