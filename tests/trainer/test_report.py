"""The report of complete, killed, empty and hostile runs: pictures, and the text of each section."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from grpo_trainer import report
from grpo_trainer.report import map, page, plots, write_report
from grpo_trainer.report.evaluations import examples_section, headline
from grpo_trainer.report.projection import map_line
from grpo_trainer.report.run_folder import RunFolder

from tests.trainer import run_folders

VOID = {"meta", "img", "source"}
ALLOWED = VOID | set(
    re.findall(
        r"\w+",
        "html head title style body main section h1 h2 h3 p div span table thead tbody tr th td figure figcaption "
        "picture details summary pre",
    )
)
HOSTILE = "<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(2)>\x00\x1b[31m\x07\u202egnp.\ud800$\\frac{$_"


class Reader(html.parser.HTMLParser):
    """Elements of the page, and the text outside the style sheet."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(path: Path) -> Reader:
    return Reader(path.read_text("utf-8"))


def pixels(path: Path) -> torch.Tensor:
    from matplotlib.image import imread

    return torch.from_numpy(imread(path).copy())


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run_folders.write(tmp_path_factory.mktemp("runs") / "complete"))


def test_complete_run_shows_every_section(complete: Path) -> None:
    text = read(complete).text
    for title in (
        "Reward in training",
        "Spread of rewards",
        "Rewards by name",
        "Validation",
        "Diversity",
        "Clipping",
        "Entropy",
        "KL from the reference",
        "Length of responses",
        "Gradient and learning rate",
        "Advantages",
        "Supervised phase",
        "Similarity groups",
        "Segments",
        "Map of one prompt's responses",
        "Time",
    ):
        assert title in text
    assert "Not drawn" not in text
    assert "3 steps of SFT, then 45 steps of similarity_group_grpo" in text
    assert "State finished" in text
    assert "Duration 48 s" in text
    assert "Time 5.0 % of the time of RL steps is spent outside generation" in text
    assert "checkpoint 2 phase 0, step 3" in text


def test_headline_is_the_comparison_of_first_and_last(complete: Path) -> None:
    text = read(complete).text
    assert "30.0 % → 80.0 %" in text
    assert re.search(
        r"\+50\.0 points, 95 % interval \+\d\d\.\d to \+\d\d\.\d better: the interval is above 0, and p below 0.05",
        text,
    )
    assert "10 better, 0 worse, 10 equal" in text
    assert "validation split: before, phase 1 step 0; after, phase 1 step 45" in text
    assert "On the test split, evaluated after training only: exact match 80.0 % of 20 prompts" in text


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((0.8, 0.3), "worse: the interval is below 0, and p below 0.05"),
        ((0.3, 0.35), "no significant change: the interval contains 0"),
        ((0.3, 0.5), "no significant change: p is not below 0.05, as too few prompts differ"),
    ],
)
def test_headline_claims_no_more_than_both_figures_say(
    shares: tuple[float, float], verdict: str, tmp_path: Path
) -> None:
    for step, share in enumerate(shares):
        run_folders.write_evaluation(tmp_path, "validation", 0, step, share, False)
    (tmp_path / "recipe.json").write_text('{"phases": [{"rl": {"steps": 1}}]}')
    assert verdict in headline(RunFolder.read(tmp_path))


def test_responses_before_and_after_are_those_of_the_first_prompts(complete: Path) -> None:
    text = read(complete).text
    shown = text[text.index("Responses before and after") : text.index("Policy")]
    assert shown.count("Ann has 0 shells") == shown.count("Ann has 1 shells") == 1
    assert "Ann has 2 shells" not in shown
    assert shown.count("#### 2") == 2
    assert "before, reward 1.000 #### 2" in shown


