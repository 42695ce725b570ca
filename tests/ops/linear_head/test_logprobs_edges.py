"""Edge cases of linear_logprobs: no rows, ignored rows, positions, layouts, precision, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.chunks import Products
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import assert_within_budget, device_of, needs_cpu_kernels, runnable_backends

BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# the parts outside of kernels are the same Python code for every backend
SHARED = [name for name in BACKENDS if name in ("cpu", "reference")]
F64 = torch.float64
ROWS, HIDDEN, VOCABULARY = 20, 6, 31
FACTORS: dict[str, dict[str, Any]] = {"plain": {}, "scaled": {"temperature": 0.7, "softcap": 9.0, "logit_scale": 0.5}}


def batch(
    *shape: int, hidden: int = HIDDEN, vocabulary: int = VOCABULARY, dtype: torch.dtype = F64
) -> dict[str, Tensor]:
    shape = shape or (ROWS,)
    return {
        "hidden": torch.randn(*shape, hidden, dtype=F64).to(dtype),
        "weight": (2 * torch.randn(vocabulary, hidden, dtype=F64)).to(dtype),
        "bias": torch.randn(vocabulary, dtype=F64).to(dtype),
        "targets": torch.randint(vocabulary, shape),
    }


def upstream_of(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Upstream gradients of log-probs and entropies, the same for every call."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(shape, dtype=F64, generator=generator), torch.randn(shape, dtype=F64, generator=generator)


def run(
    given: dict[str, Tensor], backend: str = "cpu", upstream: tuple[Tensor, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    """Both results and the gradients of all inputs but the frozen one (e.g. frozen="weight")."""
    device, frozen = device_of(backend), options.pop("frozen", "")
    leaves = {k: v.detach().to(device).requires_grad_(v.is_floating_point() and k != frozen) for k, v in given.items()}
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    logprobs, entropy = gk.linear_logprobs(**leaves, return_entropy=True, backend=backend, **options)
    by_logprob, by_entropy = (u.to(logprobs) for u in upstream or upstream_of(logprobs.shape))
    (logprobs * by_logprob + entropy * by_entropy).sum().backward()
    gradients = {f"by {k}": leaf.grad for k, leaf in leaves.items() if leaf.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach()} | gradients


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-10, atol: float = 1e-12) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


# Sizes


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str, shape: tuple[int, ...]) -> None:
    got = run(batch(*shape, dtype=torch.float32), backend)
    assert got["logprobs"].shape == got["entropy"].shape == shape
    assert got["by hidden"].shape == (*shape, HIDDEN)
    assert not got["by weight"].any() and not got["by bias"].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vocabulary_of_one_token_is_certain(backend: str) -> None:
    got = run(batch(4, vocabulary=1, dtype=torch.float32), backend)
    for name, value in got.items():
        assert not value.any(), name


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_any_number_of_dimensions(backend: str, shape: tuple[int, ...]) -> None:
    arguments = {k: v.double() if v.is_floating_point() else v for k, v in batch(*shape, dtype=torch.float32).items()}
    narrow = {k: v.float() if v.is_floating_point() else v for k, v in arguments.items()}
    got, working, gold = run(narrow, backend), run(narrow, "reference"), run(arguments, "reference")
    assert got["logprobs"].shape == shape and got["logprobs"].dtype == torch.float32
    for name in gold:
        assert_within_budget(got[name], working[name], gold[name], name)


# Ignored rows


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_ignored(backend: str) -> None:
    arguments = batch(5, dtype=torch.float32)
    for name, value in run(arguments | {"targets": torch.full((5,), -100)}, backend).items():
        assert not value.any(), name


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("backend", SHARED)
def test_ignored_rows_are_as_if_they_were_not_there(
    backend: str, chunk_size: int | None, factors: dict[str, Any]
) -> None:
    arguments = batch()
    ignored = torch.arange(ROWS) % 3 == 1
    arguments["targets"][ignored] = -100
    upstream = upstream_of(torch.Size([ROWS]))
    got = run(arguments, backend, upstream, chunk_size=chunk_size, **factors)
    others = arguments | {"hidden": arguments["hidden"][~ignored], "targets": arguments["targets"][~ignored]}
    alone = run(others, backend, tuple(u[~ignored] for u in upstream), **factors)
    for name in ("logprobs", "entropy", "by hidden"):
        assert not got[name][ignored].any(), name
        got[name] = got[name][~ignored]
    assert_close(got, alone)


# Positions


@pytest.mark.parametrize("kind", ["mask", "integers", "unsorted", "int32"])
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("backend", SHARED)
def test_positions_are_everything_and_then_a_choice(backend: str, chunk_size: int | None, kind: str) -> None:
    arguments, temperature = batch(4, 5), torch.rand(4, 5, dtype=F64) + 0.5
    mask = torch.rand(4, 5) < 0.5
    places = mask.flatten().nonzero().squeeze(1)
    places = places.flip(0)[torch.arange(len(places)) - 2] if kind == "unsorted" else places
    positions = {"mask": mask, "int32": places.int()}.get(kind, places)
    assert kind != "unsorted" or ((places.diff() < 0).any() and (places.diff() > 0).any())

    by_logprob, by_entropy = upstream_of(torch.Size([4, 5]))
    chosen = tuple(u if kind == "mask" else u.flatten()[places] for u in (by_logprob, by_entropy))
    got = run(arguments, backend, chosen, positions=positions, temperature=temperature, chunk_size=chunk_size)
    whole = run(arguments, backend, (by_logprob * mask, by_entropy * mask), temperature=temperature)
    for name in ("logprobs", "entropy"):
        whole[name] = whole[name] * mask if kind == "mask" else whole[name].flatten()[places]
    assert_close(got, whole)


@pytest.mark.parametrize("backend", SHARED)
def test_no_positions_at_all(backend: str) -> None:
    for positions, shape in (
        (torch.zeros(2, 3, dtype=torch.bool), (2, 3)),
        (torch.tensor([], dtype=torch.int64), (0,)),
    ):
        got = run(batch(2, 3), backend, positions=positions)
        assert got["logprobs"].shape == got["entropy"].shape == shape
        for name, value in got.items():
            assert not value.any(), name


@pytest.mark.parametrize("backend", SHARED)
def test_what_is_in_other_positions_is_not_looked_at(backend: str) -> None:
    """Other positions hold out-of-range targets and NaN hidden states."""
    arguments = batch()
    mask = torch.arange(ROWS) % 2 == 0
    expected = run(arguments, backend, positions=mask)
    arguments["targets"][~mask] = VOCABULARY + 5
    arguments["hidden"][~mask] = torch.nan
    assert_same(run(arguments, backend, positions=mask), expected)


# Gradients


@needs_cpu_kernels
@pytest.mark.parametrize(("frozen", "product"), [("weight", "to_weight"), ("hidden", "to_hidden")])
def test_nothing_is_computed_for_what_is_frozen(monkeypatch: pytest.MonkeyPatch, frozen: str, product: str) -> None:
    arguments = batch()
    expected = run(arguments)
    monkeypatch.setattr(Products, product, lambda *_, **__: pytest.fail(f"{product} of a frozen {frozen}"))
    got = run(arguments, frozen=frozen)
    assert f"by {frozen}" not in got
    del expected[f"by {frozen}"]
    assert_same(got, expected)


@pytest.mark.parametrize("which", [0, 1], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("backend", KERNELS)
def test_one_result_alone_has_its_gradient(backend: str, which: int) -> None:
    arguments = batch(6, dtype=torch.float32)
    leaves = {k: v.to(device_of(backend)).requires_grad_(v.is_floating_point()) for k, v in arguments.items()}
    result = gk.linear_logprobs(**leaves, return_entropy=True, backend=backend)[which]
    upstream = [torch.zeros(6, dtype=F64)] * 2
    upstream[which] = upstream_of(torch.Size([6]))[which]
    (result * upstream[which].to(result)).sum().backward()
    both = run(arguments, backend, tuple(upstream))
    for name in ("hidden", "weight", "bias"):  # one kernel adds an extra 0 to each element
        torch.testing.assert_close(leaves[name].grad, both[f"by {name}"], rtol=1e-6, atol=1e-6)


@needs_cpu_kernels
def test_rows_without_a_gradient_change_no_bit_of_the_others() -> None:
    arguments = batch(dtype=torch.float32)
    still = torch.arange(ROWS) % 3 == 0
    upstream = tuple(u * ~still for u in upstream_of(torch.Size([ROWS])))
    first = run(arguments, upstream=upstream, chunk_size=7)
    assert not first["by hidden"][still].any() and first["by hidden"][~still].all()
    arguments["hidden"][still] = torch.randn(int(still.sum()), HIDDEN)
    second = run(arguments, upstream=upstream, chunk_size=7)
    for name in ("logprobs", "entropy"):
        first[name], second[name] = first[name][~still], second[name][~still]
    assert_same(second, first)


@needs_cpu_kernels
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_rows_without_a_gradient_cost_no_precision(chunk_size: int | None) -> None:
    """Compares with a call without these rows, whose products have other shapes and so sum in other orders."""
    arguments = batch(dtype=torch.float32)
    moves = torch.arange(ROWS) % 3 != 0
    upstream = tuple(u * moves for u in upstream_of(torch.Size([ROWS])))
    got = run(arguments, upstream=upstream, chunk_size=chunk_size)
    alone = arguments | {"hidden": arguments["hidden"][moves], "targets": arguments["targets"][moves]}
    expected = run(alone, upstream=tuple(u[moves] for u in upstream))
    # a logit sums H products, a gradient of the weight sums rows; the entropy has a factor of up to log p
    eps, size = torch.finfo(torch.float32).eps, arguments["hidden"].abs() @ arguments["weight"].abs().T
    slope = (upstream[0].abs() + upstream[1].abs() * size.max()) * 2
    relative = eps * (HIDDEN * size.max() + ROWS)
    to_weight = (slope @ arguments["hidden"].abs().double()) * relative
    to_hidden = slope[:, None] * arguments["weight"].abs().sum(0) * relative
    assert ((got["by weight"] - expected["by weight"]).abs() <= to_weight).all()
    assert ((got["by hidden"][moves] - expected["by hidden"]).abs() <= to_hidden[moves]).all()


@pytest.mark.parametrize("backend", KERNELS)
def test_second_derivatives_are_refused(backend: str) -> None:
    leaves = {k: v.to(device_of(backend)) for k, v in batch(3, dtype=torch.float32).items()}
    leaves["hidden"].requires_grad_()
    logprobs = gk.linear_logprobs(**leaves, backend=backend).logprobs
    (gradient,) = torch.autograd.grad(logprobs.sum(), leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_logprobs: a second derivative"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("backend", KERNELS)
def test_repeated_calls_agree_to_the_bit(backend: str) -> None:
    arguments = batch(9, dtype=torch.float32)
    first = run(arguments, backend, chunk_size=4, softcap=9.0)
    for _ in range(3):
        assert_same(run(arguments, backend, chunk_size=4, softcap=9.0), first)


# Memory


def layouts(given: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The same values with different strides; the memory between them holds NaN or out-of-range targets."""
    rows, width, size = given["hidden"].shape
    wide = given["hidden"].new_full((rows, width + 1, size + 2), torch.nan)
    wide[:, :-1, 1:-1] = given["hidden"]
    apart = given["weight"].new_full((VOCABULARY, 2 * size), torch.nan)
    apart[:, ::2] = given["weight"]
    targets = given["targets"].new_full((rows, 2 * width), VOCABULARY + 9)
    targets[:, ::2] = given["targets"]
    return {
        "shifted": {"hidden": wide[:, :-1, 1:-1]},
        "swapped": {"hidden": given["hidden"].transpose(0, 1).contiguous().transpose(0, 1)},
        "weight turned": {"weight": given["weight"].T.contiguous().T},
        "weight apart": {"weight": apart[:, ::2]},
        "targets apart": {"targets": targets[:, ::2]},
        "bias of one number": {"bias": given["bias"][:1].expand(VOCABULARY)},
    }


