"""Pages: the report of finished, killed and hostile runs, maps of responses, and comparisons.

Faults they are there for: a page that breaks, or runs what a run's files hold; a sentence that says more than the
intervals; a map that loses distances; an interval of unpaired prompts or seeds; a prompt, a seed or a run that is left
out without a word; a measure that is compared although it is no mean over prompts.
"""

from __future__ import annotations

import html.parser
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from grpo_trainer.report import page
from grpo_trainer.report.compare import bootstrap_interval, compare, sign_flip_p, t_interval
from grpo_trainer.report.comparison import differences, select, write_comparison, write_evaluation
from grpo_trainer.report.run_folder import Evaluated, RunFolder
from grpo_trainer.report.run_page import summary, write_report
from grpo_trainer.response_map import map_of

from tests.trainer.run_folders import change, change_recipe, keep, write

VOID = {"meta", "use"}
ELEMENTS = """html head title style body main section h1 h2 h3 p div span i table thead tbody tr th td figure figcaption
    details summary pre svg g path text defs clippath rect"""
ALLOWED = VOID.union(ELEMENTS.split())
HOSTILE = "<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(2)>\x00\x1b[31m\x07\u202egnp.$\\frac{$_{{7*7}}"
NAN = math.nan


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

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts += [] if "style" in self.open else [data]


# The report of a run

START = "Exact match .30 to .80 on 20 unseen prompts, 95 % interval of the gain +.30 to +.70, in 45 steps of grpo"
NEVER = (
    "There are no evaluations before and after training; 45 of 45 RL steps are done. The mean reward of the sampled "
    "responses rose: .23 in the first 4 steps, .64 in the last."
)
AT_ONCE = "There are no evaluations before and after training; 0 of 45 RL steps are done."


def each_prompt(folder: Path, edit: Callable[[Any, int], object]) -> None:
    """Edits each prompt of each evaluation, given the step of the evaluation."""
    change(folder, lambda e: [edit(line, e["step"]) for line in e["prompts"]])


def killed_at_once(folder: Path) -> None:
    for name in ("metrics", "evaluations", "events"):
        (folder / f"{name}.jsonl").unlink()


def never_evaluated(folder: Path) -> None:
    (folder / "evaluations.jsonl").unlink()


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


def rewarded(folder: Path, component: str, is_own: bool) -> None:
    if is_own:
        change_recipe(folder, "rl.rewards", [{"name": "my_module:my_reward"}])
    change(folder, lambda e: e["metrics"].update({f"components/{component}": 0.5}))


def calibrated_chats_of_a_resumed_run(folder: Path) -> None:
    change(folder, lambda line: line.update(time=line["time"] - 20 * (line["step"] > 30)), "metrics")
    change(folder, lambda e: e.update(solved=0.3))
    change_recipe(folder, "evaluation.solved_quantile", 0.75)
    each_prompt(folder, lambda line, _: line.update(reward=0.4 * line["reward"]))
    each_prompt(folder, lambda line, _: line.update(prompt=[{"role": "user", "content": line["prompt"]}]))


def hostile(folder: Path) -> None:
    change_recipe(folder, "name", HOSTILE)
    change_recipe(folder, "rl.algorithm.name", "<b>grpo")
    change(folder, lambda line: line.update({f"rewards/{HOSTILE}": 0.1, f"train/{HOSTILE}_$a": 0.2}), "metrics")
    change(folder, lambda event: event.update({"event": HOSTILE, HOSTILE: HOSTILE}), "events")
    change(folder, lambda e: e["prompts"][0].update(prompt=HOSTILE, greedy=HOSTILE, samples=[HOSTILE] * 2))
    change(folder, lambda e: e.update(embedder=HOSTILE, metrics=e["metrics"] | {HOSTILE: 1.0}))


def without_a_recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("{")


def other_prompts(folder: Path) -> None:
    each_prompt(folder, lambda line, step: line.update(prompt=f"{step} {line['prompt']}"))


def unchanged(folder: Path) -> None:
    """The run as it was written."""


