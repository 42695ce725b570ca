"""The splits of a recipe: lines of files, of a data set of the hub or of a bundled task, with prompts and
demonstrations."""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_trainer import tasks
from grpo_trainer.data import check_prompt, prompt_text
from grpo_trainer.messages import known_columns, nearest_file, require_package
from grpo_trainer.recipe import Data, Recipe
from grpo_trainer.recipes import read_text
from grpo_trainer.tasks import Item, Splits


def load_splits(data: Data, seed: int) -> Splits:
    """Generates the splits of the bundled task, or reads them, and fills the templates.

    All lines of a split have the same columns. Lines for SFT have the text to train on in "demonstration"; a line whose
    demonstration is a list becomes one for each element.
    """
    splits = _read(data) if data.task is None else tasks.make(data.task, seed, data.options)
    lines_of = {**vars(splits), "sft": demonstrated(data, "sft", splits.sft)}
    template = None if data.template is None else Template.parse("data.template", data.template)
    column = Template("data.prompt", None, [data.prompt])
    for name in ("train", "validation", "test", "sft"):  # sft last, as its lines may be some of train's
        for i, line in enumerate(lines_of[name]):
            where = f"example {i + 1} of {name}"
            if template is not None:
                lines_of[name][i] = line | {"prompt": template.fill(where, line)}
            elif data.task is None:
                column.require(where, line)
                check_prompt("data.prompt", where, line[data.prompt])
    for name in ("sft", "train"):
        lines_of[name] = lines_of[name][: data.limit]
    for name in ("sft", "train", "validation", "test"):
        lines_of[name] = _with_all_columns(lines_of[name])
    return Splits(**lines_of)


def _with_all_columns(lines: Sequence[Item]) -> list[Item]:
    """The lines, with None in each column that other lines of the split have: rewards take columns by their names."""
    absent = dict.fromkeys(name for line in lines for name in line)
    return [absent | line for line in lines]


def require_lines(recipe: Recipe, splits: Splits) -> None:
    """Raises if a phase has no line to train on."""
    if not splits.train and recipe.rl is not None:
        raise ValueError(f"data.train: must have at least one line, got none in {recipe.data.train!r}")
    if not splits.sft and recipe.sft is not None:
        template = _demonstration(recipe.data)
        known = sorted({name for line in splits.train for name in line})
        missing = next((name for name in template.columns if name not in known), None)
        columns = known_columns(missing, known) if missing is not None else ", which are null on every line"
        names = ", ".join(map(repr, template.columns))
        raise ValueError(f"{template.key}: must have a column of some line, got {names}{columns}")


def no_usable_line(of: str, left_out: Sequence[str]) -> str:
    """The error about a phase or split without a line whose prompt fits the model; an empty prompt is too long, too.

    Args:
        of: the phase or split.
        left_out: how many lines were left out, by each limit.
    """
    reasons = f"; prompts left out: {', '.join(left_out)}" if left_out else ""
    return f"data: {of} has no usable line{reasons}"


def digest(splits: Splits) -> str:
    """A hash of all lines, by which a resumed run knows its data; of objects such as images it has the type."""

    def shown(value: object) -> str:
        text = repr(value)
        return type(value).__name__ if " at 0x" in text else text

    text = json.dumps(vars(splits), default=shown)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def corpus_of(data: Data, splits: Splits) -> list[str]:
    """Texts that a tiny model's tokenizer is trained on."""
    texts = [prompt_text(item[data.prompt]) for item in splits.sft + splits.train]
    return texts + [item["demonstration"] for item in splits.sft]


# Demonstrations and templates


def with_demonstration(data: Data, lines: Sequence[Item]) -> list[Item]:
    """Those of the lines that have a demonstration, as the lines of `train` need not."""
    names = _demonstration(data).columns
    return [line for line in lines if all(line.get(name) is not None for name in names)]