@pytest.mark.parametrize("backend", SHARED)
def test_strides_change_nothing(backend: str) -> None:
    arguments = batch(3, 5)
    arguments["bias"][:] = 0.5
    expected = run(arguments, backend, chunk_size=4)
    for changes in layouts(arguments).values():
        assert_close(run(arguments | changes, backend, chunk_size=4), expected)


# The call of a trainer: the last position has no target.
def test_hidden_states_but_the_last() -> None:
    arguments = batch(3, 5)
    leaf = arguments["hidden"].requires_grad_()
    logprobs = gk.linear_logprobs(leaf[:, :-1], arguments["weight"], arguments["targets"][:, 1:], chunk_size=5).logprobs
    logprobs.square().sum().backward()
    other = arguments["hidden"].detach().clone().requires_grad_()
    naive = torch.nn.functional.linear(other[:, :-1], arguments["weight"]).log_softmax(-1)
    naive = naive.gather(-1, arguments["targets"][:, 1:, None])[..., 0]
    naive.square().sum().backward()
    torch.testing.assert_close(logprobs, naive, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-11, atol=1e-12)
    assert not leaf.grad[:, -1].any()


# Out-of-range targets


@pytest.mark.parametrize("target", [-1, -99, VOCABULARY, 2**40])
@pytest.mark.parametrize("backend", SHARED)
def test_a_target_that_is_no_column(backend: str, target: int) -> None:
    arguments = batch(5, dtype=torch.float32)
    arguments["targets"][3] = target
    with pytest.raises(
        RuntimeError, match=rf"^linear_logprobs: targets must be in \[0, {VOCABULARY}\) or -100, got {target} in row 3"
    ):
        gk.linear_logprobs(**arguments, backend=backend, chunk_size=2)


