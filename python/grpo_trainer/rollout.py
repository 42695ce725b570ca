"""Sampling: responses to prompts, with the log-probs that they were sampled with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import processes
from grpo_trainer.model import Batch, Policy, encode_prompt, evaluating, pad, positions_of


@dataclasses.dataclass
class Rollout:
    """Responses in the order of their prompts, `group_size` each. Token ids are stored: text is never read back."""

    items: list[dict[str, Any]]  # the data's lines, one for each prompt
    batch: Batch
    logprobs: Tensor  # [N, T] of the tempered policy when it sampled
    truncated: Tensor  # [N] bool: cut off by max_new_tokens
    texts: list[str]

    @property
    def group_size(self) -> int:
        return len(self.texts) // max(len(self.items), 1)

    @property
    def lengths(self) -> Tensor:
        return self.batch.mask.sum(1)


def usable(
    policy: Policy, items: Sequence[dict[str, Any]], prompt: str, limit: int, chat: bool
) -> list[dict[str, Any]]:
    """Items with their prompts under "prompt", and as ids under "prompt_ids"; those that are too long are left out."""
    found = [
        item | {"prompt": item[prompt], "prompt_ids": encode_prompt(policy.tokenizer, item[prompt], chat)}
        for item in items
    ]
    return [item for item in found if 0 < len(item["prompt_ids"]) <= limit]


@torch.no_grad()
def roll_out(
    policy: Policy, items: list[dict[str, Any]], group_size: int, *, max_new_tokens: int,
    generator: torch.Generator | None, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
    min_new_tokens: int = 0, batch: int = 512,
) -> Rollout:  # fmt: skip
    """group_size responses to each item; temperature 0: the most probable token each time. Prompts of similar length
    are answered together, each process its share of the rows."""
    ids = [item["prompt_ids"] for item in items]
    together = max(1, batch // group_size)
    tokens: list[list[int]] = [[] for _ in range(len(ids) * group_size)]
    logprobs: list[list[float]] = [[] for _ in tokens]
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    with evaluating(policy), policy.autocast():
        for first in range(0, len(ids), together):
            some = by_length[first : first + together]
            found = _sample(policy, [ids[i] for i in some], group_size, max_new_tokens, generator, temperature, top_p,
                            top_k, min_new_tokens)  # fmt: skip
            for i, prompt in enumerate(some):
                for j in range(group_size):
                    tokens[prompt * group_size + j], logprobs[prompt * group_size + j] = found[i * group_size + j]
    prompts, prompt_mask = pad(ids, policy.pad, left=not policy.is_seq2seq)
    rows, mask = pad(tokens, policy.pad, left=False)
    stored = torch.zeros(rows.shape)
    for i, values in enumerate(logprobs):
        stored[i, : len(values)] = torch.tensor(values)
    prompt_of = torch.arange(len(tokens)) // group_size
    texts = [policy.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    truncated = torch.tensor([row[-1] not in policy.ends for row in tokens], dtype=torch.bool)
    together_batch = Batch(prompts, prompt_mask, rows, mask, prompt_of).to(policy.device)
    return Rollout(items, together_batch, stored.to(policy.device), truncated.to(policy.device), texts)


def _sample(
    policy: Policy, prompts: list[list[int]], copies: int, most: int, generator: torch.Generator | None,
    temperature: float, top_p: float, top_k: int, least: int,
) -> list[tuple[list[int], list[float]]]:  # fmt: skip
    ids, mask = pad(prompts, policy.pad, left=not policy.is_seq2seq)
    ids, mask = ids.to(policy.device), mask.to(policy.device)
    rows = torch.arange(len(prompts) * copies, device=policy.device)  # that are not finished
    finished = torch.zeros(len(rows), dtype=torch.bool, device=policy.device)
    mine = _Mine(len(rows), policy.device)
    decoder = (_EncoderDecoder if policy.is_seq2seq else _Decoder)(policy, ids, mask, mine.of(rows) // copies)
    tokens = torch.full((len(rows), most), policy.pad, device=policy.device)
    logprobs = torch.zeros((len(rows), most), device=policy.device)
    lengths = torch.zeros(len(rows), dtype=torch.int64, device=policy.device)
    ends = torch.tensor(policy.ends, device=policy.device)
    for t in range(most):
        logits = decoder.logits.float()
        # what is not sampled is scored all the same, as in the update
        open_ = logits
        if t < least:
            open_ = logits.index_fill(1, ends, float("-inf"))
        if temperature == 0:
            chosen = mine.of_all(open_.argmax(-1))
        else:
            allowed = _filtered(open_ / temperature, top_p, top_k).softmax(-1)
            # of all rows in every process, so that each row gets the random numbers that one process would give it
            chosen = torch.multinomial(mine.among_all(allowed), 1, generator=generator).squeeze(1)
            chosen = mine.of_all(mine.of(chosen))
            found = gk.token_logprobs(logits, mine.of(chosen), temperature=temperature, backend=policy.backend)
            if mine.counts:
                logprobs[mine.of(rows), t] = found.logprobs
        tokens[rows, t] = chosen
        lengths[rows] += 1
        # a finished row goes on, unread, until half of them are
        going = ~torch.isin(chosen, ends) & ~finished
        finished = ~going
        left = int(going.sum())
        if left == 0 or t == most - 1:
            break
        if left <= len(rows) // 2:
            kept = going.nonzero().squeeze(1)
            rows, chosen, finished = rows[kept], chosen[kept], finished[kept]
            decoder.keep(mine.keep(kept))
        decoder.step(mine.of(chosen))
    logprobs = processes.total(logprobs)
    # what a finished row said after its end is not part of it
    is_end = torch.isin(tokens, ends)
    until_end = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, lengths)
    return [
        (row[:length], values[:length])
        for row, values, length in zip(tokens.tolist(), logprobs.tolist(), until_end.tolist(), strict=True)
    ]


class _Mine:
    """Which of the rows that go on this process decodes: one at least, as in every pass the others may wait for it."""

    def __init__(self, count: int, device: torch.device) -> None:
        some = processes.share(count)
        self.is_alone, self.count, self.counts = processes.world() == 1, count, len(some) > 0
        self.rows = torch.tensor([*some] or [0], device=device)

    def of(self, value: Tensor) -> Tensor:
        return value if self.is_alone else value[self.rows]

    def among_all(self, value: Tensor) -> Tensor:
        """Beside rows of others that stand for nothing."""
        if self.is_alone:
            return value
        found = value.new_ones((self.count, *value.shape[1:]))
        found[self.rows] = value
        return found

    def of_all(self, value: Tensor) -> Tensor:
        """From each process its own."""
        if self.is_alone:
            return value
        counted = slice(None if self.counts else 0)
        return processes.whole(value[counted], self.rows[counted], self.count)

    def keep(self, kept: Tensor) -> Tensor:
        """Only these of all; which of the decoder's rows that leaves."""
        if self.is_alone:
            return kept
        number = torch.full((self.count,), -1, device=kept.device)
        number[kept] = torch.arange(len(kept), device=kept.device)
        self.count = len(kept)
        left = (number[self.rows] >= 0).nonzero().squeeze(1)
        self.counts = self.counts and len(left) > 0
        if not self.counts:
            self.rows = kept.new_zeros(1)
            return kept.new_zeros(1)
        self.rows = number[self.rows[left]]
        return left


