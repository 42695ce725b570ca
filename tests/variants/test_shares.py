"""token_shares: the weighted sum of policy_loss over them is the mean of its aggregation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk

F64 = torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
AGGREGATIONS = {
    "token-mean": 40.0,
    "token-sum": None,
    "seq-mean-token-mean": 8.0,
    "seq-mean-token-sum": 8.0,
    "seq-mean-token-sum-norm": 8.0,
}


def draw() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    mask = torch.rand(5, 9) < 0.6
    mask[3] = False
    lp = -torch.rand(5, 9, dtype=F64)
    return tuple(value.to(DEVICE) for value in (mask, lp, lp + 0.2 * torch.randn(5, 9), torch.randn(5, dtype=F64)))


@pytest.mark.pairs  # only the sum is not divided by the length of a row
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shares_are_the_weights_of_the_mean(aggregation: str, is_counted: bool, is_packed: bool) -> None:
    mask, lp, old, advantages = draw()
    more: dict[str, Any] = {"max_length": 12} if aggregation.endswith("norm") else {}
    config = gk.LossConfig(aggregation=aggregation, **more)
    count = AGGREGATIONS[aggregation] if is_counted else None
    unit = "tokens" if aggregation == "token-mean" else "rows"
    known = None if count is None else {unit: count}
    want = gk.policy_loss(lp, old, advantages, mask=mask, normalizer=known, config=config).loss
    options = {"aggregation": aggregation, "count": count} | more
    if is_packed:
        options["count"] = None if count is None else torch.tensor(count, device=DEVICE)
        flat = torch.cat([mask.reshape(-1), mask.new_zeros(1)])  # a token of no row
        shares = gk.token_shares(flat, cu_seqlens=torch.arange(6, device=DEVICE) * 9, **options)
        assert not shares[-1:].any()
        shares = shares[:-1].view(5, 9)
    else:
        shares = gk.token_shares(mask, **options)
    assert shares.dtype == F64 and not shares[~mask].any()
    got = gk.policy_loss(lp, old, advantages, mask=mask, weights=shares, config=config).loss
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
