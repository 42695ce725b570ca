"""Options, the document of results, and the table at the end of `pytest benchmarks`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import case, measure, tables
from benchmarks.case import DEVICES, Case, Sweep
from benchmarks.cases import OPS

if importlib.util.find_spec("ray") is None:  # verl imports it, but not for its functions
    sys.modules["ray"] = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("ray", None))

Result = dict[str, Any]
BASELINE = Path(__file__).parent / "baseline.json"
KEPT, KEPT_ELSEWHERE = 0.7, 0.4  # share of a baseline's ratio that is enough, on its CPU and on another
TRIES, PAIRS = 3, 5  # of a ratio that is compared with the baseline
SUITE = pytest.StashKey["Suite"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption("--op", choices=OPS, help="only the cases of this op")
    group.addoption("--save", type=Path, help="the results as JSON, written after each; for tables and plots")
    group.addoption("--resume", action="store_true", help="keep the rows of --save, and measure those that it lacks")
    group.addoption("--seconds", type=float, default=math.inf, help="no row starts later; the others are left")
    group.addoption(
        "--device", choices=DEVICES, help="cpu rehearses the cases of a GPU, smaller; default: a GPU if any"
    )
    group.addoption("--variants", metavar="MODULE.NAME=VALUE,...", help="ours once with each value of a private switch")
    group.addoption("--quick", action="store_true", help="compare the steady ratios with benchmarks/baseline.json")
    group.addoption("--report-limits", action="store_true", help="a limit that is not met is an expected failure")
    group.addoption("--new-baseline", action="store_true", help="with --quick: write the ratios as the baseline")


def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if options.new_baseline and not options.quick:
        raise pytest.UsageError("--new-baseline must be given with --quick")
    if options.resume and not options.save:
        raise pytest.UsageError("--resume must be given with --save, the file to continue")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a GPU, and there is none; --device cpu rehearses its cases")
    if options.device == "cpu":
        case.rehearse()
        measure.rehearse()
    config.stash[SUITE] = Suite(options.save, options.quick or options.device == "cpu", options.resume, options.seconds)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests marked quick with --quick, and the others without, in the order of a GPU on a GPU."""
    wanted = bool(config.getoption("--quick"))
    op = config.getoption("--op")
    kept, others = list[pytest.Function](), list[pytest.Item]()
    for item in items:
        assert isinstance(item, pytest.Function)
        one = item.callspec.params.get("case", item.callspec.params.get("sweep"))
        is_kept = (item.get_closest_marker("quick") is not None) == wanted and (op is None or one.op == op)
        (kept if is_kept else others).append(item)
    config.hook.pytest_deselected(items=others)
    if config.stash[SUITE].kind == "cuda":
        kept.sort(key=lambda item: turn(item.callspec.params.get("who")))
    items[:] = kept


def turn(who: str | None) -> int:
    """Ours, then peers that are ready, then those that compile for seconds, then the sweeps, which are of nobody."""
    return 3 if who is None else 0 if who == "ours" else 2 if who.startswith("torch.compile") else 1


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: Result) -> None:
    """Describes the machine as our results do, without the name of the host."""
    machine_info.clear()
    machine_info.update(measure.machine())


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Suite:
    return request.config.stash[SUITE]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    suite = config.stash[SUITE]
    if config.getoption("--new-baseline"):
        ratios = {name: round(ratio, 3) for name, ratio in suite.ratios().items()}
        BASELINE.write_text(json.dumps({"cpu": measure.machine()["cpu"], "ratios": ratios}, indent=1) + "\n")
    if suite.cases or suite.sweeps:
        is_quick = config.getoption("--quick")
        terminalreporter.section("ours and peers, measured alternately")
        ratios = [f"{name}: {ratio:.2f}" for name, ratio in suite.ratios().items()]
        terminalreporter.write_line("\n".join(ratios) if is_quick else tables.text_of(suite.document()))
    if suite.left:
        terminalreporter.write_line(f"{suite.left} rows are left; --resume measures them")


