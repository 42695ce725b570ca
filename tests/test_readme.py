"""The examples of the README are run, and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="tests are run from outside the checkout")


def test_first_example_runs_and_prints_what_it_says() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    printed = io.StringIO()
    scope: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        exec(example, scope)
    promised = re.findall(r"# (tensor\(.*?\))[:\n]", example)
    assert len(promised) == 2 and printed.getvalue().splitlines() == promised
    assert scope["result"].degenerate.tolist() == [False] * 4 + [True] * 4  # type: ignore[attr-defined]
    assert torch.isfinite(scope["mixed"].advantages).all()  # type: ignore[attr-defined]
