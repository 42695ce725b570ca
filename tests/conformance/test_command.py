"""The command: what it prints and writes, its exit status, and its errors.

The faults to notice: a failure that the exit status hides, a table that lacks a case or its numbers, a page whose texts
are not escaped, an error that does not say what to do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_conformance import CONVENTIONS, INVARIANTS, adapters, report, run
from grpo_conformance.__main__ import main
from grpo_conformance.report import START, THREADS, markdown
from grpo_conformance.run import ERROR, FAILS, LACKS, NOT_OFFERED, PASSES
from torch import Tensor

from tests.conformance.plain import Plain

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
STATUSES = (PASSES, FAILS, ERROR, NOT_OFFERED)
CASES = (*INVARIANTS, *CONVENTIONS)
WRONG = """
class Wrong:
    name = "mine<b>"

    def advantages(self, batch):
        return batch.rewards - batch.rewards.mean()

adapter = Wrong()
"""
RIGHT = "from tests.conformance.plain import Plain\nadapter = Plain()\n"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "beside_the_adapter.py").write_text(RIGHT)
    codes = {
        "wrong": WRONG,
        "right": "from beside_the_adapter import adapter\n",
        "broken": WRONG.replace("batch.rewards -", "1 / 0 -"),
        "nothing": "x = 1\n",
        "no method": "class A: name = 'a'\nadapter = A()\n",
        "misspelt": WRONG + "Wrong.los = lambda self, batch: batch.logprobs.sum()\n",
        "lacks": WRONG.replace("def", "lacks = ['packing']\n\n    def"),
        "import": "import absent_package\n",
    }
    for name, code in codes.items():
        (tmp_path / f"{name}.py").write_text(code)
    return {name: str(tmp_path / f"{name}.py") for name in codes}


def test_the_status_says_whether_an_invariant_fails(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([files["right"]]) == 0
    out = capsys.readouterr().out
    assert "NO" not in out and "wrong" not in out and all(f"\n{case.name} " in out for case in INVARIANTS)
    assert main([files["wrong"], files["right"]]) == 1
    out = capsys.readouterr().out
    title = "masked-vote: The reward of a masked row moves no mean"
    given = "mask 00 11 11; rewards [100, 3, 1]; groups [0, 0, 0]"
    wrong = "row 1 is -31.67, not 1 (-31.7 times); row 2 is -33.67, not -1 (33.7 times)"
    assert f"{title} | mine<b> | estimator='mean' | {given} | {wrong}\n" in out
    first = next(line for line in out.splitlines() if line.startswith("mean "))
    assert first.split() == ["mean", "NO", "yes"]
    assert main([files["broken"]]) == 1
    assert (
        f"{title} | mine<b> | estimator='mean' | {given} | raises ZeroDivisionError: division by zero"
        in capsys.readouterr().out
    )


def test_the_settings_of_a_case() -> None:
    """The estimator and the aggregation, since a trainer's default may be another, and what is not the default."""
    settings = {case.name: case.settings for case in INVARIANTS}
    assert settings["gae"] == "gamma=0.5 lam=0.5" and settings["gae-rollout"] == ""
    assert settings["token-mean"] == "aggregation='token-mean'"
    assert settings["ranks-rows"] == "aggregation='seq-mean-token-mean' kl_coef=0.1"
    assert settings["rollout-ratio"] == "aggregation='seq-mean-token-mean' ratio='sequence' clip=10.0"


def test_what_is_written(files: dict[str, str], tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("html", "json", "markdown")}
    options = [part for kind, path in paths.items() for part in (f"--{kind}", str(path))]
    assert main([files["wrong"], files["right"], *options]) == 1
    page, table = paths["html"].read_text(), paths["markdown"].read_text()
    assert set(THREADS) <= {case.name for case in CASES}
    for text in (page, table):
        assert "row 1 is -31.67, not 1" in text
        for case in CASES:
            assert case.title in text.replace("&#x27;", "'")
            for thread in THREADS.get(case.name, "").split():
                name, number = thread.split("#")
                assert f"https://github.com/{name}/issues/{number}" in text
    assert all(f"{status}: " in page for status in STATUSES)
    assert "<th>mine&lt;b&gt;</th>" in page and "mine<b>" not in page
    listed = json.loads(paths["json"].read_text())
    assert listed["Invariants"][0] == ["case", "what must hold", "mine<b>", "plain", "met in"]
    (one,) = (cells for cells in listed["What went wrong"] if cells[0] == "masked-vote")
    assert one[:3] == [
        "masked-vote",
        "mine<b>",
        "row 1 is -31.67, not 1 (-31.7 times); row 2 is -33.67, not -1 (33.7 times)",
    ]
    assert "<td>masked-vote</td><td>mine&lt;b&gt;</td><td>row 1 is -31.67, not 1 (-31.7 times); row 2" in page


