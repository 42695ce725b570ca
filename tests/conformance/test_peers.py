"""The adapters of TRL, verl, our integrations and the trainer, and the whole of docs/conformance.md.

The faults to notice: a peer that fails by a fault of its adapter, a row of the page that is out of date.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grpo_conformance import CONVENTIONS, INVARIANTS, run
from grpo_conformance.adapters import load
from grpo_conformance.batch import make
from grpo_conformance.report import markdown

from tests import peers, peers_trl

for _package in ("trl", "datasets", "transformers", "accelerate", "verl", "tensordict"):
    pytest.importorskip(_package)
PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
ORDER = ("grpo_kernels", "grpo_trainer", "fused_trl", "fused_verl", "trl", "verl")
CASES = (*INVARIANTS, *CONVENTIONS)


def test_the_page_is_fresh() -> None:
    if not PAGE.exists():
        pytest.skip("tests are run from outside the checkout")
    page = PAGE.read_text()
    assert markdown({name: run(load(name), CASES) for name in ORDER}, page) == page


@pytest.mark.parametrize("name", ["grpo_kernels", "grpo_trainer", "fused_trl", "fused_verl"])
def test_ours_fail_nothing_but_what_they_document(name: str) -> None:
    results = run(load(name), INVARIANTS)
    assert [(of.case.name, of.status) for of in results if of.has_failed or of.status == "ignored"] == []
    choices = {of.case.name for of in results if of.status == "choice"}
    assert choices == {
        "fused_trl": {"entropy-seq-mean-token-mean", "entropy-seq-mean-token-sum"},
        "fused_verl": {"pad-rows-means"},
    }.get(name, set())


@pytest.mark.full
def test_the_defaults_of_ours_fail_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the peers' rules do."""
    in_trl, in_verl = load("fused_trl"), load("fused_verl")
    monkeypatch.setattr(type(in_trl), "options", {})
    monkeypatch.setattr(type(in_verl), "options", {})
    monkeypatch.setattr(type(in_verl), "modes", load("verl").modes)
    failed = [[result.case.name for result in run(of, INVARIANTS) if result.has_failed] for of in (in_trl, in_verl)]
    assert failed == [["entropy-share", "entropy-of-ranks"], ["gae-masked-reward", "gae-rollout"]]
    (ratio,) = run(in_verl, [case for case in CONVENTIONS if case.name == "rollout-ratio"])
    assert ratio.text == "each row's"


@pytest.mark.parametrize("estimator", ["mean", "mean-std", "leave-one-out"])
def test_advantages_are_those_of_the_peers_own_functions(estimator: str) -> None:
    rewards = [0.3, 0.9, 0.4, 0.2, 0.8, 0.1]
    batch = make([3, 1, 2, 4, 2, 1], rewards, [0, 0, 0, 1, 1, 1], estimator=estimator)
    columns = batch.rewards[:, None]
    if estimator == "leave-one-out":
        want = peers.trl_rloo(batch.rewards, 3)
    else:
        want = peers.trl_grpo(columns, 3, scale_rewards="group" if estimator == "mean-std" else "none")
    torch.testing.assert_close(load("trl").advantages(batch), want)
    at_end = torch.nn.functional.pad(columns, (3, 0))
    function = peers.verl("rloo" if estimator == "leave-one-out" else "grpo")
    options = {} if estimator == "leave-one-out" else {"norm_adv_by_std_in_grpo": estimator == "mean-std"}
    index = batch.groups.numpy()
    want, _ = function(token_level_rewards=at_end, response_mask=batch.mask.long(), index=index, **options)
    torch.testing.assert_close(load("verl").advantages(batch), want[:, 0])


@pytest.mark.parametrize("aggregation, loss_type", [("token-mean", "dapo"), ("seq-mean-token-mean", "grpo")])
def test_the_loss_of_trl_is_that_of_its_trainer(aggregation: str, loss_type: str) -> None:
    batch = make([3, 1, 2, 4], aggregation=aggregation, kl=None, kl_coef=0.1, entropy_coef=0.2)
    inputs = {
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
    }
    options = {"loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.2}
    want, _ = peers_trl.policy_loss(batch.logprobs, batch.entropy, batch.mask, inputs, **options)
    torch.testing.assert_close(load("trl").loss(batch), want, rtol=1e-12, atol=0)


def test_the_loss_of_verl_is_that_of_its_functions() -> None:
    from verl.trainer.ppo import core_algos

    batch = make([3, 1, 2, 4], kl_coef=0.1, entropy_coef=0.2)
    config = load("verl").config(batch)
    tokens = batch.advantages[:, None].expand(batch.mask.shape)
    policy, _ = core_algos.get_policy_loss_fn("vanilla")(
        batch.old_logprobs, batch.logprobs, tokens, batch.mask, "token-mean", config
    )
    kl = core_algos.kl_penalty(batch.logprobs, batch.ref_logprobs, config.kl_loss_type)
    mean = (0.1 * kl - 0.2 * batch.entropy)[batch.mask].mean()
    torch.testing.assert_close(load("verl").loss(batch), policy + mean, rtol=1e-9, atol=0)
