"""The library in other people's trainers. Each module imports its host when it is imported itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needs(package: str) -> Iterator[None]:
    """Says how to install the package whose absence an import reports."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"grpo_kernels.integrations.{package}: needs the package {package}, which is not installed: "
            f'pip install "grpo-kernels[{package}]"',
            name=package,
        ) from None
