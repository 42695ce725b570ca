"""Makes Triton's interpreter faster without a change of what it computes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Makes the interpreter of this process faster."""
    patch_once_per_launch()
    remember_dtypes()


def patch_once_per_launch() -> None:
    """Keeps calls of device functions from patching triton.language again, which a launch has done for all of them.

    Triton 3.6 patches it at each call of a function under @triton.jit, which took 60 % of the time of kernels with
    many of them.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    patch, modules_in = interpreter._patch_lang, functools.cache(functools.partial(_modules_in, language))
    patched: set[int] = set()  # by the launch that is running
    lasting: set[int] = set()  # by device functions alone, such as those of triton.language itself: never restored

    def patch_lang(fn: Callable[..., Any]) -> Any:
        if patched and modules_in(fn) <= patched | lasting:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        if patched:
            lasting.update(modules_in(fn) - patched)
        else:
            patched.update(modules_in(fn))
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang


def remember_dtypes() -> None:
    """Remembers NumPy's type of each Triton type, for which Triton 3.6 makes a table at each operation."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    make = interpreter._get_np_dtype
    by_name: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in by_name:
            by_name[dtype.name] = make(dtype)
        return by_name[dtype.name]

    interpreter._get_np_dtype = np_dtype


def _modules_in(language: Any, fn: Callable[..., Any]) -> frozenset[int]:
    """Ids of the modules of triton.language that a function sees under any name, all of which it needs patched."""
    return frozenset(id(value) for value in fn.__globals__.values() if value is language or value is language.core)
