"""Entry point of `verl.plugins`: imports grpo_kernels.integrations.verl once verl's registries exist.

verl loads plugins in every process while it is being imported itself. Its registries are in core_algos, whose import
adds half as much time and is not needed everywhere, so this module waits for that import instead of causing it. A
failure is then only logged, because a run that uses none of our names must not break. This is not a module of
integrations.verl because importing that package registers at once.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_REGISTRIES = "verl.trainer.ppo.core_algos"


class _WhenImported(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _REGISTRIES else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                register(may_fail=True)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def register(may_fail: bool = False) -> None:
    try:
        importlib.import_module("grpo_kernels.integrations.verl")
    except Exception as error:
        # verl logs it at debug level only
        logging.getLogger(__name__).error("grpo-kernels is not registered with verl: %s", error)
        if not may_fail:
            raise


if _REGISTRIES in sys.modules:
    register()
# compared by name, because this module may have been executed before
elif not any(repr(type(finder)) == repr(_WhenImported) for finder in sys.meta_path):
    sys.meta_path.insert(0, _WhenImported())
