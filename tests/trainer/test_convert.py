"""Conversion of published data sets, and their division into parts."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from grpo_trainer import cli
from grpo_trainer.convert import named_shares, split_together
from grpo_trainer.data import deal, read_jsonl, write_jsonl

CLIPS = {
    "question": "Natalia sold clips to 48 friends, and then half as many. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
}
SOLUTION = "She sold 48/2 = 24 clips.\nThat is 48+24 = 72.\n#### 72"
TALK = {"question": "persona: i like tea. context: Q: hello R:", "answers": ["hi!", "hello."]}
HEADER = "tweet,reply,reply_likes,tweet_likes\n"


def written(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def convert(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and the lines of the single part."""
    status = cli.data(["convert", *arguments, "--output", str(tmp_path / "out"), "--into", "all=1"])
    return status, read_jsonl(tmp_path / "out-all.jsonl") if status == 0 else []


def test_gsm8k_becomes_prompts_and_solutions(tmp_path: Path) -> None:
    file = written(tmp_path / "train.jsonl", [CLIPS, {"question": "How far?", "answer": "Far.\n#### -1,200"}])
    status, lines = convert(tmp_path, "gsm8k", file)
    assert status == 0
    assert lines == [
        {
            "prompt": f"Question: {CLIPS['question']}\nAnswer:",
            "question": CLIPS["question"],
            "answer": SOLUTION,
        },
        {"prompt": "Question: How far?\nAnswer:", "question": "How far?", "answer": "Far.\n#### -1,200"},
    ]
    _, kept = convert(tmp_path, "gsm8k", file, "--annotations", "keep", "--overwrite")
    assert kept[0]["answer"] == CLIPS["answer"]


def test_convai2_keeps_every_answer(tmp_path: Path) -> None:
    status, lines = convert(tmp_path, "convai2", written(tmp_path / "a.jsonl", [TALK]))
    assert status == 0 and lines == [{"prompt": TALK["question"], "answers": TALK["answers"]}]


def test_tweets_are_read_from_csv_and_jsonl(tmp_path: Path) -> None:
    rows = '"so good,\nreally \u2028!","say ""hi""",3,10\nbad,why?,0,0\n'
    (tmp_path / "a.csv").write_text("\ufeff" + HEADER + rows, encoding="utf-8")
    expected = [
        {
            "prompt": "Post: so good,\nreally \u2028!\nReply:",
            "post": "so good,\nreally \u2028!",
            "reply": 'say "hi"',
            "likes": 3,
            "post_likes": 10,
        },
        {"prompt": "Post: bad\nReply:", "post": "bad", "reply": "why?", "likes": 0, "post_likes": 0},
    ]
    assert convert(tmp_path, "tweets", str(tmp_path / "a.csv")) == (0, expected)
    renamed = [
        {"text": line["post"], "reply": line["reply"], "hearts": float(line["likes"])}  # type: ignore[arg-type]
        for line in expected
    ]
    file = written(tmp_path / "b.jsonl", renamed)
    without = [{name: value for name, value in line.items() if name != "post_likes"} for line in expected]
    assert convert(tmp_path, "tweets", file, "--columns", "post=text", "likes=hearts", "--overwrite") == (0, without)


