"""Tests the vector math of the CPU kernels for accuracy and for equal bits of AVX2 and AVX-512."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tests.simd import levels

FUNCTIONS = {"exp": np.exp, "expm1": np.expm1, "tanh": np.tanh, "slope": lambda x: 1 / np.cosh(x) ** 2}
NUMBERS = {name: number for number, name in enumerate(FUNCTIONS)}
# Units in the last place.
BOUNDS = {"exp": 2, "expm1": 2, "tanh": 4, "slope": 8}
TYPES = {np.float32: ("apply_float", np.float64), np.float64: ("apply_double", np.longdouble)}

pytestmark = levels.needs_sources


def library(level: str) -> ctypes.CDLL:
    return levels.library("vector_math.cpp", level)


def apply(function: str, x: np.ndarray, level: str = "baseline") -> np.ndarray:
    result = np.empty_like(x)
    call = getattr(library(level), TYPES[x.dtype.type][0])
    call(
        NUMBERS[function],
        x.ctypes.data_as(ctypes.c_void_p),
        result.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(len(x)),
    )
    return result


def samples(function: str, dtype: type) -> np.ndarray:
    """Samples over the function's whole range, and as many with magnitudes near 0."""
    bottom, top = (-86.5, 88.7) if dtype is np.float32 else (-707.0, 709.7)
    if function in ("tanh", "slope"):
        bottom, top = -12, 12
    random = np.random.default_rng(0)
    wide = random.uniform(bottom, top, 40_000)
    near = random.uniform(-2, 2, 40_000) * 10.0 ** -random.uniform(0, 30, 40_000)
    return np.concatenate([wide, near, random.uniform(-2, 2, 40_000)]).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("level", levels.FLAGS)
def test_results_are_exact_to_a_few_units_in_the_last_place(level: str, function: str, dtype: type) -> None:
    x = samples(function, dtype)
    exact = FUNCTIONS[function](x.astype(TYPES[dtype][1]))
    unit = np.spacing(np.abs(exact).astype(dtype)).astype(TYPES[dtype][1])
    error = np.abs(apply(function, x, level).astype(TYPES[dtype][1]) - exact) / unit
    worst = int(error.argmax())
    assert error[worst] <= BOUNDS[function], f"{error[worst]:.2f} units at {x[worst]!r}"


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_avx512_gives_the_bits_of_avx2(function: str, dtype: type) -> None:
    x = samples(function, dtype)
    assert apply(function, x, "avx512").tobytes() == apply(function, x, "avx2").tobytes()


@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("level", levels.FLAGS)
def test_ends_of_the_range(level: str, dtype: type) -> None:
    inf, nan = np.inf, np.nan
    top, bottom = (88.73, -87.4) if dtype is np.float32 else (709.79, -708.6)
    x = np.array([nan, inf, -inf, 0.0, top, bottom, np.finfo(dtype).max, -np.finfo(dtype).max], dtype)

    def ends(function: str) -> np.ndarray:
        return apply(function, np.tile(x, 2), level)[: len(x)]  # sixteen numbers

    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(ends("exp"), [nan, inf, 0, 1, inf, 0, inf, 0])
        np.testing.assert_array_equal(ends("expm1"), [nan, inf, -1, 0, inf, -1, inf, -1])
    np.testing.assert_array_equal(ends("tanh"), [nan, 1, -1, 0, 1, -1, 1, -1])
    np.testing.assert_array_equal(ends("slope"), [nan, 0, 0, 1, 0, 0, 0, 0])


HALVES = {"half": torch.float16, "bfloat16": torch.bfloat16}


def convert(function: str, x: torch.Tensor, dtype: torch.dtype, level: str) -> torch.Tensor:
    result = torch.empty(x.shape, dtype=dtype)
    getattr(library(level), function)(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(result.data_ptr()), ctypes.c_int64(len(x))
    )
    return result


@pytest.mark.parametrize("level", levels.FLAGS)
@pytest.mark.parametrize("name", HALVES)
def test_halves_convert_as_in_torch(name: str, level: str) -> None:
    dtype = HALVES[name]
    every = torch.arange(2**16).to(torch.uint16).view(dtype)
    wide = convert(f"widen_{name}", every, torch.float32, level)
    assert torch.equal(wide.nan_to_num(7.0), every.float().nan_to_num(7.0)) and wide.isnan().equal(every.isnan())
    # every half, the midpoints of neighbours, the floats next to midpoints, and random bits
    between = (wide[:-1].double() / 2 + wide[1:].double() / 2).float()
    random = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32).view(torch.float32)
    near = [between, between.nextafter(torch.tensor(0.0)), between.nextafter(torch.tensor(float("inf")))]
    x = torch.cat([wide, *near, random])
    x = x[: len(x) // 8 * 8]
    narrow = convert(f"narrow_{name}", x, dtype, level)
    known = ~x.isnan()
    assert torch.equal(narrow[known].view(torch.int16), x[known].to(dtype).view(torch.int16))
    assert narrow[~known].isnan().all()
