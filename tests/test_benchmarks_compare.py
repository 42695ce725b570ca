"""Detection of ratios that have fallen between two results. No test here depends on speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, machine, run
from benchmarks.cases import cases

ROOT = Path(__file__).parent.parent


def with_ratio(ratio: float) -> dict[str, Any]:
    provider = {"ratio": ratio, "low": ratio, "high": ratio, "us": ratio, "ours_us": 1.0, "agrees": True}
    return {"op": "sum", "name": "of ten", "providers": {"mean": provider}}


def test_compare_finds_a_fall_and_lets_noise_pass() -> None:
    before = {"cases": [with_ratio(10.0)]}
    assert compare.fallen(before, {"cases": [with_ratio(6.9)]}) == [("sum", "of ten", "mean")]
    assert compare.fallen(before, {"cases": [with_ratio(7.1)]}) == []
    assert compare.fallen(before, {"cases": []}) == [("sum", "of ten", "mean")]
    assert "-31% **fell**" in compare.table(before, {"cases": [with_ratio(6.9)]})
    assert "not measured **fell**" in compare.table(before, {"cases": []})


def test_compare_ends_with_an_error_where_a_ratio_fell(tmp_path: Path) -> None:
    for name, ratio in {"a": 10.0, "b": 8.0, "c": 5.0}.items():
        run.write(tmp_path / f"{name}.json", {"cases": [with_ratio(ratio)]})
    compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    with pytest.raises(SystemExit, match="fell by more than 30%, or not measured: sum, of ten, mean"):
        compare.main([str(tmp_path / "a.json"), str(tmp_path / "c.json")])
    with pytest.raises(SystemExit, match="either a second result or --tries"):
        compare.main([str(tmp_path / "a.json")])


def test_compare_reads_what_make_bench_writes(tmp_path: Path) -> None:
    run.write(tmp_path / "run.json", {"machine": machine.describe(), "cases": [with_ratio(10.0)]})
    for name, ratio in {"same": 9.0, "slower": 5.0}.items():
        tests = [
            {"name": "test_case", "extra_info": with_ratio(ratio)},
            {"name": "test_sweep", "extra_info": {"op": "sum"}},
        ]
        run.write(tmp_path / f"{name}.json", {"machine_info": machine.describe(), "benchmarks": tests})
    compare.main([str(tmp_path / "run.json"), str(tmp_path / "same.json")])
    compare.main([str(tmp_path / "same.json"), str(tmp_path / "run.json")])
    with pytest.raises(SystemExit, match="fell by more than 30%, or not measured: sum, of ten, mean"):
        compare.main([str(tmp_path / "same.json"), str(tmp_path / "slower.json")])
    run.write(tmp_path / "other.json", {})
    with pytest.raises(SystemExit, match=r"other\.json must be a result of benchmarks\.run or of pytest-benchmark"):
        compare.main([str(tmp_path / "other.json"), str(tmp_path / "run.json")])


@pytest.mark.parametrize(("ratios", "tries", "passes"), [((9,), 1, True), ((5, 9), 2, True), ((5, 6, 4), 3, False)])
def test_the_best_of_three_tries_counts(ratios: tuple[float, ...], tries: int, passes: bool) -> None:
    left = list(ratios)
    before = {"machine": machine.describe(), "cases": [with_ratio(10.0)]}
    result = compare.best_of(before, 3, lambda op, name: with_ratio(left.pop(0)))
    assert len(ratios) - len(left) == tries
    assert result[0]["providers"]["mean"]["ratio"] == max(ratios)
    assert (compare.fallen(before, before | {"cases": result}) == []) == passes


def test_a_ratio_may_fall_further_on_another_cpu() -> None:
    before = {"machine": {"cpu": "one"}, "cases": [with_ratio(10.0)]}
    for cpu, ratio, falls in (("one", 5.0, True), ("two", 5.0, False), ("two", 3.9, True)):
        assert bool(compare.fallen(before, {"machine": {"cpu": cpu}, "cases": [with_ratio(ratio)]})) == falls


def test_the_baseline_has_the_quick_cases() -> None:
    baseline = json.loads((ROOT / "benchmarks" / "baseline.json").read_text())
    quick = {(case.op, case.name, name) for case in cases(device="cpu") for name in case.quick}
    assert set(compare.ratios(baseline)) == quick
    assert {op for op, _, _ in quick} >= {"group_advantages", "token_logprobs", "policy_loss", "linear_policy_loss"}
