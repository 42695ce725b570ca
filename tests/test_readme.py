"""The README's examples run and print the stated output, and its tables of variants match the code."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from tools import variants

README = Path(__file__).parent.parent / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="tests are run from outside the checkout")


def test_examples_run_and_print_what_the_readme_says() -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    printed = io.StringIO()
    scope: dict[str, object] = {}
    with contextlib.redirect_stdout(printed):
        for example in examples:
            exec(example, scope)
    promised = re.findall(r"# (tensor\(.*?\))[:\n]", "\n".join(examples))
    assert len(promised) == 2 and printed.getvalue().splitlines() == promised
    assert scope["result"].degenerate.tolist() == [False] * 4 + [True] * 4  # type: ignore[attr-defined]
    assert torch.isfinite(scope["mixed"].advantages).all()  # type: ignore[attr-defined]
    assert scope["hidden"].grad.any() and scope["lm_head"].weight.grad.any()  # type: ignore[attr-defined]


def test_links_lead_to_files() -> None:
    for path in [README, *README.parent.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("page", variants.PAGES)
def test_tables_of_variants_are_up_to_date(page: str) -> None:
    text = (variants.OPS / page).read_text()
    assert variants.updated(page, text) == text, "run python tools/variants.py"


def test_an_outdated_table_is_noticed() -> None:
    text = (variants.OPS / "policy_loss.md").read_text().replace("| `cispo` |", "| `old` |")
    assert variants.updated("policy_loss.md", text) != text


def test_every_loss_of_the_peers_is_listed_or_refused() -> None:
    pytest.importorskip("verl")
    from tests.integrations import tiny_verl  # replace servers that verl imports

    assert tiny_verl
    from verl.trainer.ppo import core_algos

    text = variants.policy_loss()
    losses = [name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("fused_")]
    assert len(losses) > 10 and all(f"`{name}`" in text for name in losses)
    refused = set(re.findall(r"`(\w+)`", text.rpartition("Refused:")[2]))
    assert refused == {"bypass_mode", "cross_entropy"}
