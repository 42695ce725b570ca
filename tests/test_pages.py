"""The pages for newcomers: every config of which_loss.md is made, and the code of moving.md runs and agrees."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_close_to_rounding

DOCS = Path(__file__).parent.parent / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="tests are run from outside the checkout")


def read(page: str) -> str:
    return (DOCS / page).read_text() if DOCS.exists() else ""


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of tables, without their heads."""
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_setting_is_made() -> None:
    settings = {*re.findall(r"`(gk\.[^`]+\))`", read("which_loss.md"))}
    kinds = gk.LossConfig | gk.CorrectionConfig | gk.AdvantageConfig | gk.TokenAdvantageConfig
    assert settings and all(isinstance(eval(setting, {"gk": gk}), kinds) for setting in settings)


def test_every_system_and_method_has_its_settings() -> None:
    text = read("which_loss.md")
    others = text.partition("## From another system")[2].partition("\n## ")[0]  # tests/ops/policy_loss evaluates them
    named = [cells for cells in rows(text.replace(others, "")) if any(cell.startswith("`gk.") for cell in cells)]
    assert len(named) > 25
    for name, *advantages, loss in named:
        assert all(re.match(r"`gk\.(Token)?AdvantageConfig\(", cell) for cell in advantages), name
        assert re.match(r"`gk\.LossConfig[.(]", loss), name


def test_names_beside_settings_are_names() -> None:
    text = read("which_loss.md")
    for name in re.findall(r"`(trl-[\w-]+)`", text):
        gk.AdvantageConfig(name)
    fields = [re.findall(r"`(\w+)`", cells[1]) for cells in rows(text.partition("## From a formula")[2])]
    known = {*vars(gk.LossConfig()), *inspect.signature(gk.policy_loss).parameters}
    assert len(fields) == 5 and all(name in known for names in fields for name in names)


def test_a_row_as_one_segment_is_trls_rloo() -> None:
    """RLOOTrainer.compute_loss: the ratio of whole completions, clipped, and the mean over them."""
    assert '`gk.LossConfig(ratio="segment")`, with a whole row as one segment' in read("which_loss.md")
    torch.manual_seed(0)
    logprobs, old, advantages = -torch.rand(8, 5), -torch.rand(8, 5), torch.randn(8)
    mask = torch.arange(5) < torch.tensor([5, 3, 4, 5, 1, 2, 5, 5])[:, None]
    ratio = torch.exp(((logprobs - old) * mask).sum(1))
    expected = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    segments = torch.zeros(8, 5, dtype=torch.int32)
    config = gk.LossConfig(ratio="segment")
    loss = gk.policy_loss(logprobs, old, advantages, mask=mask, segments=segments, config=config).loss
    torch.testing.assert_close(loss, expected)


def test_the_stated_defaults_of_the_peers() -> None:
    """Sentences of the page on what may surprise."""
    assert gk.LossConfig.trl() == gk.LossConfig.trl(loss_type="dapo", epsilon_high=0.2)
    assert gk.LossConfig.verl().dual_clip == 3.0
    assert gk.AdvantageConfig("trl-group").eps == 1e-4 and gk.AdvantageConfig("verl-grpo").eps == 1e-6


PAGES = sorted(DOCS.glob("ops/*.md"))
EXAMPLE = re.compile(r"^## (Example.*)\n(?:(?!##|```).*\n)*```python\n([\s\S]*?)```", re.MULTILINE)
EXAMPLES = {f"{page.stem}: {title}": code for page in PAGES for title, code in EXAMPLE.findall(page.read_text())}
EXAMPLES["counting"] = "\n".join(re.findall(r"```python\n(.*?)```", read("counting.md"), re.DOTALL))


