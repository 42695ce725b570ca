"""Edge cases of token_logprobs: certainty, masked tokens, ignored rows, layouts, memory, repetition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import cpu_threads, device_of, needs_cpu_kernels
from tests.ops.token_logprobs.rows import (
    BACKENDS,
    FAST,
    INF,
    KERNELS,
    NAN,
    Results,
    assert_matches,
    assert_same,
    rows_of,
    run,
    upstream_of,
)

# Certainty


@pytest.mark.parametrize("offset", [0.0, 40.0, -1000.0])
@pytest.mark.parametrize("vocabulary", [2, 700])
@pytest.mark.parametrize("backend", BACKENDS)
def test_certain_tokens_keep_their_digits(backend: str, vocabulary: int, offset: float) -> None:
    """Log-probabilities up to -1e-9, for which subtracting log-sum-exp in float32 gives 0 or more."""
    wanted = torch.tensor([1e-1, 1e-3, 1e-6, 1e-7, 1e-8, 1e-9], dtype=torch.float64)
    rest = wanted.expm1().log() - math.log(vocabulary - 1)
    logits = rest[:, None].expand(-1, vocabulary).clone()
    logits[:, vocabulary // 2] = 0
    logits = (logits + offset).float()  # the gold values are those of the rounded logits
    targets = torch.full((len(wanted),), vocabulary // 2)
    others = torch.cat([logits[:, : vocabulary // 2], logits[:, vocabulary // 2 + 1 :]], -1).double()
    distance = others - logits[:, vocabulary // 2, None].double()
    mass = distance.exp().sum(-1)
    gold = -torch.log1p(mass)
    gold_entropy = torch.log1p(mass) - (distance.exp() * distance).sum(-1) / (1 + mass)

    upstream = torch.ones(len(wanted)), torch.zeros(len(wanted))
    got = run(logits, targets, backend, upstream)
    torch.testing.assert_close(got.logprobs.double().cpu(), gold, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.entropy.double().cpu(), gold_entropy, rtol=1e-5, atol=0)
    # rounding of a float64 log-sum-exp, which is as large as the logits
    atol = torch.finfo(torch.float64).eps * abs(offset)
    certain = got.gradient[:, vocabulary // 2].double().cpu()
    torch.testing.assert_close(certain, -torch.expm1(gold), rtol=1e-5, atol=atol)
    assert (got.logprobs < 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_certain_rows_with_another_target(backend: str) -> None:
    """The entropy of a row is equally accurate for every target."""
    logits = torch.full((2, 300), -20.0)
    logits[:, 7] = 5.0
    got = run(logits, torch.tensor([7, 8]), backend, return_entropy=True)
    mass = 299 * math.exp(-25)
    gold = math.log1p(mass) + 25 * mass / (1 + mass)
    torch.testing.assert_close(got.entropy.cpu().double(), torch.full((2,), gold).double(), rtol=1e-5, atol=0)
    assert got.logprobs[1].item() == pytest.approx(-25 - math.log1p(mass), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 9, 1000, 4099])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_logits(backend: str, count: int) -> None:
    got = run(torch.full((1, count), 3.7), torch.tensor([count - 1]), backend, (torch.ones(1), torch.ones(1)))
    assert got.logprobs.item() == pytest.approx(-math.log(count), rel=1e-6)
    assert got.entropy.item() == pytest.approx(math.log(count), rel=1e-6)


# Non-finite logits


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "temperature": 0.5}], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_vocabulary(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A logit of -inf is probability 0, as if the column were absent; a target there has a log-prob of -inf."""
    logits, targets = rows_of((6, 530), dtype)
    logits -= 25
    hidden = torch.rand(6, 530) < 0.7
    hidden[0, :520] = True  # a whole tile of a kernel
    hidden[1, 1:] = True
    hidden[torch.arange(6), targets] = False
    hidden[5] = torch.arange(530) != targets[5] - 1
    masked = logits.masked_fill(hidden, -INF)
    upstream = upstream_of(targets)
    got = assert_matches(masked, targets, backend, upstream, **options)
    assert got.logprobs[5] == -INF and got.logprobs[:5].isfinite().all()
    assert got.entropy.isfinite().all() and got.gradient.isfinite().all()
    assert not got.gradient.cpu()[:5][hidden[:5]].any()
    lowest = torch.finfo(dtype).min
    kept = run(logits.masked_fill(hidden, lowest)[2:5], targets[2:5], backend, return_entropy=True)
    if not options:  # the dtype's lowest number is a common mask value, too
        assert torch.equal(kept.logprobs, got.logprobs[2:5]) and torch.equal(kept.entropy, got.entropy[2:5])


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("where", [0, 64, 640])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "capped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_row_spoils_itself_alone(backend: str, options: dict[str, Any], where: int, poison: float) -> None:
    logits, targets = rows_of((3, 641))
    upstream = torch.ones(3), torch.ones(3)
    clean = run(logits, targets, backend, upstream, **options)
    bad = logits.clone()
    bad[1, where] = poison
    got = run(bad, targets, backend, upstream, **options)
    assert got.logprobs[1].isnan() and got.entropy[1].isnan() and got.gradient[1].isnan().any()
    keep = torch.tensor([0, 2], device=got.logprobs.device)
    assert_same(Results(*(r[keep] for r in got)), Results(*(r[keep] for r in clean)))
    # the row's gradient is not requested
    silent = run(bad, targets, backend, (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])), **options)
    assert not silent.gradient[1].any() and torch.equal(silent.gradient[keep], clean.gradient[keep])