# a change to a run, its arguments, the start of the page's sentence, and texts of the page
CASES: list[tuple[Callable[[Path], None], tuple[float, ...], str, tuple[str, ...]]] = [
    (unchanged, (0.8, 0.5, 0.3), "Exact match .80 to .30 on 20 ", ("the gain \u2212.70 to \u2212.30, in",)),
    (unchanged, (0.3, 0.5, 0.35), "Exact match .30 to .35", ("+.00 to +.15 (no significant change)",)),
    (killed_at_once, (), AT_ONCE, ("path: tiny",)),
    (never_evaluated, (), NEVER, ()),
    (without_a_recipe, (), "Exact match .30 to .80", ("not be read: recipe.yaml",)),
    (sft_alone, (), "Exact match .80 on 20 unseen prompts after 3 steps of SFT; nothing was evaluated before.", ()),
    (unscored, (), "No prompt has a reward before and after 45 steps of grpo.", ()),
    (continuous, (), "Mean reward .28 to .78 on 20", ("responses to validation prompts exact reward",)),
    (lambda folder: rewarded(folder, "length", is_own=True), (), "Mean reward .30 to .80 on 20", ()),
    (lambda folder: rewarded(folder, "correct", is_own=True), (), "Exact match .30 to .80 on 20", ()),
    (lambda folder: rewarded(folder, "f1", is_own=False), (), "Mean reward .30 to .80 on 20", ()),
    # by version 0.1.0, whose exact reported no component
    (lambda run: change_recipe(run, "rl.rewards", [{"name": n} for n in ("exact", "a:b")]), (), "Mean reward .30", ()),
    (other_prompts, (), "The evaluations before and after 45 steps of grpo do not compare: compare: before must ", ()),
    (hostile, (), "Exact match", ("<script>alert(1)</script>\"'&amp;<img src=x", "{{7*7}}", "\u241b[31m")),
    (
        calibrated_chats_of_a_resumed_run,
        (),
        START,
        ("duration 0:00:59", "correct from a reward of 0.300000 on: the quantile 0.75", "user: Ann has 0 shells"),
    ),
]


def opened(folder: Path, sentence: str) -> Reader:
    """The page of a run, which opens with a sentence."""
    reader = Reader(write_report(folder))
    assert summary(folder).splitlines()[0].startswith(sentence)
    assert reader.text.partition(sentence)[0].endswith(f"{page._visible(RunFolder(folder).name)} ")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]|nan", "".join(reader.texts))
    return reader


