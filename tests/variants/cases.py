"""Batches of gk.variants and of token_shares, padded and packed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.promises import Inputs, Op, Results, Same

ROWS, WIDTH = 4, 6
NUMBERS = ("logprobs", "old_logprobs", "sampling_logprobs", "ref_logprobs", "entropy")


def draw(is_packed: bool = False) -> Inputs:
    """Rows of two groups; of packed tokens, the last may belong to no row."""
    shape = (ROWS * WIDTH,) if is_packed else (ROWS, WIDTH)
    inputs = {name: -torch.rand(shape).double() for name in NUMBERS}
    inputs |= {
        "mask": torch.rand(shape) < 0.8,
        "advantages": torch.randn(ROWS).double(),
        "groups": torch.arange(ROWS) // 2,
        "log_z": torch.randn(ROWS).double(),
    }
    if is_packed:
        cuts = torch.randint(ROWS * WIDTH, (ROWS,)).sort().values
        inputs["cu_seqlens"] = torch.nn.functional.pad(cuts, (1, 0))
        inputs["mask"] &= torch.arange(ROWS * WIDTH) < cuts[-1]
    return inputs


def call(inputs: Inputs, backend: str | None) -> Results:
    """Each function once; the loss is the sum of all that have a gradient."""
    lp, old, advantages = (inputs[name] for name in ("logprobs", "old_logprobs", "advantages"))
    rows = {"mask": inputs["mask"], "cu_seqlens": inputs.get("cu_seqlens")}
    of = gk.variants
    shares = gk.token_shares(**rows, aggregation="seq-mean-token-mean")
    loss = of.gvpo_loss(lp, old, advantages, inputs["groups"], **rows)
    loss = loss + of.real_loss(lp, old, advantages, inputs["groups"], **rows)
    loss = loss + of.flowrl_loss(lp, old, inputs["ref_logprobs"], advantages, inputs["log_z"], **rows)
    loss = loss + of.kl_cov_penalty(lp, old, advantages, shares, ratio=0.2, **rows)
    for average in (of.average_logprobs, of.geometric_average_logprobs):
        loss = loss + average(lp, old, **rows).where(inputs["mask"], 0.0).sum()
    return {
        "loss": loss,
        "shares": shares,
        "off_policy": of.off_policy_mask(lp, inputs["sampling_logprobs"], advantages, threshold=0.01, **rows),
        "high_entropy": of.high_entropy_mask(inputs["entropy"], quantile=0.5, **rows),
        "clip_cov": of.clip_cov_weights(lp, old, advantages, ratio=0.2, bounds=(-1.0, 1.0), **rows),
        "future_kl": of.future_kl_weights(lp, old, advantages, half_life=2.0, cap=1.2, safety=1.1, **rows),
    }


def ignored(inputs: Inputs) -> dict[str, Tensor]:
    slots = ~inputs["mask"]
    if "cu_seqlens" in inputs:
        slots = slots | (torch.arange(ROWS * WIDTH) >= inputs["cu_seqlens"][-1])
    return {name: slots for name in NUMBERS if name in inputs}


def packed(inputs: Inputs) -> Same:
    """Whole rows one after the other, with a masked token after the last."""

    def flat(value: Tensor) -> Tensor:
        if value.dim() < 2:
            return value
        last = value[0, :1]
        return torch.cat([value.reshape(-1), torch.zeros_like(last) if value.dtype == torch.bool else last])

    def padded(results: list[Results]) -> Results:
        return {name: value[:-1].view(ROWS, WIDTH) if value.dim() else value for name, value in results[0].items()}

    written = {name: flat(value) for name, value in inputs.items()}
    return Same([written | {"cu_seqlens": torch.arange(ROWS + 1) * WIDTH}], padded)


def draw_rows(*names: str) -> Inputs:
    inputs = draw(is_packed=True)
    inputs |= {"count": 5 + torch.rand(()).double(), "rollouts": torch.randint(-2, 2, (ROWS,))}
    return {name: inputs[name] for name in ("mask", "cu_seqlens", *names)}


def shares(inputs: Inputs, backend: str | None, aggregation: str) -> Results:
    return {"shares": gk.token_shares(**inputs, aggregation=aggregation)}


def ratios(inputs: Inputs, backend: str | None) -> Results:
    logprobs = gk.rollout_logprobs(**inputs)  # 0 where no token takes part
    return {"loss": (logprobs * inputs["old_logprobs"].nan_to_num()).sum(), "logprobs": logprobs}


SUPPORTS = {"reference": (torch.float32, torch.float64)}
OPS = {
    "token_shares": Op(
        functools.partial(draw_rows, "count"), functools.partial(shares, aggregation="token-mean"), SUPPORTS
    ),
    "token_shares of rollouts": Op(
        functools.partial(draw_rows, "rollouts"), functools.partial(shares, aggregation="seq-mean-token-mean"), SUPPORTS
    ),
    "token_shares of groups": Op(
        functools.partial(draw_rows, "groups"), functools.partial(shares, aggregation="group-mean-token-mean"), SUPPORTS
    ),
    "rollout_logprobs": Op(
        functools.partial(draw_rows, "logprobs", "old_logprobs", "rollouts"), ratios, SUPPORTS, ("logprobs",), ignored
    ),
    "variants": Op(draw, call, SUPPORTS, ("logprobs",), ignored, {"packed": packed}),
    "variants of packed rows": Op(functools.partial(draw, is_packed=True), call, SUPPORTS, ("logprobs",), ignored),
}