@pytest.mark.parametrize("value", [NAN, -INF], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_any_number_is_nan(backend: str, value: float) -> None:
    got = run(torch.full((1, 600), value), torch.tensor([3]), backend, (torch.ones(1), torch.ones(1)))
    assert got.logprobs.isnan().all() and got.entropy.isnan().all()


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN, INF], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_of_no_meaning_spoils_its_row_alone(backend: str, bad: float) -> None:
    logits, targets = rows_of((3, 40))
    upstream = torch.ones(3), torch.ones(3)
    got = run(logits, targets, backend, upstream, temperature=torch.tensor([1.0, bad, 1.0]))
    clean = run(logits, targets, backend, upstream, temperature=torch.ones(3))
    assert got.logprobs[1].isnan() and got.entropy[1].isnan() and got.gradient[1].isnan().all()
    keep = torch.tensor([0, 2], device=got.logprobs.device)
    assert_same(Results(*(r[keep] for r in got)), Results(*(r[keep] for r in clean)))


# Ignored rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_are_zero_whatever_they_hold(backend: str) -> None:
    logits, targets = rows_of((6, 72))  # all rows aligned alike, as the order of a sum depends on that
    logits[1], logits[3, 5] = NAN, INF
    targets[[1, 3, 4]] = -100
    upstream = torch.randn(6), torch.randn(6)
    got = run(logits, targets, backend, upstream)
    kept = [0, 2, 5]
    alone = run(logits[kept], targets[kept], backend, tuple(u[kept] for u in upstream))
    assert_same(Results(*(r[kept] for r in got)), alone)
    for field in got:
        assert torch.equal(field[[1, 3, 4]], torch.zeros_like(field[:3]))


@pytest.mark.pairs
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("cpu", "reference")])
@pytest.mark.parametrize("target", [-1, -99, 70, 2**40])
def test_a_target_that_is_no_column_gives_nan_where_it_cannot_be_an_error(backend: str, target: int) -> None:
    logits, targets = rows_of((3, 70))
    targets[1] = target
    got = run(logits, targets, backend, (torch.ones(3), torch.ones(3)))
    for field in got:
        assert field[1].isnan().all() and field[[0, 2]].isfinite().all()


# Memory