@pytest.mark.parametrize("target", [-1, VOCABULARY])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in SHARED])
def test_a_target_that_is_no_column_gives_nan_where_it_cannot_be_an_error(backend: str, target: int) -> None:
    arguments = batch(3, dtype=torch.float32)
    arguments["targets"][1] = target
    got = run(arguments, backend)
    for name in ("logprobs", "entropy", "by hidden"):
        assert got[name][1].isnan().all() and got[name][[0, 2]].isfinite().all(), name


# Precision


@pytest.fixture(scope="module")
def model_sized() -> dict[str, Tensor]:
    """Float64 inputs whose logits over a model's vocabulary have a standard deviation of 4."""
    torch.manual_seed(3)
    return {
        "hidden": torch.randn(24, 256, dtype=F64),
        "weight": torch.randn(32003, 256, dtype=F64) / 4,
        "targets": torch.randint(32003, (24,)),
    }


def logprobs_of(given: dict[str, Tensor], dtype: torch.dtype, backend: str = "cpu") -> Tensor:
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    return gk.linear_logprobs(**cast, backend=backend).logprobs.double()


@pytest.mark.parametrize("backend", SHARED)
def test_float32_is_exact_to_the_fifth_digit(model_sized: dict[str, Tensor], backend: str) -> None:
    rounded = {k: v.float() if v.is_floating_point() else v for k, v in model_sized.items()}
    exact = logprobs_of(rounded, F64, "reference")
    torch.testing.assert_close(logprobs_of(rounded, torch.float32, backend), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", SHARED)
def test_halves_lose_what_rounding_the_inputs_loses(
    model_sized: dict[str, Tensor], backend: str, dtype: torch.dtype
) -> None:
    rounded = {k: v.to(dtype).double() if v.is_floating_point() else v for k, v in model_sized.items()}
    exact, of_rounded = (logprobs_of(arguments, F64, "reference") for arguments in (model_sized, rounded))
    got = logprobs_of(model_sized, dtype, backend)
    assert (got - exact).abs().max() <= 2 * (of_rounded - exact).abs().max()
    # logits are rounded to float32 whatever the dtype of the inputs
    torch.testing.assert_close(got, of_rounded, rtol=0, atol=1e-5)
