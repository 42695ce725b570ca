"""Pages: the report of finished, killed and hostile runs, the map of a prompt's responses, and adapters by layer.

Faults they are there for: a page that breaks, or runs what a run's files hold; a sentence that says more than the
intervals; figures that close gaps; a map that loses distances; measures of adapters that are not the dense product's.
"""

from __future__ import annotations

import html.parser
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from grpo_trainer.report import page
from grpo_trainer.report.adapters import Update, measure, read_adapter, write_adapters
from grpo_trainer.report.run_folder import RunFolder
from grpo_trainer.report.run_page import summary, write_report
from grpo_trainer.response_map import map_of
from safetensors.torch import save_file

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


def test_gaps_numbers_and_long_texts() -> None:
    """Gaps stay gaps, and points between them are seen."""
    nan = math.nan
    y = pd.Series([1.0, nan, 3.0, 8.0] * 11)
    assert page.smoothed(y)[:4].tolist() == pytest.approx([1.0, nan, 5.5, 4.0], nan_ok=True)
    assert page.smoothed(y).isna().tolist() == y.isna().tolist()
    alone = pd.Series([nan] * 50 + [1.0] + [nan] * 50)
    (figure,) = page.draw_curves("", {"": page.Curve(alone)})
    assert len(re.findall(r"<use [^>]*var\(--c0\)", figure.svg)) == 1
    assert page.draw_curves("", {"": page.Curve(alone * nan)}) == []
    assert page.format_number(math.nan) == "none" and page.format_number(-1234.5, 1) == "\u22121,234.5"
    assert page.format_number(0.5, 2, "+") == "+0.50"
    assert page.shorten("x" * 4_000).endswith("x … and 1,000 more")
    assert len(page.shorten("x" * 4_000)) < 3_100


# Maps of responses


def test_a_map_keeps_distances_and_does_not_depend_on_signs_or_lengths() -> None:
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
    for axis in range(3):  # the largest component of an axis is positive
        pair = torch.full((2, 3), 0.1)
        pair[:, axis] = torch.tensor([0.8, -0.8])
        for rows, first in ((pair, 0), (pair.flip(0), 1)):
            line = map_of("p", ["a", "b"], rows, torch.zeros(2), torch.zeros(2))
            assert line["responses"][first]["xy"][0] > 0.9


def test_the_report_lists_equal_responses_once_and_those_without_a_point(tmp_path: Path) -> None:
    nan = math.nan
    rows = torch.tensor([[1.0, 0.0], [nan, 0.0], [2.0, 0.0]])
    line = map_of("p", ["a", "b", "c"], rows, torch.tensor([0, -1, 0]), torch.tensor([1.0, nan, 0.5]))
    assert [response["xy"] for response in line["responses"]] == [[0, 0], None, [0, 0]]
    assert [response["reward"] for response in line["responses"]] == [1.0, None, 0.5] and line["explained"] == [0, 0]
    json.dumps(line, allow_nan=False)
    nobody = map_of("p", ["a"], torch.full((1, 3), nan), torch.tensor([-1]), torch.tensor([nan]))
    assert nobody["responses"] == [{"text": "a", "cluster": -1, "reward": None, "xy": None}]
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [nan, 0.0]])
    drawn = map_of("p", ["a", "a", "b", "<c>"], rows, torch.tensor([0, 0, 1, -1]), torch.tensor([1.0, 0.0, 0.5, nan]))
    folder = write(tmp_path / "run", steps=2)
    change(folder, lambda line: line.update(map=drawn))
    reader = Reader(write_report(folder))
    shown = reader.text + " ".join(reader.labels)
    for about in ("1: 2 times, cluster 0, reward 0.500", "2: cluster 1, reward 0.500", "3: excluded from the cluster"):
        assert about in shown
    assert "4 responses, 3 distinct" in shown and "over axis 1, 100 % of the variance: 1 at -0.298" in shown
    assert "<c>" in shown


# Adapters


def drawn(seed: int, outputs: int, inputs: int, rank: int, scale: float = 0.5) -> Update:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, inputs, generator=generator, dtype=torch.float64)
    return Update(a, torch.randn(outputs, rank, generator=generator, dtype=torch.float64), scale)


def dense(update: Update) -> torch.Tensor:
    return update.scale * update.b @ update.a