class Suite:
    """The results of this run and of earlier ones, as plain numbers.

    A row has in "run" the number of its run among "runs", which say on what machine and of what commit they are.

    Args:
        path: file that gets them after each; None for none.
        on_cpu: whether a GPU is left alone, as the baseline has ratios of a CPU, and a rehearsal needs none.
        resumes: whether rows of the file stay until they are measured again, which those of this run are not.
        seconds: time after which no row starts.
    """

    def __init__(
        self, path: Path | None, on_cpu: bool = False, resumes: bool = False, seconds: float = math.inf
    ) -> None:
        self.path, self.on_cpu, self.left, self.ends = path, on_cpu, 0, time.monotonic() + seconds
        known = json.loads(path.read_text()) if path is not None and resumes and path.exists() else {}
        self.runs: list[Result] = known.get("runs", [])
        self.cases = {(one["op"], one["name"]): one for one in known.get("cases", [])}
        self.sweeps = {(one["op"], one["name"]): one for one in known.get("sweeps", [])}
        self._inputs: tuple[Case | None, list[Any]] = None, []

    @functools.cached_property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.on_cpu else measure.usable_device()

    @property
    def kind(self) -> str:
        """Device whose cases are measured or rehearsed."""
        return "cuda" if measure.has_events(self.device) else "cpu"

    @functools.cached_property
    def run(self) -> int:
        """Number of this run, which is that of an earlier one of the same commit and machine."""
        device = "rehearsal" if measure.is_rehearsal() else self.device.type
        facts = json.loads(json.dumps({"machine": measure.machine(), "device": device}))
        for number, run in enumerate(self.runs):
            if all(run[name] == value for name, value in facts.items()):
                return number
        self.runs.append(facts | {"ceiling": measure.ceiling(self.device)})
        return len(self.runs) - 1

    @property
    def limits(self) -> dict[str, float]:
        limits: dict[str, float] = self.runs[self.run]["ceiling"]
        return limits

    def passes_over(self, one: Case | Sweep, who: str = "") -> str:
        """Reason why a row is not measured now, or ""."""
        entry = (self.cases if who else self.sweeps).get((one.op, one.name), {})
        rows = {"": entry, "ours": entry.get("ours", {}), **entry.get("providers", {})}
        if rows.get(who, {}).get("run") == self.run:
            return "measured before"
        if time.monotonic() < self.ends:
            return ""
        self.left += 1
        return "left, as the time is up"

    def inputs(self, case: Case) -> list[Any]:
        """Those of one case at a time."""
        if self._inputs[0] is not case:
            self._inputs = None, []
            self._inputs = case, measure.sets_of(case, self.device)
        return self._inputs[1]

    def measure(self, case: Case, who: str) -> Result:
        """Measures a row: "ours" or a provider, after ours; the bars that it decides are in "bars"."""
        key, sets = (case.op, case.name), self.inputs(case)
        entry = self.cases.get(key, {"ours": {"run": -1}})
        if who == "ours" or entry["ours"]["run"] != self.run:
            ours = measure.measure_ours(case, sets, self.device, self.limits) | {"run": self.run}
            facts = {"op": case.op, "name": case.name, "shape": case.shape, "dtype": case.dtype}
            facts["floor"] = {"bytes": case.floor.bytes, "flops": case.floor.flops}
            entry = self.cases[key] = {"providers": {}, "bars": []} | entry | facts | {"ours": ours}
        row = entry["ours"]
        if who != "ours":
            row = measure.measure_provider(case, case.provider(who), sets, self.device) | {"run": self.run}
            entry["providers"][who] = row
        own = [bar for bar in case.bars if (bar.of == who) or (who == "ours" and (not bar.of or bar.of in case.arrays))]
        bars = [measure.judged(bar, case, entry, sets[0]) for bar in own]
        others = [
            bar for bar in entry["bars"] if (bar["kind"], bar["of"]) not in {(new["kind"], new["of"]) for new in bars}
        ]
        entry["bars"] = others + bars
        self.save()
        return row | {"bars": bars}

    def scale(self, sweep: Sweep) -> Result:
        result = measure.measure_sweep(sweep, self.device, self.limits) | {"run": self.run}
        self.sweeps[sweep.op, sweep.name] = result
        self.save()
        return result

    def compare_with_baseline(self, case: Case, who: str) -> tuple[float, float]:
        """The best ratio of several tries, and the least that the baseline allows.

        Other load lowers a ratio once, a slower kernel every time. On a busy machine two threads wait for each other,
        so that one is used.
        """
        inputs, case = self.inputs(case), dataclasses.replace(case, pairs=PAIRS)
        baseline = json.loads(BASELINE.read_text())
        share = KEPT if baseline["cpu"] == measure.machine()["cpu"] else KEPT_ELSEWHERE
        least = share * baseline["ratios"].get(f"{case.op}, {case.name}: {who}", math.inf)
        key, best, threads = (case.op, case.name), 0.0, torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for _ in range(TRIES):
                row = measure.measure_provider(case, case.provider(who), inputs, self.device)
                if "ratio" not in row:
                    (pytest.skip if "missing" in row else pytest.fail)(next(iter(row.values())))
                best = max(best, row["ratio"])
                if best >= least:
                    break
        finally:
            torch.set_num_threads(threads)
        self.cases.setdefault(key, {"ours": {}, "providers": {}})["providers"][who] = row | {"ratio": best}
        return best, least

    def document(self) -> Result:
        return {"runs": self.runs, "cases": [*self.cases.values()], "sweeps": [*self.sweeps.values()]}

    def save(self) -> None:
        if self.path is not None:
            measure.write(self.path, self.document())

    def ratios(self) -> dict[str, float]:
        rows = ((key, name, row) for key, entry in self.cases.items() for name, row in entry["providers"].items())
        return {f"{op}, {name}: {who}": row["ratio"] for (op, name), who, row in rows if "ratio" in row}