def test_every_op_has_an_example() -> None:
    assert PAGES and all(f"{page.stem}: Example" in EXAMPLES for page in PAGES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_the_page_says(name: str) -> None:
    """Comments behind a print are what it prints."""
    code = EXAMPLES[name]
    promised = [
        line.removeprefix("# ")
        for block in re.findall(r"^print\(.*\n((?:#.*\n)+)", code, re.MULTILINE)
        for line in block.splitlines()
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert promised and printed.getvalue().splitlines() == promised


def test_every_function_of_variants_is_shown_in_a_loss() -> None:
    setting, *blocks = re.findall(r"```python\n(.*?)```", read("variants.md"), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(setting, scope)
    for block in blocks:
        exec(block, scope)
        leaf = scope["hidden" if "hidden" in block else "logprobs"]
        (gradient,) = torch.autograd.grad(scope.pop("loss"), leaf)
        assert gradient.isfinite().all() and gradient.any() and not gradient[~scope["mask"]].any(), block
    assert all(f"gk.variants.{name}(" in "".join(blocks) for name in gk.variants.__all__)


def examples(section: str) -> list[str]:
    text = read("moving.md").split(f"## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def scope() -> dict[str, Any]:
    """What the examples take from their surroundings: two prompts with four completions each."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 32, bias=False)
    mask = torch.arange(5) < torch.tensor([5, 3, 4, 5, 1, 2, 5, 5])[:, None]
    hidden, tokens = torch.randn(8, 5, 8, requires_grad=True), torch.randint(32, (8, 5))
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.2, 1.0, 0.0, 0.3])
    logprobs = gk.linear_logprobs(hidden, head.weight, tokens).logprobs.detach()
    return {
        "head": head,
        "mask": mask,
        "hidden": hidden,
        "tokens": tokens,
        "rewards": rewards,
        "old_logprobs": logprobs + 0.3 * torch.randn(8, 5),  # far enough for some ratios to be clipped
        "advantages": torch.randn(8),
        "token_rewards": rewards[:, None] * torch.eye(5)[mask.sum(1) - 1],
        "uids": np.array(list("abababba"), dtype=object),
    }


def loss_and_gradients(code: str, scope: dict[str, Any]) -> list[torch.Tensor]:
    names = dict(scope)
    exec(code, names)
    return [names["loss"].detach(), *torch.autograd.grad(names["loss"], (scope["hidden"], scope["head"].weight))]


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Liger in a folder of its own, which is on the path during the test, as other peers look for it."""
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "liger"))
    pytest.importorskip("liger_kernel")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


LIGER: list[dict[str, Any]] = [
    {"loss_type": kind, "beta": beta, "importance_sampling_level": level, "epsilon_high": 0.3}
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo")
    for beta in (0.0, 0.1)
    for level in ("token", "sequence")
]
LIGER += [{"loss_type": kind, "beta": 0.1, "epsilon_high": 1.1} for kind in ("cispo", "sapo", "vespo")]
LIGER += [{"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.1, "temperature": 0.7}]
LUSPO = {"loss_type": "luspo", "beta": 0.0, "importance_sampling_level": "sequence"}  # else Liger averages over padding


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize(
    ("settings", "is_weighted"), [*itertools.product(LIGER, [False, True]), (LUSPO, False)], ids=str
)
def test_settings_of_liger_are_those_of_trl(settings: dict[str, Any], is_weighted: bool, scope: dict[str, Any]) -> None:
    """Under the names, and but for the defaults, that the page lists."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    mask, old = scope["mask"], scope["old_logprobs"]
    batch = scope["hidden"], scope["head"].weight, scope["tokens"]
    reference = old + 0.3 * torch.randn_like(old)
    is_weights = torch.where(mask, 0.5 + torch.rand_like(old), 1) if is_weighted else None
    settings = {"epsilon_low": 0.15, "max_completion_length": 7} | settings
    peer = LigerFusedLinearGRPOLoss(use_ref_model=True, compiled=False, **settings)

    def theirs() -> list[torch.Tensor]:
        expected, _ = peer(
            *batch,
            mask,
            scope["advantages"],
            ref_per_token_logps=reference,
            old_per_token_logps=old,
            vllm_is_ratio=is_weights,
        )
        return [expected.detach(), *torch.autograd.grad(expected, batch[:2])]

    renamed = {"use_bias_correction_kl": False, "epsilon": settings.pop("epsilon_low"), "epsilon_high": 0.2} | settings
    temperature = renamed.pop("temperature", 1.0)
    loss = gk.linear_policy_loss(
        *batch,
        old,
        scope["advantages"],
        mask=mask,
        ref_logprobs=reference if settings["beta"] else None,
        is_weights=is_weights,
        temperature=temperature,
        config=gk.LossConfig.trl(**renamed),
    ).loss
    inputs = scope["hidden"], scope["head"].weight
    want = theirs()
    assert all(gradient.abs().max() > 1e-3 for gradient in want[1:])
    assert_close_to_rounding([loss.detach(), *torch.autograd.grad(loss, inputs)], want, theirs)


@pytest.mark.parametrize("section", ["Liger", "A loop of your own"])
def test_losses_before_and_after_agree(section: str, scope: dict[str, Any], request: pytest.FixtureRequest) -> None:
    if section == "Liger":
        request.getfixturevalue("liger")
    codes = examples(section)
    before, after = (loss_and_gradients(code, scope) for code in codes)
    assert before[1].abs().max() > 0.01
    assert_close_to_rounding(after, before, lambda: loss_and_gradients(codes[0], scope))


def test_advantages_of_verl_before_and_after_agree(scope: dict[str, Any]) -> None:
    pytest.importorskip("verl")

    def advantages(code: str) -> torch.Tensor:
        names = dict(scope, mask=scope["mask"].float())
        exec(code, names)
        result: torch.Tensor = names["advantages"]
        return result

    codes = examples("verl")
    before, after = map(advantages, codes)
    assert before.abs().max() > 0.5
    assert_close_to_rounding(after, before, lambda: advantages(codes[0]))


def test_names_of_the_trainers_exist() -> None:
    pytest.importorskip("trl")
    for code in examples("TRL's trainer"):
        imported: dict[str, Any] = {}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                imported |= {alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call):
                called = imported[ast.unparse(node.func)]
                accepted = {name for kind in called.__mro__[:2] for name in inspect.signature(kind).parameters}
                assert {keyword.arg for keyword in node.keywords} <= accepted, ast.unparse(node)


@pytest.mark.parametrize("page", ["integrations/hidden_states.md", "integrations/megatron.md"])
def test_code_for_other_trainers_parses_and_names_ours(page: str) -> None:
    """It runs in those trainers alone; what it imports and calls of ours must exist."""
    blocks = re.findall(r"```python\n(.*?)```", read(page), re.DOTALL)
    assert len(blocks) > 1
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), block
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gk":
                assert hasattr(gk, node.attr), block


def test_who_may_use_what_names_tests() -> None:
    root = Path(__file__).parent
    named = re.findall(r"`(\w+/\w+\.py)::(test_\w+)`", (root.parent / "docs" / "README.md").read_text())
    assert len(named) > 20
    for path, name in named:
        assert f"def {name}(" in (root / path).read_text(), (path, name)
