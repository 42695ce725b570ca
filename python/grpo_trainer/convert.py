"""Conversion of published data sets into the JSONL files that recipes read, and their division into parts."""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_trainer.data import Line, column_values, numbered_jsonl, split_stratified
from grpo_trainer.rewards.numbers import parse_number
from grpo_trainer.settings import known_columns

TWEET_COLUMNS = {"post": "tweet", "reply": "reply", "likes": "reply_likes", "post_likes": "tweet_likes"}
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_PERSONA = re.compile(r"persona:(.*?)context:", re.IGNORECASE | re.DOTALL)


def named_shares(assignments: Sequence[str]) -> dict[str, float]:
    """Shares by the names of their parts, from texts NAME=SHARE; they must be positive and sum to 1."""
    shares: dict[str, float] = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not sign or not re.fullmatch(r"[\w-]+", name) or not 0 < share <= 1:
            rule = "a name of letters, digits, - and _, and a share above 0 and at most 1"
            raise ValueError(f"--into: must be NAME=SHARE, {rule}, got {assignment!r}")
        if name in shares:
            raise ValueError(f"--into: must name each part once, got {name!r} again")
        shares[name] = share
    if abs(math.fsum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"--into: the shares must sum to 1, got {math.fsum(shares.values()):.6g} of {shares}")
    return shares


def split_together(
    lines: Sequence[Line],
    by: Sequence[float],
    shares: Mapping[str, float],
    strata: int,
    seed: int,
    column: str | None,
    option: str = "--into",
) -> dict[str, list[Line]]:
    """Splits lines into named parts; lines with the same value of a column stay together.

    Args:
        lines: the lines.
        by: [len(lines)] numbers to stratify by; of lines that stay together, their mean.
        shares: shares of the parts by name; of the groups of lines, if a column is given.
        strata: number of quantiles.
        seed: of the random choice.
        column: column whose values keep lines together; None: every line is by itself.
        option: names the shares in the error for a part without lines.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, line in enumerate(lines):
        if column is not None and column not in line:
            raise ValueError(f"--together: {column!r} must be a column of every line{known_columns(column, line)}")
        groups[i if column is None else repr(line[column])].append(i)
    units: list[Line] = [{"rows": rows} for rows in groups.values()]
    means = [math.fsum(by[i] for i in rows) / len(rows) for rows in groups.values()]
    parts = split_stratified(units, means, list(shares.values()), strata, seed)
    if not all(parts):
        name = next(name for name, part in zip(shares, parts, strict=True) if not part)
        together = "" if len(units) == len(lines) else f" in {len(units)} groups that stay together"
        raise ValueError(
            f"{option}: must leave lines to every part, got {name}={shares[name]:g} of {len(lines)} usable lines"
            f"{together}; give more {'groups' if together else 'lines'} or other parts"
        )
    rows = [sorted(i for unit in part for i in unit["rows"]) for part in parts]
    return {name: [lines[i] for i in part] for name, part in zip(shares, rows, strict=True)}


def split(kind: str, lines: Sequence[Line], shares: Mapping[str, float], seed: int) -> dict[str, list[Line]]:
    """Divides converted lines into parts, without a question, persona or post in more than one of them.

    Replies are stratified by their likes as a share of those of the post, by quartile.
    """
    keys = {"gsm8k": _question, "convai2": _persona, "tweets": _post}
    marked = [line | {"": keys[kind](line)} for line in lines]
    is_tweets = kind == "tweets"
    by = column_values(lines, _likes(lines)) if is_tweets else [0.0] * len(lines)
    parts = split_together(marked, by, shares, 4 if is_tweets else 1, seed, "")
    return {name: [{key: line[key] for key in line if key} for line in part] for name, part in parts.items()}


def _question(line: Line) -> str:
    return " ".join(line["question"].lower().split())


def _persona(line: Line) -> str:
    found = _PERSONA.search(line["prompt"])
    return " ".join((found[1] if found else line["prompt"]).lower().split())


def _post(line: Line) -> str:
    return " ".join(line["post"].lower().split())


def _likes(lines: Sequence[Line]) -> str:
    return "likes/post_likes" if lines and "post_likes" in lines[0] else "likes"


def read(
    kind: str,
    files: Sequence[Path],
    annotations: str | None = None,
    columns: Sequence[str] | None = None,
    leave_out: bool = False,
) -> tuple[list[Line], list[str]]:
    """Reads and converts the lines of published files.

    Args:
        kind: "gsm8k", "convai2" or "tweets".
        files: the files.
        annotations: gsm8k: "strip" (default) or "keep" the calculator annotations.
        columns: tweets: "NAME=COLUMN" for each of `TWEET_COLUMNS` that has another name in the files.
        leave_out: leave out lines whose columns break a rule.

    Returns:
        The converted lines, and messages about those that were left out.

    Raises:
        ValueError: names the file, the line, the column and the rule.
    """
    for option, value, format in (("--annotations", annotations, "gsm8k"), ("--columns", columns, "tweets")):
        if value is not None and kind != format:
            raise ValueError(f"{option}: requires the format {format}, got {kind}")
    names = _tweet_columns(columns or ())
    converters: dict[str, Callable[[Line], Line]] = {
        "gsm8k": lambda line: gsm8k(line, annotations == "keep"),
        "convai2": convai2,
        "tweets": lambda line: tweet(line, names),
    }
    lines, left_out = [], []
    for file in files:
        rows = _numbered_csv(file) if kind == "tweets" and file.suffix.lower() == ".csv" else numbered_jsonl(file)
        for number, row in rows:
            try:
                lines.append(converters[kind](row))
            except ValueError as error:
                message = f"{file}, line {number}: {error}"
                if not leave_out:
                    named = ", ".join(f"{name}={column}" for name, column in names.items())
                    rename = f", name the columns with --columns, now {named}" if kind == "tweets" else ""
                    raise ValueError(f"{message}; correct the line{rename}, or give --leave-out") from None
                left_out.append(message)
    if kind == "tweets" and len({"post_likes" in line for line in lines}) > 1:
        raise ValueError(f"{names['post_likes']}: must be on every line or on none, as likes are divided by it")
    return lines, left_out


def gsm8k(line: Line, keep_annotations: bool = False) -> Line:
    """A line of GSM8K as prompt, question and answer; the answer is the solution, which ends in #### and a number."""
    question, answer = _text(line, "question"), _text(line, "answer")
    _solution, mark, number = answer.rpartition("####")
    if not mark or parse_number(number) is None:
        raise ValueError(f"answer: must end in #### and a number, got {answer[-80:]!r}")
    if not keep_annotations:
        answer = _ANNOTATION.sub("", answer)
        if "<<" in answer or ">>" in answer:
            raise ValueError(f"answer: annotations must have the form <<48/2=24>>, got {answer[:200]!r}")
    return {"prompt": f"Question: {question}\nAnswer:", "question": question, "answer": answer}