def demonstrated(data: Data, split: str, lines: Sequence[Item]) -> list[Item]:
    """A line for each demonstration of the lines, with its text in the column "demonstration"."""
    template = _demonstration(data)
    texts = [template.fill_each(f"example {i} of {split}", line) for i, line in enumerate(lines, 1)]
    return [line | {"demonstration": text} for line, of_line in zip(lines, texts, strict=True) for text in of_line]


def _demonstration(data: Data) -> Template:
    if data.demonstration_template is not None:
        return Template.parse("data.demonstration_template", data.demonstration_template)
    return Template("data.demonstration", None, [data.demonstration])


class Template(NamedTuple):
    """A text with columns in braces, or the text of a single column."""

    key: str  # of the recipe, for errors
    text: str | None  # None: that of the column
    columns: list[str]

    @classmethod
    def parse(cls, key: str, text: str) -> Template:
        """A template from a text in which {{ and }} are literal braces."""
        try:
            fields = [part for part in string.Formatter().parse(text) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"{key}: must have columns in braces, with {{{{ and }}}} for a brace: {error}") from None
        for _, column, form, conversion in fields:
            if form or conversion or not column or column.isdigit() or set(column) & set(".[]"):
                written = f"{{{column}" + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
                raise ValueError(f"{key}: must have nothing but the name of a column in braces, got {written!r}")
        if not fields:
            raise ValueError(f"{key}: must have a column in braces, got {text!r}")
        return cls(key, text, list(dict.fromkeys(str(column) for _, column, *_ in fields)))

    def require(self, where: str, line: Item) -> None:
        for column in self.columns:
            if column not in line:
                raise ValueError(f"{self.key}: no column {column!r}{known_columns(column, sorted(line))} ({where})")

    def fill(self, where: str, line: Item) -> str:
        """The text with the columns of a line."""
        self.require(where, line)
        for column in self.columns:
            value = line[column]
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number and not isinstance(value, str):
                way_out = "; the messages of a chat need no template" if isinstance(value, list) else ""
                rule = f"column {column!r} must hold a text or a number"
                raise ValueError(f"{self.key}: {rule}, got {value!r:.80} ({where}){way_out}")
        return str(line[self.columns[0]]) if self.text is None else self.text.format_map(line)

    def fill_each(self, where: str, line: Item) -> list[str]:
        """One text for each element of the column that holds a list; one text if no column does."""
        self.require(where, line)
        lists = [column for column in self.columns if isinstance(line[column], list)]
        if len(lists) > 1:
            raise ValueError(f"{self.key}: at most one column may hold a list, got {lists} ({where})")
        column = lists[0] if lists else self.columns[0]
        values = line[column] if lists else [line[column]]
        if (lists or self.text is None) and not (values and all(str(value).strip() for value in values)):
            rule = f"no text of column {column!r} may be empty"
            raise ValueError(f"{self.key}: {rule}, got {line[column]!r:.80} ({where})")
        return [self.fill(where, line | {column: value}) for value in values]


# Reading


def _read(data: Data) -> Splits:
    sources = {"train": data.train, "sft": data.sft, "validation": data.validation, "test": data.test}
    splits: dict[str, Any] = {
        name: [] if source is None else read_lines(f"data.{name}", source, "train" if name == "sft" else name)
        for name, source in sources.items()
    }
    if data.sft is None:
        splits["sft"] = with_demonstration(data, splits["train"])
    return Splits(**splits)


def read_lines(key: str, source: str, split: str) -> list[Item]:
    """Reads a JSONL, JSON, CSV or parquet file, or a data set of the hub.

    Args:
        key: recipe key of the data, for errors.
        source: the file; or owner/name, owner/name:config or owner/name:config:split on the hub.
        split: split on the hub unless `source` names it.
    """
    path = Path(source)
    readers = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.is_file() and path.suffix in readers:
        try:
            return readers[path.suffix](path)
        except ValueError as error:  # of which pandas' and pyarrow's are subclasses
            raise ValueError(f"{key}: {source!r} cannot be read: {' '.join(str(error).split())}") from error
    if path.is_file():
        raise ValueError(f"{key}: must be a file that ends in {', '.join(readers)}, or a hub name, got {source!r}")
    if source.count("/") != 1 or source.startswith((".", "~", "/")) or path.suffix in readers or path.parent.is_dir():
        kind = "the folder " if path.is_dir() else ""
        is_clear = path.is_dir() or path.is_absolute()
        place = "" if is_clear else f"; paths are relative to the current folder, {Path.cwd()}"
        raise FileNotFoundError(f"{key}: must be an existing file, got {kind}{source!r}{nearest_file(source)}{place}")
    return _read_hub(key, source, split)