def test_pictures_are_drawn_twice_and_not_blank(complete: Path) -> None:
    drawn = sorted((complete.parent / "plots").glob("*.png"))
    assert len(drawn) == 2 * 19
    for path in drawn:
        image = pixels(path)
        assert image.shape[0] > 300 and image.shape[1] > 800
        assert image[..., 3].mean() < 0.5, f"{path} is not transparent"
        assert image[..., 3].std() > 0.02, f"{path} is blank"
        coloured = (image[..., :3].amax(2) - image[..., :3].amin(2) > 0.2) & (image[..., 3] > 0.2)
        assert coloured.float().mean() > 0.0005, f"{path} has axes but no data"
        if path.stem.startswith("time"):
            # the legend alone must not pass
            assert coloured[len(coloured) // 2 :].float().mean() > 0.2


def test_page_needs_nothing_else_and_has_a_dark_variant_of_each_picture(complete: Path) -> None:
    tags = read(complete).tags
    images = [attributes for tag, attributes in tags if tag == "img"]
    sources = [attributes for tag, attributes in tags if tag == "source"]
    assert len(images) == len(sources) == 19
    for attributes in images:
        assert str(attributes["src"]).startswith("data:image/png;base64,") and attributes["alt"]
    assert all(attributes["media"] == "(prefers-color-scheme: dark)" for attributes in sources)
    assert {str(a["src"]) for a in images}.isdisjoint(str(a["srcset"]) for a in sources)
    text = complete.read_text("utf-8")
    assert "http://" not in text and "https://" not in text
    assert "default-src 'none'" in text


def test_killed_run(tmp_path: Path) -> None:
    folder = run_folders.write(tmp_path / "run", steps=25, finished=False, rich=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "rl", "step": 26, "rewards/me')
    (folder / "evaluations" / "validation-1-000025.json").write_text('{"metrics": {"exa')
    text = read(write_report(folder)).text
    assert "not finished: the last logged step of rl is 25 of 30" in text
    assert "Could not be read: metrics.jsonl: 1 line; validation-1-000025.json" in text
    assert "30.0 % → 50.0 %" in text
    assert "No map was logged" in text
    for missing in ("Similarity groups (similarity_groups/avg_groups_per_prompt", "Segments (group/compression_ratio"):
        assert missing in text
    assert not list((folder / "plots").glob("clusters*"))


def test_run_killed_before_its_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_text('{"name": "early", "phases": [{"rl": {"steps": 5}}]}')
    text = read(write_report(folder)).text
    assert "no step was logged" in text and "nothing was logged" in text
    assert "There are not yet two evaluations" in text
    assert "No evaluation was written" in text
    assert not (folder / "plots").exists()


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"contains no run: neither recipe.json nor metrics.jsonl"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_evaluations_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    folder = run_folders.write(tmp_path / "run", steps=4, finished=False, rich=False)
    last = folder / "evaluations" / "validation-1-000020.json"
    content = json.loads(last.read_text())
    content["prompts"][1]["prompt"] = "another"
    last.write_text(json.dumps(content))
    run = RunFolder.read(folder)
    assert "The evaluations cannot be compared: compare: prompt 2 before has no counterpart after" in headline(run)
    assert "They do not match" in examples_section(run)


def test_text_of_strangers_is_never_an_element(tmp_path: Path) -> None:
    folder = run_folders.write(tmp_path / "run", name=HOSTILE, steps=3)
    recipe = json.loads((folder / "recipe.json").read_text())
    names = [f"$\\frac{{$a{HOSTILE}", f"_b{HOSTILE}"]  # half a formula, and a label that legends omit
    recipe["phases"][1]["rl"]["rewards"] = [{"name": name} for name in names]
    recipe["phases"][1]["rl"]["algorithm"]["name"] = recipe["model"]["path"] = recipe["data"]["task"] = HOSTILE
    recipe["seed"] = HOSTILE
    (folder / "recipe.json").write_text(json.dumps(recipe))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {f"rewards/{name}": 0.1 for name in names} | {f"time/{HOSTILE}": 0.1}
    run_folders.write_lines(folder / "metrics.jsonl", lines)
    for path in (folder / "evaluations").iterdir():
        content = json.loads(path.read_text())
        content["prompts"][0] |= {"prompt": HOSTILE, "greedy": HOSTILE, "samples": [HOSTILE] * 2}
        content["metrics"][HOSTILE] = 1.0
        content["embedder"] = HOSTILE
        path.rename(path.with_name(path.name.replace("test", "te<i>st"))).write_text(json.dumps(content))
    run_folders.write_lines(folder / "events.jsonl", [{"event": HOSTILE, HOSTILE: HOSTILE}])
    the_map = run_folders.made_map(2, HOSTILE)
    the_map["responses"][0]["text"] = HOSTILE
    the_map["responses"][1] |= {"cluster": HOSTILE, "xy": HOSTILE, "reward": HOSTILE}
    run_folders.write_lines(folder / "maps.jsonl", [the_map])
    reader = read(write_report(folder))  # checks every element
    for _, attributes in reader.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert set(attributes) <= {
            "class",
            "src",
            "srcset",
            "media",
            "alt",
            "name",
            "content",
            "charset",
            "lang",
            "http-equiv",
        }
    assert reader.text.count("<script>alert(1)</script>\"'&amp;<img src=x onerror=alert(2)>") >= 15
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800]", "".join(reader.texts))
    assert "<i>" in reader.text


@pytest.mark.full
def test_values_that_no_run_writes_do_not_stop_the_report(tmp_path: Path) -> None:
    folder = run_folders.write(tmp_path / "run", steps=4)
    odd: list[run_folders.Line] = [
        {"phase": "rl", "step": None, "rewards/mean": "high", "time/step": [1]},
        {"phase": "rl", "step": 5, "rewards/mean": math.inf, "train/kl_mean": 10**400, "time": "late"},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[1]\n\n" + "".join(json.dumps(line) + "\n" for line in odd))
    run_folders.write_lines(folder / "maps.jsonl", [{"step": 1}, {"responses": [3, {"xy": [1]}, {"xy": [1, None]}]}])
    (folder / "evaluations" / "validation-1-000009.json").write_text('{"metrics": [], "prompts": [1, {"reward": {}}]}')
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | {"phases": [None, {"rl": {"algorithm": "x"}}], "model": 3}))
    text = read(write_report(folder)).text
    assert "metrics.jsonl: 1 line" in text
    assert "No response has coordinates" in text


def test_gaps_are_gaps_and_not_zeros() -> None:
    nan = math.nan
    assert plots.rolling_mean([1.0, nan, 3.0, 8.0], 3) == pytest.approx([1.0, nan, 5.5, 5.5], nan_ok=True)
    assert plots.rolling_mean([nan, nan], 1) == pytest.approx([nan, nan], nan_ok=True)
    assert [plots.window_of(n) for n in (1, 39, 40, 80, 400)] == [1, 1, 3, 5, 21]


def test_gap_leaves_its_columns_empty(tmp_path: Path) -> None:
    y = [1.0] * 40 + [math.nan] * 20 + [1.0] * 40
    picture = plots.draw_panels(tmp_path, "gap", [plots.Panel("y", [plots.Curve("y", list(range(100)), y)])], "step")
    image = pixels(picture.light)
    blue = ((image[..., 2] - image[..., 0] > 0.3) & (image[..., 3] > 0.5)).any(0)
    columns = blue.nonzero().flatten()
    gap = columns.diff().max() / (columns[-1] - columns[0])
    assert 0.18 < gap < 0.24


def test_point_between_gaps_is_seen(tmp_path: Path) -> None:
    y = [math.nan] * 50 + [1.0] + [math.nan] * 50
    picture = plots.draw_panels(tmp_path, "one", [plots.Panel("y", [plots.Curve("y", list(range(101)), y)])], "step")
    image = pixels(picture.light)
    assert ((image[..., 2] - image[..., 0] > 0.3) & (image[..., 3] > 0.5)).any()


