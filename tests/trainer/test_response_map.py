"""The map of a prompt's responses: distances that it keeps, signs, and responses without a point."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.report.run_page import write_report
from grpo_trainer.response_map import map_of

from tests.trainer.run_folders import change, write


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


def test_the_report_lists_equal_responses_once_and_draws_them_as_one(tmp_path: Path) -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [math.nan, 0.0]])
    labels, rewards = torch.tensor([0, 0, 1, -1]), torch.tensor([1.0, 0.0, 0.5, math.nan])
    folder = write(tmp_path / "run", steps=2)
    change(folder, lambda line: line.update(map=map_of("p", ["a", "a", "b", "<c>"], rows, labels, rewards)))
    page = " ".join(html.unescape(write_report(folder).read_text()).split())
    for about in ("1: 2 times, cluster 0, reward 0.500", "2: cluster 1, reward 0.500", "3: excluded from the cluster"):
        assert about in page
    assert "4 responses, 3 distinct" in page and "over axis 1, 100 % of the variance: 1 at -0.298" in page
    assert "&lt;c&gt;" in (folder / "report.html").read_text()