class _Decoder:
    """The next token's logits of each row, after prompts that were computed once for all their copies."""

    def __init__(self, policy: Policy, ids: Tensor, mask: Tensor, prompt_of: Tensor) -> None:
        from transformers import DynamicCache

        self.policy = policy
        used, prompt_of = torch.unique(prompt_of, return_inverse=True)
        ids, mask = ids[used], mask[used]
        found = policy(
            "next", None, input_ids=ids, attention_mask=mask.long(), position_ids=positions_of(mask),
            past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        self.cache = found.past_key_values
        self.cache.batch_select_indices(prompt_of)
        self.logits = found.logits[:, -1][prompt_of]
        self.mask = mask[prompt_of]

    def step(self, chosen: Tensor) -> None:
        self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), 1)
        found = self.policy(
            "next", None, input_ids=chosen[:, None], attention_mask=self.mask.long(),
            position_ids=positions_of(self.mask)[:, -1:], past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        self.logits = found.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


class _EncoderDecoder:
    def __init__(self, policy: Policy, ids: Tensor, mask: Tensor, prompt_of: Tensor) -> None:
        self.policy = policy
        used, prompt_of = torch.unique(prompt_of, return_inverse=True)
        self.encoded = policy("encoded", None, input_ids=ids[used], attention_mask=mask[used].long())
        self.encoded.last_hidden_state = self.encoded.last_hidden_state[prompt_of]
        self.mask = mask[used][prompt_of]
        self.cache: Any = None
        self.step(torch.full((len(self.mask),), policy.lm.config.decoder_start_token_id, device=ids.device))

    def step(self, chosen: Tensor) -> None:
        found = self.policy(
            "next", None, encoder_outputs=self.encoded, attention_mask=self.mask.long(),
            decoder_input_ids=chosen[:, None], past_key_values=self.cache, use_cache=True,
        )  # fmt: skip
        self.cache, self.logits = found.past_key_values, found.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.encoded.last_hidden_state = self.encoded.last_hidden_state[rows]
        self.mask = self.mask[rows]


def _filtered(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """-inf for tokens that are not sampled; the most probable one always is."""
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits
