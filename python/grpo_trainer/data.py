"""Data: lines of JSONL files, their token ids, and padded batches."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.messages import known_columns
from grpo_trainer.recipes import read_text

Line = dict[str, Any]
Prompt = str | list[dict[str, str]]  # a text, or the messages of a chat
TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt", "tokenize")  # of a chat template, which are ours


def numbered_jsonl(path: str | Path) -> Iterator[tuple[int, Line]]:
    """Yields the objects of a file with one JSON object per line, and the numbers of their lines."""
    # not splitlines(), which also splits at characters that JSON allows within texts, such as U+2028
    for number, text in enumerate(read_text(path, encoding="utf-8-sig").split("\n"), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: must be a JSON object, one on each line, got {text[:80]!r} ({error})"
            ) from None
        if not isinstance(line, dict):
            raise TypeError(
                f"{path}, line {number}: must be a JSON object, one on each line, got {type(line).__name__} "
                f"{text[:80]!r}"
            )
        yield number, line


def read_jsonl(path: str | Path, columns: Mapping[str, str] | None = None) -> list[Line]:
    """Reads a file with one JSON object per line; errors name the file and the line.

    Args:
        path: the file.
        columns: columns that every line must have, by the recipe keys that name them.
    """
    lines = []
    for number, line in numbered_jsonl(path):
        for key, column in (columns or {}).items():
            if column not in line:
                raise ValueError(
                    f"{key}: must be a column of every line, got {column!r}{known_columns(column, sorted(line))} "
                    f"({path}, line {number})"
                )
        lines.append(line)
    return lines


def write_jsonl(path: str | Path, lines: Sequence[Line]) -> None:
    Path(path).write_text(_jsonl(lines), encoding="utf-8")


def _jsonl(lines: Sequence[Line]) -> str:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write_parts(parts: Mapping[Path, Sequence[Line]], overwrite: bool) -> None:
    """Writes JSONL files, all or none; a file with other lines is replaced only if `overwrite` says so."""
    for path, lines in parts.items():
        is_other = path.exists() and (not path.is_file() or path.read_bytes() != _jsonl(lines).encode())
        if is_other and not overwrite:
            raise FileExistsError(
                f"{path} exists, with other lines; replace it with --overwrite, or choose another name"
            )
    for path, lines in parts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, lines)


def split_stratified(
    lines: Sequence[Line], by: Sequence[float], shares: Sequence[float], strata: int, seed: int
) -> list[list[Line]]:
    """Splits lines into parts, each with its share of every quantile of a column.

    Args:
        lines: the lines.
        by: [len(lines)] numbers to rank by.
        shares: share of each part, with sum 1. Every part has its share to within one line, overall and, of two parts,
            in each quantile; of more parts, to within two lines in each quantile.
        strata: number of quantiles.
        seed: of the random choice within each quantile.

    Returns:
        The parts, each in the original order.
    """
    if strata < 1:
        raise ValueError(f"--parts: must be at least 1, got {strata}")
    order = sorted(range(len(lines)), key=lambda i: (by[i], i))
    dealt = deal(len(order), shares)
    rng = random.Random(seed)
    part_of: dict[int, int] = {}
    for stratum in range(strata):
        start, end = stratum * len(order) // strata, (stratum + 1) * len(order) // strata
        rest, counts = order[start:end], Counter(dealt[start:end])
        for part in range(len(shares) - 1):
            chosen = rng.sample(rest, counts[part])
            part_of |= dict.fromkeys(chosen, part)
            rest = [i for i in rest if i not in part_of]
        part_of |= dict.fromkeys(rest, len(shares) - 1)
    return [[line for i, line in enumerate(lines) if part_of[i] == part] for part in range(len(shares))]


def deal(count: int, shares: Sequence[float]) -> list[int]:
    """Deals places to parts so that after each place every part has its share to within one.

    This is Tijdeman's rule for the chairman assignment problem: of the parts that lag by enough, the one that is due
    first. Of two parts, the first has its share rounded to the nearest integer after each place.
    """
    exact = [Fraction(repr(share)) for share in shares]
    exact = [share / sum(exact) for share in exact]
    least = Fraction(1, 2 * len(shares) - 2) if len(shares) > 1 else Fraction(0)
    counts, places = [0] * len(shares), []
    for place in range(1, count + 1):
        lags = [share * place - dealt for share, dealt in zip(exact, counts, strict=True)]
        late = [part for part, lag in enumerate(lags) if lag >= least]
        part = min(late, key=lambda part: (1 - least - lags[part]) / exact[part])
        counts[part] += 1
        places.append(part)
    return places


def column_values(lines: Sequence[Line], by: str) -> list[float]:
    """Numbers of a column, or quotients "A/B" of two, in which a divisor below 1 counts as 1."""
    names = by.split("/")
    if len(names) > 2:
        raise ValueError(f"--by: must be a column or A/B, got {by!r}")
    columns, known = [], sorted({name for line in lines for name in line})
    for name in names:
        if known and name not in known:
            raise ValueError(f"--by: {name} must be a column{known_columns(name, known)}")
        for number, line in enumerate(lines, 1):
            value = line.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"--by: {name} must be a number on every line, got {value!r} on line {number}")
        columns.append([float(line[name]) for line in lines])
    return columns[0] if len(columns) == 1 else [a / max(b, 1.0) for a, b in zip(*columns, strict=True)]


def check_prompt(key: str, where: str, prompt: object) -> None:
    """Raises if a prompt is neither a text nor the messages of a chat."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise ValueError(f"{key}: must be a text, or a list of messages, got {prompt!r:.80} ({where})")
    for message in prompt:
        for name in ("role", "content"):
            if name not in message:
                known = known_columns(name, sorted(message))
                raise ValueError(f"{key}: must have {name!r} in every message, got {message!r:.80}{known} ({where})")


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


def equal_length_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows in batches of one length, which need no padding, shortest first.

    Args:
        lengths: length of each row.
        tokens: largest number of tokens of a batch; a longer row is a batch of its own.
    """
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    batches = []
    for length, rows in sorted(by_length.items()):
        size = max(1, tokens // max(length, 1))
        batches += [rows[start : start + size] for start in range(0, len(rows), size)]
    return batches


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