@pytest.mark.parametrize(("edit", "shares", "sentence", "texts"), CASES)
def test_every_run_has_a_page_that_opens_with_its_result(
    edit: Callable[[Path], None], shares: tuple[float, ...], sentence: str, texts: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", *shares)
    edit(folder)
    reader = opened(folder, sentence)
    assert all(text in reader.text for text in texts)


def test_the_page_of_a_killed_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", steps=25, left=5)
    for name in ("metrics", "evaluations"):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write('{"kind": "tr')
    interval = "95 % interval of the gain +.05 to +.40 (p = 0.12: too few prompts differ)"
    sentence = f"Exact match .30 to .50 on 20 validation prompts, {interval}, in 20 steps of grpo; 25 of 30 RL steps"
    assert "Could not be read: metrics.jsonl line 28, evaluations.jsonl line 4." in opened(folder, sentence).text


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
    assert "Greedy responses to validation prompts: exact from 0.3 to 0.8" in reader.labels
    times = "time: time/generate from 1.1 to 1.1; time/model from 0.8 to 0.8; time/step from 2.01 to 2.45"
    assert times in reader.labels
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == len(reader.labels) > 12
    for svg in svgs:  # the colours are those of the page's theme
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {"#000000", "#ffffff"}
        assert re.search(r"var\(--c\d\)", svg) and "var(--soft)" in svg
    assert len([*folder.iterdir()]) == 5 and write_report(folder).read_text() == text
    with pytest.raises(FileNotFoundError, match=r"^report: folder must have a recipe.yaml or .*; there are .*run$"):
        write_report(tmp_path)


def test_gaps_numbers_and_long_texts() -> None:
    """Gaps stay gaps, and points between them are seen."""
    y = pd.Series([1.0, NAN, 3.0, 8.0] * 11)
    assert page.smoothed(y)[:4].tolist() == pytest.approx([1.0, NAN, 5.5, 4.0], nan_ok=True)
    assert page.smoothed(y).isna().tolist() == y.isna().tolist()
    alone = pd.Series([NAN] * 50 + [1.0] + [NAN] * 50)
    (figure,) = page.draw_curves("", {"": page.Curve(alone)})
    assert len(re.findall(r"<use [^>]*var\(--c0\)", figure.svg)) == 1
    assert page.draw_curves("", {"": page.Curve(alone * NAN)}) == []
    assert page.format_number(NAN) == "none" and page.format_number(-1234.5, 1) == "\u22121,234.5"
    assert page.shorten("x" * 4_000).endswith("x … and 1,000 more")


# Maps of responses


def test_a_map_keeps_distances_and_does_not_depend_on_signs_or_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.nn.functional.normalize(torch.randn(6, 2, generator=generator, dtype=torch.float64), dim=1)
    turned = flat @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q[:2]
    places = []
    for rows in (turned * 7, turned.float()):
        drawn = map_of("p", ["t"] * 6, rows, torch.arange(6), torch.ones(6))
        places.append(torch.tensor([response["xy"] for response in drawn["responses"]], dtype=torch.float64))
        assert sum(drawn["explained"]) == pytest.approx(1) and drawn["explained"][0] >= drawn["explained"][1]
    torch.testing.assert_close(torch.cdist(places[0], places[0]), torch.cdist(flat, flat), rtol=0, atol=1e-6)
    torch.testing.assert_close(places[1], places[0], rtol=0, atol=1e-5)
    pair = torch.tensor([[0.1, 0.8, 0.1], [0.1, -0.8, 0.1]])
    for rows, first in ((pair, 0), (pair.flip(0), 1)):  # the largest component of an axis is positive
        drawn = map_of("p", ["a", "b"], rows, torch.zeros(2), torch.zeros(2))
        assert drawn["responses"][first]["xy"][0] > 0.9


def test_the_report_lists_equal_responses_once_and_those_without_a_point(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, 0.0], [NAN, 0.0], [2.0, 0.0]])
    line = map_of("p", ["a", "b", "c"], rows, torch.tensor([0, -1, 0]), torch.tensor([1.0, NAN, 0.5]))
    assert [response["xy"] for response in line["responses"]] == [[0, 0], None, [0, 0]]
    assert [response["reward"] for response in line["responses"]] == [1.0, None, 0.5] and line["explained"] == [0, 0]
    nobody = map_of("p", ["a"], torch.full((1, 3), NAN), torch.tensor([-1]), torch.tensor([NAN]))
    assert nobody["responses"] == [{"text": "a", "cluster": -1, "reward": None, "xy": None}]
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [NAN, 0.0]])
    drawn = map_of("p", ["a", "a", "b", "<c>"], rows, torch.tensor([0, 0, 1, -1]), torch.tensor([1.0, 0.0, 0.5, NAN]))
    folder = write(tmp_path / "run", steps=2)
    change(folder, lambda line: line.update(map=drawn))
    reader = Reader(write_report(folder))
    shown = reader.text + " ".join(reader.labels)
    for about in ("1: 2 times, cluster 0, reward 0.500", "2: cluster 1, reward 0.500", "3: excluded from the cluster"):
        assert about in shown
    assert "4 responses, 3 distinct" in shown and "over axis 1, 100 % of the variance: 1 at -0.298" in shown
    assert "<c>" in shown


# Comparisons of two evaluations


def evaluation(rewards: list[float | None], samples: list[list[float]] | None = None) -> dict[str, Any]:
    """An evaluation with a prompt for each reward, and its samples."""
    lines: list[dict[str, Any]] = [{"prompt": f"p{i}", "reward": reward} for i, reward in enumerate(rewards)]
    for line, of_line in zip(lines, samples or [], strict=False):
        line["rewards"] = of_line
    metrics = {"pass@1": 0.0, "pass@2": 0.0, "pass@4": 0.0, "length": 5.0} if samples else {}
    return {"metrics": metrics, "prompts": lines}


