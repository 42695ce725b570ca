"""Estimators with a peer's prefix, against the code of the installed peer.

Faults that this is for: a setting that is not the peer's (eps, ddof, a single row, the order of weights and sums), and
a new version of a peer that computes something else.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import peers
from tests.harness import device_of
from tests.ops.group_advantages.cases import BACKENDS, NAN

pytest.importorskip("trl")
pytest.importorskip("verl")
on_backends = pytest.mark.parametrize("backend", BACKENDS)
# Group sizes with and without singletons, which some peers reject.
RAGGED = [1, 5, 2, 1, 8, 3]
PLURAL = [2, 5, 3, 8]
# An offset exposes a one-pass variance; ties and zeros are typical of rule-based rewards.
KINDS = ("normal", "offset", "binary")


def rewards_of(kind: str, *shape: int) -> Tensor:
    if kind == "binary":
        return torch.randint(0, 2, shape).float()
    return torch.randn(shape) + (100.0 if kind == "offset" else 0.0)


def assert_parity(got: gk.GroupAdvantages, peer: Tensor, rewards: Tensor, extra: float = 1.0) -> None:
    """Checks equality up to the rounding of the peer's float32, and exact zeros for groups of equal rewards.

    The peer's mean of n <= 8 rewards is off by up to n/2 ulps of the largest reward, and so is each difference, which
    the divisor then amplifies; the result adds an ulp or two. `extra` is the factor applied by later steps.
    """
    live = ~got.degenerate.cpu()
    ours, theirs = got.advantages.cpu().double()[live], peer.double()[live]
    assert live.any() and not got.advantages.cpu()[~live].any()
    ulp = torch.finfo(torch.float32).eps
    largest = float(rewards.nan_to_num().abs().max())
    allowed = 8 * ulp * (theirs.abs() + extra * largest) + 8 * ulp * theirs.abs() * extra * largest
    error = (ours - theirs).abs()
    assert (error <= allowed).all(), f"error {float(error.max()):.3g}, allowed {float(allowed[error.argmax()]):.3g}"


def smallest_divisor(got: gk.GroupAdvantages) -> float:
    std = got.std[~got.degenerate & (got.size > 1)]
    return min(1.0, float(std.min())) if len(std) else 1.0


# verl


class VerlBatch:
    """A batch in verl's layout: a reward at the last token of each response, and string uids in random order."""

    def __init__(self, sizes: list[int], kind: str, columns: int = 1) -> None:
        names = [f"{7 * g:x}-{'uid'[g % 3]}" for g, size in enumerate(sizes) for _ in range(size)]
        n = len(names)
        self.uids = np.array([names[i] for i in torch.randperm(n)], dtype=object)
        self.columns = rewards_of(kind, n, columns)
        self.scores = self.columns[:, 0]
        self.lengths = torch.randint(1, 12, (n,))
        self.mask = (torch.arange(12) < self.lengths[:, None]).long()
        self.baselines = torch.randn(n)

    def tokens(self, scores: Tensor) -> Tensor:
        placed = torch.zeros(self.mask.shape)
        placed[torch.arange(len(scores)), self.lengths - 1] = scores
        return placed

    def peer(self, estimator: str, **options: Any) -> Tensor:
        """verl's advantages, one per row, after checking that all tokens of a row share it and the padding is 0."""
        function = peers.verl(estimator)
        tokens, _ = function(token_level_rewards=self.tokens(self.scores), response_mask=self.mask, **options)
        assert torch.equal(tokens, tokens[:, :1] * self.mask)
        return tokens[:, 0]

    def ours(self, name: str, backend: str, rewards: Tensor | None = None, **changes: Any) -> gk.GroupAdvantages:
        config, device = gk.AdvantageConfig(name, **changes), device_of(backend)
        options = {"lengths": self.lengths.to(device)} if config.needs_lengths else {}
        options |= {"baselines": self.baselines.to(device)} if config.needs_baselines else {}
        rewards = (self.scores if rewards is None else rewards).to(device)
        ids = gk.group_ids(self.uids, device=device)
        return gk.group_advantages(rewards, ids, config=config, backend=backend, **options)


