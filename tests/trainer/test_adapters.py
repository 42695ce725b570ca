"""LoRA adapters by layer: against the dense product in float64, and the page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

from grpo_trainer.report.adapters import Update, measure, read_adapter, write_adapters
from safetensors.torch import save_file

from tests.trainer.test_report import Reader


def drawn(seed: int, outputs: int, inputs: int, rank: int, scale: float = 0.5) -> Update:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, inputs, generator=generator, dtype=torch.float64)
    return Update(a, torch.randn(outputs, rank, generator=generator, dtype=torch.float64), scale)


def dense(update: Update) -> torch.Tensor:
    return update.scale * update.b @ update.a


@pytest.mark.parametrize(("outputs", "inputs", "rank"), [(12, 20, 3), (20, 12, 1), (4, 30, 8), (30, 4, 8), (5, 5, 5)])
def test_measures_are_those_of_the_dense_product(outputs: int, inputs: int, rank: int) -> None:
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


def write(folder: Path, changes: dict[str, Any] | None = None, kinds: tuple[str, ...] = ("mlp.up", "attn.q")) -> Path:
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


def test_scales_and_names_are_those_of_peft(tmp_path: Path) -> None:
    plain = read_adapter(write(tmp_path / "plain"))
    assert list(plain)[:3] == ["model.layers.0.attn.q", "model.layers.0.mlp.up", "model.layers.2.attn.q"]
    assert list(plain)[-1] == "model.layers.10.mlp.up"
    assert plain["model.layers.0.mlp.up"].scale == 4
    stabilized = read_adapter(write(tmp_path / "stabilized", {"use_rslora": True}))
    assert stabilized["model.layers.0.mlp.up"].scale == 8 / math.sqrt(2)


def test_adapters_saved_by_peft_are_read(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(5, 6, bias=False), torch.nn.ReLU(), torch.nn.Linear(6, 4, bias=False))
    frozen = {name: model[int(name)].weight.detach().clone() for name in ("0", "2")}
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[*frozen], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "saved")
    updates, merged = read_adapter(tmp_path / "saved"), adapted.merge_and_unload()
    for name, before in frozen.items():
        assert torch.allclose(dense(updates[name]).float(), merged[int(name)].weight - before, atol=1e-6)


def test_the_page_of_two_adapters(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a"), write(tmp_path / "b", {"lora_alpha": 2})]
    reader = Reader(write_adapters(folders, tmp_path / "out"))
    assert "model.layers.10.mlp.up" in reader.text and "module norm effective rank cosine" in reader.text
    first, second = json.loads((tmp_path / "out" / "adapters.json").read_text()).values()
    first, second = first["model.layers.0.mlp.up"], second["model.layers.0.mlp.up"]
    assert first["norm"] == pytest.approx(4 * second["norm"]) and first["cosine"] == pytest.approx(1)
    # a curve for each kind of module, over the layers 0, 2 and 10
    assert sum(label.startswith("norm: model.layers.*.attn.q from ") for label in reader.labels) == 2
    assert "effective rank cosine" not in Reader(write_adapters(folders[:1], tmp_path / "one")).text


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    a, other = write(tmp_path / "a"), write(tmp_path / "b", kinds=("mlp.up",))
    unsupported = [write(tmp_path / key, {key: {"q": 3}}) for key in ("use_dora", "alpha_pattern", "rank_pattern")]
    for folders, message in (
        ([a, other], "folders must adapt the same weights.*attn.q"),
        ([a, a, a], "folders must be one or two, got 3"),
        ([tmp_path], rf"folders must have adapters, .* got '{tmp_path}', which has no adapter_config\.json$"),
        *(([folder], f"{folder.name} of .* must be unset, got {{'q': 3}}") for folder in unsupported),
    ):
        with pytest.raises(ValueError, match=f"^write_adapters: {message}"):
            write_adapters(folders, tmp_path / "out")
