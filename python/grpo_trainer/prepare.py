"""Parts of the scripts recipes/<system>/prepare.py, which convert published data to the files that recipes read."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, StringConstraints

from grpo_trainer.recipes import validated
from grpo_trainer.section import Section
from grpo_trainer.splits import read_lines
from grpo_trainer.tasks import Item

STRATA = 4  # quartiles


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class Line(Section):
    """A line of published data, whose other columns are left out. Scripts name its columns and convert it."""

    model_config = ConfigDict(extra="ignore")

    def converted(self) -> Item:
        """The line of the recipe; a `ValueError` says what is wrong with it."""
        raise NotImplementedError


def run(
    description: str,
    kind: type[Line],
    group: Callable[[Item], str],
    shares: Mapping[str, float],
    by: Callable[[Item], float] | None = None,
    arguments: Sequence[str] | None = None,
) -> None:
    """Converts files and divides their lines into parts, as the command line says.

    Args:
        description: what the script does.
        kind: the lines of the files.
        group: converted lines of the same group, such as the replies to a post, are in one part.
        shares: the parts and their shares, unless the command line names others.
        by: number by whose quartiles the parts are stratified.
        arguments: those of the command line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSONL, JSON, CSV or parquet file, or a hub name")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="the parts are written to PREFIX-PART.jsonl")
    default = [f"{name}={share}" for name, share in shares.items()]
    parser.add_argument(
        "--into", nargs="+", default=default, metavar="PART=SHARE", help=f"default: {' '.join(default)}"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random division")
    parser.add_argument("--leave-out", action="store_true", help="leave out lines that break a rule, and report them")
    options = parser.parse_args(arguments)
    try:
        lines = []
        for file in options.files:
            for number, line in enumerate(read_lines("FILE", file, "train"), 1):
                try:
                    lines.append(validated(kind, line).converted())
                except ValueError as error:
                    message = f"{file}, example {number}: {error}"
                    if not options.leave_out:
                        raise ValueError(f"{message}; correct it, or give --leave-out") from None
                    print(f"left out: {message}", file=sys.stderr)
        _write(options.output, divide(lines, _shares(options.into), group, by, options.seed))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def divide(
    lines: Sequence[Item],
    shares: Mapping[str, float],
    group: Callable[[Item], str],
    by: Callable[[Item], float] | None,
    seed: int,
) -> dict[str, list[Item]]:
    """Divides lines into parts, each in the original order; every quartile of the groups has the same shares."""
    groups: dict[str, list[int]] = {}
    for row, line in enumerate(lines):
        groups.setdefault(" ".join(group(line).lower().split()), []).append(row)
    members = list(groups.values())
    if by is not None:
        numbers = [by(line) for line in lines]
        members.sort(key=lambda rows: statistics.fmean(numbers[row] for row in rows))
    bounds = [len(members) * i // STRATA for i in range(STRATA + 1)] if by is not None else [0, len(members)]
    rng, rows_of, counts = random.Random(seed), {name: list[int]() for name in shares}, dict.fromkeys(shares, 0)
    for start, end in itertools.pairwise(bounds):
        for place, rows in enumerate(rng.sample(members[start:end], end - start), start + 1):
            # to the part that lacks most of its share of the groups up to here
            name = max(shares, key=lambda name: shares[name] * place - counts[name])
            counts[name] += 1
            rows_of[name] += rows
    for name, rows in rows_of.items():
        if not rows:
            rule = "must leave lines to every part"
            raise ValueError(f"--into: {rule}, got {name}={shares[name]:g} of {len(lines)} usable lines")
    return {name: [lines[row] for row in sorted(rows)] for name, rows in rows_of.items()}


def _shares(assignments: Sequence[str]) -> dict[str, float]:
    matches = [re.fullmatch(r"([^/=]+)=(\d*\.?\d+)", assignment) for assignment in assignments]
    shares = {match[1]: float(match[2]) for match in matches if match is not None}
    is_share = all(0 < share <= 1 for share in shares.values()) and abs(math.fsum(shares.values()) - 1) <= 1e-6
    if len(shares) < len(assignments) or not is_share:
        rule = "must be PART=SHARE, each part once, and the shares must sum to 1"
        raise ValueError(f"--into: {rule}, got {' '.join(assignments)}")
    return shares


def _write(prefix: str, parts: Mapping[str, Sequence[Item]]) -> None:
    paths = {name: Path(f"{prefix}-{name}.jsonl") for name in parts}
    for path in paths.values():
        if path.exists():
            raise FileExistsError(f"--output: must not replace a file, got {str(path)!r}; remove it, or give another")
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in parts[name])
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(parts[name])} lines")
