"""A trainer in loops over rows and tokens, written apart from every kernel, that counts right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from grpo_conformance import PAD_GROUP, Batch
from torch import Tensor


class Plain:
    name = "plain"
    epsilon = 0.0  # added to the standard deviation

    def advantages(self, batch: Batch) -> Tensor:
        """Compares each rollout with the others of its group that have a reward and a token in the loss."""
        groups: dict[int, dict[int, float]] = {}
        counts = batch.mask.any(1) & ~batch.rewards.isnan() & (batch.groups != PAD_GROUP)
        for row in counts.nonzero().flatten().tolist():
            of_group = groups.setdefault(int(batch.groups[row]), {})
            of_group[int(batch.rollouts[row])] = float(batch.rewards[row])
        result = torch.zeros(len(counts), dtype=torch.float64)
        for row in range(len(counts)):
            of_group = groups.get(int(batch.groups[row]), {})
            rewards = list(of_group.values())
            own = of_group.get(int(batch.rollouts[row]))
            if own is not None and len(rewards) > 1:
                result[row] = self._compared(own, rewards, batch.estimator or "mean-std")
            if batch.filter_groups and (not rewards or min(rewards) == max(rewards)):
                result[row] = math.nan
        return result

    def _compared(self, own: float, rewards: list[float], estimator: str) -> float:
        count = len(rewards)
        mean = math.fsum(rewards) / count
        difference = own - mean if min(rewards) < max(rewards) else 0.0
        deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
        if estimator.startswith("leave-one-out"):
            difference = difference * count / (count - 1)
        if not estimator.endswith("std") or difference == 0:
            return difference
        return difference / (deviation + self.epsilon)

    def token_advantages(self, batch: Batch) -> Tensor:
        """GAE over the counting tokens of each rollout, one after another."""
        result = torch.zeros_like(batch.values)
        for rollout in set(batch.rollouts.tolist()):
            rows = (batch.rollouts == rollout).nonzero().flatten().tolist()
            places = [(row, token) for row in rows for token in range(batch.mask.shape[1])]
            rewards: list[float] = []
            counting = [place for place in places if batch.mask[place]]
            for place in places:
                reward = float(batch.token_rewards[place].nan_to_num())
                if batch.mask[place]:
                    rewards.append(reward)
                elif rewards:
                    rewards[-1] += reward
            following, advantage = 0.0, 0.0
            for place, reward in zip(reversed(counting), reversed(rewards), strict=True):
                value = float(batch.values[place])
                advantage = reward + batch.gamma * following - value + batch.gamma * batch.lam * advantage
                result[place], following = advantage, value
        if batch.whiten:
            own = result[batch.mask]
            result = torch.where(batch.mask, (result - own.mean()) / own.std(), 0)
        return result

    def loss(self, batch: Batch) -> Tensor:
        if batch.lengths is not None:
            return self.loss(self._unpacked(batch))
        batch = self._without_truncated(batch)
        ratios = self._log_ratios(batch)
        shares = batch.of_total(self._shares(batch.total))
        terms = []
        for place in self._places(batch):
            advantage, ratio = batch.advantages[place[0]], ratios[place].exp()
            clipped = ratio.clamp(1 - batch.clip, 1 + batch.clip)
            term = torch.maximum(-advantage * ratio, -advantage * clipped)
            if batch.kl_coef:
                term = term + batch.kl_coef * self._kl(batch.kl, batch.ref_logprobs[place] - batch.logprobs[place])
            if batch.teacher_coef:
                term = term + batch.teacher_coef * (batch.logprobs[place] - batch.teacher_logprobs[place])
            term = term + batch.value_coef * (batch.values[place] - batch.returns[place]) ** 2
            term = term - batch.entropy_coef * batch.entropy[place]
            terms.append(term * shares[place])
        auxiliary = batch.auxiliary_coef * batch.auxiliary / batch.ranks / batch.steps
        return (torch.stack(terms).sum() if terms else batch.logprobs.nansum() * 0) + auxiliary

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        scaled = (logits / temperature).log_softmax(2)
        return scaled[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]

    def _kl(self, form: str | None, difference: Tensor) -> Tensor:
        forms: dict[str, Callable[[], Tensor]] = {
            "k1": lambda: -difference,
            "k2": lambda: difference**2 / 2,
            "k3": lambda: difference.exp() - difference - 1,
        }
        return forms[form or "k3"]()

    def _places(self, batch: Batch) -> Iterable[tuple[int, int]]:
        return (tuple(place) for place in batch.mask.nonzero().tolist())

    def _log_ratios(self, batch: Batch) -> dict[tuple[int, int], Tensor]:
        own = {place: batch.logprobs[place] - batch.old_logprobs[place] for place in self._places(batch)}
        if batch.ratio == "token":
            return own
        of_rollouts: dict[int, list[Tensor]] = {}
        for (row, _), value in own.items():
            of_rollouts.setdefault(int(batch.rollouts[row]), []).append(value)
        return {place: torch.stack(of_rollouts[int(batch.rollouts[place[0]])]).mean() for place in own}

    def _shares(self, total: Batch) -> Tensor:
        tokens: dict[int, int] = {}
        for row, count in enumerate(total.mask.sum(1).tolist()):
            rollout = int(total.rollouts[row])
            tokens[rollout] = tokens.get(rollout, 0) + count
        number = max(1, sum(count > 0 for count in tokens.values()))
        everything = max(1, sum(tokens.values()))
        of_rollout = {
            "token-mean": lambda count: 1 / everything,
            "seq-mean-token-mean": lambda count: 1 / (number * max(count, 1)),
            "seq-mean-token-sum": lambda count: 1 / number,
        }[total.aggregation or "token-mean"]
        rows = torch.tensor([of_rollout(tokens[rollout]) for rollout in total.rollouts.tolist()], dtype=torch.float64)
        return rows[:, None].expand(total.mask.shape)

    def _without_truncated(self, batch: Batch) -> Batch:
        if not batch.mask_truncated:
            return batch
        whole = None if batch.whole is None else self._without_truncated(batch.whole)
        return batch.replace(mask=batch.mask & ~batch.truncated[:, None], whole=whole)

    def _unpacked(self, batch: Batch) -> Batch:
        fields = ("mask", "logprobs", "old_logprobs", "ref_logprobs", "entropy", "values", "returns")
        changes = {}
        for name in fields:
            rows = torch.split(getattr(batch, name)[0], batch.lengths.tolist())
            changes[name] = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        return batch.replace(lengths=None, **changes)