def layouts(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same [3, 4, V] values with different strides; the memory between them holds NaN."""
    a, b, v = logits.shape
    wide = logits.new_full((a, b + 1, v + 3), NAN)
    wide[:, :-1, 2:-1] = logits
    turned = logits.new_full((v, a, b), NAN)
    turned.copy_(logits.permute(2, 0, 1))
    return {
        "slice": wide[:, :-1, 2:-1],
        "swapped": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "last dimension apart": turned.permute(1, 2, 0),
        "odd address": torch.cat([logits.new_zeros(1), logits.flatten()])[1:].view(a, b, v),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_change_nothing(backend: str, dtype: torch.dtype) -> None:
    logits, targets = rows_of((3, 4, 93), dtype)
    upstream = upstream_of(targets)
    expected = run(logits, targets, backend, upstream)
    for name, strided in layouts(logits).items():
        spread = targets.new_full((3, 8), 12345)
        spread[:, ::2] = targets
        device = device_of(backend)
        memory = strided.as_strided((strided.untyped_storage().nbytes() // strided.itemsize,), (1,), 0).to(device)
        leaf = memory.as_strided(strided.shape, strided.stride(), strided.storage_offset())
        got = run(leaf, spread[:, ::2], backend, upstream)
        for one, other in zip(got, expected, strict=True):  # a row's alignment may change the summation order
            torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_backward_writes_the_same_gradient_over_the_logits(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    logits, targets = rows_of((2, 5, 130), dtype)
    targets[0, 1] = -100
    upstream = tuple(u.to(device) for u in upstream_of(targets))
    expected = run(logits[:, :-1], targets[:, :-1], backend, tuple(u[:, :-1] for u in upstream))
    leaf = logits.to(device).requires_grad_()
    computed = leaf * 1
    head = computed[:, :-1]
    result = gk.token_logprobs(
        head, targets[:, :-1].to(device), return_entropy=True, inplace_backward=True, backend=backend
    )
    torch.autograd.backward(result, [u[:, :-1].to(result.logprobs.dtype) for u in upstream])
    assert torch.equal(leaf.grad[:, :-1], expected.gradient) and not leaf.grad[:, -1].any()
    assert torch.equal(computed[:, :-1], expected.gradient), "the logits' memory"
    assert torch.equal(computed[:, -1], logits[:, -1].to(device)), "beside it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_backward_tells_whoever_needs_the_logits(backend: str) -> None:
    logits, targets = (t.to(device_of(backend)) for t in rows_of((3, 50)))
    computed = logits.requires_grad_() * 1
    logprobs = gk.token_logprobs(computed, targets, inplace_backward=True, backend=backend).logprobs
    other = computed.square().sum()  # saves the logits for its own backward
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    with pytest.raises(RuntimeError, match="token_logprobs: backward must run once"):
        logprobs.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_were_overwritten_are_noticed(backend: str) -> None:
    logits, targets = (t.to(device_of(backend)) for t in rows_of((3, 50)))
    computed = logits.requires_grad_() * 1
    logprobs = gk.token_logprobs(computed, targets, backend=backend).logprobs
    computed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


# Repetition


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_agree_to_the_bit(backend: str) -> None:
    logits, targets = rows_of((3, 2100))
    upstream = upstream_of(targets)
    first = run(logits, targets, backend, upstream, temperature=0.9)
    for _ in range(3):
        assert_same(run(logits, targets, backend, upstream, temperature=0.9), first)


@pytest.mark.parametrize("backend", KERNELS)
def test_a_row_does_not_change_with_its_neighbours(backend: str) -> None:
    logits, targets = rows_of((5, 1027))
    upstream = upstream_of(targets)
    whole = run(logits, targets, backend, upstream)
    for row in (0, 3):
        alone = run(
            logits[row : row + 1].clone(), targets[row : row + 1], backend, tuple(u[row : row + 1] for u in upstream)
        )
        for one, other in zip(whole, alone, strict=True):
            torch.testing.assert_close(one[row : row + 1], other, rtol=2e-6, atol=1e-6)


@needs_cpu_kernels
def test_number_of_threads_changes_no_bit() -> None:
    logits, targets = rows_of((37, 9001), torch.bfloat16)
    upstream = upstream_of(targets)
    results = []
    for threads in (1, 2, 5):
        with cpu_threads(threads):
            results.append(run(logits, targets, "cpu", upstream, softcap=20.0))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.full
@pytest.mark.parametrize("backend", [b for b in FAST if b in KERNELS])
def test_more_than_2_to_the_31_elements(backend: str) -> None:
    rows, vocabulary = 70_000, 30_720  # 2.15e9, and more rows than a grid's second dimension takes
    logits = torch.zeros((), dtype=torch.bfloat16, device=device_of(backend)).expand(rows, vocabulary)
    if backend != "cpu":
        logits = logits.contiguous()
    got = gk.token_logprobs(logits, torch.arange(rows, device=logits.device) % vocabulary, backend=backend)
    torch.testing.assert_close(got.logprobs, torch.full_like(got.logprobs, -math.log(vocabulary)))
