"""Sampling: responses to prompts, with the log-probs they were sampled with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import distributed, interruption
from grpo_trainer.data import Batch, encode_prompt, pad, pad_kept, positions_of
from grpo_trainer.policy import Policy, evaluating
from grpo_trainer.recipe import Rollout as Sampling


@dataclasses.dataclass
class Rollout:
    """Responses in the order of their prompts, `group_size` each. Token ids are kept and never recovered from texts."""

    items: list[dict[str, Any]]  # one line of data per prompt
    batch: Batch
    logprobs: Tensor  # [N, T] of the tempered policy when it sampled, over the support if the batch has one
    truncated: Tensor  # [N] bool: cut off by max_completion_length
    texts: list[str]

    @property
    def group_size(self) -> int:
        return len(self.texts) // max(len(self.items), 1)

    @property
    def lengths(self) -> Tensor:
        return self.batch.mask.sum(1)


def select_usable(
    policy: Policy,
    items: Sequence[dict[str, Any]],
    column: str,
    max_prompt_length: int,
    chat: bool,
    chat_options: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Adds "prompt" and "prompt_ids" to the items, and drops those whose prompt is empty or too long."""
    tokenizer = policy.tokenizer
    encoded = [
        item | {"prompt": item[column], "prompt_ids": encode_prompt(tokenizer, item[column], chat, chat_options)}
        for item in items
    ]
    for item in encoded:
        policy.check_tokens(item["prompt_ids"], "the prompts")
    return [item for item in encoded if 0 < len(item["prompt_ids"]) <= max_prompt_length]


