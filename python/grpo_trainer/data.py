"""Data: lines of JSONL files, their token ids, and padded batches."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Line = dict[str, Any]
Prompt = str | list[dict[str, str]]  # a text, or the messages of a chat


def read_jsonl(path: str | Path, columns: Mapping[str, str] | None = None) -> list[Line]:
    """Reads a file with one JSON object per line; errors name the file and the line.

    Args:
        path: the file.
        columns: columns that every line must have, by the recipe keys that name them.
    """
    lines = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: must be JSON, got {text[:80]!r} ({error})") from None
        if not isinstance(line, dict):
            raise TypeError(f"{path}, line {number}: must be an object, got {type(line).__name__}")
        for key, column in (columns or {}).items():
            if column not in line:
                raise ValueError(
                    f"{key}: must be a column of every line, got {column!r} with the columns {sorted(line)} "
                    f"({path}, line {number})"
                )
        lines.append(line)
    return lines


def write_jsonl(path: str | Path, lines: Sequence[Line]) -> None:
    Path(path).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def split_stratified(
    lines: Sequence[Line], by: Sequence[float], ratio: float, parts: int, seed: int
) -> tuple[list[Line], list[Line]]:
    """Splits lines into two parts with equal shares of each quantile of a column.

    Args:
        lines: the lines.
        by: [len(lines)] numbers to rank by.
        ratio: share of the first part, met to within one line overall and in each quantile.
        parts: number of quantiles.
        seed: of the random choice within each quantile.

    Returns:
        The two parts, each in the original order.
    """
    if parts < 1:
        raise ValueError(f"--parts: must be at least 1, got {parts}")
    order = sorted(range(len(lines)), key=lambda i: (by[i], i))
    rng = random.Random(seed)
    first: set[int] = set()
    for part in range(parts):
        start, end = part * len(order) // parts, (part + 1) * len(order) // parts
        count = math.floor(ratio * end + 0.5) - math.floor(ratio * start + 0.5)  # so that rounding does not accumulate
        first |= set(rng.sample(order[start:end], count))
    if not 0 < len(first) < len(lines):
        raise ValueError(
            f"--ratio: must leave lines to both parts, got {ratio} of {len(lines)} lines, which is {len(first)}"
        )
    return [lines[i] for i in sorted(first)], [line for i, line in enumerate(lines) if i not in first]


def column_values(lines: Sequence[Line], by: str) -> list[float]:
    """Numbers of a column, or quotients "A/B" of two, in which a divisor below 1 counts as 1."""
    names = by.split("/")
    if len(names) > 2:
        raise ValueError(f"--by: must be a column or A/B, got {by!r}")
    columns = []
    for name in names:
        for number, line in enumerate(lines, 1):
            value = line.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"--by: {name} must be a number on every line, got {value!r} on line {number}")
        columns.append([float(line[name]) for line in lines])
    return columns[0] if len(columns) == 1 else [a / max(b, 1.0) for a, b in zip(*columns, strict=True)]


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text; the contents of a chat's messages."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def encode_prompt(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt; `chat` applies the tokenizer's chat template to texts, as it always is to messages."""
    if isinstance(prompt, list) or chat:
        if tokenizer.chat_template is None:
            where = "data.prompt: a list of messages" if isinstance(prompt, list) else "model.chat_template: true"
            raise ValueError(f"{where} needs a tokenizer with a chat template, and that of model.path has none")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
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

    def to(self, device: torch.device) -> Batch:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in fields.items() if value is not None}
        return Batch(**moved)

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
