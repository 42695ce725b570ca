"""Sorts the greedy answers of a run on `word_problems` by what is wrong with them, before and after training.

    python tools/calculation_errors.py runs/smollm2-1

An answer has the requested form if it is "A + B = C. #### C", with - or x as well. A wrong one in this form either
calculates what it wrote correctly, so that its numbers or its operator do not fit the problem, or it does not.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_trainer.report.run_folder import RunFolder

CALCULATION = re.compile(r"\s*(\d+) ([-+*x]) (\d+) = (-?\d+)\.\s*#### (-?\d+)\s*")
KINDS = ("right answer", "another problem, calculated correctly", "wrong calculation", "another form")


def kind(answer: str, is_correct: bool) -> str:
    match = CALCULATION.fullmatch(answer)
    if is_correct:
        return KINDS[0]
    if match is None or match[4] != match[5]:
        return KINDS[3]
    a, b = int(match[1]), int(match[3])
    result = a + b if match[2] == "+" else a - b if match[2] == "-" else a * b
    return KINDS[1] if result == int(match[4]) else KINDS[2]


def count(prompts: Iterable[Mapping[str, Any]]) -> Counter[str]:
    return Counter(kind(prompt["greedy"], prompt["correct"] == 1) for prompt in prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run")
    print("| run | greedy answers | before | after |\n|---|---|---|---|")
    for folder in parser.parse_args().run:
        pair = RunFolder.read(folder).before_and_after()
        if pair is None:
            parser.error(f"{folder}: must have two evaluations of one split")
        before, after = (count(evaluated.content["prompts"]) for evaluated in pair)
        for name in KINDS:
            print(f"| {folder.name} | {name} | {before[name]} | {after[name]} |")


if __name__ == "__main__":
    main()
