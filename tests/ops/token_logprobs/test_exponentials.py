"""The kernel that writes the exponentials of logits as it measures them, against the float64 reference.

Faults that this is for: an offset that lets numbers overflow; a target that is counted among the others, or whose own
value cancels; a row that is read again and keeps what the first turn found; a row of no numbers, or that does not
count, which multiplies a product; columns around whole pieces of 16 bytes; a softcap without its slope.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.ops.token_logprobs import reference
from grpo_kernels.ops.token_logprobs.reference import Gradient, GradientInto, LogitRows, Measured
from grpo_kernels.ops.token_logprobs.registration import BACKWARD_INTO, EXPONENTIALS, FORWARD
from tests.harness import device_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 4.0, "scale": 1.7},
    "hot": {"temperature": 0.3},
}


def exponentials(
    logits: Tensor,
    targets: Tensor,
    *,
    dtype: torch.dtype = F32,
    temperatures: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    offset: int = 0,
) -> dict[str, Tensor]:
    """The results of the kernel, in memory that was NaN; its first column is `offset` numbers behind a boundary."""
    device, (rows, columns) = device_of("triton"), logits.shape
    stride = -(-(columns + offset) // 16) * 16
    memory = torch.full((rows, stride), torch.nan, dtype=dtype, device=device)
    given = torch.zeros(rows, stride, device=device)
    given[:, offset : offset + columns] = logits.float()
    into = memory[:, offset : offset + columns]
    values = [None if each is None else each.to(device) for each in (targets, temperatures)]
    results = EXPONENTIALS(into, given[:, offset : offset + columns], *values, temperature, softcap, scale, True, True)
    assert memory[:, :offset].isnan().all() and memory[:, offset + columns :].isnan().all()
    names = "logprobs", "row_scale", "entropy", "squares"
    return {"into": into.cpu()} | {name: value.cpu() for name, value in zip(names, results, strict=True)}


def defined(logits: Tensor, targets: Tensor, **options: Any) -> dict[str, Tensor]:
    """The reference, with the gradient by the logits of the sum of log-probs."""
    temperatures = options.get("temperatures")
    rows = LogitRows(
        logits.float().double()[None],
        targets[None],
        None if temperatures is None else temperatures.double()[None],
        options.get("temperature", 1.0),
        options.get("softcap"),
        options.get("scale", 1.0),
    )
    logprobs, entropy, normalizer = reference.forward(Measured(rows, True))
    gradient = reference.backward(Gradient(torch.ones_like(logprobs), None, normalizer, None, rows))
    p = (rows.scaling.apply(rows.logits) - normalizer[..., None]).exp()
    squares = torch.where(targets == reference.IGNORED, 0, p.square().sum(-1))
    values = {"logprobs": logprobs, "entropy": entropy, "squares": squares, "gradient": gradient}
    return {name: value[0] for name, value in values.items()}


def gradient(got: dict[str, Tensor]) -> Tensor:
    return got["row_scale"].double()[:, None] * got["into"].double()


def assert_close(got: dict[str, Tensor], gold: dict[str, Tensor], rounding: float = 2**-23) -> None:
    """A logit's product with the scale is rounded before its exponential is taken, and a sum of them again."""
    exponent = gold["logprobs"].abs().max() + 20
    relative = (4 * exponent * 2**-24) + 2**-19
    for name, absolute in (("logprobs", exponent * 2**-22), ("entropy", exponent * 2**-21), ("squares", 0.0)):
        torch.testing.assert_close(got[name].double(), gold[name], rtol=float(relative), atol=float(absolute))
    error = (gradient(got) - gold["gradient"]).abs()
    # the sum of the others is what the target's own is made of
    allowed = (relative + rounding) * gold["gradient"].abs() + 1e-30
    assert (error <= allowed).all(), float((error / allowed).max())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("columns", [1, 7, 31, 530, 2100])
def test_any_row(columns: int, offset: int, options: dict[str, Any]) -> None:
    logits, targets = 3 * torch.randn(3, columns), torch.randint(columns, (3,))
    got = exponentials(logits, targets, offset=offset, **options)
    assert_close(got, defined(logits, targets, **options))


def test_half_precision_rounds_once() -> None:
    """Triton's interpreter cuts numbers off instead of rounding them."""
    logits, targets = 3 * torch.randn(4, 530), torch.randint(530, (4,))
    rounding = torch.finfo(BF16).eps / (2 if torch.cuda.is_available() else 1)
    assert_close(exponentials(logits, targets, dtype=BF16), defined(logits, targets), rounding)


def test_a_temperature_of_each_row() -> None:
    logits, targets, temperatures = torch.randn(3, 40), torch.randint(40, (3,)), torch.tensor([0.5, 1.0, 3.0])
    got = exponentials(logits, targets, temperatures=temperatures)
    assert_close(got, defined(logits, targets, temperatures=temperatures))


# 20 keeps the target as the offset; sums with it would overflow from 40 on, and the exponentials from 89 on
@pytest.mark.parametrize("above", [20.0, 40.0, 100.0, 3000.0])
def test_a_target_that_is_far_from_likely(above: float) -> None:
    logits, targets = torch.randn(2, 100), torch.tensor([5, 98])
    logits[:, 17] += above
    assert_close(exponentials(logits, targets), defined(logits, targets))
    assert_close(exponentials(logits, targets, dtype=BF16), defined(logits, targets), torch.finfo(BF16).eps)