def test_counts_means_and_pass_at_k_by_hand() -> None:
    comparison = compare(evaluation([0.0, 1.0, 0.5, 0.5]), evaluation([1.0, 0.5, 0.5, 1.0]))
    reward, exact = comparison.measures["reward"], comparison.measures["exact"]
    assert (reward.before, reward.after, reward.change) == (0.5, 0.75, 0.25)
    assert (reward.higher, reward.lower, reward.equal, reward.prompts) == (2, 1, 1, 4)
    assert (exact.before, exact.after, exact.higher, exact.lower) == (0.25, 0.5, 2, 1)
    table = comparison.table().splitlines()
    assert [line.split()[0] for line in table] == ["measure", "reward", "exact"] and comparison.notes == []
    shown = "0.5000  0.7500  +0.2500  {:+.4f} to {:+.4f}".format(*reward.interval)
    assert shown in table[1] and len({*map(len, table)}) == 1
    samples = [[[1.0, 0, 0, 0, 0], [0.0] * 5], [[1.0, 1, 0, 0, 0], [1.0, 0, 0, 0, 0]]]
    measures = compare(*(evaluation([0.0, 0.0], of) for of in samples)).measures
    # length is no mean over what was written of each prompt
    assert list(measures) == ["reward", "exact", "pass@1", "pass@2", "pass@4"]
    assert measures["pass@2"].before == pytest.approx((1 - math.comb(4, 2) / math.comb(5, 2)) / 2)
    assert measures["pass@2"].after == pytest.approx((1 - 3 / 10 + 1 - 6 / 10) / 2) and measures["pass@4"].higher == 2


def test_solved_decides_correctness_unless_the_evaluation_says_it() -> None:
    sides = evaluation([0.2, 0.6], [[0.2, 0.6]] * 2), evaluation([0.6, 0.7], [[0.6, 0.7]] * 2)

    def shares(solved: float) -> list[tuple[float, float]]:
        measures = compare(*sides, solved=solved).measures
        return [(measures[name].before, measures[name].after) for name in ("exact", "pass@1")]

    assert shares(1.0) == [(0, 0), (0, 0)] and shares(0.6) == [(0.5, 1), (0.5, 1)]
    for side, correct in zip(sides, (1.0, 0.0), strict=True):
        side["prompts"] = [line | {"correct": correct, "right": [correct, 0.0]} for line in side["prompts"]]
    assert shares(0.6) == [(1, 0), (0.5, 0)]


def test_intervals_and_p_values_by_hand() -> None:
    means = sorted(sum(drawn) / 3 for drawn in itertools.product([0.0, 1.0, 4.0], repeat=3))
    # of 27 equally likely outcomes the 2.5 and 97.5 % quantiles are the first and the last
    assert bootstrap_interval([0.0, 1.0, 4.0, NAN]) == pytest.approx((means[0], means[-1]))
    # mean 2, deviation 1, and the table's 4.303 for two degrees of freedom
    reach = 4.302652730 / math.sqrt(3)
    assert t_interval([1.0, 2.0, NAN, 3.0]) == pytest.approx((2 - reach, 2 + reach))
    assert all(map(math.isnan, [*t_interval([1.0]), *bootstrap_interval([1.0, NAN]), *t_interval([])]))
    # of eight sums, only 1 + 2 + 4 and its negative are as large; 5 and 7, with either sign, are at least -1 + 2 + 4
    assert sign_flip_p([1.0, 2.0, 4.0, 0.0]) == pytest.approx(2 / 8)
    assert [sign_flip_p([-1.0, 2.0, 4.0]), sign_flip_p([1.0, 2.0])] == pytest.approx([4 / 8, 2 / 4])
    assert sign_flip_p([0.0] * 5) == sign_flip_p([1.0, 0.0]) == 1 and math.isnan(sign_flip_p([]))
    # too many for all signs; 26 better and 14 worse: a difference of 12 or more among 40 fair coins
    exact = 2 * sum(math.comb(40, k) for k in range(26, 41)) / 2**40
    assert sign_flip_p([1.0] * 26 + [-1.0] * 14) == pytest.approx(exact, abs=0.01)


def test_prompts_are_paired_whatever_their_order_and_without_those_that_lack_a_reward() -> None:
    """Prompts differ by more than the two sides do, which pairing removes."""
    chosen = random.Random(0)
    rewards = [chosen.random() for _ in range(30)]
    before, after = evaluation([*rewards]), evaluation([r + 0.05 + chosen.random() / 20 for r in rewards])
    expected = compare(before, after)
    low, high = expected.measures["reward"].interval
    assert 0.05 < low < high < 0.1 and expected.measures["reward"].higher == 30
    for side in (before, after):
        chosen.shuffle(side["prompts"])
    assert compare(before, after) == expected
    comparison = compare(evaluation([None, 0.5, 0.5, NAN]), evaluation([1.0, 1.0, 0.0, NAN]))
    reward = comparison.measures["reward"]
    assert reward.prompts == comparison.measures["exact"].prompts == 2
    assert (reward.before, reward.after) == (0.5, 0.5)
    assert comparison.notes == ["2 of 4 prompts have no reward on one side and are excluded."]
    assert math.isnan(compare(evaluation([]), evaluation([])).measures["reward"].change)
    for sides, message in (
        ("abc axy", "before must have each prompt of after, got no 'x'"),
        ("aa a", "after must have each prompt of before, got no 'a'"),
    ):
        some = [{"metrics": {}, "prompts": [{"prompt": p, "reward": 0.0} for p in side]} for side in sides.split()]
        with pytest.raises(ValueError, match=f"^compare: {message}"):
            compare(*some)


# Pages of several runs


def final(quality: float, diversity: float) -> dict[str, Any]:
    """An evaluation whose prompts have rewards and diversity around the given values, and one correct sample of ten."""
    lines = []
    for i in range(20):
        value = quality + (i - 9.5) / 100
        line = {"prompt": f"p{i}", "rewards": [value] * 10, "right": [1.0] + [0.0] * 9, "correct": 1.0, "reward": value}
        lines.append(line | {"measures": {"semantic_diversity": diversity + (i - 9.5) / 200}})
    names = {"sampled_reward": quality, "reward": quality, "semantic_diversity": diversity, "length": 7.0}
    return {"metrics": names | {"pass@10": 1.0, "pass@5": 0.5, "exact": 1.0, "prompts": 20.0}, "prompts": lines}


def run(folder: Path, name: str, seed: int = 0, quality: float = 0.5, diversity: float = 0.5, **more: Any) -> Path:
    write(folder, name=name, seed=seed, **{"steps": 6, **more})
    change(folder, lambda e: e.update(final(quality, diversity)))
    return folder


def test_seeds_of_a_recipe_are_one_row_and_differences_are_paired(tmp_path: Path) -> None:
    """Seeds differ by more than the recipes do, which pairing removes."""
    qualities = (0.2, 0.5, 0.8)
    for seed, quality in enumerate(qualities):
        run(tmp_path / f"a{seed}", "a", seed, quality)
        # in another order, as a pair is of equal seeds
        run(tmp_path / f"b{2 - seed}", "b", seed, quality + 0.02 + 0.001 * seed, diversity=0.5 + 0.1 * (seed - 1))
    run(tmp_path / "c0", "c", 0, 0.3)
    run(tmp_path / "d9", "d", 9)
    rows, left_out = select(sorted(tmp_path.iterdir()))
    a, b, c, d = rows
    assert [(row.label, list(row.evaluated)) for row in (a, d)] == [("1 a", [0, 1, 2]), ("4 d", [9])] and not left_out
    name = "sampled_reward"
    assert a.estimate(name) == (pytest.approx(0.5), *map(pytest.approx, t_interval(qualities)), "3 seeds")
    # values 0.205 to 0.395 in steps of 0.01: a normal interval is close to the bootstrap
    single, deviation = c.estimate(name), float(torch.tensor([(i - 9.5) / 100 for i in range(20)]).std())
    assert single.mean == pytest.approx(0.3) and single.units == "20 prompts"
    assert single.high - single.low == pytest.approx(2 * 1.96 * deviation / math.sqrt(20), rel=0.1)
    # no mean over what was written of each prompt
    assert c.estimate("length").cell() == "7.000" and c.estimate("other").cell() == "none"
    better, unclear = b.minus(a, name), b.minus(a, "semantic_diversity")
    assert better == (pytest.approx(0.021), *map(pytest.approx, t_interval([0.02, 0.021, 0.022])), "3 seeds")
    assert unclear.low < 0 < unclear.high
    # one seed in common: every prompt differs by as much
    assert c.minus(a, name) == (*[pytest.approx(0.1)] * 3, "20 prompts") and d.minus(a, name).cell() == "none"


