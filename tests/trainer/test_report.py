"""The report of finished, killed and hostile runs: its first sentence, its sections, and its figures."""

from __future__ import annotations

import html.parser
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from grpo_trainer.report import page
from grpo_trainer.report.run_folder import RunFolder
from grpo_trainer.report.run_page import summary, write_report

from tests.trainer.run_folders import change, change_recipe, keep, write

VOID = {"meta", "use"}
ALLOWED = VOID | set(
    re.findall(
        r"\w+",
        "html head title style body main section h1 h2 h3 p div span i table thead tbody tr th td figure figcaption "
        "details summary pre svg g path text defs clippath rect",
    )
)
HOSTILE = "<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(2)>\x00\x1b[31m\x07\u202egnp.$\\frac{$_{{7*7}}"


class Reader(html.parser.HTMLParser):
    """Elements of the page, and the text outside of style sheets."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.labels: list[str] = []
        self.texts: list[str] = []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        assert all(str(value).startswith("#") for name, value in attrs if name == "xlink:href")
        self.labels += [str(value) for name, value in attrs if name == "aria-label"]
        self.open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open[len(self.open) - (tag not in VOID) :] = []

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [] if "style" in self.open else [data]


START = "Exact match .30 to .80 on 20 unseen prompts, 95 % interval of the gain +.30 to +.70, in 45 steps of grpo"


def each_prompt(folder: Path, edit: Callable[[Any, int], object]) -> None:
    """Edits each prompt of each evaluation, given the step of the evaluation."""
    change(folder, lambda e: [edit(line, e["step"]) for line in e["prompts"]])


def killed(folder: Path) -> None:
    for name in ("metrics", "evaluations"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"kind": "tr')


def killed_at_once(folder: Path) -> None:
    for name in ("metrics", "evaluations", "events"):
        (folder / f"{name}.jsonl").unlink()


def resumed(folder: Path) -> None:
    change(folder, lambda line: line.update(time=line["time"] - 20 * (line["step"] > 30)), "metrics")


def sft_alone(folder: Path) -> None:
    change_recipe(folder, "rl", None)
    keep(folder, lambda evaluation: evaluation["split"] == "test" and evaluation["step"] == 45)
    change(folder, lambda e: e.update(phase="sft", step=3))


def unscored(folder: Path) -> None:
    change(folder, lambda line: line.update({key: None for key in line if "/" in key}), "metrics")
    each_prompt(folder, lambda line, _: line.update(reward=None, rewards=[None] * 2))


def continuous(folder: Path) -> None:
    each_prompt(folder, lambda line, step: line.update(reward=0.25 + step / 100 + line["reward"] / 10))
    change(folder, lambda e: e["metrics"].update(reward=0.25))


def calibrated(folder: Path) -> None:
    change(folder, lambda e: e.update(solved=0.3))
    change_recipe(folder, "evaluation.solved_quantile", 0.75)
    each_prompt(folder, lambda line, _: line.update(reward=0.4 * line["reward"]))


def chat(folder: Path) -> None:
    each_prompt(folder, lambda line, _: line.update(prompt=[{"role": "user", "content": line["prompt"]}]))


def hostile(folder: Path) -> None:
    change_recipe(folder, "name", HOSTILE)
    change_recipe(folder, "rl.algorithm.name", "<b>grpo")
    change(folder, lambda line: line.update({f"rewards/{HOSTILE}": 0.1, f"train/{HOSTILE}_$a": 0.2}), "metrics")
    change(folder, lambda event: event.update({"event": HOSTILE, HOSTILE: HOSTILE}), "events")
    change(folder, lambda e: e["prompts"][0].update(prompt=HOSTILE, greedy=HOSTILE, samples=[HOSTILE] * 2))
    change(folder, lambda e: e.update(embedder=HOSTILE, metrics=e["metrics"] | {HOSTILE: 1.0}))


# name: start of the page's sentence, a text of the page, a change to a finished run, and arguments of `write`
CASES: dict[str, tuple[str, str, Callable[[Path], object] | None, dict[str, Any]]] = {
    "worse": (
        "Exact match .80 to .30 on 20 ",
        "the gain \u2212.70 to \u2212.30, in",
        None,
        {"shares": (0.8, 0.5, 0.3)},
    ),
    "no change": ("Exact match .30 to .35", "+.00 to +.15 (no significant change)", None, {"shares": (0.3, 0.5, 0.35)}),
    "killed": (
        "Exact match .30 to .50 on 20 validation prompts, 95 % interval of the gain +.05 to +.40 (p = 0.12: too few "
        "prompts differ), in 20 steps of grpo; 25 of 30 RL steps are done.",
        "Could not be read: metrics.jsonl line 28, evaluations.jsonl line 4.",
        killed,
        {"steps": 25, "finished": False},
    ),
    "killed at once": (
        "There are no evaluations before and after training; 0 of 45 RL steps are done.",
        "path: tiny",
        killed_at_once,
        {},
    ),
    "resumed": (START, "duration 0:00:59", resumed, {}),
    "without a recipe": (
        "Exact match .30 to .80",
        "not be read: recipe.yaml",
        lambda folder: (folder / "recipe.yaml").write_text("{"),
        {},
    ),
    "sft alone": (
        "Exact match .80 on 20 unseen prompts after 3 steps of SFT; nothing was evaluated before.",
        "SFT, all metrics train/loss",
        sft_alone,
        {},
    ),
    "unscored": ("No prompt has a reward before and after 45 steps of grpo.", "", unscored, {}),
    "continuous": ("Mean reward .28 to .78 on 20", "responses to validation prompts exact reward", continuous, {}),
    "calibrated": (START, "correct from a reward of 0.300000 on: the quantile 0.75", calibrated, {}),
    "other prompts": (
        "The evaluations before and after 45 steps of grpo do not compare: compare: before must have each prompt of",
        "",
        lambda folder: each_prompt(folder, lambda line, step: line.update(prompt=f"{step} {line['prompt']}")),
        {},
    ),
    "chat": (START, "user: Ann has 0 shells", chat, {}),
    "hostile": ("Exact match", "<script>alert(1)</script>\"'&amp;<img src=x", hostile, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_run_has_a_page_that_opens_with_its_result(name: str, tmp_path: Path) -> None:
    sentence, text, edit, arguments = CASES[name]
    folder = write(tmp_path / "run", **arguments)
    if edit is not None:
        edit(folder)
    reader = Reader(write_report(folder))
    assert summary(folder).splitlines()[0].startswith(sentence)
    assert reader.text.partition(sentence)[0].endswith(f"{page._visible(RunFolder(folder).name)} ")
    assert text in reader.text
    assert ("{{7*7}}" in reader.text and "\u241b[31m" in reader.text) == (name == "hostile")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]|nan", "".join(reader.texts))


def test_sections_and_figures(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    path = write_report(folder)
    text, reader = path.read_text(), Reader(path)
    assert "http" not in text.replace("http-equiv", "")
    order = [START, "Greedy responses to validation prompts", "Responses before and after", "Before and after"]
    order += ["Evaluations", "Validation, all metrics", "RL, all metrics", "train/kl ", "Events", "Recipe"]
    places = [reader.text.index(title) for title in order]
    assert places == sorted(places)
    examples = reader.text[places[2] : places[3]]
    assert "before, reward 1.000 #### 0" in examples and "after, reward 1.000 #### 45" in examples
    assert examples.count("Ann has") == 4
    assert "vendi 1.8000 2.3000 +0.5000 +0.3000 to +0.7000 0.0020 10 0 10" in reader.text
    assert "checkpoint 2 phase sft" in reader.text and "vendi" in summary(folder).splitlines()[-1]
    labels = reader.labels
    assert "Greedy responses to validation prompts: exact from 0.3 to 0.8" in labels
    assert "time: time/generate from 1.1 to 1.1; time/model from 0.8 to 0.8; time/step from 2.01 to 2.45" in labels
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == len(labels) > 12
    for svg in svgs:  # the colours are those of the page's theme
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000", "#ffffff"}
        assert re.search(r"var\(--c\d\)", svg) and "var(--soft)" in svg
    files = ["evaluations.jsonl", "events.jsonl", "metrics.jsonl", "recipe.yaml", "report.html"]
    assert sorted(file.name for file in folder.iterdir()) == files
    assert write_report(folder).read_text() == text
    with pytest.raises(FileNotFoundError, match=r"^report: folder must have a recipe.yaml or .*; there are .*run$"):
        write_report(tmp_path)


def test_gaps_are_gaps_and_points_between_them_are_seen() -> None:
    nan = math.nan
    y = pd.Series([1.0, nan, 3.0, 8.0] * 11)
    assert page.smoothed(y)[:4].tolist() == pytest.approx([1.0, nan, 5.5, 4.0], nan_ok=True)
    assert page.smoothed(y).isna().tolist() == y.isna().tolist()
    alone = pd.Series([nan] * 50 + [1.0] + [nan] * 50)
    (figure,) = page.draw_curves("", {"": page.Curve(alone)})
    assert len(re.findall(r"<use [^>]*var\(--c0\)", figure.svg)) == 1
    assert page.draw_curves("", {"": page.Curve(alone * nan)}) == []


def test_numbers_and_long_texts() -> None:
    assert page.format_number(math.nan) == "none" and page.format_number(-1234.5, 1) == "\u22121,234.5"
    assert page.format_number(0.5, 2, "+") == "+0.50"
    assert page.shorten("x" * 4_000).endswith("x … and 1,000 more")
    assert len(page.shorten("x" * 4_000)) < 3_100
