"""The build backend of pyproject.toml: setuptools, with one sentence where it is missing or too old.

With pip's --no-build-isolation nothing is installed for the build, and a new environment of Python 3.12 has no
setuptools; pip would show a traceback.
"""

from __future__ import annotations

_WAY_OUT = 'pip install "setuptools>=77" wheel cmake ninja'

try:
    import setuptools
except ImportError:
    raise SystemExit(f"grpo-kernels: setuptools must be installed with --no-build-isolation; {_WAY_OUT}") from None
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(f"grpo-kernels: setuptools must be 77 or later, got {setuptools.__version__}; {_WAY_OUT}")

from setuptools.build_meta import *  # noqa: E402, F403