def _read_json(path: Path) -> list[Item]:
    """Objects, one on each line or in a list.

    `datasets` would read a text with a date as a date, and "1" as 1 in a column that holds 2 on another line.
    """
    text = read_text(path, encoding="utf-8-sig")
    is_list = text.lstrip().startswith("[")
    # not splitlines(), which also splits at characters that JSON allows within texts, such as U+2028
    parts = [(1, text)] if is_list else [part for part in enumerate(text.split("\n"), 1) if part[1].strip()]
    lines: list[Any] = []
    for number, part in parts:
        try:
            value = json.loads(part, parse_constant=_number)
        except json.JSONDecodeError as error:
            rule = "must be JSON, an object on each line or one list of objects"
            place = f"line {number + error.lineno - 1}"
            raise ValueError(f"{place} {rule}, got {part.strip()[:80]!r} ({error.msg}, column {error.colno})") from None
        lines += value if is_list else [value]
    for i, line in enumerate(lines, 1):
        if not isinstance(line, dict):
            raise ValueError(f"example {i} must be an object, got {type(line).__name__} {line!r:.80}")
    return lines


def _number(name: str) -> float | None:
    """NaN is None, as pandas writes it for an absent value; infinities are numbers."""
    return None if name == "NaN" else float(name)


def _read_csv(path: Path) -> list[Item]:
    """Rows of a file with a header; a column holds numbers if all its values are, and an empty value is None."""
    import pandas  # comes with datasets, as pyarrow does

    # nullable types, as NaN would turn integers beside it into floats
    types: dict[str, Any] = {"na_values": [""], "keep_default_na": False, "dtype_backend": "numpy_nullable"}
    types["low_memory"] = False  # or the parts of a long file may have types of their own
    frame = pandas.read_csv(path, encoding="utf-8-sig", **types)
    if flags := [name for name, kind in frame.dtypes.items() if pandas.api.types.is_bool_dtype(kind)]:
        types["dtype"] = dict.fromkeys(flags, str)  # true and false are texts, as they were written
        frame = pandas.read_csv(path, encoding="utf-8-sig", **types)
    if not isinstance(frame.index, pandas.RangeIndex):  # pandas takes the first values as names of the rows
        raise ValueError("rows must have as many values as the header, got more; texts with a comma need quotes")
    rows = frame.to_dict("records")
    return [
        {str(name): None if pandas.isna(value) or value == "" else value for name, value in row.items()} for row in rows
    ]


def _read_parquet(path: Path) -> list[Item]:
    from pyarrow.parquet import read_table

    return _without_nan(read_table(path).to_pylist())


def _without_nan(lines: list[Any]) -> list[Item]:
    return [{name: None if value != value else value for name, value in line.items()} for line in lines]


def _read_hub(key: str, source: str, split: str) -> list[Item]:
    require_package(f"{key}: {source!r} of the hub", "datasets", "trainer")
    import datasets

    name, config, named_split = (*source.split(":", 2), "", "")[:3]
    try:
        return _without_nan(datasets.load_dataset(name, config or None, split=named_split or split).to_list())
    except Exception as error:  # of any of the libraries that it uses
        text = " ".join(str(error.__cause__ or error).split())
        rule = f"is no file here{nearest_file(source)}, and was not loaded from the Hugging Face hub"
        raise ValueError(f"{key}: {source!r} {rule}: {text}") from error
