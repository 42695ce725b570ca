"""Wrong trainers: the plain one with a small change, and how many of them the cases notice.

python -m tests.conformance.mutants             # prints the mutants, and what notices each
python -m tests.conformance.mutants PAGE.md     # and writes their number into the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from grpo_conformance import INVARIANTS, run
from grpo_conformance.run import ERROR, FAILS, IGNORED, METHODS

WRONG = (FAILS, ERROR, IGNORED)
HERE = Path(__file__).parent
SOURCE = (HERE / "plain.py").read_text()
SENTENCE = re.compile(r"notices \d+ of \d+\s+mutants")


def _read() -> dict[str, list[tuple[str, str]]]:
    """By what is wrong: texts of the plain trainer, each with the one that replaces it."""
    found = {}
    for block in (HERE / "mutants.txt").read_text().split("\n# ")[1:]:
        name, _, changes = block.partition("\n")
        pairs = re.findall(r"((?:- .*\n)+)((?:\+ .*\n)+)", changes + "\n")
        found[name] = [tuple("\n".join(line[2:] for line in side.splitlines()) for side in pair) for pair in pairs]
    return found


MUTANTS = _read()


def mutant(name: str) -> Any:
    """The plain trainer with the changes of this name."""
    code = SOURCE
    for old, new in MUTANTS[name]:
        assert old in code, f"{name}: no {old!r} in the plain trainer"
        code = code.replace(old, new)
    scope: dict[str, Any] = {"__name__": "mutant"}
    exec(compile(code, name, "exec"), scope)
    return scope["Plain"]()


def noticed(name: str) -> list[str]:
    """The cases of a method that a mutant fails."""
    trainer = mutant(name)
    for method in sorted(METHODS, key=lambda method: method == "loss"):  # which takes longest
        results = run(trainer, [case for case in INVARIANTS if case.method == method])
        failed = [result.case.name for result in results if result.status in WRONG]
        if failed:
            return failed
    return []


def is_noticed(name: str) -> bool:
    """Whether a case fails, without asking those after it."""
    trainer = mutant(name)
    cases = sorted(INVARIANTS, key=lambda case: case.method == "loss")
    return any(run(trainer, [case])[0].status in WRONG for case in cases)


def main() -> None:
    """Prints what notices each mutant, and writes the numbers into a page if there is one."""
    found = {name: noticed(name) for name in MUTANTS}
    for name, cases in found.items():
        print(f"{name}: {', '.join(cases) or 'not noticed'}")
    sentence = f"notices {sum(map(bool, found.values()))} of {len(found)} mutants"
    print(f"The suite {sentence}.")
    for page in map(Path, sys.argv[1:]):
        page.write_text(SENTENCE.sub(sentence, page.read_text()))


if __name__ == "__main__":
    main()