def test_the_terminal_says_why_cases_are_not_offered(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main([files["wrong"], files["right"]])
    _, _, listed = capsys.readouterr().out.partition("Not offered\n")
    reasons, _, _ = listed.partition("\n\n")
    of_tokens = [case.name for case in INVARIANTS if case.method == "token_advantages"]
    assert f"mine<b> | the adapter has no token_advantages | {', '.join(of_tokens)}, discount" in reasons.split("\n")
    assert not any(line.startswith("plain |") for line in reasons.split("\n"))


def test_an_introduction_is_kept(files: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Title\n\nWords.\n\n{START}\n\nold tables\n")
    assert main([files["right"], "--markdown", str(path)]) == 0
    text = path.read_text()
    assert text.startswith(f"# Title\n\nWords.\n\n{START}\n\n## Invariants\n\n| case |") and "old tables" not in text
    results = run(Plain(), CASES)
    assert text == markdown({"plain": results}, text)
    new = tmp_path / "new.md"
    new.touch()
    assert [main([files["right"], "--markdown", str(new)]) for _ in range(2)] == [0, 0]
    assert text.endswith(new.read_text()) and new.read_text().startswith(START)
    assert "What went wrong" not in text + report.page({"plain": results})
    path.write_text("# Mine\n")
    assert main([files["right"], "--markdown", str(path)]) == 2 and path.read_text() == "# Mine\n"
    assert "| a\\|b |" in markdown({"a|b": results}), "a bar would end the cell"


@pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
def test_the_page_explains_every_status() -> None:
    assert all(f"**{status}** " in PAGE.read_text() for status in STATUSES)


@pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
def test_textbook_grpo_in_the_template_of_the_page_fails_by_its_own_faults_alone() -> None:
    def my_advantages(rewards: Tensor, groups: Tensor, mask: Tensor, divide_by_std: bool) -> Tensor:
        of_group = [rewards[groups == group] for group in groups.tolist()]
        means, stds = (torch.stack([getattr(group, of)() for group in of_group]) for of in ("mean", "std"))
        return (rewards - means) / (stds + 1e-6 if divide_by_std else 1)

    def my_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
        ratio, advantages = (logprobs - old)[mask].exp(), advantages[:, None].expand(mask.shape)[mask]
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).sum()

    scope: dict[str, Any] = {"my_advantages": my_advantages, "my_loss": my_loss}
    exec(PAGE.read_text().split("```python\n")[1].partition("```")[0], scope)
    scope["Mine"].token_advantages = Plain.token_advantages
    assert scope["Mine"].lacks == tuple(LACKS)
    results = {result.case.name: result for result in run(scope["adapter"], INVARIANTS)}
    assert [name for name, result in results.items() if result.has_failed] == [
        "equal-rewards",
        "masked-vote",
        "unscored",
    ]
    asked = [name for name, result in results.items() if result.status == "yes" and result.case.method == "loss"]
    assert asked == [
        *("token-mean", "clip", "padding", "gaps", "nan-masked", "inf-masked", "row-order-loss"),
        *("parts-tokens", "ranks-tokens", "pad-rows-loss", "empty-part"),
    ]


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["nothing"], "must define `adapter`, an object with a name, got None"),
        (["no method"], "must have one of the methods advantages, token_advantages, loss"),
        (["misspelt"], "or others that start with an underscore, got 'los' (did you mean 'loss'?)"),
        (["lacks"], "may lack rollouts of several rows, uneven groups"),
        (["import"], "cannot be imported: ModuleNotFoundError: No module named 'absent_package'"),
        (["ver"], "adapter must be one of grpo_kernels, grpo_trainer, trl, fused_trl, verl, fused_verl or the path of"),
        (["absent.py"], "or the path of a .py file, got 'absent.py'"),
        (["verl"], "'verl' cannot be imported: ModuleNotFoundError: No module named 'grpo_conformance.adapters.a"),
        (["right", "right"], "adapters must have different names, got plain twice"),
        (["right", "--html", "/absent/page.html"], "[Errno 2] No such file or directory: '/absent/page.html'"),
    ],
)
def test_errors(
    files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    error: str,
) -> None:
    monkeypatch.setitem(adapters.BUILT_IN, "verl", ("absent_module", "Verl"))
    assert main([files.get(argument, argument) for argument in arguments]) == 2
    printed = capsys.readouterr().err
    assert error in printed and printed.startswith("grpo-conformance: ") and printed.count("\n") == 1


def test_adapters_use_public_names_of_the_kernels_and_the_package_needs_torch_alone() -> None:
    sources = [path.read_text() for path in Path(adapters.__file__).parent.glob("*.py")]
    imports = {line.strip() for source in sources for line in source.splitlines() if "import" in line}
    assert {line for line in imports if "grpo_kernels" in line} == {
        "import grpo_kernels as gk",
        "from grpo_kernels.integrations.trl import FusedGRPOTrainer",
        "from grpo_kernels.integrations.verl import fused_ppo_loss, patch_verl, unpatch_verl",
    }
    code = (
        "import sys, torch; before = set(sys.modules); import grpo_conformance.__main__; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(n for n in new if n not in sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "['grpo_conformance']", done.stderr
