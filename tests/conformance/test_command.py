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
from xml.etree import ElementTree

import pytest
import torch
from grpo_conformance import CONVENTIONS, INVARIANTS, adapters, report, run
from grpo_conformance.__main__ import main
from grpo_conformance.report import START, THREADS, markdown
from grpo_conformance.run import CHOICE, ERROR, FAILS, IGNORED, LACKS, NOT_OFFERED, PASSES
from torch import Tensor

from tests.conformance.plain import Plain

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
STATUSES = (PASSES, FAILS, ERROR, CHOICE, IGNORED, NOT_OFFERED)
CASES = (*INVARIANTS, *CONVENTIONS)
WRONG = """
class Wrong:
    name = "mine<b>"

    def advantages(self, batch):
        return batch.rewards - batch.rewards.mean()

adapter = Wrong()
"""
LOOSE = """
from tests.conformance.plain import Plain

class Loose(Plain):
    def loss(self, batch):
        return super().loss(batch) + 0 * (batch.logprobs * ~batch.mask).sum()

adapter = Loose()
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
    title = "mean: The baseline is a group's mean"
    given = "mask 11 11 11 11; rewards [3, 1, 5, 9]; groups [70, 70, 3, 3]"
    wrong = "row 0 is -1.5, not 1 (-1.5 times); row 1 is -3.5, not -1 (3.5 times); row 2 is 0.5, not -2 (-0.25 times)"
    assert f"{title} | mine<b> | estimator='mean' | {given} | {wrong}; and 1 more\n" in out
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
    assert settings["gae"] == "gamma=0.5 lam=0.5" and settings["gae-nan"] == ""
    assert settings["token-mean"] == "aggregation='token-mean'"
    assert settings["gspo"] == "aggregation='token-mean' ratio='sequence' clip=10.0"
    (share,) = (case for case in INVARIANTS if case.name == "kl-share")
    assert share.under(share.variants[4]).settings == "aggregation=None kl='k2' kl_coef=0.5"


def test_what_fails_a_run(files: dict[str, str], tmp_path: Path) -> None:
    """Faults alone, unless it is asked to fail on all."""
    path = tmp_path / "loose.py"
    path.write_text(LOOSE)
    assert main([str(path)]) == 0
    assert [main([str(path), "--fail-on", kind]) for kind in ("faults", "all", "nothing")] == [0, 1, 0]
    assert main([files["wrong"], "--fail-on", "nothing"]) == 0


def test_what_ci_reads(files: dict[str, str], tmp_path: Path) -> None:
    junit, badge = tmp_path / "out.xml", tmp_path / "badge.json"
    options = ["--junit", str(junit), "--badge", str(badge)]
    assert main([files["right"], *options]) == 0
    expected = {"schemaVersion": 1, "label": "conformance", "message": "no faults", "color": "brightgreen"}
    assert json.loads(badge.read_text()) == expected
    assert main([files["wrong"], files["broken"].replace("broken", "right"), *options]) == 1
    wrong, right = ElementTree.parse(junit).getroot()
    assert [suite.get("name") for suite in (wrong, right)] == ["mine<b>", "plain"]
    assert int(wrong.get("failures", 0)) == len(wrong.findall(".//failure")) > 1 and right.get("failures") == "0"
    assert int(wrong.get("tests", 0)) == len(wrong.findall("testcase")) == len(CASES)
    (mean,) = wrong.findall("testcase[@name='mean']/failure")
    assert mean.get("message", "").startswith("row 0 is -1.5, not 1") and "groups [70, 70, 3, 3]" in str(mean.text)
    assert json.loads(badge.read_text())["message"] == f"{wrong.get('failures')} faults"


def test_what_is_written(files: dict[str, str], tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("html", "json", "markdown")}
    options = [part for kind, path in paths.items() for part in (f"--{kind}", str(path))]
    assert main([files["wrong"], files["right"], *options]) == 1
    page, table = paths["html"].read_text(), paths["markdown"].read_text()
    assert set(THREADS) <= {case.name for case in CASES}
    for text in (page, table):
        assert "row 0 is -1.5, not 1" in text
        for case in CASES:
            assert case.title in text.replace("&#x27;", "'")
            for thread in THREADS.get(case.name, "").split():
                name, number = thread.split("#")
                assert f"https://github.com/{name}/issues/{number}" in text
    assert all(f"{status}: " in page for status in STATUSES)
    assert "<th>mine&lt;b&gt;</th>" in page and "mine<b>" not in page
    listed = json.loads(paths["json"].read_text())
    assert listed["Faults"][0] == ["case", "what must hold", "mine<b>", "plain", "met in"]
    (one,) = (cells for cells in listed["What went wrong"] if cells[0] == "mean")
    assert one[:4] == ["mean", "mine<b>", "", "estimator='mean'"] and one[4].startswith("row 0 is -1.5, not 1")
    assert "<td>mean</td><td>mine&lt;b&gt;</td><td></td><td>estimator=&#x27;mean&#x27;</td><td>row 0 is" in page


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
    assert text.startswith(f"# Title\n\nWords.\n\n{START}\n\n## Faults\n\n| case |") and "old tables" not in text
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

    def my_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits.log_softmax(2).gather(2, tokens[:, :, None])[:, :, 0]

    scope: dict[str, Any] = {"my_advantages": my_advantages, "my_loss": my_loss, "my_logprobs": my_logprobs}
    exec(PAGE.read_text().split("```python\n")[1].partition("```")[0], scope)
    scope["Mine"].token_advantages = Plain.token_advantages
    assert scope["Mine"].lacks == tuple(LACKS)
    results = {result.case.name: result for result in run(scope["adapter"], INVARIANTS)}
    assert [name for name, result in results.items() if result.has_failed] == ["equal-rewards-exact"]
    asked = [name for name, result in results.items() if result.status == "yes" and result.case.method == "loss"]
    assert asked == [
        *("token-mean", "default-loss", "clip", "clip-low", "padding", "gaps", "row-order-loss"),
        *("parts-tokens", "parts-default", "ranks-tokens", "ranks-steps", "nan-masked", "inf-masked"),
    ]
    assert {results[name].status for name in ("kl-k3", "entropy", "gspo", "seq-mean-token-mean")} == {"ignored", "-"}


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["nothing"], "must define `adapter`, an object with a name, got None"),
        (["no method"], "must have one of the methods advantages, token_advantages, loss, logprobs"),
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
