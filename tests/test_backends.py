"""Backends by name, and kernels that are not built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import backends, compiled


@pytest.mark.parametrize(
    "call",
    [
        lambda: gk.group_advantages(torch.rand(4), 4, backend="tritn"),
        lambda: gk.use_backend("tritn").__enter__(),
        lambda: backends._checked("tritn", "GRPO_KERNELS_BACKEND"),
    ],
    ids=["argument", "use_backend", "environment"],
)
def test_the_nearest_backend_is_named(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be one of cuda, triton, .* got 'tritn' \(did you mean 'triton'\?\)$"):
        call()


def test_a_backend_for_a_block_or_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_forced", None)
    gk.use_backend("reference")
    assert backends._forced == "reference"
    with gk.use_backend("cpu"):
        assert backends._forced == "cpu"
    assert backends._forced == "reference"


def test_a_refused_choice_names_the_setting_that_made_it() -> None:
    rewards = torch.rand(4).to("meta")
    for choose, setting in (
        (lambda: gk.group_advantages(rewards, 4, backend="cpu"), "use backend='reference' or leave it out$"),
        (
            lambda: gk.group_advantages(rewards, 4),
            "GRPO_KERNELS_BACKEND or use_backend, which chose it, with 'reference'",
        ),
    ):
        with gk.use_backend("cpu"), pytest.raises(RuntimeError, match=setting):
            choose()


def test_a_checkout_that_hides_the_installed_package_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m grpo_kernels` in a checkout imports its sources, which have no compiled kernels."""

    class Installed:
        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    class Checkout:
        def locate_file(self, name: str) -> Path:
            return Path(gk.__file__).parent

    monkeypatch.setattr("importlib.metadata.distributions", lambda name: iter([Checkout(), Installed()]))
    _, error = compiled._load(compiled.CpuLibrary, "none")
    assert error == "not built; reinstall with GRPO_KERNELS_BUILD=none"
    (tmp_path / "grpo_kernels").mkdir()
    _, error = compiled._load(compiled.CpuLibrary, "none")
    here = Path(gk.__file__).parent
    assert error == f"not built in {here}, which hides the package in {tmp_path / 'grpo_kernels'}; leave this folder"


@pytest.mark.parametrize("content", [b"not a library", b""])
def test_a_library_that_does_not_load_is_a_reason(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libgrpo_kernels_cpu.so").write_bytes(content)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    library, error = compiled.load_cpu()
    assert library is None and error is not None and error.startswith("built, but cannot be loaded: ")
