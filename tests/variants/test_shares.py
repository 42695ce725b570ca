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
    counted = None if count is None else torch.tensor(count, device=DEVICE)
    if is_packed:
        bounds = torch.arange(6, device=DEVICE) * 9
        flat, options = (
            torch.cat([mask.reshape(-1), mask[0, :1]]),
            {"aggregation": aggregation, "count": counted} | more,
        )
        shares = gk.token_shares(flat, cu_seqlens=bounds, **options)
        assert not shares[-1:].any()
        shares = shares[:-1].view(5, 9)
    else:
        shares = gk.token_shares(mask, aggregation=aggregation, count=count, **more)
    assert shares.dtype == F64 and not shares[~mask].any()
    got = gk.policy_loss(lp, old, advantages, mask=mask, weights=shares, config=config).loss
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


def test_nothing_at_all() -> None:
    for shape in ((0, 3), (3, 0), (3, 2)):
        mask = torch.zeros(shape, dtype=torch.bool)
        for aggregation in ("token-mean", "seq-mean-token-mean"):
            assert not gk.token_shares(mask, aggregation=aggregation).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": torch.ones(3)}, r"token_shares: mask must have shape \[B, T\], or \[M\] with cu_seqlens, got \[3\]"),
        ({"aggregation": "mean"}, "token_shares: aggregation must be one of token-mean, .* got 'mean'"),
        ({"aggregation": "local-token-mean"}, "token_shares: aggregation must be one of"),
        ({"max_length": 3}, "token_shares: max_length must be given with aggregation='seq-mean-token-sum-norm'"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "max_length must be given .*, got None"),
        ({"count": 0.0}, "token_shares: count must be .*, got 0.0"),
        ({"count": torch.ones(2)}, r"token_shares: count must have one element, got shape \[2\]"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gk.token_shares(**{"mask": torch.ones(2, 3)} | arguments)