# our name: verl's name, the group sizes it takes, its other arguments
VERL: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "verl-grpo": ("grpo", RAGGED, {}),
    "verl-grpo-vectorized": ("grpo_vectorized", RAGGED, {}),
    "verl-dr-grpo": ("grpo", RAGGED, {"norm_adv_by_std_in_grpo": False}),
    "verl-rloo": ("rloo", RAGGED, {}),
    "verl-rloo-vectorized": ("rloo_vectorized", RAGGED, {}),
    "verl-opo": ("opo", RAGGED, {}),
    "verl-gdpo": ("gdpo", RAGGED, {}),
    "verl-grpo-passk": ("grpo_passk", PLURAL, {"config": {}}),
    "verl-reinforce-plus-plus-baseline": ("reinforce_plus_plus_baseline", RAGGED, {}),
    "verl-gpg": ("gpg", RAGGED, {}),
    "verl-remax": ("remax", RAGGED, {}),
}


def test_every_name_with_a_peers_prefix_is_tested_here() -> None:
    trl = {*TRL, "trl-rloo", "trl-rloo-normalized", "trl-async"}
    prefixed = {name for name in gk.AdvantageConfig.names() if name.startswith(("trl-", "verl-"))}
    assert prefixed == set(VERL) | trl


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", VERL)
@on_backends
def test_verl_estimators_equal_verl(backend: str, name: str, kind: str) -> None:
    estimator, sizes, options = VERL[name]
    for _ in range(5 if backend in ("cpu", "reference") else 1):
        batch = VerlBatch(sizes, kind)
        options = dict(options)
        if estimator == "remax":
            options["reward_baselines"] = batch.baselines
        else:
            options["index"] = batch.uids
        if estimator == "grpo_vectorized":  # needs integer uids below the number of rows
            options["index"] = gk.group_ids(batch.uids).numpy()
        got = batch.ours(name, backend)
        extra = 1.0 if gk.AdvantageConfig(name).scale == "none" else 1 / smallest_divisor(got)
        extra *= 4 if gk.AdvantageConfig(name).whiten != "none" else 1
        assert_parity(got, batch.peer(estimator, **options), batch.scores, extra)


@pytest.mark.parametrize("weights", [None, (0.5, 2.0, -1.0)])
@on_backends
def test_verl_gdpo_of_several_rewards_equals_verl(backend: str, weights: tuple[float, ...] | None) -> None:
    batch = VerlBatch(RAGGED, "normal", columns=3)
    keys = ["format", "accuracy", "style"]
    prompt = torch.ones(len(batch.uids), 4, dtype=torch.long)
    peer = batch.peer(
        "gdpo",
        index=batch.uids,
        config={"gdpo_reward_keys": keys, "gdpo_reward_weights": weights},
        non_tensor_batch={key: batch.columns[:, c].numpy() for c, key in enumerate(keys)},
        batch={"prompts": prompt, "attention_mask": torch.cat([prompt, batch.mask], 1)},
    )
    got = batch.ours("verl-gdpo", backend, batch.columns, reward_weights=weights)
    spread = min(float(part.std()) for part in batch.columns.T)
    assert_parity(got, peer, batch.columns, 12 / min(spread, smallest_divisor(got)))


# TRL


# our name: the scale_rewards of its GRPOConfig
TRL = {"trl-group": "group", "trl-batch": "batch", "trl-none": "none", "trl-gdpo": "group"}


def trl_rewards(kind: str, columns: int, missing: bool) -> Tensor:
    """Rewards of four groups of six, one reward function per column; rows can lack some or all rewards."""
    rewards = rewards_of(kind, 24, columns)
    if missing:
        rewards[torch.rand(24, columns) < 0.2] = NAN
        rewards[[3, 13, 14]] = NAN
    return rewards


