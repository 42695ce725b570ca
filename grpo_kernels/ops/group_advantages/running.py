"""Baselines and norms that go on from batch to batch, for rewards without a group to compare with.

A state holds one entry per key: an agent, a prompt, a domain. Rows are taken in their order, so that a key may stand in
several of them. Keys are read on the host; nothing else waits for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_kernels import checks


class _Running:
    """The entries of a state by key, each a row of numbers in float64 on the rewards' device."""

    _initial: ClassVar[tuple[float, ...]]

    def __init__(self) -> None:
        self._slots: dict[Hashable, int] = {}
        self._state = torch.empty(0, len(self._initial), dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"keys": list(self._slots), "state": self._state.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        where = f"{type(self).__name__}.load_state_dict"
        if set(state) != {"keys", "state"}:
            raise ValueError(f"{where}: state must have the keys 'keys' and 'state', got {sorted(state)}")
        want = [len(state["keys"]), len(self._initial)]
        if list(state["state"].shape) != want:
            raise ValueError(f"{where}: state must have shape {want}, got {list(state['state'].shape)}")
        self._slots = {key: slot for slot, key in enumerate(state["keys"])}
        self._state = state["state"].double().clone()

    def _rows(self, rewards: Tensor, keys: Iterable[Hashable] | Tensor) -> tuple[Tensor, _Order]:
        """The rewards in float64, and their order by key. Adds entries for new keys."""
        where = f"{type(self).__name__}.step"
        checks.tensor(where, "rewards", rewards, checks.FLOATS)
        if rewards.dim() != 1:
            raise ValueError(f"{where}: rewards must have shape [N], got {list(rewards.shape)}")
        checks.constant(where, "rewards", rewards)
        listed = checks.keys(where, keys)
        if len(listed) != len(rewards):
            raise ValueError(f"{where}: keys must have {len(rewards)} entries, one per reward, got {len(listed)}")
        slots = [self._slots.setdefault(key, len(self._slots)) for key in listed]
        new = len(self._slots) - len(self._state)
        initial = torch.tensor(self._initial, dtype=torch.float64).expand(new, -1)
        self._state = torch.cat([self._state.to(rewards.device), initial.to(rewards.device, non_blocking=True)])
        return rewards.double(), _Order(slots, rewards.device)


class _Order:
    """Rows sorted by slot, those of a slot in their order. Made on the host, where the keys are."""

    def __init__(self, slots: list[int], device: torch.device) -> None:
        order = sorted(range(len(slots)), key=slots.__getitem__)
        of = [slots[row] for row in order]
        last = [i for i, slot in enumerate(of) if i + 1 == len(of) or of[i + 1] != slot]
        self.rows, self.slots, self.last = (
            torch.tensor(part, dtype=torch.long).to(device, non_blocking=True) for part in (order, of, last)
        )

    def scan(self, decay: Tensor, gain: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """state <- decay * state + gain, row by row: what each row finds, and what the last row of a slot leaves."""
        scale, shift, slots = decay[self.rows], gain[self.rows], self.slots
        step = 1
        while step < len(slots):  # composes the maps of 1, 2, 4, ... rows of a slot
            is_same = torch.zeros_like(slots, dtype=torch.bool)
            is_same[step:] = slots[step:] == slots[:-step]
            before = scale.roll(step, 0), shift.roll(step, 0)
            shift = torch.where(is_same, scale * before[1] + shift, shift)
            scale = torch.where(is_same, scale * before[0], scale)
            step *= 2
        after = scale * state[slots] + shift
        first = torch.ones_like(slots, dtype=torch.bool)
        first[1:] = slots[1:] != slots[:-1]
        found = torch.empty_like(after)
        found[self.rows] = torch.where(first, state[slots], after.roll(1, 0))
        return found, after[self.last]


class EmaBaseline(_Running):
    """An exponential moving average of each key's rewards (SPIRAL's RAE, prime-rl's `rae`).

    A row is compared with the average before its own reward moves it: baseline <- decay * baseline + (1 - decay) *
    reward. It starts at 0. A reward of NaN changes nothing.

        baseline = gk.EmaBaseline(decay=0.95)
        before = baseline.step(rewards, agents)
        advantages = gk.group_advantages(rewards, 1, baselines=before, config="remax").advantages
    """

    _initial = (0.0,)

    def __init__(self, decay: float = 0.95) -> None:
        super().__init__()
        checks.finite("EmaBaseline", "decay", decay, minimum=0.0)
        if decay >= 1:
            raise ValueError(f"EmaBaseline: decay must be below 1, got {decay!r}")
        self.decay = float(decay)

    def step(self, rewards: Tensor, keys: Iterable[Hashable] | Tensor) -> Tensor:
        """The baseline of each row, in the rewards' dtype; then the state includes these rewards."""
        values, order = self._rows(rewards, keys)
        scored = ~values.isnan()
        decay = torch.where(scored, torch.full_like(values, self.decay), 1)
        found, left = order.scan(decay, torch.where(scored, (1 - self.decay) * values, 0), self._state[:, 0])
        self._state = self._state.index_copy(0, order.slots[order.last], left[:, None])
        return found.to(rewards.dtype)


class ValueTracker(_Running):
    """The success rate of each prompt as a Beta distribution that forgets (SPO, arXiv 2509.13232).

    alpha <- rho * alpha + reward, beta <- rho * beta + 1 - reward, and the value is alpha / (alpha + beta). rho is
    2^(-drift / half_life) within [rho_min, rho_max], where drift is the KL divergence between the policy and the one
    that last answered the prompt. A prompt's first value is `prior`, which weighs as much as 1 / (1 - rho_min) rewards.

        tracker = gk.ValueTracker(half_life=0.06, rho_min=0.875, rho_max=0.96)
        values = tracker.step(rewards, prompts, drift)
        advantages = gk.group_advantages(rewards, 1, baselines=values, config="spo").advantages

    Args:
        half_life: drift that halves the weight of the past
        rho_min, rho_max: bounds of rho
        prior: value of a prompt that was never seen
    """

    _initial = (math.nan, math.nan)

    def __init__(self, half_life: float, rho_min: float, rho_max: float, prior: float = 0.5) -> None:
        super().__init__()
        checks.finite("ValueTracker", "half_life", half_life, minimum=0.0, open_end=True)
        for name, value in (("rho_min", rho_min), ("rho_max", rho_max), ("prior", prior)):
            checks.finite("ValueTracker", name, value, minimum=0.0)
        if not rho_min <= rho_max < 1 or prior > 1:
            raise ValueError(
                "ValueTracker: rho_min must be at most rho_max, rho_max below 1 and prior at most 1, "
                f"got rho_min={rho_min!r}, rho_max={rho_max!r}, prior={prior!r}"
            )
        self.half_life, self.rho_min, self.rho_max, self.prior = half_life, rho_min, rho_max, prior

    def step(self, rewards: Tensor, keys: Iterable[Hashable] | Tensor, drift: Tensor | float = 0.0) -> Tensor:
        """The value of each row before its reward, in the rewards' dtype; then the state includes these rewards.

        Args:
            rewards: [N], within [0, 1]; NaN changes nothing
            keys: prompt of each row
            drift: one number, or one per row
        """
        values, order = self._rows(rewards, keys)
        checks.values("ValueTracker.step", "rewards", "be within [0, 1], or NaN", (values < 0) | (values > 1), values)
        if isinstance(drift, Tensor):
            if drift.shape not in (values.shape, ()):
                raise ValueError(f"ValueTracker.step: drift must have shape [{len(values)}], got {list(drift.shape)}")
            drift = drift.detach().to(values)
        drift = torch.zeros_like(values) + drift
        checks.values("ValueTracker.step", "drift", "not be NaN", drift.isnan(), drift)
        scored = ~values.isnan()
        rho = torch.exp2(-drift / self.half_life).clamp(self.rho_min, self.rho_max)
        rho = torch.where(scored, rho, 1.0)
        weight = 1 / (1 - self.rho_min)
        sides = ((0, self.prior, values), (1, 1 - self.prior, 1 - values))
        found, left = zip(
            *(
                order.scan(rho, torch.where(scored, gain, 0), self._state[:, side].nan_to_num(weight * share))
                for side, share, gain in sides
            ),
            strict=True,
        )
        self._state = self._state.index_copy(0, order.slots[order.last], torch.stack(left, 1))
        value: Tensor = found[0] / (found[0] + found[1])
        return value.to(rewards.dtype)


class RunningNorm(_Running):
    """Mean and standard deviation over all rewards so far of each key (ROLL's `running`, with a domain as the key).

    The batch is included before it is normalised: (reward - mean) / (std + eps), with ddof 1. A NaN stays NaN. Where
    all rewards so far were equal, the result is 0.

        norm = gk.RunningNorm()
        advantages = norm.step(rewards, domains)
    """

    _initial = (0.0, 0.0, 0.0, math.inf, -math.inf)  # count, mean, sum of squared deviations, least, greatest

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        checks.finite("RunningNorm", "eps", eps, minimum=0.0)
        self.eps = float(eps)

    def step(self, rewards: Tensor, keys: Iterable[Hashable] | Tensor) -> Tensor:
        """The normalised rewards, in their dtype, by a state that includes them."""
        values, order = self._rows(rewards, keys)
        if len(values) == 0:
            return rewards
        scored = ~values.isnan()
        lengths = order.last.diff(prepend=order.last.new_full((1,), -1))

        def reduced(how: str, numbers: Tensor, initial: float = 0.0) -> Tensor:
            """Over the scored rows of each slot, in a fixed order."""
            taken = torch.where(scored, numbers, initial)[order.rows]
            return torch.segment_reduce(taken, how, lengths=lengths, initial=initial, unsafe=True)

        def spread(of_slot: Tensor) -> Tensor:
            """From one number a slot to one a row."""
            rows = torch.empty_like(values)
            rows[order.rows] = of_slot.repeat_interleave(lengths, output_size=len(values))
            return rows

        here = order.slots[order.last]
        before, mean, squares, least, greatest = self._state[here].unbind(1)
        count = reduced("sum", torch.ones_like(values))
        own_mean = reduced("sum", values) / count.clamp(min=1)
        own_squares = reduced("sum", (values - spread(own_mean)).square())
        least = torch.minimum(least, reduced("min", values, math.inf))
        greatest = torch.maximum(greatest, reduced("max", values, -math.inf))
        both = (before + count).clamp(min=1)
        change = torch.where(count > 0, own_mean - mean, 0)
        squares = squares + own_squares + change.square() * before * count / both
        mean = mean + change * count / both
        state = torch.stack([before + count, mean, squares, least, greatest], 1)
        self._state = self._state.index_copy(0, here, state)
        std = (squares / (before + count - 1).clamp(min=1)).sqrt()
        centered = values - spread(mean)
        # by comparison, because the rounded mean of equal rewards may differ from them
        differs = spread((least < greatest).double()) > 0
        return torch.where(differs, centered / (spread(std) + self.eps), 0 * centered).to(rewards.dtype)