def test_steps_count_on_over_phases_and_time_over_restarts(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(
        '{"phases": [{"rl": {"steps": 2}}, {"sft": {"steps": 1}}, {"rl": {"steps": 2}}]}'
    )
    logged = [(1, 10.0), (2, 20.0), (1, 5.0), (2, 8.0)]
    run_folders.write_lines(tmp_path / "metrics.jsonl", [{"phase": "rl", "step": s, "time": t} for s, t in logged])
    run = RunFolder.read(tmp_path)
    assert run.steps(run.lines("rl")) == [1, 2, 3, 4]
    assert run.seconds == 28
    assert [run.rl_offset(phase) for phase in range(3)] == [0, 2, 2]


def test_test_split_is_compared_where_it_was_evaluated_before(tmp_path: Path) -> None:
    folder = run_folders.write(tmp_path / "run", steps=2, rich=False)
    run_folders.write_evaluation(folder, "test", 1, 0, 0.1, False)
    pair = RunFolder.read(folder).before_and_after()
    assert pair is not None
    assert [(evaluated.split, evaluated.phase, evaluated.step) for evaluated in pair] == [
        ("test", 1, 0),
        ("test", 2, 0),
    ]


def test_map_keeps_distances_and_does_not_depend_on_signs_or_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.nn.functional.normalize(torch.randn(6, 2, generator=generator, dtype=torch.float64), dim=1)
    turned = flat @ torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q[:2]
    labels, rewards = torch.arange(6), torch.ones(6)
    line = map_line(3, "p", ["t"] * 6, turned * 7, labels, rewards)
    places = torch.tensor([response["xy"] for response in line["responses"]], dtype=torch.float64)
    torch.testing.assert_close(torch.cdist(places, places), torch.cdist(flat, flat), rtol=0, atol=1e-6)
    assert sum(line["explained"]) == pytest.approx(1)
    assert line["explained"][0] >= line["explained"][1]
    again = map_line(3, "p", ["t"] * 6, turned.float(), labels, rewards)
    other = torch.tensor([response["xy"] for response in again["responses"]], dtype=torch.float64)
    torch.testing.assert_close(other, places, rtol=0, atol=1e-5)
    mirrored = map_line(3, "p", ["t"] * 6, turned * torch.tensor([1, 1, -1, 1, 1]), labels, rewards)
    assert mirrored["explained"] == pytest.approx(line["explained"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes_of_a_map_have_a_positive_largest_component(axis: int, order: tuple[int, int]) -> None:
    pair = torch.full((2, 3), 0.1)
    pair[:, axis] = torch.tensor([0.8, -0.8])
    line = map_line(1, "p", ["a", "b"], pair[list(order)], torch.zeros(2), torch.zeros(2))
    first = line["responses"][order.index(0)]["xy"][0]
    assert first > 0.9


def test_map_of_few_or_equal_responses() -> None:
    nan = math.nan
    rows = torch.tensor([[1.0, 0.0], [nan, 0.0], [2.0, 0.0]])
    line = map_line(1, "p", ["a", "b", "c"], rows, torch.tensor([0, -1, 0]), torch.tensor([1.0, nan, 0.5]))
    assert [response["xy"] for response in line["responses"]] == [[0, 0], None, [0, 0]]
    assert [response["reward"] for response in line["responses"]] == [1.0, None, 0.5]
    assert line["explained"] == [0, 0]
    json.dumps(line, allow_nan=False)
    nobody = map_line(1, "p", ["a"], torch.full((1, 3), nan), torch.tensor([-1]), torch.tensor([nan]))
    assert nobody["responses"] == [{"text": "a", "cluster": -1, "reward": None, "xy": None}]
    of_one_number = map_line(1, "p", ["a", "b"], torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 1]), torch.zeros(2))
    assert [response["xy"][1] for response in of_one_number["responses"]] == [0, 0]


def test_missing_numbers_are_shown_as_none() -> None:
    assert page.format_number(math.nan) == page.format_percent(math.nan) == page.format_duration(math.nan) == "none"
    assert [page.format_duration(seconds) for seconds in (0, 59.6, 61, 3_600, 7_325)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 h",
        "2 h 2 min",
    ]
    assert page.shown("x" * 4_000).endswith("x … and 1,000 more")


def test_equal_responses_are_listed_once_and_drawn_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[plots.Point] = []

    def note(folder: Path, name: str, points: list[plots.Point], titles: tuple[str, str]) -> page.Picture:
        drawn.extend(points)
        return draw_map(folder, name, points, titles)

    draw_map = plots.draw_map
    monkeypatch.setattr(map, "draw_map", note)
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    line = map_line(1, "p", ["a", "a", "b", "c"], rows, torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, 0.0, 0.5, 1.0]))
    (tmp_path / "recipe.json").write_text("{}")
    run_folders.write_lines(tmp_path / "maps.jsonl", [line])
    text = Reader(map.map_section(RunFolder.read(tmp_path))).text
    assert "1: 2 times, cluster 0, reward 0.500 a 2: cluster 1, reward 0.500 b 3: cluster 0, reward 1.000 c" in text
    assert "4 responses, 3 distinct, in 2 clusters" in text
    assert {(point.label, point.cluster, point.responses) for point in drawn} == {("1,3", 0, 3), ("2", 1, 1)}


def test_band_of_the_reward_counts_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[plots.Panel]] = {}
    empty = plots.Panel("", [plots.Curve("", [0.0], [0.0])])
    any_picture = plots.draw_panels(tmp_path, "any", [empty], "step")

    def note(folder: Path, name: str, panels: list[plots.Panel], xlabel: str) -> page.Picture:
        drawn[name] = panels
        return any_picture

    monkeypatch.setattr(report, "draw_panels", note)
    write_report(run_folders.write(tmp_path / "run", steps=2, rich=False))
    curve = drawn["reward"][0].curves[0]
    half = 1.96 * 0.4 / math.sqrt(16)
    assert [high - value for value, high in zip(curve.y, curve.high, strict=True)] == pytest.approx([half] * 2)
    assert [value - low for value, low in zip(curve.y, curve.low, strict=True)] == pytest.approx([half] * 2)


@pytest.mark.full
def test_the_time_of_other_runs_stands_beside(tmp_path: Path) -> None:
    here = run_folders.write(tmp_path / "here", steps=3, rich=False)
    other = run_folders.write(tmp_path / "other", name="another <b>run</b>", steps=3, rich=False)
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    slower = [line | {"time/model": 7.125} if line["phase"] == "rl" else line for line in lines]
    run_folders.write_lines(other / "metrics.jsonl", slower)
    text = read(write_report(here, [other])).text
    assert "seconds per step made up another <b>run</b>" in text and "model 0.800 7.125" in text
