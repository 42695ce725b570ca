"""The benchmarks: which peers are timed, what a bar says, what is stored. No test here depends on speed.

Faults in view: a peer that is timed though its results differ; a bar that is lost, relaxed or judged on the wrong side;
a ratio of unequal work; a slow kernel that another load hides, or a load that looks like one; minutes of a GPU that a
mistyped peer ends, whose results a kill loses, or that measure known rows; a row that passes for another commit's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes

import grpo_kernels as gk
from benchmarks import conftest, measure, plot, tables, test_cases
from benchmarks.case import Bar, Case, Floor, Provider, Same, Sweep, with_variants
from benchmarks.cases import OPS, cases, sweeps
from benchmarks.conftest import Suite
from benchmarks.paired import Ratio, least
from tests.test_layout import OPS as PACKAGE_OPS

CPU = torch.device("cpu")
LIMITS = {"copy": 1e10, "float32": 1e11, "bfloat16": 1e12}
ROOT = Path(__file__).parent.parent


def small_case(**changes: Any) -> Case:
    case = Case(
        "sum",
        "of ten",
        "ten numbers",
        Floor(bytes=40),
        lambda device, seed: torch.arange(10.0, device=device),
        lambda x: x.sum(),
        (Provider("mean", lambda x: x.mean() * 10), Provider("twice", lambda x: (x.sum(), x.sum()), agrees=False)),
        (Bar("ratio at least", 0.0, "mean"), Bar("cost at most", 1e9, "twice")),
        Same(rtol=1e-6),
        pairs=3,
    )
    return dataclasses.replace(case, **changes)


@pytest.fixture(autouse=True)
def known_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ceiling", lambda _: LIMITS)


def suite_of(path: Path | None = None, **options: Any) -> Suite:
    return Suite(path, **options)


# Cases and bars


def test_every_op_has_cases_and_a_sweep_of_four_decades() -> None:
    of_head = {"linear_logprobs", "linear_policy_loss", "linear_distillation_loss"}
    assert {*OPS} == {*PACKAGE_OPS} - {"linear_head"} | of_head
    for op in OPS:
        assert cases(op, device="cpu") and cases(op, device="cuda"), op
        assert any(len(case.providers) > 0 for case in cases(op)), op
        assert max(sweep.sizes[-1] / sweep.sizes[0] for sweep in sweeps(op)) >= 1e4, op


def test_every_case_has_a_floor_and_bars_of_its_providers() -> None:
    assert all(one.floor.bytes > 0 or one.floor.flops > 0 for one in (*cases(), *sweeps()))
    for case in cases():
        names = [provider.name for provider in case.providers]
        assert len(names) == len(set(names)), case.name
        assert {bar.of for bar in case.bars if bar.of} <= {*names, *case.arrays} and set(case.quick) <= set(names)
    for device in ("cpu", "cuda"):
        names = [f"{case.op}: {case.name}" for case in cases(device=device)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("ratio at least", 3, 2.99),
        ("ratio at most", 3, 3.01),
        ("cost at most", 3, 3.01),
        ("memory below", 2.99, 3),
        ("microseconds at most", 3, 3.01),
        ("exponent below", 2.99, 3),
        ("growth at most", 3, 3.01),
    ],
)
def test_a_bar_is_met_on_its_side_of_the_limit(kind: str, good: float, bad: float) -> None:
    assert Bar(kind, 3).held(good) and not Bar(kind, 3).held(bad)


# Measurements


def test_rows_of_a_case_are_measured_judged_and_stored(tmp_path: Path) -> None:
    case, suite = small_case(), suite_of(tmp_path / "a.json")
    ours, mean, twice = (suite.measure(case, who) for who in ("ours", "mean", "twice"))
    assert ours["low"] <= ours["us"] <= ours["high"] and ours["of_ceiling"] == pytest.approx(4e-3 / ours["us"])
    assert ours["bars"] == [] and [bar["held"] for bar in mean["bars"] + twice["bars"]] == [True, True]
    assert twice["bars"][0]["value"] == pytest.approx(1 / twice["ratio"]) and "memory" not in twice
    stored = json.loads((tmp_path / "a.json").read_text())
    assert stored.keys() == {"runs", "cases", "sweeps"} and stored["runs"][0]["ceiling"] == LIMITS
    (entry,) = stored["cases"]
    assert [entry["ours"]["run"], entry["providers"]["mean"]["run"]] == [0, 0]
    assert entry["providers"]["mean"]["ratio"] == mean["ratio"] and len(entry["bars"]) == 2
    with pytest.raises(AssertionError, match="limit at least"):
        test_cases.assert_met({"bars": [measure.judged(Bar("ratio at least", 1e9, "mean"), case, entry, None)]})
    with pytest.raises(pytest.xfail.Exception, match="limit at least"):
        test_cases.assert_met(
            {"bars": [measure.judged(Bar("ratio at least", 1e9, "mean"), case, entry, None)]}, is_reported=True
        )


def test_a_peer_with_other_results_is_refused_and_not_timed() -> None:
    timed: list[int] = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        timed.append(1)
        return x.sum() * (1 + 1e-5)

    case = small_case(providers=(Provider("wrong", wrong),), bars=(Bar("ratio at least", 0.0, "wrong"),))
    suite = suite_of()
    row = suite.measure(case, "wrong")
    assert "the results of wrong differ from ours" in row["refused"] and "ratio" not in row and len(timed) == 1
    assert row["bars"][0]["held"] is None and "differ from ours" in tables.text_of(suite.document())


def test_other_groups_are_refused() -> None:
    case = cases("similarity_groups", "K=8", "cpu")[0]
    peer = case.provider("fastcluster")
    wrong = dataclasses.replace(peer, call=lambda e: [cut._replace(score=cut.score + 1e-3) for cut in peer.call(e)])
    assert "different silhouette" in measure.verdict(case, wrong, CPU)["refused"]
    assert measure.verdict(case, peer, CPU) == {}


def test_a_provider_that_cannot_run_has_a_reason() -> None:
    reasons = {
        "no_such_package is not installed": Provider("absent", torch.sum, package="no_such_package"),
        "not made for the device cpu": Provider("gpu", torch.sum, devices=("cuda",)),
    }
    for reason, provider in reasons.items():
        assert measure.verdict(small_case(), provider, CPU) == {"missing": reason}


def test_smaller_inputs_count_by_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "paired", lambda *_, **__: Ratio(1.0, 3.0, 3.0, 2.0, 4.0))
    few = Provider("few", lambda x: x.sum(), few=lambda device, seed: torch.arange(5.0), share=0.5)
    row = measure.measure_provider(small_case(providers=(few,)), few, [torch.arange(10.0)], CPU)
    assert [row[name] for name in ("us", "ratio", "low", "high")] == [6, 6, 4, 8] and "memory" not in row


def test_processor_times_are_compared_on_one_thread() -> None:
    threads: list[int] = []

    def busy(rounds: int) -> None:
        threads.append(torch.get_num_threads())
        sum(range(rounds))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ratio = least(lambda: busy(40_000), lambda: busy(120_000), pairs=15)
    assert torch.get_num_threads() == 2 and set(threads) == {1}
    torch.set_num_threads(before)
    assert 2 < ratio.ratio < 4.5 and ratio.ratio == pytest.approx(ratio.theirs / ratio.ours)


def test_inputs_take_turns() -> None:
    call = measure.in_turn(lambda x: x, [1, 2, 3])
    assert [call() for _ in range(5)] == [1, 2, 3, 1, 2]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory of a process is only measured on Linux")
def test_memory_is_the_peak_without_the_results() -> None:
    size = 32 * 2**20
    case = small_case(
        inputs=lambda device, seed: torch.ones(size // 4),
        ours=lambda x: (x + 1) * 2,
        providers=(),
        arrays={"x": lambda x: size},
        returned=lambda x: size,
        bars=(Bar("memory below", 1.1, "x"), Bar("memory below", 0.9, "x")),
    )
    assert [bar["held"] for bar in suite_of().measure(case, "ours")["bars"]] == [True, False]


def test_scaling_fits_the_sizes_from_one_on() -> None:
    times = [(size, 5.0 + 2e-3 * size**1.5) for size in (10**4, 10**5, 10**6)]
    assert measure.exponent(times) == pytest.approx(1.5, abs=1e-2)
    sweep = Sweep("sum", "all", "numbers", (10, 100, 1000), lambda _, n: torch.ones(n), torch.sum, Floor(bytes=4))
    suite = suite_of()
    result = suite.scale(dataclasses.replace(sweep, fit_from=100, bars=(Bar("exponent below", 9),)))
    assert [point["size"] for point in result["points"]] == [10, 100, 1000] and result["bars"][0]["held"]
    assert result["points"][2]["floor_us"] == pytest.approx(0.4)
    assert result["exponent"] == measure.exponent([(p["size"], p["us"]) for p in result["points"][1:]])


@pytest.mark.parametrize(
    ("ratios", "cpu", "best", "tries"),
    [([7.1], "here", 7.1, 1), ([6.9, 7.0], "here", 7.0, 2), ([5, 6, 3], "here", 6, 3), ([4.0], "elsewhere", 4.0, 1)],
)
def test_a_ratio_counts_as_lower_if_it_is_so_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratios: list[float], cpu: str, best: float, tries: int
) -> None:
    (tmp_path / "baseline.json").write_text(json.dumps({"cpu": cpu, "ratios": {"sum, of ten: mean": 10.0}}))
    monkeypatch.setattr(conftest, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(measure, "machine", lambda: {"cpu": "here"})
    left, threads = [*ratios], set[int]()

    def measured(*_: Any) -> dict[str, Any]:
        threads.add(torch.get_num_threads())
        return {"us": 1.0, "ratio": left.pop(0), "low": 1.0, "high": 1.0}

    monkeypatch.setattr(measure, "measure_provider", measured)
    assert suite_of().compare_with_baseline(small_case(), "mean") == (best, 7.0 if cpu == "here" else 4.0)
    assert len(ratios) - len(left) == tries and threads == {1}


@pytest.mark.parametrize(
    ("row", "outcome"),
    [({"missing": "no such package"}, pytest.skip.Exception), ({"refused": "differ"}, pytest.fail.Exception)],
)
def test_a_peer_that_is_not_timed_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, str], outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(measure, "measure_provider", lambda *_: row)
    with pytest.raises(outcome, match=next(iter(row.values()))):
        suite_of().compare_with_baseline(small_case(), "mean")


def test_the_baseline_has_every_steady_ratio() -> None:
    wanted = {f"{case.op}, {case.name}: {who}" for case in cases(device="cpu") for who in case.quick}
    assert json.loads(conftest.BASELINE.read_text())["ratios"].keys() == wanted


def test_the_machine_is_described_without_names() -> None:
    result = measure.machine()
    assert result["packages"]["torch"] == torch.__version__ and result["grpo_kernels"] == gk.__version__
    text = json.dumps(result)
    for secret in (__import__("socket").gethostname(), str(Path.home()), str(ROOT)):
        assert secret == "/" or secret not in text


# Several runs, and a GPU


def test_a_run_of_the_same_commit_and_machine_measures_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, path = small_case(), tmp_path / "a.json"
    suite_of(path).measure(case, "mean")
    second = suite_of(path, resumes=True)
    passed = [second.passes_over(case, who) for who in ("ours", "mean", "twice")]
    assert passed == ["measured before", "measured before", ""] and len(second.runs) == 1
    assert suite_of(path).passes_over(case, "mean") == ""  # without resumes
    machine = measure.machine()
    monkeypatch.setattr(measure, "machine", lambda: machine | {"commit": "another"})
    third = suite_of(path, resumes=True)
    assert third.passes_over(case, "mean") == ""
    third.measure(case, "twice")
    stored = json.loads(path.read_text())
    assert [run["machine"]["commit"] for run in stored["runs"]] == [machine["commit"], "another"]
    (entry,) = stored["cases"]
    runs = {name: row["run"] for name, row in ({"ours": entry["ours"]} | entry["providers"]).items()}
    assert runs == {"ours": 1, "mean": 0, "twice": 1}
    assert sorted(bar["of"] for bar in entry["bars"]) == ["mean", "twice"]
    third.measure(case, "mean")
    assert [sum(bar["of"] == who for bar in third.cases["sum", "of ten"]["bars"]) for who in ("mean", "twice")] == [
        1,
        1,
    ]


def test_a_kill_loses_the_row_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, path = small_case(), tmp_path / "a.json"
    suite = suite_of(path)
    suite.measure(case, "ours")

    def killed(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "peak_memory", lambda *_: None)  # writes a file of its own
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", killed)
        suite.measure(case, "mean")
    again = suite_of(path, resumes=True)
    assert [again.passes_over(case, who) for who in ("ours", "mean")] == ["measured before", ""]


def test_rows_after_the_time_are_left() -> None:
    suite = suite_of(seconds=-1)
    sweep = Sweep("sum", "all", "numbers", (10, 100), lambda _, n: torch.ones(n), torch.sum, Floor(bytes=4))
    assert {suite.passes_over(small_case(), "mean"), suite.passes_over(sweep)} == {"left, as the time is up"}
    assert suite.left == 2


def test_a_peer_that_raises_is_a_row_with_its_reason(tmp_path: Path) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ModuleNotFoundError("No module named\n'cutlass'")

    suite = suite_of(tmp_path / "a.json")
    providers = Provider("broken", broken), Provider("unequal", broken, agrees=False)
    case = small_case(providers=providers, bars=(Bar("ratio at least", 1, "broken"),))
    for who in ("broken", "unequal"):
        assert suite.measure(case, who)["raised"] == "ModuleNotFoundError: No module named 'cutlass'"
    (entry,) = json.loads((tmp_path / "a.json").read_text())["cases"]
    assert entry["providers"]["broken"]["raised"] and entry["bars"][0]["held"] is None
    assert "broken: ModuleNotFoundError: No module named 'cutlass'" in tables.text_of(suite.document())


def test_a_peer_that_breaks_the_gpu_ends_the_run_and_another_that_raises_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an illegal memory access")

    suite, case = suite_of(), small_case(providers=(Provider("broken", broken), Provider("again", broken)), bars=())
    for who, error, outcome in (("broken", "", pytest.skip.Exception), ("again", "sticky", pytest.exit.Exception)):
        monkeypatch.setattr(test_cases, "device_error", lambda error=error: error)
        # a skip that nothing expects would skip this test
        with pytest.raises((pytest.skip.Exception, pytest.exit.Exception)) as ended:
            test_cases.test_case(None, suite, case, who, None)
        assert isinstance(ended.value, outcome) and (error or "an illegal memory access") in str(ended.value)


def test_a_machine_that_tells_no_clock_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Any:
        raise RuntimeError("not permitted")

    clock = measure.HostClock()
    monkeypatch.setattr(clock, "clock_rate", refuses, raising=False)
    monkeypatch.setattr(measure, "cuda", clock)
    monkeypatch.setattr(measure, "launches", refuses)
    row = suite_of().measure(small_case(), "ours")
    assert "cold_us" in row and not {"sm_mhz", "launches"} & row.keys()


def test_a_gpu_has_the_times_of_the_host_and_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "cuda", measure.HostClock())
    suite, case = suite_of(), small_case()
    ours, mean = suite.measure(case, "ours"), suite.measure(case, "mean")
    wanted = {"us", "host_us", "warm_us", "cold_us", "is_gapless", "sm_mhz", "launches", "memory"}
    assert wanted | {"floor_us", "of_ceiling"} <= ours.keys() and wanted | {"ratio"} <= mean.keys()
    assert suite.kind == "cuda" and suite.runs[0]["device"] == "rehearsal"


def test_a_gpu_multiplies_no_float32_for_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(measure, "cuda", measure.HostClock())
    assert measure.ceiling(CPU, 2**10, 8).keys() == {"copy", "bfloat16"}
    assert Floor(flops=4.0).seconds({"copy": 1.0, "bfloat16": 2.0}, "float32") == 2


def test_a_private_switch_is_a_row_for_each_of_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "KEPT", 1.0)
    seen: list[float] = []
    case = small_case(ours=lambda x: (seen.append(conftest.KEPT), x.sum())[1])
    switched = with_variants(case, "benchmarks.conftest.KEPT=0.5,2")
    assert [provider.name for provider in switched.providers] == ["KEPT=0.5", "KEPT=2"] and not switched.bars
    for provider in switched.providers:
        provider.call(torch.ones(1))
    assert seen == [0.5, 2] and conftest.KEPT == 1.0
    assert "raised" in suite_of().measure(with_variants(case, "benchmarks.conftest.KEEPT=1"), "KEEPT=1")


# The command


def benchmarks(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "benchmarks", "-p", "no:cacheprovider", *options]
    # with the name of a worker of xdist in its environment, pytest-benchmark shows nothing
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment).stdout


def test_a_rehearsal_of_a_gpu(tmp_path: Path) -> None:
    """Ours come first on a GPU; a second command measures what the first one left, while there is time."""
    assert sorted([None, "torch.compile", "trl", "ours"], key=conftest.turn) == ["ours", "trl", "torch.compile", None]
    file = tmp_path / "a.json"
    options = ["--device", "cpu", "--save", str(file), "--op", "group_advantages", "--report-limits"]
    out = benchmarks(*options, "-vv", "-k", "(groups or step) and (ours or mean) and not scaling")
    rows = [
        line.partition("[")[2] for line in out.splitlines() if line.startswith("benchmarks/test_cases.py::test_case[")
    ]
    assert len(rows) == 3 and ["ours]" in row for row in rows] == [True, True, False], out
    first = json.loads(file.read_text())
    assert [run["device"] for run in first["runs"]] == ["rehearsal"] and len(first["cases"]) == 2
    assert "cold_us" in first["cases"][0]["ours"] and [*first["cases"][0]["providers"]] == ["torch, mean and std"]
    out = benchmarks(*options, "--resume", "--seconds", "0", "-rs", "-k", "8 and (ours or mean or trl) and not scaling")
    assert "measured before" in out and "left, as the time is up" in out and "1 rows are left" in out
    assert json.loads(file.read_text()) == first


def test_pytest_benchmarks(tmp_path: Path) -> None:
    out = benchmarks("--op", "policy_loss", "-k", "16 and not many", "--save", str(tmp_path / "a.json"))
    assert "3 passed" in out and "benchmark 'policy_loss: one token in 16, packed': 3 tests" in out
    assert "| `policy_loss`, one token in 16, packed | " in out and "<br>the same by a mask" in out
    (case,) = json.loads((tmp_path / "a.json").read_text())["cases"]
    assert case["ours"]["us"] > 0 and case["providers"]["all tokens"]["ratio"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_kernels_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gk, "available_kernels", lambda: {"cpu": "not built", "cuda": "no GPU", "triton": "no GPU"})
    with pytest.raises(RuntimeError, match="kernels must run on cpu, got cpu: not built; build them in place"):
        measure.usable_device()


# Tables and pictures


@pytest.fixture
def results() -> list[dict[str, Any]]:
    points = [{"size": 10**e, "us": 2.0 * 10**e + 5, "floor_us": 10.0**e} for e in range(5)]
    sweep = {"op": "sum", "name": "all", "unit": "numbers", "points": points, "exponent": 1.0, "bars": []}
    of_case, of_sweep = suite_of(), suite_of()
    for who in ("ours", "mean", "twice"):
        of_case.measure(small_case(), who)
    of_sweep.sweeps["sum", "all"] = sweep | {"run": of_sweep.run}
    return [of_case.document(), of_sweep.document()]


def test_tables_go_between_the_marks(results: list[dict[str, Any]], tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("before\n<!-- measured on cpu -->\nold\n<!-- end of cpu -->\nafter\n")
    files = [tmp_path / f"{i}.json" for i in range(2)]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    tables.main([*map(str, files), "--into", str(document)])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `sum`, of ten | " in text and "| `sum`, all | 1 numbers" in text
    with pytest.raises(SystemExit, match="once each"):
        tables.replaced("no marks", "begin", "end", "new")


def test_a_case_is_a_row_with_its_peers_and_the_limits_that_are_not_met() -> None:
    def bar(kind: str, of: str, value: float | None, held: bool | None) -> dict[str, Any]:
        return {"kind": kind, "of": of, "limit": 2, "value": value, "held": held}

    run = {"machine": {"commit": "0123456789"}}
    peer = {"us": 12e3, "ratio": 3.0, "low": 2.0, "high": 4.0, "memory": 3 * 2**20, "run": 1}
    bars = [
        bar("ratio at least", "peer", 3.0, True),
        bar("memory below", "peer", 2.5, False),
        bar("ratio at most", "slow", 3.0, False),
        bar("cost at most", "slow", 4.0, False),
        bar("memory below", "the logits", 1.5, True),
        bar("microseconds at most", "", 2.5, False),
        bar("ratio at most", "absent", None, None),
    ]
    ours = {"us": 4e6, "of_ceiling": 0.5, "memory": 2**19, "run": 1}
    slow = {"us": 1e6, "ratio": 0.25, "low": 0.2, "high": 0.3, "run": 0}
    of_device = {"missing": "not made for the device cpu", "run": 1}
    providers = {"peer": peer, "slow": slow, "other": of_device, "wrong": {"refused": "differs", "run": 1}}
    providers["broken"] = {"raised": "ValueError: no", "run": 1}
    case = {"op": "op", "name": "name", "dtype": "bfloat16", "ours": ours, "providers": providers, "bars": bars}
    runs = [{"machine": {"commit": "fedcba9876"}}, run]
    assert tables.case_table({"runs": runs, "cases": [case]}).splitlines()[2:] == [
        "| `op`, name, bfloat16 | 4 s | 50% | 0.5 | "
        "peer 3 (2 to 4), 3.0 MiB, **memory 2.5 of peer, limit below 2**<br>"
        "slow 0.25 (0.2 to 0.3) (commit fedcba9), **limit at most 2**, **limit at least 0.5**<br>"
        "wrong: differs<br>broken: ValueError: no<br>**microseconds 2.5, limit at most 2** |",
    ]


def test_a_gpu_has_its_events_launches_and_speed_in_the_table(results: list[dict[str, Any]]) -> None:
    case = results[0]["cases"][0]
    times = {"us": 30.0, "host_us": 25.0, "warm_us": 10.0, "cold_us": 20.0, "is_gapless": False, "launches": 3}
    ours = case["ours"] | times | {"of_ceiling": 0.5}
    providers = {"mean": case["providers"]["mean"] | {"cold_us": 40.0, "launches": 7}}
    flops = {"floor": {"bytes": 0, "flops": 4e6}, "ours": ours, "providers": {}}
    document = results[0] | {"cases": [case | {"ours": ours, "providers": providers}, case | flops]}
    rows = tables.case_table(document).splitlines()
    assert rows[0].startswith("| case | cold | warm | wall (host) | launches | speed | floor |")
    assert rows[2].startswith(
        "| `sum`, of ten | 20 us | 10 us with the host's gaps | 30 us (25 us) | 3 | 0.002 GB/s | 50% |"
    )
    assert "| mean " in rows[2] and "cold 40 us, 7 launches" in rows[2]
    assert " | 0.2 Tflop/s | 50% |" in rows[3]


def test_rows_of_another_commit_or_machine_say_so(results: list[dict[str, Any]]) -> None:
    document = results[0]
    (newest,) = document["runs"]
    old = newest | {"machine": newest["machine"] | {"commit": "d42268c8b028"}}
    elsewhere = newest | {"machine": newest["machine"] | {"cores": 1000}}
    document["runs"] = [old, elsewhere, newest]
    for run, said in ((0, " (commit d42268c)"), (1, " (another machine)"), (2, "")):
        document["cases"][0]["ours"]["run"] = run
        assert f"| `sum`, of ten{said} |" in tables.text([document])


def test_the_picture_of_a_run_has_its_steps_of_rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"kind": "train", "phase": "sft", "step": 1, "rewards/mean": 0.1},
        {"kind": "eval", "phase": "rl", "step": 0, "eval/validation_exact": 0.4},
        {"kind": "train", "phase": "rl", "step": 1, "rewards/mean": 0.5},
        {"kind": "train", "phase": "rl", "step": 2, "rewards/mean": None},
        {"kind": "eval", "phase": "rl", "step": 2, "eval/validation_exact": 0.6},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    drawn: list[Any] = []
    monkeypatch.setattr(Axes, "plot", lambda self, *points, **look: drawn.append(points))
    written = plot.write_all([plot.load(file)], tmp_path)
    assert [path.name for path in written] == ["curve_light.png", "curve_dark.png"]
    assert drawn == [((1,), (0.5,)), ((0, 2), (0.4, 0.6))] * 2


def test_the_picture_of_several_runs_has_the_mean_of_the_seeds_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = {"one-0": [0.0, None, 1.0], "one-1": [0.5, 0.5, 0.0], "two-0": [1.0, 1.0]}
    files = []
    for name, values in rewards.items():
        lines = [{"kind": "train", "phase": "rl", "rewards/mean": value} for value in values]
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "metrics.jsonl")
        files[-1].write_text("\n".join(map(json.dumps, lines)))
    drawn: list[Any] = []
    draw = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *at, **look: drawn.append((look["label"], at[1])) or draw(self, *at))
    written = plot.write_all([plot.load(file) for file in files], tmp_path)
    assert [path.name for path in written] == ["curves_light.png", "curves_dark.png"]
    assert [label for label, _ in drawn] == ["_", "_", "one", "_", "two"] * 2
    assert drawn[2][1] == pytest.approx([0.25, math.nan, 0.5], nan_ok=True) and drawn[4][1] == [1.0, 1.0]
