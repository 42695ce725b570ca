"""Micro-batches dealt by length, whose gradients add up to those of TRL's and whose metrics are those of TRL's.

TRL deals the rows of a generation to its micro-batches at random, and pads each to the longest of all. Gradients add up
between two optimizer steps, so rows may run in any micro-batch of one step, without padding that none of them needs, if
a token keeps the weight that it has in TRL's. Rows without a gradient need not run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import TrainerCallback

import grpo_kernels as gk
from grpo_kernels.integrations.trl import counting
from grpo_kernels.integrations.trl.arguments import IMAGES

Inputs = dict[str, Any]
ROWS = "rows_of_window"  # of the inputs of a micro-batch: places of its rows in the window
_SCORED = "completion_ids"
_LEFT = ("prompt_ids", "prompt_mask")  # padded on the left
_RIGHT = (  # if they have an entry for each token
    *(_SCORED, "completion_mask", "tool_mask", "advantages", "importance_sampling_ratio", counting.WEIGHTS),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"),
)
_NO_LOGPROB = -1.0  # of a row that did not run: any number that a log-prob may be
# RoPE whose angles depend on the length of the batch.
_BY_LENGTH_OF_BATCH = ("longrope", "dynamic")
# Sizes of recurrent layers. In a batch of one row their state takes in the padding before the prompt.
_RECURRENT = ("state_size", "ssm_state_size", "mamba_d_state", "linear_conv_kernel_dim", "conv_L_cache", "lru_width")


class Croppable(NamedTuple):
    """Sides on which a model may lose padding without another result."""

    left: bool
    right: bool

    @classmethod
    def of(cls, model: Any) -> Croppable:
        """Both, if positions are relative. Without RoPE they are counted from the left, padding included."""
        text = model.config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
        kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
        names = {part.get("rope_type", part.get("type")) for part in kinds}
        if not names.isdisjoint(_BY_LENGTH_OF_BATCH):
            return cls(False, False)
        reads_places = getattr(text, "attention_chunk_size", None) is not None or "llama_4_scaling_beta" in rope
        has_prefix = any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values())
        left = bool(rope) and not reads_places and not has_prefix
        if any(hasattr(text, name) for name in _RECURRENT) and (not left or hasattr(text, "lru_width")):
            raise ValueError(
                "FusedGRPOTrainer: batching must be 'trl' for a model whose recurrent layers see the padding before a "
                f"prompt, got {text.model_type!r}"
            )
        return cls(left, True)


class Lengths:
    """Columns [N, 2] that the prompts and the completions of rows need."""

    def __init__(self, prompts: Tensor, completions: Tensor, sides: Croppable, multiple: int | None) -> None:
        """From masks of both parts, [N, P] and [N, T]."""
        needed = [
            _last(mask) if may_crop else torch.full((len(mask),), mask.shape[1], device=mask.device)
            for mask, may_crop in zip((prompts.flip(1), completions), sides, strict=True)
        ]
        # a completion's first token needs one before it
        self.columns, self.multiple = torch.stack(needed, 1).clamp(min=1).cpu(), multiple or 1
        self._is_exact = sides.left

    def deal(self, rows: Tensor, count: int, most_tokens: int | None) -> list[Tensor]:
        """The rows of at most `count` micro-batches."""
        parts = gk.deal_by_length(self.columns[rows], count, most_tokens=most_tokens, multiple=self.multiple)
        return [rows[part] for part in parts]

    def longest(self, rows: Tensor) -> tuple[int, int]:
        """Columns of the prompts and of the completions of a micro-batch of these rows."""
        before, after = self.columns[rows].amax(0).tolist()
        if len(rows) > 1 or not self._is_exact:  # recurrent layers mask the padding of several rows alone
            before = -(-before // self.multiple) * self.multiple
        return before, -(-after // self.multiple) * self.multiple


def _last(mask: Tensor) -> Tensor:
    """Columns up to the last one that is not 0."""
    return ((mask != 0) * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)


class Original(NamedTuple):
    """A micro-batch as TRL makes it, with log-probs and entropies [B, T], and which of its rows ran, on the CPU."""

    inputs: Inputs
    logprobs: Tensor
    entropy: Tensor
    has_run: Tensor


class Dealer(TrainerCallback):
    """Deals the micro-batches of one generation that one optimizer step takes, which are a window."""

    def __init__(self, trainer: Any, micro_batch_tokens: int | None) -> None:
        self._trainer, self.most_tokens = trainer, micro_batch_tokens
        self._sides = Croppable.of(trainer.model)
        # elsewhere all processes must run the model equally often
        self.is_alone = trainer.accelerator.distributed_type == DistributedType.NO
        self._queue: list[Inputs] = []
        self._taken = 0  # micro-batches of the optimizer step
        self._tokens: tuple[Tensor, Tensor] | None = None
        trainer.add_callback(self)

    def lengths(self, prompt_mask: Tensor, completion_mask: Tensor) -> Lengths:
        return Lengths(prompt_mask, completion_mask, self._sides, self._trainer.pad_to_multiple_of)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._queue, self._taken = [], 0

    def next(self) -> Inputs:
        """The micro-batch in the place of TRL's next one."""
        trainer = self._trainer
        if not self._queue:
            first = trainer._step % trainer.args.steps_per_generation
            end = first + trainer.current_gradient_accumulation_steps - self._taken
            self._window = trainer._buffered_inputs[first:end]
            self._queue = self._dealt()
        self._taken += 1
        return self._queue.pop(0)

    def _dealt(self) -> list[Inputs]:
        if images := [name for name in IMAGES if name in self._window[0]]:
            raise ValueError(f"FusedGRPOTrainer: batching must be 'trl' with images, got {', '.join(images)}")
        count, rows = len(self._window), joined([self._weighted(inputs) for inputs in self._window])
        running = has_gradient(self._trainer, rows).cpu()
        self._has_run, self._tokens = running, None
        lengths = self.lengths(rows["prompt_mask"], rows["completion_mask"])
        parts = lengths.deal(running.nonzero().squeeze(1), count, self.most_tokens)
        dealt = [self._part(rows, part, lengths) for part in parts]
        more = (0 if dealt else 1) if self.is_alone else count - len(dealt)
        dealt += [self._without_weight(rows, lengths)] * more
        nothing = {name: value for name, value in rows.items() if not is_by_row(value)}
        return dealt + [nothing] * (count - len(dealt))

    def _weighted(self, inputs: Inputs) -> Inputs:
        """Adds the weights of TRL's mean over the micro-batch, unless they are there or it divides by all tokens."""
        trainer, config = self._trainer, self._trainer._loss_config(0.0)
        if counting.WEIGHTS in inputs or trainer.loss_type in counting.BY_ALL_TOKENS:
            return inputs
        mask, of_rows = counting.loss_mask(inputs), config.aggregation.startswith("seq-mean")
        count = len(mask) if of_rows else None  # as in TRL, a row without a token counts
        shares = gk.token_shares(mask, aggregation=config.aggregation, count=count, max_length=config.max_length)
        return inputs | {counting.WEIGHTS: shares}

    def _part(self, rows: Inputs, part: Tensor, lengths: Lengths) -> Inputs:
        index = part.to(rows[_SCORED].device)
        return cropped(at(rows, index), *lengths.longest(part)) | {ROWS: index}

    def _without_weight(self, rows: Inputs, lengths: Lengths) -> Inputs:
        """The shortest row, of which no token is in the loss: its gradients are zeros, and not None."""
        inputs = self._part(rows, lengths.columns.sum(1).argmin()[None], lengths)
        return inputs | {"tool_mask": torch.zeros_like(inputs["completion_mask"]), ROWS: inputs[ROWS][:0]}

    def measured(self, inputs: Inputs, tokens: tuple[Tensor, Tensor] | None) -> list[Original]:
        """Notes the log-probs and entropies of a micro-batch.

        Returns:
            TRL's micro-batches, if that was the last one of the window
        """
        if tokens is not None:
            index, width = inputs[ROWS], tokens[0].shape[1]
            for values, of_window in zip(tokens, self._tokens_of_window(tokens[0]), strict=True):
                of_window[index, :width] = values.detach()[: len(index)]
        if self._queue:
            return []
        assert self._tokens is not None
        size = len(self._window[0][_SCORED])
        split = [torch.split(values, size) for values in (*self._tokens, self._has_run)]
        self._tokens = None
        return [Original(*parts) for parts in zip(self._window, *split, strict=True)]

    def _tokens_of_window(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all rows. Those that do not run keep the ratio of 1."""
        if self._tokens is None:
            old = [part.get("old_per_token_logps") for part in self._window]
            rows, width = sum(len(part[_SCORED]) for part in self._window), self._window[0][_SCORED].shape[1]
            logprobs = like.new_full((rows, width), _NO_LOGPROB) if old[0] is None else torch.cat(old).to(like.dtype)
            self._tokens = logprobs, torch.zeros_like(logprobs)
        return self._tokens


def is_empty(inputs: Inputs) -> bool:
    """Whether all rows of a micro-batch are in others."""
    return _SCORED not in inputs


def has_gradient(trainer: Any, rows: Inputs) -> Tensor:
    """Which rows have a token with a gradient [N], as far as that is known before the model runs."""
    config = trainer._loss_config(0.0)
    has_grad = counting.loss_mask(rows)
    if config.has_other_terms or trainer._entropy_bonus_enabled:
        return has_grad.any(1)
    advantages = rows["advantages"]
    has_grad = has_grad & (advantages.view(len(has_grad), -1) != 0)
    is_weighted = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    if is_weighted and config.loss != "vespo":  # whose weight is a power of them, bounded from below
        has_grad = has_grad & (rows["importance_sampling_ratio"] != 0)
    result: Tensor = has_grad.any(1)
    return result


def is_by_row(value: Any) -> bool:
    """Whether a value of inputs has an entry for each row, as TRL decides when it splits a batch."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def joined(parts: Sequence[Inputs]) -> Inputs:
    """The rows of several micro-batches."""
    result = dict(parts[0])
    for name, value in parts[0].items():
        if is_by_row(value):
            values = [part[name] for part in parts]
            result[name] = [*itertools.chain(*values)] if isinstance(value, list) else torch.cat(values)
    return result


def at(rows: Inputs, index: Tensor) -> Inputs:
    """Some of the rows."""
    result = dict(rows)
    for name, value in rows.items():
        if is_by_row(value):
            result[name] = [value[row] for row in index.tolist()] if isinstance(value, list) else value[index]
    return result


def cropped(rows: Inputs, prompt: int, completion: int) -> Inputs:
    """The rows without columns before the last `prompt` of prompts and after the first `completion` of completions."""
    result = rows | {name: rows[name][:, -prompt:] for name in _LEFT}
    for name in _RIGHT:
        if name in rows and rows[name].dim() == 2:
            result[name] = rows[name][:, :completion]
    return result


def score(
    call: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]],
    dealer: Dealer,
    model: Any,
    ids: Tensor,
    mask: Tensor,
    completion: int,
    batch_size: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """TRL's log-probs and entropies of all rows, in batches by length in the place of those of `batch_size` rows."""
    prompt, count = ids.shape[1] - completion, -(-len(ids) // batch_size)
    lengths = dealer.lengths(mask[:, :prompt], mask[:, prompt:])
    parts = lengths.deal(torch.arange(len(ids)), count, dealer.most_tokens)
    if not dealer.is_alone:
        parts += [parts[-1][:1]] * (count - len(parts))
    results: dict[int, Tensor] = {}
    for part in parts:
        before, after = lengths.longest(part)
        index, columns = part.to(ids.device), slice(prompt - before, prompt + after)
        for place, values in enumerate(call(model, ids[index, columns], mask[index, columns], after)):
            if values is not None:
                results.setdefault(place, values.new_zeros(len(ids), completion))[index, :after] = values
    return results[0], results.get(1), None
