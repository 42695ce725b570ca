"""The reference of token_advantages against its definition, and what the page says of optimal baselines.

Faults that this is for: a discount that is applied to each token of a turn, or over a gap; a reward in a gap that is
lost or goes to a later token; a row with a NaN reward that enters the whitening; a biased variance; for the optimal
baseline the wrong energy, a tail at the wrong column, a row that is not there and votes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import grpo_kernels as gk
from tests.harness import examples
from tests.ops.promises import Inputs, run
from tests.ops.token_advantages import cases
from tests.ops.token_advantages.cases import F64, NAN, op_of

every_place = pytest.mark.parametrize("places", ["position", "rank"])


@settings(max_examples=examples(600))
@given(cases.batches(6, 20), cases.configs())
def test_any_settings_give_the_definition(inputs: Inputs, config: gk.TokenAdvantageConfig) -> None:
    got = run(op_of(config), inputs, "reference", F64)
    for name, want in cases.by_definition(inputs, config).items():
        torch.testing.assert_close(got[name], want, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_discounted_differences_in_numbers() -> None:
    """The example of the page: gamma 1, lam 0.95."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    values = torch.tensor([[0.4, 0.6, 0.8], [0.4, 0.2, 0.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    config = gk.TokenAdvantageConfig("gae", lam=0.95, whiten="none")
    got = gk.token_advantages(rewards, values, mask=mask, config=config, backend="reference")
    torch.testing.assert_close(got.advantages, torch.tensor([[0.5705, 0.39, 0.2], [-0.39, -0.2, 0.0]]))
    torch.testing.assert_close(got.returns, torch.tensor([[0.9705, 0.99, 1.0], [0.01, 0.0, 0.0]]))


# The optimal token baseline


def baseline(inputs: Inputs, **changes: object) -> gk.TokenAdvantages:
    return gk.optimal_token_baseline(**inputs | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("zero_tail", [True, False])
def test_a_tail_begins_after_the_last_token_of_all_others(zero_tail: bool) -> None:
    """Verl's begins at the column that is their number of tokens, which differs where the mask has gaps."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 0]])
    p = torch.tensor([[0.5], [0.25]], dtype=F64).expand(2, 5)
    rewards = torch.tensor([[0, 0, 0, 1, 2], [0, 0, 0, 4, 0]], dtype=F64)
    options = {"mask": mask, "is_weights": torch.tensor([[1.0], [2.0]]).expand(2, 5), "zero_tail": zero_tail}
    got = gk.optimal_token_baseline(rewards, p.log(), p, 2, **options).advantages
    # a token has energy 1 - 2 * 0.5 + 0.5 or 4 * (1 - 2 * 0.25 + 0.25); columns 0 and 3: (3 / 2 + 4 * 3) / 3.5 and
    # (3 * 2 + 4 * 6) / 8
    want = torch.tensor([[-6 / 7, 0, 0, -0.75, 2 if zero_tail else 0], [1 / 7, 0, 0, 0.25, 0]], dtype=F64)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@every_place
def test_equal_returns_have_no_advantage(places: str) -> None:
    batch = cases.draw_probabilities(places) | {"mask": torch.ones(6, 12), "groups": 6, "rewards": torch.zeros(6, 12)}
    batch["rewards"][:, -1] = 0.7
    assert not baseline(batch, places=places).advantages.any()


@every_place
def test_a_single_response_has_no_baseline(places: str) -> None:
    batch = cases.draw_probabilities(places) | {"groups": torch.tensor([0, 1, 0, 1, 2, 0])}
    for zero_tail in (True, False):
        got = baseline(batch, places=places, zero_tail=zero_tail)
        assert torch.equal(got.advantages[4], got.returns[4]) and got.returns[4].any()


@every_place
def test_a_row_with_a_nan_reward_is_as_if_it_were_not_there(places: str) -> None:
    batch = cases.draw_probabilities(places)
    batch["mask"][3, :5] = True
    batch["rewards"][3, 4] = NAN
    others = torch.arange(6) != 3
    got, want = baseline(batch, places=places), baseline({n: x[others] for n, x in batch.items()}, places=places)
    for ours, of_others in zip(got, want, strict=True):
        assert not ours[3].any() and torch.equal(ours[others], of_others)