def test_runs_that_are_left_out_and_settings_that_differ_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        run(tmp_path / name, "a", seed) for seed, name in enumerate(("good", "data", "prompts", "count", "split"))
    ]
    change_recipe(folders[1], "data.task", "gsm8k")
    for key, value in (("seed", 0), ("name", "b")):
        change_recipe(folders[2], key, value)
    change(folders[2], lambda e: e["prompts"][0].update(prompt="another"))
    change(folders[3], lambda e: e["prompts"].pop())
    keep(folders[4], lambda e: e["split"] != "test")
    folders += [run(tmp_path / "unfinished", "a", 7, left=5), run(tmp_path / "twin", "a", 0), tmp_path / "none"]
    reasons = [
        "other data: data.task is 'gsm8k', not 'arithmetic' as in 1 a",
        "other data: prompts of seed 0 is ['another', ",
        "other data: prompts, number of is 19, not 20",
        "other data: split is 'validation', not 'test'",
        "no evaluation after its last step",
        "another run has its recipe and its seed, 0",
        "folder must exist",
    ]
    rows, left_out = select(folders)
    assert [row.runs[0].path for row in rows] == folders[:1] and [*left_out] == folders[1:]
    text = Reader(write_comparison(folders, tmp_path / "out")).text
    printed = capsys.readouterr().err
    for folder, reason in zip(folders[1:], reasons, strict=True):
        assert reason in left_out[folder] and reason in text and f"left out {folder}: " in printed
    with pytest.raises(ValueError, match=r"^write_comparison: folders must have a run with a final evaluation, got "):
        write_comparison(folders[7:], tmp_path / "out")
    folders = [folders[0], run(tmp_path / "b", "b")]
    change_recipe(folders[1], "evaluation.temperature", 0.7)
    change_recipe(folders[1], "rl.rewards", [{"name": "judge"}])
    change(folders[1], lambda e: e.update(embedder="minilm"))
    named = differences(select(folders)[0])
    assert named[0] == "2 b: evaluation.temperature is 0.7, not None as in 1 a."
    assert [text.split()[2] for text in named] == ["evaluation.temperature", "evaluation.rewards", "embedder"]
    for folder in folders:
        change_recipe(folder, "evaluation.rewards", [{"name": "exact"}])
    assert len(differences(select(folders)[0])) == 2


