"""The comparison of float32 logits with rounded ones, on a small head."""

from __future__ import annotations

import pytest
import torch

from benchmarks import half_logits


def test_float32_logits_are_nearly_exact_and_rounded_ones_are_not() -> None:
    errors = dict(half_logits.measured(half_logits.inputs(64, 128, 2000)))
    ours = errors.pop("grpo_kernels")
    # logits of up to 40, products summed in float32: a few roundings of 40 * 2**-24 each
    assert ours.largest < 16 * 40 * 2**-24 and ours.moved == 0 and abs(ours.ratio - 1) < 1e-4
    assert "bfloat16 logits, float32 log_softmax" in errors
    for name, other in errors.items():
        assert other.largest > 1000 * ours.largest and other.mean > 1000 * ours.mean and other.moved > 0.05, name


def test_inputs_reach_from_unlikely_to_nearly_certain() -> None:
    inputs = half_logits.inputs(64, 128, 2000)
    exact = half_logits.exact(inputs)
    assert inputs.hidden.dtype == inputs.weight.dtype == torch.bfloat16
    assert float(exact.max()) > -0.01 and float(exact.min()) < -8


def test_the_command_prints_a_line_for_each_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["half_logits", "--rows", "8", "--hidden", "32", "--vocabulary", "100"])
    half_logits.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["largest", "error", "mean", "error", "ratio", "moved", "by", "1%"]
    assert lines[-1].startswith("grpo_kernels") and len(lines) >= 3