def convai2(line: Line) -> Line:
    """A line of ConvAI2 as prompt and answers."""
    answers = line.get("answers")
    if "answers" not in line:
        raise ValueError(f"answers: must be a column of every line{known_columns('answers', line)}")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError(f"answers: must be a list of at least one text, and of no empty one, got {answers!r}")
    return {"prompt": _text(line, "question"), "answers": answers}


def tweet(line: Line, columns: Mapping[str, str] = TWEET_COLUMNS) -> Line:
    """A tweet and a reply as prompt, post, reply, likes and, if the file has them, the likes of the post."""
    post, reply = _text(line, columns["post"]), _text(line, columns["reply"])
    converted: Line = {"prompt": f"Post: {post}\nReply:", "post": post, "reply": reply}
    converted["likes"] = _count(line, columns["likes"])
    if columns["post_likes"] in line:
        converted["post_likes"] = _count(line, columns["post_likes"])
    return converted


def _tweet_columns(assignments: Sequence[str]) -> dict[str, str]:
    columns = dict(TWEET_COLUMNS)
    for assignment in assignments:
        name, sign, column = assignment.partition("=")
        if name not in columns or not sign or not column:
            raise ValueError(f"--columns: must be NAME=COLUMN with a NAME of {', '.join(columns)}, got {assignment!r}")
        columns[name] = column
    return columns


def _text(line: Line, column: str) -> str:
    if column not in line:
        raise ValueError(f"{column}: must be a column of every line{known_columns(column, line)}")
    value = line[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column}: must be a text that is not empty, got {value!r}")
    return value.strip()


def _count(line: Line, column: str) -> int:
    if column not in line:
        raise ValueError(f"{column}: must be a column of every line{known_columns(column, line)}")
    value = line[column]
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and re.fullmatch(r"[0-9]+(\.0+)?", text):  # spreadsheets write 3 as 3.0
        return int(text.partition(".")[0])
    if isinstance(text, bool) or not isinstance(text, int | float) or text < 0 or text != text // 1:
        raise ValueError(f"{column}: must be a whole number of 0 or more, got {value!r}")
    return int(text)


def _numbered_csv(path: Path) -> Iterator[tuple[int, Line]]:
    """Yields the rows of a CSV file with a header, and the numbers of the lines they start on."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        start = 1
        try:
            header = next(rows, [])
            if len(set(header)) < len(header) or not header:
                raise ValueError(f"{path}, line 1: must name every column once, got {header}")
            start = rows.line_num + 1
            for row in rows:
                if row and len(row) != len(header):
                    raise ValueError(
                        f"{path}, line {start}: must have the {len(header)} values of the header, got {len(row)}; "
                        "values are separated by commas, and texts with a comma or a quote must be quoted"
                    )
                if row:
                    yield start, dict(zip(header, row, strict=True))
                start = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}, line {start}: must be CSV ({error})") from None
