"""Backends by name, and kernels that are not built."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels import backends, compiled
from tests.harness import needs_cpu_kernels
from tests.ops.all_cases import OPS
from tests.ops.promises import assert_same_bits, drawn, evaluated


@pytest.mark.parametrize(
    "call",
    [
        lambda name: gk.group_advantages(torch.rand(4), 4, backend=name),
        lambda name: gk.sampling_correction(torch.rand(1, 2), torch.rand(1, 2), backend=name),
        lambda name: gk.use_backend(name),
        lambda name: backends._checked(name, "GRPO_KERNELS_BACKEND"),
    ],
    ids=["argument", "argument of an op without kernels", "use_backend", "environment"],
)
def test_users_choose_between_kernel_and_reference(call: Callable[[str], object], as_user: None) -> None:
    for name in ("cuda", "triton", "cpu"):
        with pytest.raises(ValueError, match=rf"must be one of kernel, reference, got '{name}'"):
            call(name)
    with pytest.raises(ValueError, match=r"got 'kernle' \(did you mean 'kernel'\?\)$"):
        call("kernle")


def test_the_kernel_of_an_op_of_plain_torch_is_that(as_user: None) -> None:
    old, sampling = -torch.rand(2, 3), -torch.rand(2, 3)
    results = [gk.sampling_correction(old, sampling, backend=name).metrics for name in ("kernel", "reference", None)]
    assert results[0].to_dict() == results[1].to_dict() == results[2].to_dict()


FLOATS = dict.fromkeys(("cuda", "triton", "cpu", "reference"), (torch.float32,))


def chosen(requested: str | None, device: str, supports: backends.Supports = FLOATS) -> str:
    return backends.select("op", requested, device, torch.float32, supports, 0)


def test_a_kernel_is_the_first_that_can_run(as_user: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = {"cuda": "not built", "triton": "not installed", "cpu": "not built, either"}
    absent: dict[str, str] = {}
    monkeypatch.setattr(backends, "missing", lambda name, device_index=None: absent.get(name))
    monkeypatch.setattr(backends, "DEVICES", backends.DEVICES | {"cuda": {"cuda"}})
    monkeypatch.setattr(backends, "interpreting", lambda: True)
    for expected in ("cuda", "triton"):
        assert chosen("kernel", "cuda") == chosen(None, "cuda") == expected
        absent[expected] = lacking[expected]
    assert chosen("kernel", "cpu") == chosen(None, "cpu") == "cpu"
    monkeypatch.setattr(backends, "through_host", {"op"})
    assert chosen("kernel", "cuda") == chosen(None, "cuda") == "cpu"
    absent["cpu"] = lacking["cpu"]
    assert {chosen(name, device) for name in (None, "reference") for device in ("cuda", "cpu")} == {"reference"}
    reasons = [f"{name} ({reason})" for name, reason in lacking.items()]
    for device, why in (("cuda", ", ".join(reasons)), ("cpu", reasons[-1])):
        with pytest.raises(RuntimeError) as caught:
            chosen("kernel", device)
        way_out = "use backend='reference' or leave it out"
        assert str(caught.value) == f"op: backend 'kernel' cannot run here: {why}; {way_out}"
    absent.clear()
    with pytest.raises(RuntimeError, match=r"cannot run here: it is not .*; use backend='kernel' or leave it out$"):
        chosen("reference", "cpu", {"cpu": (torch.float32,)})
    with pytest.raises(RuntimeError, match=r"^op: backend 'kernel' .* cpu \(it is not implemented for this op\)$"):
        chosen("kernel", "cuda", {})


COMPOSED = {"gigpo_advantages": "group_advantages", "similarity_advantages": "similarity_groups"}


@needs_cpu_kernels
@pytest.mark.parametrize(
    "name", [name for name, op in OPS.items() if "cpu" in op.supports and not name.startswith("LMHead")]
)
def test_every_op_takes_both(name: str, as_user: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops hand their choice on to others, which accept no name of an implementation from users."""
    op, inputs = OPS[name], drawn(OPS[name], 0)
    function = name.partition(" ")[0]
    function = COMPOSED.get(function, function)
    assert_same_bits(evaluated(op, inputs, "kernel"), evaluated(op, inputs, None))
    with pytest.raises(ValueError, match=f"^{function}: backend must be one of kernel, reference, got 'gpu'"):
        op.call(inputs, "gpu")
    monkeypatch.setattr(backends, "cpu_error", "not built")
    reason = r"backend 'kernel' cannot run here: cpu \(not built\); use backend='reference' or leave it out$"
    with pytest.raises(RuntimeError, match=rf"^{function}: {reason}"):
        op.call(inputs, "kernel")
    assert_same_bits(evaluated(op, inputs, None), evaluated(op, inputs, "reference"))


def test_a_backend_for_a_block_or_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_forced", None)
    gk.use_backend("reference")
    assert backends._forced == "reference"
    block = gk.use_backend("kernel")
    for _ in range(2):
        with block:
            assert backends._forced == "kernel"
        assert backends._forced == "reference"


def test_a_refused_choice_names_the_setting_that_made_it() -> None:
    rewards = torch.rand(4).to("meta")
    for choose, setting in (
        (lambda: gk.group_advantages(rewards, 4, backend="kernel"), "use backend='reference' or leave it out$"),
        (
            lambda: gk.group_advantages(rewards, 4),
            "GRPO_KERNELS_BACKEND or use_backend, which chose it, with 'reference'",
        ),
    ):
        with gk.use_backend("kernel"), pytest.raises(RuntimeError, match=setting):
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
    reason = f"not built in {here}, which hides the package in {tmp_path / 'grpo_kernels'}; leave this folder"
    assert error == reason
    for name in ("none", "both"):
        (tmp_path / "grpo_kernels" / f"libgrpo_kernels_{name}.so").touch()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        compiled._load(compiled.CpuLibrary, "none")
        compiled._load(compiled.CudaLibrary, "both")
    assert [str(warning.message) for warning in shown] == [f"grpo_kernels: the kernels are {reason}"]


@pytest.mark.parametrize("content", [b"not a library", b""])
def test_a_library_that_does_not_load_is_a_reason(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libgrpo_kernels_cpu.so").write_bytes(content)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    library, error = compiled.load_cpu()
    assert library is None and error is not None and error.startswith("built, but cannot be loaded: ")
