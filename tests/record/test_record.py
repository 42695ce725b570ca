"""The library computes what record.json holds: losses, gradients, metrics, advantages, corrections, segments, groups.

The record was computed in float64 and rounded to twelve digits. Sums in another order differ by a few times 1e-16 of
their largest term, which is about 1 and at most 10^5 times the result. So float64 results must be within 1e-10 of their
largest entry, plus 1e-12. Results in float32 have the budget of harness.py. For a single number below 1 it is that of
1, as the terms of a sum may cancel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.harness import assert_within_budget
from tests.record import calls, write
from tests.record.calls import Way
from tests.record.write import CASES

RECORD = write.read()
F32, F64 = torch.float32, torch.float64
ULPS = 4 * torch.finfo(F32).eps
PACKED = ("policy_loss", "linear_policy_loss", "loss_of_logits", "sampling_correction", "token_advantages")
QUICK = (Way(), Way("kernel", layout="packed"), Way("kernel", memory="low"), Way("kernel", F32))


def ways(name: str) -> list[Way]:
    """All ways to compute a case."""
    case = CASES[name]
    is_packed = case.call in PACKED and "index" not in case.inputs
    layouts = ("padded", "packed") if is_packed else ("padded",)
    memories = ("fast", "low") if case.call == "linear_policy_loss" and "support" not in case.inputs else ("fast",)
    return [Way("reference", F64, layout) for layout in layouts] + [
        Way("kernel", *way) for way in itertools.product((F64, F32), layouts, memories)
    ]


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_record(name: str) -> None:
    own = ways(name)
    check(name, [way for way in own if way in QUICK or (way == Way("kernel") and QUICK[1] not in own)])


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_every_layout_and_memory_gives_the_results_of_the_record(name: str) -> None:
    check(name, ways(name))


def check(name: str, chosen: list[Way]) -> None:
    wrong = [f"{way}: {line}" for way in chosen for line in sorted(differences(name, way))]
    assert not wrong, f"{name} differs from the record:\n" + "\n".join(wrong)


def differences(name: str, way: Way) -> Iterator[str]:
    record, results = RECORD.get(name, {}), write.results(name, way)
    working = write.results(name, way._replace(backend="reference")) if way.dtype == F32 else {}
    for what in record.keys() - results:
        yield f"{what}: the record alone has it"
    for what, got in results.items():
        if what not in record:
            yield f"{what}: the record lacks it"
        elif got.dim() == 0:
            yield from number_differs(what, got.item(), record[what], working[what].item() if working else None)
        else:
            yield from tensor_differs(what, got, torch.tensor(record[what], dtype=F64), working.get(what))


def number_differs(what: str, got: float, gold: float, working: float | None) -> Iterator[str]:
    if got == gold or (math.isnan(got) and math.isnan(gold)):
        return
    exact = 1e-10 * abs(gold) + 1e-12
    allowed = exact if working is None else 2 * abs(working - gold) + ULPS * max(1.0, abs(gold))
    if not abs(got - gold) <= allowed:
        yield f"{what}: {got:.12g} instead of {gold:.12g}, error {abs(got - gold):.3g}, allowed {allowed:.3g}"


def tensor_differs(what: str, got: Tensor, gold: Tensor, working: Tensor | None) -> Iterator[str]:
    largest = float(gold[gold.isfinite()].abs().amax()) if gold.isfinite().any() else 0.0
    # some results are float32 whatever the inputs, and whole numbers must be equal
    tolerance = {F64: 1e-10 * largest + 1e-12, F32: ULPS * largest}.get(got.dtype, 0.0)
    try:
        if working is not None and got.is_floating_point():
            assert_within_budget(got, working, gold, what)
        else:
            torch.testing.assert_close(got.double(), gold, rtol=0, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        text = str(error) if str(error).startswith(what) else f"{what}: {error}"
        yield " ".join(text.split())


def test_every_case_has_a_call_and_a_record() -> None:
    lost = sorted({case.call for case in CASES.values() if not hasattr(calls, case.call)})
    assert not lost, f"calls.py lacks {lost}: remove their cases from cases.py and the record, and say why"
    new = sorted(CASES.keys() - RECORD)
    assert not new, f"the record lacks {new}: python -m tests.record.write adds them"
    gone = sorted(RECORD.keys() - CASES)
    assert not gone, f"cases.py lacks {gone}: python -m tests.record.write NAMES --remove, and say why in the commit"


def test_a_value_is_replaced_and_a_case_removed_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write, "PATH", tmp_path / "record.json")
    name = "running/norm"
    write.main([name])
    now = write.read()
    assert now == {name: RECORD[name]}
    before = now | {name: now[name] | {"first": [0.0]}}
    write.write(before)
    with pytest.raises(SystemExit, match="these values differ and were left as they are"):
        write.main([name])
    assert write.read() == before and f"{name}: first\n    was [0.0]\n    now [" in capsys.readouterr().out
    write.main([name, "--replace"])
    assert write.read() == now
    with pytest.raises(SystemExit, match=f"names must be of cases that cases.py no longer has, got {name}"):
        write.main([name, "--remove"])
    monkeypatch.delitem(CASES, name)
    write.main([name, "--remove"])
    assert write.read() == {}
