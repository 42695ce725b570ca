"""Finds the ratios that fell from one result to another.

    python -m benchmarks.compare A.json B.json
    python -m benchmarks.compare benchmarks/baseline.json --tries 3 --json now.json

A and B are results of `python -m benchmarks.run`, or of pytest-benchmark as `make bench` writes them. Times depend on
the machine and its load and are not compared; ratios of two sides measured alternately are. The exit status is 1 if a
ratio of B is more than 30 % below that of A, or missing. On another kind of CPU, whose vectors and caches may favour
one side, the margin is 60 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.cases import cases
from benchmarks.run import document, quick, show, write

ALLOWED, ELSEWHERE = 0.3, 0.6
Result = dict[str, Any]
Key = tuple[str, str, str]  # op, case, provider


def read(path: Path) -> Result:
    """A result of `benchmarks.run`, or one of pytest-benchmark, which holds each case as the extra_info of a test."""
    result: Result = json.loads(path.read_text())
    if "cases" in result:
        return result
    if "benchmarks" not in result:
        raise SystemExit(f"compare: {path} must be a result of benchmarks.run or of pytest-benchmark, got neither")
    measured = [test["extra_info"] for test in result["benchmarks"]]
    # sweeps have no providers
    return {"machine": result["machine_info"], "cases": [case for case in measured if "providers" in case]}


def ratios(result: Result) -> dict[Key, float]:
    return {
        (case["op"], case["name"], name): provider["ratio"]
        for case in result["cases"]
        for name, provider in case["providers"].items()
        if "ratio" in provider
    }


def allowed(before: Result, after: Result) -> float:
    a, b = (result.get("machine", {}).get("cpu") for result in (before, after))
    return ALLOWED if a == b else ELSEWHERE


def fallen(before: Result, after: Result) -> list[Key]:
    old, new, part = ratios(before), ratios(after), allowed(before, after)
    return [key for key in old if key not in new or new[key] < (1 - part) * old[key]]


def table(before: Result, after: Result) -> str:
    old, new = ratios(before), ratios(after)
    fell = fallen(before, after)
    lines = ["| op | case | against | before | after | change |", "|---|---|---|---|---|---|"]
    for key in [*old, *(key for key in new if key not in old)]:
        a, b = old.get(key), new.get(key)
        change = "new" if a is None else "not measured" if b is None else f"{b / a - 1:+.0%}"
        numbers = ["" if ratio is None else f"{ratio:.2f}" for ratio in (a, b)]
        lines.append("| " + " | ".join([*key, *numbers, change + (" **fell**" if key in fell else "")]) + " |")
    return "\n".join(lines)


def best_of(before: Result, tries: int, measure: Callable[[str, str], Result]) -> list[Result]:
    """Results of the cases of `before`. A case whose ratio fell is repeated, up to `tries` times: other load on the
    machine lowers a ratio once, a slower kernel lowers it every time."""
    results: dict[tuple[str, str], Result] = {}
    left = list(dict.fromkeys((case["op"], case["name"]) for case in before["cases"]))
    for _ in range(tries):
        for op, name in left:
            result = measure(op, name)
            for provider, numbers in results.get((op, name), result)["providers"].items():
                if numbers.get("ratio", 0) > result["providers"][provider].get("ratio", 0):
                    result["providers"][provider] = numbers
            results[op, name] = result
        now = {"machine": machine.describe(), "cases": list(results.values())}
        left = list(dict.fromkeys(key[:2] for key in fallen(before, now)))
    return list(results.values())


def measure_quick(op: str, name: str) -> Result:
    device = torch.device("cpu")
    (case,) = (case for case in cases(op, name, device.type) if case.name == name)
    result = quick(case, device)
    show(result)
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="A: JSON file of the earlier result")
    parser.add_argument("after", type=Path, nargs="?", help="B: JSON file of the later result; not with --tries")
    parser.add_argument("--tries", type=int, default=0, help="measure the quick cases of A now, instead of reading B")
    parser.add_argument("--json", type=Path, help="the file for the results of --tries")
    options = parser.parse_args(arguments)
    if (options.after is None) == (options.tries == 0) or options.tries < 0:
        raise SystemExit("compare: give either a second result or --tries, at least 1")
    before = read(options.before)
    if options.after:
        after = read(options.after)
    else:
        after = document(torch.device("cpu"), best_of(before, options.tries, measure_quick), {})
    if options.json:
        write(options.json, after)
    print(table(before, after))
    fell = fallen(before, after)
    if fell:
        names = "; ".join(", ".join(key) for key in fell)
        raise SystemExit(f"compare: fell by more than {allowed(before, after):.0%}, or not measured: {names}")


if __name__ == "__main__":
    main()