@pytest.mark.parametrize(("outputs", "inputs", "rank"), [(12, 20, 3), (20, 12, 1), (4, 30, 8), (30, 4, 8), (5, 5, 5)])
def test_measures_of_adapters_are_those_of_the_dense_product(outputs: int, inputs: int, rank: int) -> None:
    x, y = drawn(0, outputs, inputs, rank), drawn(1, outputs, inputs, rank + 1, scale=-2.0)
    product, other = dense(x), dense(y)
    values = torch.linalg.svdvals(product)
    shares = values[values > 1e-12] / values.sum()
    cosine = float((product * other).sum() / product.norm() / other.norm())
    expected = [float(product.norm()), math.exp(-float((shares * shares.log()).sum())), cosine]
    measured = measure(x, y)
    assert [*measured.values()] == pytest.approx(expected, rel=1e-9, abs=1e-12) and "cosine" not in measure(x)
    assert [*measured] == ["norm", "effective rank", "cosine"] and measure(y, x)["cosine"] == pytest.approx(cosine)
    zero = measure(Update(x.a, torch.zeros_like(x.b), x.scale), x)  # neither rank nor direction
    assert [*zero.values()] == pytest.approx([0, math.nan, math.nan], nan_ok=True)


def write_adapter(
    folder: Path, changes: dict[str, Any] | None = None, kinds: tuple[str, ...] = ("mlp.up", "attn.q")
) -> Path:
    weights = {}
    for layer in (0, 2, 10):
        for kind in kinds:
            update = drawn(layer, 6, 5, 2)
            for part, value in (("A", update.a), ("B", 0 * update.b if layer == 2 else update.b)):
                weights[f"base_model.model.model.layers.{layer}.{kind}.lora_{part}.weight"] = value.float()
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 8} | (changes or {})))
    return folder


def test_adapters_saved_by_peft_are_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for use_rslora in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(5, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
        frozen = {name: model[int(name)].weight.detach().clone() for name in ("0", "1")}
        options = {"r": 3, "lora_alpha": 6, "target_modules": [*frozen], "init_lora_weights": False}
        adapted = peft.get_peft_model(model, peft.LoraConfig(use_rslora=use_rslora, **options))
        saved = tmp_path / f"saved {use_rslora}"
        adapted.save_pretrained(saved)
        updates, merged = read_adapter(saved), adapted.merge_and_unload()
        for name, before in frozen.items():
            assert torch.allclose(dense(updates[name]).float(), merged[int(name)].weight - before, atol=1e-6)


def test_the_page_of_two_adapters(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", {"lora_alpha": 2})]
    names = list(read_adapter(folders[0]))
    assert names[:2] == ["model.layers.0.attn.q", "model.layers.0.mlp.up"] and names[-1] == "model.layers.10.mlp.up"
    reader = Reader(write_adapters(folders, tmp_path / "out"))
    assert "model.layers.10.mlp.up" in reader.text and "module norm effective rank cosine" in reader.text
    first, second = json.loads((tmp_path / "out" / "adapters.json").read_text()).values()
    first, second = first["model.layers.0.mlp.up"], second["model.layers.0.mlp.up"]
    assert first["norm"] == pytest.approx(4 * second["norm"]) and first["cosine"] == pytest.approx(1)
    # a curve for each kind of module, over the layers 0, 2 and 10
    assert sum(label.startswith("norm: model.layers.*.attn.q from ") for label in reader.labels) == 2
    assert "effective rank cosine" not in Reader(write_adapters(folders[:1], tmp_path / "one")).text
    other = write_adapter(tmp_path / "c", kinds=("mlp.up",))
    unsupported = [
        write_adapter(tmp_path / key, {key: {"q": 3}}) for key in ("use_dora", "alpha_pattern", "rank_pattern")
    ]
    for given, message in (
        ([folders[0], other], "folders must adapt the same weights.*attn.q"),
        ([folders[0]] * 3, "folders must be one or two, got 3"),
        ([tmp_path], rf"folders must have adapters, .* got '{tmp_path}', which has no adapter_config\.json$"),
        *(([folder], f"{folder.name} of .* must be unset, got {{'q': 3}}") for folder in unsupported),
    ):
        with pytest.raises(ValueError, match=f"^write_adapters: {message}"):
            write_adapters(given, tmp_path / "out")