@pytest.mark.parametrize("weights", [None, (0.5, 2.0, -1.0)])
@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRL)
@on_backends
def test_trl_grpo_equals_trl(
    backend: str, name: str, kind: str, missing: bool, weights: tuple[float, ...] | None
) -> None:
    is_gdpo = name == "trl-gdpo"
    rewards = trl_rewards("normal" if is_gdpo else kind, 3, missing)
    options = {"aggregation": "normalize_then_sum"} if is_gdpo else {"scale_rewards": TRL[name]}
    peer = peers.trl_grpo(rewards, 6, **options, weights=None if weights is None else torch.tensor(weights))
    config = gk.AdvantageConfig(name, reward_weights=weights)
    got = gk.group_advantages(rewards.to(device_of(backend)), 6, config=config, backend=backend)
    divisor = 1.0 if TRL[name] == "none" else smallest_divisor(got)
    if is_gdpo:
        divisor = min(1.0, *(float(g[~g.isnan()].std()) for g in rewards.view(4, 6, 3).movedim(2, 1).flatten(0, 1)))
    assert_parity(got, peer, rewards, 3.5 / divisor)  # the sum of the absolute weights


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])
@pytest.mark.parametrize("kind", KINDS)
@on_backends
def test_trl_rloo_equals_trl(backend: str, kind: str, missing: bool, normalize: bool) -> None:
    rewards = trl_rewards(kind, 1, missing)[:, 0]
    if missing:
        rewards[6:11], rewards[11] = NAN, 1.0  # a group with one scored row
    peer = peers.trl_rloo(rewards, 6, normalize=normalize)
    name = "trl-rloo-normalized" if normalize else "trl-rloo"
    got = gk.group_advantages(rewards.to(device_of(backend)), 6, config=name, backend=backend)
    # TRL subtracts one reward from the sum of all six, which is up to six times the largest
    assert_parity(got, peer, rewards, 6.0 if not normalize else 6.0 / min(1.0, float(peer[peer != 0].abs().max())))


@pytest.mark.parametrize("name", TRL)
@on_backends
def test_trl_groups_of_one_are_zero_in_both(backend: str, name: str) -> None:
    rewards = torch.randn(4, 1)
    peer = peers.trl_grpo(rewards, 1, scale_rewards=TRL[name])
    got = gk.group_advantages(rewards.to(device_of(backend)), 1, config=name, backend=backend)
    assert not peer.any() and not got.advantages.any() and got.degenerate.all()


def trl_async(columns: np.ndarray) -> np.ndarray:
    """Advantages of one group's rewards [functions, rows], by the statements of TRL's asynchronous worker."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import async_rollout_worker as module
    tree = ast.parse(textwrap.dedent(inspect.getsource(module)))
    blocks = [n.body for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for block in blocks:
        lines = [ast.unparse(statement) for statement in block]
        first = [i for i, line in enumerate(lines) if line.startswith("all_nan_mask = ")]
        last = [i for i, line in enumerate(lines) if line.startswith("if scored_mask.any():")]
        if first and last:
            scope = dict(vars(module)) | {"arr": columns, "logger": logging.getLogger(__name__)}
            exec("\n".join(lines[first[0] : last[0] + 1]), scope)
            return scope["advantages"]
    raise AssertionError("TRL's asynchronous worker no longer has this block")


@pytest.mark.parametrize("kind", KINDS)
@on_backends
def test_trl_async_equals_trl(backend: str, kind: str) -> None:
    rewards = trl_rewards(kind, 3, missing=True).double()
    rewards[6:11] = NAN  # a group with one scored row
    with np.errstate(all="ignore"):
        peer = np.concatenate([trl_async(group.T) for group in rewards.view(4, 6, 3).numpy()])
    got = gk.group_advantages(rewards.to(device_of(backend)), 6, config="trl-async", backend=backend)
    live = ~got.degenerate.cpu().numpy()
    ours, largest = got.advantages.cpu().numpy(), float(rewards.nan_to_num().abs().max())
    # both are float64 and differ by the rounding of up to 18 rewards, over the deviation
    allowed = 50 * np.finfo(np.float64).eps * (1 + 3 * largest / smallest_divisor(got))
    assert np.abs(ours - peer)[live].max() <= allowed * (1 + np.abs(peer).max()) and not ours[~live].any()