@torch.no_grad()
def roll_out(
    policy: Policy, items: list[dict[str, Any]], sampling: Sampling, generator: torch.Generator | None
) -> Rollout:
    """Samples responses; prompts of similar length share a batch, whose rows are divided among the processes.

    Args:
        policy: the policy.
        items: lines of data with "prompt_ids".
        sampling: its settings; a temperature of 0 takes the most probable token.
        generator: random numbers; the same in every process.
    """
    ids, group_size = [item["prompt_ids"] for item in items], sampling.num_generations
    prompts_at_once = max(1, sampling.batch // group_size)
    tokens: list[list[int]] = [[] for _ in range(len(ids) * group_size)]
    logprobs: list[list[float]] = [[] for _ in tokens]
    kept: list[list[Tensor]] = [[] for _ in tokens]
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    with evaluating(policy), policy.autocast():
        for start in range(0, len(ids), prompts_at_once):
            interruption.stop_if_asked()  # sampling leaves the weights as they are after the last step
            chosen = by_length[start : start + prompts_at_once]
            responses = _sample(policy, [ids[i] for i in chosen], sampling, generator)
            rows = [prompt * group_size + copy for prompt in chosen for copy in range(group_size)]
            for row, response in zip(rows, responses, strict=True):
                tokens[row], logprobs[row], kept[row] = response
    return assemble(policy, items, tokens, logprobs, kept if sampling.keep_support else None)


def assemble(
    policy: Policy,
    items: list[dict[str, Any]],
    tokens: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    kept: Sequence[Sequence[Tensor]] | None = None,
) -> Rollout:
    """Pads sampled responses, and decodes them for the rewards.

    Args:
        policy: the policy.
        items: lines of data with "prompt_ids".
        tokens: token ids of the responses, in the order of their prompts.
        logprobs: log-probs of the tokens.
        kept: kept ids of the tokens; None: all.
    """
    ids = [item["prompt_ids"] for item in items]
    prompts, prompt_mask = pad(ids, policy.pad_id, left=not policy.is_seq2seq)
    padded, mask = pad(tokens, policy.pad_id, left=False)
    padded_logprobs = torch.zeros(padded.shape)
    for i, values in enumerate(logprobs):
        padded_logprobs[i, : len(values)] = torch.tensor(values)
    prompt_of = torch.arange(len(tokens)) * len(items) // max(len(tokens), 1)
    texts = [policy.tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    truncated = torch.tensor([row[-1] not in policy.stop_ids for row in tokens], dtype=torch.bool)
    whole = Batch(prompts, prompt_mask, padded, mask, prompt_of, None if kept is None else pad_kept(kept))
    whole = whole.to(policy.device)
    return Rollout(items, whole, padded_logprobs.to(policy.device), truncated.to(policy.device), texts)


def _sample(
    policy: Policy, prompts: list[list[int]], sampling: Sampling, generator: torch.Generator | None
) -> list[tuple[list[int], list[float], list[Tensor]]]:
    """Samples a group of responses to each prompt: token ids, log-probs, and kept ids of each token if wanted."""
    device, longest, copies = policy.device, sampling.max_completion_length, sampling.num_generations
    ids, mask = pad(prompts, policy.pad_id, left=not policy.is_seq2seq)
    rows = torch.arange(len(prompts) * copies, device=device)  # rows that are still decoded
    is_finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
    local = _LocalRows(len(rows), device)
    kind = _EncoderDecoder if policy.is_seq2seq else _Decoder
    decoder = kind(policy, ids.to(device), mask.to(device), local.select(rows) // copies)
    tokens = torch.full((len(rows), longest), policy.pad_id, device=device)
    logprobs = torch.zeros((len(rows), longest), device=device)
    lengths = torch.zeros(len(rows), dtype=torch.int64, device=device)
    stop_ids = torch.tensor(policy.stop_ids, device=device)
    supports: list[list[Tensor]] = [[] for _ in range(len(rows))]
    for t in range(longest):
        logits = decoder.logits.float()
        # without keep_support, tokens that may not be sampled are still scored, as in the update
        open_logits = logits
        if t < sampling.min_completion_length:
            open_logits = logits.index_fill(1, stop_ids, float("-inf"))
        if sampling.temperature == 0:
            chosen = local.all_gather(open_logits.argmax(-1))
        else:
            filtered = _filtered(open_logits / sampling.temperature, sampling.top_p, sampling.top_k)
            probs = filtered.softmax(-1)
            # every process draws for all rows, so that a row gets the random numbers it would get in a single process
            chosen = torch.multinomial(local.embed(probs), 1, generator=generator).squeeze(1)
            chosen = local.all_gather(local.select(chosen))
            scored_logits = logits
            if sampling.keep_support:
                scored_logits = logits.masked_fill(~filtered.isfinite(), float("-inf"))
                _append_kept(supports, rows, local.all_gather(filtered.isfinite().to(torch.uint8)))
            if local.counts:
                scored = gk.token_logprobs(
                    scored_logits,
                    local.select(chosen),
                    temperature=sampling.temperature,
                    backend=policy.backend,
                )
                logprobs[local.select(rows), t] = scored.logprobs
        tokens[rows, t] = chosen
        lengths[rows] += 1
        # finished rows are decoded along, unread, until they are half of the batch
        is_finished = torch.isin(chosen, stop_ids) | is_finished
        remaining = int((~is_finished).sum())
        if remaining == 0 or t == longest - 1:
            break
        if remaining <= len(rows) // 2:
            kept = (~is_finished).nonzero().squeeze(1)
            rows, chosen, is_finished = rows[kept], chosen[kept], is_finished[kept]
            decoder.keep(local.keep(kept))
        decoder.step(local.select(chosen))
    logprobs = distributed.all_reduce_sum(logprobs)
    # tokens that a finished row produced after its end are dropped
    is_end = torch.isin(tokens, stop_ids)
    lengths = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, lengths)
    return [
        (row[:length], values[:length], ids[:length])
        for row, values, ids, length in zip(tokens.tolist(), logprobs.tolist(), supports, lengths.tolist(), strict=True)
    ]


def _append_kept(kept: list[list[Tensor]], rows: Tensor, is_kept: Tensor) -> None:
    """Adds the kept ids of one token of these rows."""
    ids = is_kept.nonzero()[:, 1].cpu().split(is_kept.sum(1, dtype=torch.int64).tolist())
    for row, row_ids in zip(rows.tolist(), ids, strict=True):
        kept[row].append(row_ids)


class _LocalRows:
    """The rows of a batch that this process decodes; at least one, as other processes may wait for each forward pass.

    A process without a row of its own decodes a copy that does not count.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        local = distributed.local_range(count)
        self.is_alone, self.count, self.counts = distributed.world_size() == 1, count, len(local) > 0
        self.rows = torch.tensor([*local] or [0], device=device)

    def select(self, value: Tensor) -> Tensor:
        """Local rows of a tensor of all rows."""
        return value if self.is_alone else value[self.rows]

    def embed(self, value: Tensor) -> Tensor:
        """Tensor of all rows: the local rows in their places, and the number 1 elsewhere."""
        if self.is_alone:
            return value
        whole = value.new_ones((self.count, *value.shape[1:]))
        whole[self.rows] = value
        return whole

    def all_gather(self, value: Tensor) -> Tensor:
        """Tensor of all rows from each process's local rows."""
        if self.is_alone:
            return value
        counted = slice(None if self.counts else 0)
        return distributed.all_gather_rows(value[counted], self.rows[counted], self.count)

    def keep(self, kept: Tensor) -> Tensor:
        """Drops all but the given rows, and returns the indices of the local rows that remain."""
        if self.is_alone:
            return kept
        new_index = torch.full((self.count,), -1, device=kept.device)
        new_index[kept] = torch.arange(len(kept), device=kept.device)
        self.count = len(kept)
        remaining = (new_index[self.rows] >= 0).nonzero().squeeze(1)
        self.counts = self.counts and len(remaining) > 0
        if not self.counts:
            self.rows = kept.new_zeros(1)
            return kept.new_zeros(1)
        self.rows = new_index[self.rows[remaining]]
        return remaining


class _Decoder:
    """Next-token logits of each row, after prompts that were computed once for all their copies."""

    def __init__(self, policy: Policy, ids: Tensor, mask: Tensor, prompt_of: Tensor) -> None:
        from transformers import DynamicCache

        self.policy = policy
        used, prompt_of = torch.unique(prompt_of, return_inverse=True)
        ids, mask = ids[used], mask[used]
        output = policy(
            "next",
            None,
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions_of(mask),
            use_cache=True,
            logits_to_keep=1,
            **{policy.cache_name: DynamicCache()},
        )
        self.cache = getattr(output, policy.cache_name)
        self.cache.batch_select_indices(prompt_of)
        self.logits = output.logits[:, -1][prompt_of]
        self.mask = mask[prompt_of]

    def step(self, chosen: Tensor) -> None:
        self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), 1)
        output = self.policy(
            "next",
            None,
            input_ids=chosen[:, None],
            attention_mask=self.mask.long(),
            position_ids=positions_of(self.mask)[:, -1:],
            use_cache=True,
            **{self.policy.cache_name: self.cache},
        )
        self.logits = output.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]