@pytest.mark.parametrize(
    ("format", "lines", "message"),
    [
        ("gsm8k", [CLIPS, {"question": "a", "anwser": "1"}], "line 2: answer: .* nearest is 'anwser'"),
        ("gsm8k", [{"question": " ", "answer": "#### 1"}], "line 1: question: must be a text that is not empty"),
        ("gsm8k", [{"question": "a", "answer": "72"}], "line 1: answer: must end in #### and a number, got '72'"),
        ("gsm8k", [{"question": "a", "answer": "#### x"}], "line 1: answer: must end in #### and a number"),
        ("gsm8k", [{"question": "a", "answer": "<<1+1=2\n#### 2"}], "line 1: answer: annotations must have the form"),
        ("gsm8k", [{"question": 3, "answer": "#### 2"}], "line 1: question: must be a text that is not empty, got 3"),
        ("convai2", [{"question": "a", "answers": []}], "line 1: answers: must be a list of at least one text"),
        ("convai2", [{"question": "a", "answers": "hi"}], "line 1: answers: must be a list .* got 'hi'"),
        ("convai2", [TALK, {"question": "a", "answers": ["x", " "]}], "line 2: answers: must be a list"),
        ("convai2", [{"question": "a", "answer": "hi"}], "line 1: answers: .* nearest is 'answer'"),
        ("tweets", [{"tweet": "a", "reply": "b", "reply_likes": -1}], "line 1: reply_likes: must be a whole number"),
        ("tweets", [{"tweet": "a", "reply": "b", "reply_likes": True}], "reply_likes: .* got True"),
        ("tweets", [{"tweet": "a", "reply": "b", "reply_likes": 1.5}], "reply_likes: .* got 1.5"),
        ("tweets", [{"tweet": "a", "reply": "b", "reply_likes": float("nan")}], "reply_likes: .* got nan"),
        (
            "tweets",
            [{"tweet": "a", "reply": "b", "likes": 1}],
            "line 1: reply_likes: .* nearest is .* all are tweet, reply, likes",
        ),
        (
            "tweets",
            [
                {"tweet": "a", "reply": "b", "reply_likes": 1},
                {"tweet": "a", "reply": "b", "reply_likes": 1, "tweet_likes": 2},
            ],
            "tweet_likes: must be on every line or on none",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_column_and_rule(
    tmp_path: Path, format: str, lines: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, format, written(tmp_path / "in.jsonl", lines))[0] == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (HEADER + "a,b,1,2\na,b,c,1,2\n", "in.csv, line 3: must have the 4 values of the header, got 5"),
        (HEADER + '"a\nb",c,1,2\na,b,x,1\n', "in.csv, line 4: reply_likes: must be a whole number"),
        (HEADER + 'a,"b,1,2\n', "in.csv, line 2: must be CSV"),
        ("tweet,tweet\na,b\n", "in.csv, line 1: must name every column once"),
        ("", "in.csv, line 1: must name every column once"),
        (HEADER, "in.csv: must have at least one usable line, got none"),
        ("tweet;reply\na;b,c\n", "values are separated by commas, and texts with a comma or a quote must be quoted"),
        ("text,reply,reply_likes\na,b,1\n", "name the columns with --columns, now post=tweet, reply=reply, likes=rep"),
    ],
)
def test_bad_csv_is_named_by_line(tmp_path: Path, rows: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.csv").write_text(rows)
    assert convert(tmp_path, "tweets", str(tmp_path / "in.csv"))[0] == 2
    assert message in capsys.readouterr().err


def test_bad_lines_are_left_out_only_if_asked_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "in.jsonl", [CLIPS, {"question": "a", "answer": "72"}])
    status, lines = convert(tmp_path, "gsm8k", file, "--leave-out")
    assert status == 0 and len(lines) == 1
    assert "left out: " in (said := capsys.readouterr().err) and "line 2: answer: must end" in said
    assert cli.data(["convert", "gsm8k", file, "--leave-out", "--output", str(tmp_path / "few")]) == 2
    said = capsys.readouterr().err
    assert "left out: " in said and "got validation=0.1 of 1 usable lines; give more lines or other parts" in said
    assert not list(tmp_path.glob("few*"))


def test_options_of_other_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "in.jsonl", [TALK])
    assert convert(tmp_path, "convai2", file, "--annotations", "keep")[0] == 2
    assert "--annotations: requires the format gsm8k, got convai2" in capsys.readouterr().err
    assert convert(tmp_path, "convai2", file, "--columns", "post=a")[0] == 2
    assert "--columns: requires the format tweets, got convai2" in capsys.readouterr().err
    assert convert(tmp_path, "tweets", file, "--columns", "pots=a")[0] == 2
    assert "--columns: must be NAME=COLUMN with a NAME of post, reply" in capsys.readouterr().err


def test_a_file_that_is_read_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "out-all.jsonl", [CLIPS])
    assert convert(tmp_path, "gsm8k", file)[0] == 2
    assert "--output: must not replace a file that is read" in capsys.readouterr().err
    assert json.loads(Path(file).read_text()) == CLIPS
    edited = written(tmp_path / "in.jsonl", [CLIPS])
    Path(file).write_text("edited by hand\n")
    assert convert(tmp_path, "gsm8k", edited, "--seed", "1")[0] == 2
    assert "out-all.jsonl exists, with other lines" in capsys.readouterr().err
    assert Path(file).read_text() == "edited by hand\n"


def test_parts_share_no_post_and_the_same_likes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"tweet": f"post {i // 2}", "reply": f"r{i}", "reply_likes": i // 2 * 37 % 101, "tweet_likes": 1}
        for i in range(400)
    ]
    file = written(tmp_path / "in.jsonl", lines)
    output = str(tmp_path / "data" / "replies")
    assert cli.data(["convert", "tweets", file, "--output", output]) == 0
    parts = {name: read_jsonl(f"{output}-{name}.jsonl") for name in ("train", "validation", "test")}
    assert [len(part) for part in parts.values()] == [320, 40, 40]
    assert "replies-train.jsonl: 320 lines" in capsys.readouterr().out
    posts = [{line["post"] for line in part} for part in parts.values()]
    assert sum(map(len, posts)) == 200 and sum(map(len, parts.values())) == 400
    likes = sorted(line["reply_likes"] for line in lines)
    quartiles = [likes[-1 + 100 * q] for q in (1, 2, 3)]
    for part in parts.values():
        for low, high in zip([-1, *quartiles], [*quartiles, 999], strict=True):
            share = sum(low < line["likes"] <= high for line in part) / len(part)
            assert abs(share - 0.25) <= 4 / len(part)  # two posts of two replies