@pytest.mark.parametrize("rest", [1e-3, 1e-9, 1e-13])
def test_a_nearly_certain_target_keeps_its_digits(rest: float) -> None:
    logits = torch.full((1, 31), float(torch.tensor(rest / 30).log()))
    logits[0, 4] = 0
    got = exponentials(logits, torch.tensor([4]))
    others = 30 * logits[0, 0].double().exp()
    torch.testing.assert_close(got["logprobs"].double(), -torch.log1p(others)[None], rtol=1e-6, atol=0)
    entropy = torch.log1p(others) - others * logits[0, 0].double() / (1 + others)
    torch.testing.assert_close(got["entropy"].double(), entropy[None], rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient(got)[0, 4], others / (1 + others), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "target", "temperature", "nothing"], ids=str)
def test_a_bad_row_spoils_itself_alone(bad: float | str) -> None:
    """With zeros for the products, as 0 times what is no number would spoil other rows."""
    logits, targets, temperatures = torch.randn(3, 641), torch.tensor([3, 640, 9]), torch.ones(3)
    clean = exponentials(logits, targets, temperatures=temperatures)
    match bad:
        case "target":
            targets[1] = 641
        case "temperature":
            temperatures[1] = -1.0
        case "nothing":
            logits[1] = -torch.inf
        case _:
            logits[1, 77] = bad
    got = exponentials(logits, targets, temperatures=temperatures)
    for name, value in got.items():
        assert torch.equal(value[[0, 2]], clean[name][[0, 2]]), name
        assert not value[1].any() if name == "into" else value[1].isnan(), name


def test_rows_that_do_not_count_are_not_read() -> None:
    logits, targets = torch.full((2, 40), torch.nan), torch.full((2,), reference.IGNORED)
    assert not any(value.any() for value in exponentials(logits, targets).values())


def test_columns_of_no_probability() -> None:
    """Banned ids, and a target that is one."""
    logits, targets = torch.randn(2, 100), torch.tensor([5, 7])
    logits[:, 7:60] = -torch.inf
    got, gold = exponentials(logits, targets), defined(logits, targets)
    assert got["logprobs"][1] == -torch.inf and not gradient(got)[0, 7:60].any()
    assert_close({name: value[:1] for name, value in got.items()}, {name: value[:1] for name, value in gold.items()})
    assert (gradient(got)[1] - gold["gradient"][1]).norm() < 1e-6


# The products


def test_errors_of_the_gradients() -> None:
    """Rounded to bfloat16, E and the scaled hidden states give a weight's gradient an error of two roundings.

    That of the hidden states has one as before, of E instead of the gradient by the logits.
    """
    rows, width, columns = 128, 256, 2048
    hidden = torch.randn(rows, width).to(BF16).double()
    weight = (torch.randn(columns, width) / width**0.5).to(BF16).double()
    targets, upstream = torch.randint(columns, (rows,)), torch.randn(rows, dtype=F64) / rows
    logits = (hidden @ weight.T).float()
    got = exponentials(logits, targets)
    by_logits = upstream[:, None] * defined(logits, targets)["gradient"]
    factors = (got["row_scale"] * upstream.float()).double()[:, None]

    def rounded(value: Tensor) -> Tensor:
        return value.to(BF16).double()

    into = rounded(got["into"])
    ways = {
        "hidden": (factors * (into @ weight), rounded(by_logits) @ weight, by_logits @ weight),
        "weight": (into.T @ rounded(factors * hidden), rounded(by_logits).T @ hidden, by_logits.T @ hidden),
    }
    errors = {
        name: [float((way - gold).norm() / gold.norm()) for way in (now, once)]
        for name, (now, once, gold) in ways.items()
    }
    largest = torch.finfo(BF16).eps / 2  # error of one rounding; two that are independent add up in squares
    assert max(errors["hidden"]) < largest and errors["weight"][1] < largest, errors
    assert errors["weight"][0] < 2**0.5 * largest, errors


def test_a_logit_is_read_once_and_its_exponential_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six bytes; measured and differentiated by two kernels it is ten."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        pytest.skip("counts the interpreter's accesses")
    moved = 0

    def counted(access: Any, place: int) -> Any:
        def call(self: Any, pointers: Any, *rest: Any) -> Any:
            nonlocal moved
            moved += int(rest[place].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return access(self, pointers, *rest)

        return call

    for name, place_of_mask in (("create_masked_load", 0), ("create_masked_store", 1)):
        access = getattr(interpreter.InterpreterBuilder, name)
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, counted(access, place_of_mask))
    logits, targets = torch.randn(2, 4096), torch.randint(4096, (2,))
    exponentials(logits, targets, dtype=BF16)
    small = moved - 6 * logits.numel()
    assert 0 < small < 64 * len(targets)
    moved, rows = 0, LogitRows(logits[None], targets[None], None, 1.0, None, 1.0)
    logprobs, _, normalizer = FORWARD("triton", Measured(rows, False))
    gradient = Gradient(torch.ones_like(logprobs), None, normalizer, None, rows)
    BACKWARD_INTO("triton", GradientInto(torch.empty_like(rows.logits, dtype=BF16), gradient))
    assert moved - 10 * logits.numel() < 64 * len(targets)