def check_cache(policy: Policy) -> None:
    """Raises for a decoder whose state of a prompt is not that of attention, which its responses could not share."""
    if policy.is_seq2seq:
        return
    ids, rows = torch.zeros(1, 2, dtype=torch.int64, device=policy.device), torch.zeros(1, dtype=torch.int64)
    try:
        with torch.no_grad(), evaluating(policy):
            decoder = _Decoder(policy, ids, torch.ones_like(ids, dtype=torch.bool), rows.to(policy.device))
            decoder.step(ids[:, 0])
            decoder.keep(rows.to(policy.device))
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        kind = type(policy.inner).__name__
        raise ValueError(
            f"model.path: must be a model whose cache holds keys and values alone, got a {kind}, which raises "
            f"{type(error).__name__}: {error}"
        ) from error


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
        output = self.policy(
            "next",
            None,
            encoder_outputs=self.encoded,
            attention_mask=self.mask.long(),
            decoder_input_ids=chosen[:, None],
            use_cache=True,
            **{self.policy.cache_name: self.cache},
        )
        self.cache, self.logits = getattr(output, self.policy.cache_name), output.logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.encoded.last_hidden_state = self.encoded.last_hidden_state[rows]
        self.mask = self.mask[rows]


def _filtered(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Sets the logits of tokens outside top-k and top-p to -inf; the most probable token always remains."""
    if top_k:
        threshold = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        probs_before = probs.cumsum(-1) - probs
        is_dropped = torch.zeros_like(probs_before, dtype=torch.bool).scatter(-1, order, probs_before >= top_p)
        logits = logits.masked_fill(is_dropped, float("-inf"))
    return logits
