"""The report of complete, killed, empty and hostile runs: its first sentence, its sections, and its figures."""

from __future__ import annotations

import html.parser
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from grpo_trainer.monitor import map_of
from grpo_trainer.report import page, summary, write_report
from grpo_trainer.report.page import format_number, shorten, smoothed
from grpo_trainer.report.run_folder import RunFolder

from tests.trainer import run_folders
from tests.trainer.run_folders import change, change_recipe, write

VOID = {"meta", "use"}
ALLOWED = VOID | set(
    re.findall(
        r"\w+",
        "html head title style body main section h1 h2 h3 p div span i table thead tbody tr th td figure figcaption "
        "details summary pre svg g path text defs clippath rect",
    )
)
HOSTILE = (
    "<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(2)>\x00\x1b[31m\x07\u202egnp.\ud800$\\frac{$_{{7*7}}"
)


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


def keep(condition: Callable[[Any], bool]) -> Callable[[Path], None]:
    """Keeps the evaluations that meet a condition."""

    def edit(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        run_folders.write_lines(folder / "evaluations.jsonl", list(filter(condition, lines)))

    return edit


def is_final_test(evaluation: Any) -> bool:
    return evaluation["split"] == "test" and evaluation["step"] == 45


def append(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def each_line(name: str, edit: Callable[[Any], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder, edit, name)


def each_prompt(edit: Callable[[Any, int], object]) -> Callable[[Path], object]:
    """Edits each prompt of each evaluation, given the step of the evaluation."""
    return lambda folder: change(folder, lambda e: [edit(line, e["step"]) for line in e["prompts"]])


def hostile(folder: Path) -> None:
    change_recipe(folder, "name", HOSTILE.encode("utf-8", "replace").decode())
    change_recipe(folder, "rl.algorithm.name", "<b>grpo")
    change(folder, lambda line: line.update({f"rewards/{HOSTILE}": 0.1, f"train/{HOSTILE}_$a": 0.2}), "metrics")
    change(folder, lambda event: event.update({"event": HOSTILE, HOSTILE: HOSTILE}), "events")

    def edit(e: Any) -> None:
        e["prompts"][0] |= {"prompt": HOSTILE, "greedy": HOSTILE, "samples": [HOSTILE] * 2}
        e["metrics"][HOSTILE] = 1.0
        e["embedder"] = HOSTILE
        e["map"] = run_folders.made_map(2, HOSTILE)
        e["map"]["responses"][0]["text"] = HOSTILE
        e["map"]["responses"][1] |= {"cluster": HOSTILE, "xy": HOSTILE, "reward": HOSTILE}

    change(folder, edit)


def odd(folder: Path) -> None:
    """Values that no run writes."""
    each_prompt(lambda line, _: line.update(reward={}, rewards=3, samples=4, measures=[]))(folder)
    change(folder, lambda e: e.update(map={"responses": [3, {"xy": [1]}, {"xy": [1, None]}], "explained": 3}))
    change(
        folder, lambda line: line.update({"train/kl_mean": 10**400, "time": "late", "train/lr": math.inf}), "metrics"
    )
    append("metrics.jsonl", '[1]\n\n{"kind": "train", "phase": "rl", "step": null}\n')(folder)
    append("evaluations.jsonl", '{"phase": "rl", "step": 9, "split": "test", "metrics": [1], "prompts": [1, {}]}\n')(
        folder
    )
    change_recipe(folder, "evaluation", "x")


START = "Exact match .30 to .80 on 20 unseen prompts, 95 % interval of the gain +.30 to +.70, in 45 steps of grpo"
AFTER = "Exact match .80 on 20 unseen prompts after {}; nothing was evaluated before."


class Case(NamedTuple):
    """A run that differs from a finished one, the start of its page's sentence, and texts of the page."""

    sentence: str
    texts: tuple[str, ...]
    edits: tuple[Callable[[Path], object], ...]
    arguments: dict[str, Any]


def case(sentence: str, *texts: str, edits: tuple[Callable[[Path], object], ...] = (), **arguments: Any) -> Case:
    return Case(sentence, texts, edits, arguments)


CASES = {
    "finished": case(f"{START}.", "Responses before and after", "Map of one prompt", "similarity_groups/share"),
    "plain": case(f"{START}.", "train/entropy", rich=False),
    "worse": case(
        "Exact match .80 to .30 on 20 unseen prompts, 95 % interval of the gain \u2212.70 to \u2212.30, in",
        shares=(0.8, 0.5, 0.3),
    ),
    "no change": case(
        "Exact match .30 to .35 on 20 unseen prompts, 95 % interval of the gain +.00 to +.15 (no significant change)",
        shares=(0.3, 0.5, 0.35),
    ),
    "few prompts differ": case("Exact match .30 to .50", "too few prompts differ", shares=(0.3, 0.5, 0.5)),
    "killed": case(
        "Exact match .30 to .50 on 20 validation prompts, 95 % interval of the gain +.05 to +.40 (p = 0.12: too few "
        "prompts differ), in 20 steps of grpo; 25 of 30 RL steps are done.",
        "Could not be read: metrics.jsonl line 28, evaluations.jsonl line 4.",
        edits=(append("metrics.jsonl", '{"kind": "tr'), append("evaluations.jsonl", '{"metrics": {"exa')),
        steps=25,
        finished=False,
    ),
    "killed before its first step": case(
        "There are no evaluations before and after training; 0 of 45 RL steps are done.",
        "path: tiny",
        edits=tuple(remove(f"{name}.jsonl") for name in ("metrics", "evaluations", "events")),
    ),
    "resumed": case(
        START,
        "duration 0:00:59",
        edits=(each_line("metrics", lambda line: line.update(time=line["time"] - 20 * (line["step"] > 30))),),
    ),
    "without evaluations": case("There are no", "train/entropy", edits=(remove("evaluations.jsonl"),)),
    "without a recipe": case(
        "Exact match .30 to .80", "not be read: recipe.yaml", edits=(lambda f: (f / "recipe.yaml").write_text("{"),)
    ),
    "validation alone": case(START.replace("unseen", "validation"), edits=(keep(lambda e: e["split"] != "test"),)),
    "evaluated after training alone": case(AFTER.format("45 steps of grpo"), edits=(keep(is_final_test),)),
    "sft alone": case(
        AFTER.format("3 steps of SFT"),
        "SFT, all metrics train/loss",
        edits=(
            lambda f: change_recipe(f, "rl", None),
            keep(is_final_test),
            each_line("evaluations", lambda e: e.update(phase="sft", step=3)),
        ),
    ),
    "one prompt": case(
        "Exact match .00 to 1.00 on 1 unseen prompts, too few for an interval, in 45 steps of grpo.",
        edits=(each_line("evaluations", lambda e: e.update(prompts=e["prompts"][10:11])),),
    ),
    "half of the rewards NaN": case(
        "Exact match .56 to 1.00 on 9 unseen prompts",
        "11 of 20 prompts have no reward on one side and are excluded.",
        edits=(each_prompt(lambda line, step: line.update(reward=None) if step and "1" in line["prompt"] else None),),
    ),
    "NaN everywhere": case(
        "No prompt has a reward before and after 45 steps of grpo.",
        edits=(
            each_line("metrics", lambda line: line.update(dict.fromkeys(line.keys() - {"kind", "phase"}))),
            each_prompt(lambda line, _: line.update(reward=None, rewards=[None] * 2)),
        ),
    ),
    "continuous reward": case(
        "Mean reward .28 to .78 on 20 unseen prompts",
        "Greedy responses to validation prompts exact reward",
        edits=(
            each_prompt(lambda line, step: line.update(reward=0.25 + step / 100 + line["reward"] / 10)),
            each_line("evaluations", lambda e: e["metrics"].update(reward=0.25)),
        ),
    ),
    "calibrated": case(
        START,
        "correct from a reward of 0.300000 on: the quantile 0.75",
        edits=(
            each_line("evaluations", lambda e: e.update(solved=0.3)),
            lambda f: change_recipe(f, "evaluation.solved_quantile", 0.75),
            each_prompt(lambda line, step: line.update(reward=0.4 * line["reward"])),
        ),
    ),
    "other prompts": case(
        "The evaluations before and after 45 steps of grpo do not compare: compare: before must have each prompt of",
        edits=(each_prompt(lambda line, step: line.update(prompt=f"{step} {line['prompt']}")),),
    ),
    "chat": case(
        START,
        "user: Ann has 0 shells",
        edits=(each_prompt(lambda line, _: line.update(prompt=[{"role": "user", "content": line["prompt"]}])),),
    ),
    "hostile": case("Exact match", "<script>alert(1)</script>\"'&amp;<img", "{{7*7}}", "\u241b[31m", edits=(hostile,)),
    "odd": case("No prompt has a reward", "Could not be read: metrics.jsonl line 48.", edits=(odd,)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_run_has_a_page_that_opens_with_its_result(name: str, tmp_path: Path) -> None:
    sentence, texts, edits, arguments = CASES[name]
    folder = write(tmp_path / "run", **arguments)
    for edit in edits:
        edit(folder)
    reader = Reader(write_report(folder))
    assert summary(folder).splitlines()[0].startswith(sentence)
    assert reader.text.partition(sentence)[0].endswith(f"{page._visible(RunFolder(folder).name)} ")
    for text in texts:
        assert text in reader.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800]|nan", "".join(reader.texts))


def test_sections_in_their_order(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    reader = Reader(write_report(folder))
    order = [
        "Exact match .30",
        "Greedy responses to validation prompts",
        "Responses before and after",
        "Before and after",
    ]
    order += ["Evaluations", "Validation, all metrics", "RL, all metrics", "train/kl ", "Map of one prompt's"]
    order += ["Time of a step", "Events", "Recipe"]
    places = [reader.text.index(text) for text in order]
    assert places == sorted(places)
    examples = reader.text[places[2] : places[3]]
    assert "before, reward 1.000 #### 0" in examples and "after, reward 1.000 #### 45" in examples
    assert examples.count("Ann has") == 2  # evaluation.tracked
    assert "vendi 1.8000 2.3000 +0.5000 +0.3000 to +0.7000 0.0020 10 0 10" in reader.text
    assert "checkpoint 2 phase sft" in reader.text
    assert "vendi" in summary(folder).splitlines()[-1]
    text = (folder / "report.html").read_text()
    assert "http" not in text.replace("http-equiv", "")
    written = ["evaluations.jsonl", "events.jsonl", "metrics.jsonl", "recipe.yaml", "report.html"]
    assert sorted(file.name for file in folder.iterdir()) == written
    write_report(folder)
    assert (folder / "report.html").read_text() == text


def test_figures_have_two_themes_and_say_their_values(tmp_path: Path) -> None:
    path = write_report(write(tmp_path / "run"))
    labels = Reader(path).labels
    assert "Greedy responses to validation prompts: exact from 0.3 to 0.8" in labels
    assert any(re.match(r"time: time/generate from .*; time/model from .*; time/step from ", label) for label in labels)
    svgs = re.findall(r"<svg.*?</svg>", path.read_text(), re.DOTALL)
    assert len(svgs) == len(labels) > 15
    for svg in svgs:
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000", "#ffffff"}
        assert re.search(r"var\(--c\d\)", svg) and "var(--soft)" in svg


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "inside")
    with pytest.raises(
        FileNotFoundError, match=r"^report: folder must have a recipe.yaml or metrics.jsonl, got .*inside$"
    ):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def test_the_time_of_other_runs_stands_beside(tmp_path: Path) -> None:
    folders = [write(tmp_path / name, name=name, steps=3, rich=False) for name in ("here", "there")]
    for folder, seconds in zip(folders, (1.25, 7.125), strict=True):
        change(folder, lambda line, s=seconds: line.update({"time/step": 2 * s, "time/model": s}), "metrics")
    text = Reader(write_report(folders[0], folders[1:])).text
    assert "seconds per step here there" in text and "time/model 1.250 7.125" in text


def test_gaps_are_gaps_and_points_between_them_are_seen() -> None:
    nan = math.nan
    y = pd.Series([1.0, nan, 3.0, 8.0] * 11)
    assert smoothed(y)[:4].tolist() == pytest.approx([1.0, nan, 5.5, 4.0], nan_ok=True)
    assert smoothed(y).isna().tolist() == y.isna().tolist()
    alone = pd.Series([nan] * 50 + [1.0] + [nan] * 50)
    (figure,) = page.draw_curves("", {"": page.Curve(alone)})
    assert len(re.findall(r"<use [^>]*var\(--c0\)", figure.svg)) == 1
    assert page.draw_curves("", {"": page.Curve(alone * nan)}) == []


def test_numbers_and_long_texts() -> None:
    assert format_number(math.nan) == "none" and format_number(-1234.5, 1) == "\u22121,234.5"
    assert format_number(0.5, 2, "+") == "+0.50"
    assert shorten("x" * 4_000).endswith("x … and 1,000 more")


def test_map_keeps_distances_and_does_not_depend_on_signs_or_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.nn.functional.normalize(torch.randn(6, 2, generator=generator, dtype=torch.float64), dim=1)
    turned = flat @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q[:2]
    labels, rewards = torch.arange(6), torch.ones(6)
    line = map_of("p", ["t"] * 6, turned * 7, labels, rewards)
    places = torch.tensor([response["xy"] for response in line["responses"]], dtype=torch.float64)
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(flat, flat), rtol=0, atol=1e-6)
    assert sum(line["explained"]) == pytest.approx(1) and line["explained"][0] >= line["explained"][1]
    again = map_of("p", ["t"] * 6, turned.float(), labels, rewards)
    other = torch.tensor([response["xy"] for response in again["responses"]], dtype=torch.float64)
    torch.testing.assert_close(other, places, rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes_of_a_map_have_a_positive_largest_component(axis: int) -> None:
    pair = torch.full((2, 3), 0.1)
    pair[:, axis] = torch.tensor([0.8, -0.8])
    for rows, first in ((pair, 0), (pair.flip(0), 1)):
        line = map_of("p", ["a", "b"], rows, torch.zeros(2), torch.zeros(2))
        assert line["responses"][first]["xy"][0] > 0.9


def test_map_of_few_or_equal_responses() -> None:
    nan = math.nan
    rows = torch.tensor([[1.0, 0.0], [nan, 0.0], [2.0, 0.0]])
    line = map_of("p", ["a", "b", "c"], rows, torch.tensor([0, -1, 0]), torch.tensor([1.0, nan, 0.5]))
    assert [response["xy"] for response in line["responses"]] == [[0, 0], None, [0, 0]]
    assert [response["reward"] for response in line["responses"]] == [1.0, None, 0.5] and line["explained"] == [0, 0]
    json.dumps(line, allow_nan=False)
    nobody = map_of("p", ["a"], torch.full((1, 3), nan), torch.tensor([-1]), torch.tensor([nan]))
    assert nobody["responses"] == [{"text": "a", "cluster": -1, "reward": None, "xy": None}]


def test_equal_responses_are_listed_once_and_drawn_as_one(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8]])
    line = map_of("p", ["a", "a", "b"], rows, torch.tensor([0, 0, 1]), torch.tensor([1.0, 0.0, 0.5]))
    folder = write(tmp_path / "run", steps=2)
    change(folder, lambda e: e.update(map=line))
    reader = Reader(write_report(folder))
    assert "1: 2 times, cluster 0, reward 0.500 a 2: cluster 1, reward 0.500 b" in reader.text
    assert "3 responses, 2 distinct" in reader.text
    (label,) = {label for label in reader.labels if label.startswith("axis 2")}
    assert re.search(r"over axis 1, 100 % of the variance: 1 at -0.298, -?\d\S*; 2 at 0.596, ", label)
