"""The README's examples run and print the stated output, and the tables of variants match the code."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from benchmarks import plot
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
    promised = re.findall(r"# (tensor\(.*?\)|[\d.]+)[:\n]", "\n".join(examples))
    assert len(promised) == 3 and printed.getvalue().splitlines() == promised
    assert scope["result"].degenerate.tolist() == [False] * 4 + [True] * 4  # type: ignore[attr-defined]
    assert scope["hidden"].grad.any() and scope["lm_head"].weight.grad.any()  # type: ignore[attr-defined]


def test_hidden_states_of_a_model_are_shifted_by_one() -> None:
    """As the pages say: last_hidden_state[:, P - 1 : -1] after prompts of P tokens."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model, ids, prompt = transformers.Qwen2ForCausalLM(config).eval(), torch.randint(19, (2, 9)), 4
    for page in ("README.md", "docs/ops/linear_logprobs.md", "docs/ops/linear_policy_loss.md"):
        assert "last_hidden_state[:, P - 1 : -1]" in (README.parent / page).read_text(), page
    with torch.no_grad():
        logits = model(ids).logits.log_softmax(-1)
        hidden = model.model(ids).last_hidden_state[:, prompt - 1 : -1]
        got = gk.linear_logprobs(hidden, model.lm_head.weight, ids[:, prompt:]).logprobs
    want = torch.stack([logits[:, t - 1].gather(1, ids[:, t : t + 1])[:, 0] for t in range(prompt, 9)], 1)
    torch.testing.assert_close(got, want)


def test_the_text_of_the_picture_has_the_numbers_of_the_results() -> None:
    """The picture is drawn from these results, with three digits, and its text is for those who do not see it."""
    text = re.search(r'images/summary_light\.png" width="\d+" alt="([^"]*)"', README.read_text())
    cases = json.loads((README.parent / "benchmarks" / "results" / "cpu.json").read_text())["cases"]
    ops = {
        "Advantages": "group_advantages",
        "Policy loss": "policy_loss",
        "LM head to policy gradient": "linear_policy_loss",
    }
    assert text is not None and list(ops.values()) == list(plot.SUMMARY)
    for title, op in ops.items():
        case = next(case for case in cases if case["op"] == op)
        stated = re.search(rf"{title}: (.*?)\.(?: |$)", text[1])
        assert stated is not None
        numbers = dict(re.findall(r"([\w.\- ]+?) ([\d.,]+)(?:, |$)", stated[1]))
        assert [name.lower() for name in numbers] == [name.lower() for name in plot.SUMMARY[op]]
        for name, number in zip(plot.SUMMARY[op], numbers.values(), strict=True):
            ratio = case["providers"][name]["ratio"]
            assert f"{float(number.replace(',', '')):.3g}" == f"{ratio:.3g}", (title, name)


@pytest.mark.parametrize("page", variants.PAGES)
def test_tables_of_variants_are_up_to_date(page: str) -> None:
    text = (variants.DOCS / page).read_text()
    assert variants.updated(page, text) == text, "run python -m tools.variants"


def published_variants() -> list[Any]:
    """Setting and test of each row of the tables of docs/variants.md."""
    text = (variants.DOCS / "variants.md").read_text()
    rows = re.findall(r"^\| (.+) \| `(.+)` \| .+ \| `(.+::.+)` \|$", text, re.MULTILINE)
    assert len(rows) == text.count("::test_") > 30
    return [pytest.param(setting, test, id=name) for name, setting, test in rows]


@pytest.mark.parametrize(("setting", "test"), published_variants())
def test_every_published_variant_has_a_setting_and_a_test(setting: str, test: str) -> None:
    shape = (4, 6)
    logprobs, old, advantages, mask = -torch.rand(shape), -torch.rand(shape), torch.rand(4), torch.ones(shape).bool()
    scope = {
        "gk": gk,
        "tokens": (logprobs, old, torch.rand(shape)),
        "loss": gk.policy_loss(logprobs, old, advantages).loss,
        "logprobs": logprobs,
        "old_logprobs": old,
        **dict.fromkeys(("ref_logprobs", "sampling_logprobs", "teacher_logprobs"), -torch.rand(shape)),
        "probs": logprobs.exp(),
        "advantages": advantages[:, None] if "probs" in setting else advantages,
        **dict.fromkeys(("rewarded", "imitated", "expert"), torch.arange(6).repeat(4, 1) % 2 == 0),
        "mu": 0.3,
        **dict.fromkeys(("ids", "mu_logprobs"), torch.zeros(*shape, 1)),
        "is_weights": torch.rand(shape),
        "entropy": torch.rand(shape),
        "log_z": torch.zeros(4),
        "rewards": torch.rand(shape) if "turns=" in setting else torch.rand(4),
        "values": torch.rand(shape),
        "mask": mask,
        "turns": (torch.arange(6) // 2).repeat(4, 1),
        "returns": torch.rand(4),
        "states": torch.zeros(4, dtype=torch.long),
        "groups": torch.zeros(4, dtype=torch.long),
    }
    eval(setting, scope)
    file, name = test.split("::")
    assert f"\ndef {name}(" in (README.parent / "tests" / file).read_text()


def test_the_readme_says_what_the_page_of_variants_says() -> None:
    page = (variants.DOCS / "variants.md").read_text()
    unlinked = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", README.read_text())
    assert " ".join(page.split("\n\n")[1].split()) in " ".join(unlinked.split())


def test_every_loss_of_the_peers_is_listed_or_refused() -> None:
    pytest.importorskip("verl")
    from verl.trainer.ppo import core_algos

    text = variants.policy_loss()
    losses = [name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("fused_")]
    assert len(losses) > 10 and all(f"`{name}`" in text for name in losses)
    refused = re.findall(r"^\| `(\w+)` \|", text.rpartition("refused `loss_mode`")[2], re.MULTILINE)
    assert refused == ["bypass_mode", "clip_cov", "kl_cov"]
