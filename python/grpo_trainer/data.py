"""Token ids of prompts and demonstrations, and padded batches."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Prompt = str | list[dict[str, str]]  # a text, or the messages of a chat
TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt", "tokenize")  # of a chat template, which are ours


def check_prompt(key: str, where: str, prompt: object) -> None:
    """Raises if a prompt is neither a text nor the messages of a chat."""
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not isinstance(prompt, str) and not is_chat:
        rule = "must be a text, or a list of messages with role and content"
        raise ValueError(f"{key}: {rule}, got {prompt!r:.80} ({where})")


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text; the contents of a chat's messages."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def encode_prompt(
    tokenizer: Any, prompt: Prompt, chat: bool, options: Mapping[str, Any] = MappingProxyType({})
) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: the tokenizer.
        prompt: a text or the messages of a chat.
        chat: apply the tokenizer's chat template to texts, as it always is to messages.
        options: variables of the template.
    """
    if isinstance(prompt, list) or chat:
        if tokenizer.chat_template is None:
            where = "data.prompt: a list of messages" if isinstance(prompt, list) else "model.chat_template: true"
            raise ValueError(f"{where} needs a tokenizer with a chat template, and that of model.path has none")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        for name in options:
            # a template ignores variables that it does not name
            if name in TEMPLATE_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
                raise ValueError(
                    f"model.chat_template_options: must be variables of the tokenizer's chat template, got {name!r}"
                )
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if options:
        rule = "need model.chat_template: true for prompts that are texts"
        raise ValueError(f"model.chat_template_options: {rule}, got {dict(options)}")
    return list(tokenizer(prompt)["input_ids"])


def encode_demonstration(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a demonstrated response, with the end-of-sequence token."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]


@dataclasses.dataclass
class Batch:
    """Prompts and the responses to them."""

    prompts: Tensor  # [P, S] token ids
    prompt_mask: Tensor  # [P, S] bool
    tokens: Tensor  # [N, T] token ids of the responses, end included
    mask: Tensor  # [N, T] bool
    prompt_of: Tensor  # [N] row of `prompts` that each response answers
    kept: Tensor | None = None  # [N, T, K] token ids that sampling kept, filled up with -1; None: all

    def rows(self, rows: Tensor) -> Batch:
        """Selects responses and the prompts they answer, without columns that hold only padding."""
        used, prompt_of = torch.unique(self.prompt_of[rows], return_inverse=True)
        width = max(1, int(self.mask[rows].sum(1).max()))
        start = int(self.prompt_mask[used].int().argmax(1).min())
        prompts, prompt_mask = self.prompts[used][:, start:], self.prompt_mask[used][:, start:]
        kept = None if self.kept is None else self.kept[rows][:, :width]
        return Batch(prompts, prompt_mask, self.tokens[rows][:, :width], self.mask[rows][:, :width], prompt_of, kept)

    @property
    def lengths(self) -> Tensor:
        """Tokens [N, 2] of the prompt and of the response of each row."""
        return torch.stack((self.prompt_mask.sum(1)[self.prompt_of], self.mask.sum(1)), 1)

    def to(self, device: torch.device) -> Batch:
        fields: list[Any] = [getattr(self, field.name) for field in dataclasses.fields(self)]
        moved: list[Any] = [None if field is None else field.to(device) for field in fields]
        return Batch(*moved)

    @property
    def support(self) -> tuple[Tensor, Tensor] | None:
        """The kept token ids of all tokens, one after the other, and where those of each token begin."""
        if self.kept is None:
            return None
        is_id = self.kept >= 0
        return self.kept[is_id], torch.nn.functional.pad(is_id.sum(-1).flatten().cumsum(0), (1, 0))


def pad(rows: Sequence[Sequence[int]], value: int, left: bool) -> tuple[Tensor, Tensor]:
    """Padded ids [N, longest] and their mask."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), value, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, columns] = torch.tensor(list(row), dtype=torch.int64)
        mask[i, columns] = True
    return ids, mask


def pad_kept(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Kept ids [N, longest, most], filled up with -1, of rows that hold a tensor of ids for each token."""
    counts = [ids.numel() for row in rows for ids in row]
    padded = torch.full((len(rows), max((len(row) for row in rows), default=0), max(counts, default=0)), -1)
    for i, row in enumerate(rows):
        for t, ids in enumerate(row):
            padded[i, t, : len(ids)] = ids
    return padded


def positions_of(mask: Tensor) -> Tensor:
    """Position ids [N, T], counted over the tokens where the mask is True."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)