def test_the_page_of_recipes_and_seeds(tmp_path: Path) -> None:
    values = {"best": (0.9, 0.2), "poor": (0.5, 0.1), "wide": (0.3, 0.8), "<b>{{7*7}}": (0.2, 0.7)}
    folders = [run(tmp_path / f"r{i}", name, 0, *value, steps=25) for i, (name, value) in enumerate(values.items())]
    validation = {0: 0.9, 20: 0.5, 25: 0.4}
    change(
        folders[2],
        lambda e: e["metrics"].update(semantic_diversity=0.8 if e["split"] == "test" else validation[e["step"]]),
    )
    folders.append(run(tmp_path / "second", "<b>{{7*7}}", 1, 0.2, 0.7, steps=25))
    change(folders[4], lambda e: [line.update(right=[1.0] * 5 + [0.0] * 5) for line in e["prompts"]])
    for folder, mean in zip(folders[3:], (0.0, 1.0), strict=True):
        curve = {"rewards/mean": mean}
        change(folder, lambda line, c=curve: line.update(c if line["phase"] == "rl" else {}), "metrics")
    reader = Reader(write_comparison(folders, tmp_path / "out"))
    for text in (
        "Comparison 5 runs of 4 recipes, evaluated on 20 test prompts of arithmetic.",
        "on the Pareto front yes no yes no",
        "aside: 1 best, 3 wide.",
        "collapse of semantic_diversity none none 25 none",
        "<b>{{7*7}}",
    ):
        assert text in reader.text
    assert reader.text.index("pass@5") < reader.text.index("pass@10") < reader.text.index("semantic_diversity")
    points = "1 at 0.2, 0.9; 2 at 0.1, 0.5; 3 at 0.8, 0.3; 4 at 0.7, 0.2"
    assert f"sampled_reward over semantic_diversity: {points}" in reader.labels
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["front"] == ["1 best", "3 wide"] and content["measures"]["1 best"]["sampled_reward"]["mean"] == 0.9
    # figures are means over seeds
    pass_at = next(label for label in reader.labels if label.startswith("pass@k by the number of samples"))
    assert "1 best from 0.1 to 1; " in pass_at and pass_at.endswith("4 <b>{{7*7}} from 0.3 to 1")
    # at k = 2 the first seed has 0.2 / (2 * 0.1), the second one 1 - C(5, 2) / C(10, 2) = 7 / 9 over 2 * 0.5
    efficiency = next(label for label in reader.labels if label.startswith("DER@k = pass@k / (k pass@1)"))
    assert efficiency.endswith(f"4 <b>{{{{7*7}}}} from {(1 + 7 / 9) / 2:.3g} to 0.6")
    curves = [label for label in reader.labels if label.startswith("rewards/mean, rl")]
    assert any(label.endswith("4 <b>{{7*7}} from 0.5 to 0.5") for label in curves)


def test_evaluated_models_stand_beside_each_other(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(name="mine")
    results = {"base": final(0.4, 0.5), "trained": final(0.5, 0.5)}
    text = Reader(write_evaluation(results, recipe, "test", tmp_path / "out")).text
    assert "20 prompts of the test split, evaluated with the recipe mine." in text and "Learning curves" not in text
    assert "semantic_diversity sampled_reward not told apart by 2 trained \u2212 1 base +0.000" in text
    assert "2 trained \u2212 1 base +0.000 +0.000 to +0.000 +0.100 +0.100 to +0.100 semantic_diversity" in text
    assert "on the Pareto front yes yes" not in text and "on the Pareto front no yes" in text
    assert "measure 1 base 2 trained intervals over" in text and "ollapse" not in text
    without = {label: {**e, "metrics": {"reward": e["metrics"]["reward"]}} for label, e in results.items()}
    assert "Pareto" not in Reader(write_evaluation(without, recipe, "test", tmp_path / "out")).text
    chosen = random.Random(0)
    for e in results.values():  # the page and the terminal bootstrap one difference alike
        e["prompts"] = [line | {"reward": chosen.random(), "rewards": [chosen.random()]} for line in e["prompts"]]
    interval = compare(*results.values()).measures["sampled_reward"].interval
    text = Reader(write_evaluation(results, recipe, "test", tmp_path / "out")).text
    assert " to ".join(page.format_number(end, 3, "+") for end in interval) in text
    line = {"reward": 0.5, "correct": 1.0, "rewards": [0.0, 1.0, None], "right": [1.0, 0, 0], "measures": {"vendi": 2}}
    row = Evaluated({"metrics": {}, "prompts": [line | {"prompt": "p"}]}).table.iloc[0]
    expected = {"reward": 0.5, "exact": 1.0, "sampled_reward": 0.5, "sampled_exact": 1 / 3, "vendi": 2.0}
    assert row.to_dict() == pytest.approx(expected | {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1.0})
