"""How far rounding moves the results of a computation in float32, whatever processor it runs on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# A single number may move little in a few runs. The largest move of all of them counts.
RUNS = 4
EPS = torch.finfo(torch.float32).eps
# Libraries add up products in blocks of some hundred terms. With terms of one sign, they are off by up to 4 ulps of the
# sum, whatever instructions they use; half of that is a move, of which a budget allows two.
ULPS_OF_A_SUM = 2
# Operations that add up terms: their error depends on the order of the terms.
SUMS = {
    *("sum", "nansum", "mean", "cumsum", "dot", "mv", "mm", "bmm", "addmv", "addmm", "baddbmm"),
    *("convolution", "index_add", "index_put", "scatter_add", "embedding_dense_backward"),
    "_grouped_mm",
}
# Operations that float64 does not have.
NARROW = {"_grouped_mm"}


def choice(value: Tensor, seed: int) -> Tensor:
    """0 or 1 by the bits of each number in float64: at random, but the same for equal numbers.

    A comparison of two numbers that are computed alike, such as one with its clamped self, has one outcome.
    """
    mixed = (value.view(torch.int64) ^ (seed * 0x9E3779B97F4A7C1)) * 0x2545F4914F6CDD1D
    return (mixed >> 62) & 1


def either_neighbour(value: Tensor, seed: int) -> Tensor:
    """Rounds float64 up or down to the digits of float32, at random; those numbers themselves are kept."""
    beyond = 2**29 - 1  # the digits of float64 that float32 lacks
    return ((value.view(torch.int64) + choice(value, seed) * beyond) & ~beyond).view(torch.float64)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """tree_map, which takes longer than a small operation, for lists alone."""
    return tree_map(change, value) if isinstance(value, (list, tuple)) else change(value)


def name_of(func: Any) -> str:
    """The name of an operation, without the underscore of those that change a tensor."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removesuffix("_")


class RandomRounding(TorchDispatchMode):
    """Computes torch's operations in float64 and rounds each result up or down to float32, at random.

    Numbers that float32 can hold are kept. A sum also moves by ULPS_OF_A_SUM of the sum of its absolute terms, up or
    down.
    Backward passes are treated alike.

    Args:
        seed: of the random choices.
        dtype: of the tensors to round: float32, or float64 for a reference in that dtype.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.seed = seed
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(kind in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a nested tensor computes with plain ones, which are rounded
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if not self.applies_to(func, named):
            return func(*args, **kwargs)
        dtype = torch.float32 if name_of(func) in NARROW else torch.float64

        def widened(value: Any) -> Any:
            return value.to(dtype, copy=True) if self.has_dtype(value) else value

        wide = {name: mapped(widened, value) for name, value in named.items()}
        size = self.sum_of_terms(func, wide)
        result = func(**wide)
        originals = {}
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for original, copy in zip(tree_leaves(named[argument.name]), tree_leaves(wide[argument.name]), strict=True):
                originals[id(copy)] = original
                if original is not copy:
                    original.copy_(self.rounded(copy, size))
        return mapped(lambda value: originals.get(id(value), self.rounded(value, size)), result)

    def applies_to(self, func: Any, named: dict[str, Any]) -> bool:
        if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if name_of(func) == "set":  # makes a tensor a view, in deepcopy
            return False
        dtypes = {value.dtype for value in tree_leaves(named) if isinstance(value, Tensor)}
        is_other = named.get("dtype") not in (None, self.dtype)
        return self.dtype in dtypes and not is_other and (self.dtype == torch.float64 or torch.float64 not in dtypes)

    def has_dtype(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.dtype == self.dtype

    def sum_of_terms(self, func: Any, wide: dict[str, Any]) -> Tensor | None:
        """The sum of the absolute terms of each result of an operation that adds up; None for others."""
        if name_of(func) not in SUMS:
            return None

        def absolute(value: Any) -> Any:
            return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value

        result: Tensor = func(**{name: mapped(absolute, value) for name, value in wide.items()})
        return result

    def rounded(self, value: Any, size: Tensor | None) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in (torch.float32, torch.float64):
            return value
        value = value.double()
        if size is not None:
            value = value + ULPS_OF_A_SUM * EPS * size * (2 * choice(value, self.seed) - 1)
        return either_neighbour(value, self.seed).to(self.dtype)


def numbers_of(results: Any, name: str = "") -> dict[str, Tensor]:
    """Tensors and numbers in nested dicts, tuples and lists, by their names joined by dots."""
    if isinstance(results, (dict, tuple, list)):
        parts = results.items() if isinstance(results, dict) else enumerate(results)
        inner = [numbers_of(part, f"{name}.{key}" if name else str(key)) for key, part in parts]
        return {key: value for numbers in inner for key, value in numbers.items()}
    return {} if results is None else {name: torch.as_tensor(results).detach().cpu()}


class Moves:
    """How far random rounding moves the results of a computation, by name; computed when first asked for.

    Args:
        call: the computation, of tensors of `dtype`.
        want: its results without further rounding.
        dtype: float64 for a reference in that dtype, or float32.
    """

    def __init__(self, call: Callable[[], Any], want: Any, dtype: torch.dtype = torch.float64) -> None:
        self.call, self.want, self.dtype = call, numbers_of(want), dtype

    def __getitem__(self, name: str) -> float:
        """The farthest move of an element of this tensor."""
        return self.largest[name]

    @functools.cached_property
    def largest(self) -> dict[str, float]:
        result = dict.fromkeys(self.want, 0.0)
        for seed in range(1, RUNS + 1):
            with RandomRounding(seed, self.dtype):
                moved = numbers_of(self.call())
            for name, value in self.want.items():
                move = (moved[name].double() - value.double()).abs().nan_to_num(0, 0, 0)
                result[name] = max(result[name], float(move.max()) if move.numel() else 0.0)
        return result
