"""The splits of a recipe: lines of files or of a bundled task, with their prompts and demonstrations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_trainer import tasks
from grpo_trainer.data import check_prompt, prompt_text, read_jsonl
from grpo_trainer.messages import known_columns, nearest_file
from grpo_trainer.recipe import Data, Recipe
from grpo_trainer.tasks import Item, Splits
from grpo_trainer.templates import Template, texts_of


def load_splits(data: Data, seed: int) -> Splits:
    """Generates the splits of the bundled task, or reads them from files, and fills the templates.

    Lines for SFT have the text to train on in "demonstration"; a line whose demonstration is a list becomes one for
    each element.
    """
    splits = _read(data) if data.task is None else tasks.make(data.task, seed, data.options)
    sft = demonstrated(data, "sft", splits.sft)
    if data.template is not None:
        template = Template("data.template", data.template)
        filled: dict[str, Any] = {
            name: _prompted(template, name, getattr(splits, name)) for name in ("train", "validation", "test")
        }
        splits = dataclasses.replace(splits, **filled)
        sft = _prompted(template, "sft", sft)
    elif data.task is None:
        for name in ("train", "validation", "test", "sft"):  # last, as its lines may be some of train's
            for i, line in enumerate(sft if name == "sft" else getattr(splits, name), 1):
                check_prompt("data.prompt", f"example {i} of {name}", line[data.prompt])
    limit = slice(data.limit)
    return dataclasses.replace(splits, sft=sft[limit], train=splits.train[limit])


def missing_files(data: Data) -> list[str]:
    """Errors about files that are not there."""
    paths = {name: getattr(data, name) for name in ("train", "sft", "validation", "test")}
    return [
        f"data.{name}: must be an existing file, got {'the folder ' * Path(path).is_dir()}{path!r}{nearest_file(path)}"
        for name, path in paths.items()
        if path is not None and not Path(path).is_file()
    ]


def require_lines(recipe: Recipe, splits: Splits) -> None:
    """Raises if a phase has no line to train on."""
    data = recipe.data
    if not splits.train and recipe.rl is not None:
        raise ValueError(f"data.train: must have at least one line, got none in {data.train!r}")
    if not splits.sft and recipe.sft is not None:
        if data.demonstration_template is not None:
            template = Template("data.demonstration_template", data.demonstration_template)
            raise ValueError(
                f"{template.key}: must have columns that are not null on some line, got {', '.join(template.columns)}"
            )
        columns = known_columns(data.demonstration, sorted({name for line in splits.train for name in line}))
        raise ValueError(f"data.demonstration: must be a column of some line, got {data.demonstration!r}{columns}")


def no_usable_line(of: str, left_out: Sequence[str]) -> str:
    """The error about a phase or split without a line whose prompt fits the model; an empty prompt is too long, too.

    Args:
        of: the phase or split.
        left_out: how many lines were left out, by each limit.
    """
    reasons = f"; prompts left out: {', '.join(left_out)}" if left_out else ""
    return f"data: {of} has no usable line{reasons}"


def _read(data: Data) -> Splits:
    if missing := missing_files(data):
        raise FileNotFoundError("; ".join(missing))
    columns = {} if data.template is not None else {"data.prompt": data.prompt}
    train, validation, test = (
        [] if path is None else read_jsonl(path, columns) for path in (data.train, data.validation, data.test)
    )
    if data.sft is not None:
        if data.demonstration_template is None:
            columns["data.demonstration"] = data.demonstration
        return Splits(read_jsonl(data.sft, columns), train, validation, test)
    sft = with_demonstration(data, train)
    if not sft and data.demonstration_template is not None:
        Template("data.demonstration_template", data.demonstration_template).check("train", train)
    return Splits(sft, train, validation, test)


def with_demonstration(data: Data, lines: Sequence[Item]) -> list[Item]:
    """Those of the lines that have a demonstration, as the lines of `train` need not."""
    names = [data.demonstration]
    if data.demonstration_template is not None:
        names = Template("data.demonstration_template", data.demonstration_template).columns
    return [line for line in lines if all(line.get(name) is not None for name in names)]


def demonstrated(data: Data, split: str, lines: Sequence[Item]) -> list[Item]:
    """A line for each demonstration of the lines, with its text in the column "demonstration"."""
    if data.demonstration_template is not None:
        template = Template("data.demonstration_template", data.demonstration_template)
        template.check(split, lines)
        each = [template.fill_each(f"example {i} of {split}", line) for i, line in enumerate(lines, 1)]
    else:
        key, column = "data.demonstration", data.demonstration
        each = [texts_of(key, f"example {i} of {split}", line[column]) for i, line in enumerate(lines, 1)]
    return [line | {"demonstration": text} for line, texts in zip(lines, each, strict=True) for text in texts]


def _prompted(template: Template, split: str, lines: list[Item]) -> list[Item]:
    template.check(split, lines)
    return [line | {"prompt": template.fill(f"example {i} of {split}", line)} for i, line in enumerate(lines, 1)]


def corpus_of(data: Data, splits: Splits) -> list[str]:
    """Texts that a tiny model's tokenizer is trained on."""
    texts = [prompt_text(item[data.prompt]) for item in splits.sft + splits.train]
    return texts + [item["demonstration"] for item in splits.sft]