def test_one_persona_is_in_one_part(tmp_path: Path) -> None:
    lines = [{"question": f"persona: fact {i % 30}. context: Q: {i} R:", "answers": ["a"]} for i in range(300)]
    output = str(tmp_path / "out")
    assert cli.data(["convert", "convai2", written(tmp_path / "in.jsonl", lines), "--output", output]) == 0
    parts = [read_jsonl(f"{output}-{name}.jsonl") for name in ("train", "validation", "test")]
    personas = [{line["prompt"].split("context")[0] for line in part} for part in parts]
    assert [len(part) for part in parts] == [240, 30, 30] and [len(names) for names in personas] == [24, 3, 3]
    assert len(set.union(*personas)) == 30


@pytest.mark.parametrize("shares", [[0.8, 0.1, 0.1], [0.5, 0.3, 0.15, 0.05], [0.3, 0.7], [1.0], [0.2] * 5, [1 / 3] * 3])
def test_dealing_gives_every_part_its_share_after_every_place(shares: list[float]) -> None:
    places = deal(500, shares)
    for part, share in enumerate(shares):
        for place in range(1, 501):
            assert abs(places[:place].count(part) - Fraction(share) * place) <= 1


def test_two_parts_get_the_rounded_share() -> None:
    for ratio in (0.3, 0.5, 0.81):
        firsts = [part == 0 for part in deal(300, [ratio, round(1 - ratio, 12)])]
        exact = Fraction(repr(ratio))
        assert [sum(firsts[:n]) for n in range(301)] == [int(exact * n + Fraction(1, 2)) for n in range(301)]


def test_a_file_is_split_into_as_many_parts_as_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "in.jsonl", [{"n": i, "of": i // 4} for i in range(100)])
    assert cli.data(["split", file, "--by", "n", "--into", "a=0.5", "b=0.3", "c=0.15", "d=0.05"]) == 0
    parts = [read_jsonl(tmp_path / f"in.{name}.jsonl") for name in "abcd"]
    assert [len(part) for part in parts] == [50, 30, 15, 5]
    assert sorted(line["n"] for part in parts for line in part) == list(range(100))
    for part, share in zip(parts, (0.5, 0.3, 0.15, 0.05), strict=True):
        for stratum in range(4):
            assert abs(sum(line["n"] // 25 == stratum for line in part) - 25 * share) < 2
    assert cli.data(["split", file, "--into", "a=0.5", "b=0.5", "--together", "of", "--overwrite"]) == 0
    first, second = ({line["of"] for line in read_jsonl(tmp_path / f"in.{name}.jsonl")} for name in "ab")
    assert not first & second and len(first | second) == 25
    capsys.readouterr()
    assert cli.data(["split", file, "--into", "a=0.999", "b=0.001"]) == 2
    assert "--into: must leave lines to every part, got b=0.001 of 100 usable lines" in capsys.readouterr().err
    few = written(tmp_path / "few.jsonl", [{"of": i % 3} for i in range(100)])
    assert cli.data(["split", few, "--into", "a=0.9", "b=0.1", "--together", "of"]) == 2
    wanted = "got b=0.1 of 100 usable lines in 3 groups that stay together; give more groups or other parts"
    assert wanted in capsys.readouterr().err
    assert cli.data(["split", file, "--together", "off"]) == 2
    assert "--together: 'off' must be a column of every line; the nearest is 'of'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.data(["split", file, "--into", "a=1", "--ratio", "0.5"])


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["a"], "--into: must be NAME=SHARE, .* got 'a'"),
        (["a=x"], "got 'a=x'"),
        (["a=nan"], "got 'a=nan'"),
        (["a=0", "b=1"], "got 'a=0'"),
        (["../a=1"], "got '../a=1'"),
        (["a=0.5", "a=0.5"], "must name each part once, got 'a' again"),
        (["a=0.5", "b=0.4"], r"must sum to 1, got 0.9 of"),
    ],
)
def test_bad_shares_are_named(assignments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_shares(assignments)


def test_equal_lines_stay_themselves_without_a_column() -> None:
    parts = split_together([{"a": 1}] * 10, [0.0] * 10, {"x": 0.5, "y": 0.5}, 1, 0, None)
    assert [len(part) for part in parts.values()] == [5, 5]


def test_line_separators_within_texts_do_not_end_a_line(tmp_path: Path) -> None:
    lines = [{"prompt": "a\u2028b\u0085c\u2029d"}, {"prompt": "e"}]
    write_jsonl(tmp_path / "a.jsonl", lines)
    assert read_jsonl(tmp_path / "a.jsonl") == lines
