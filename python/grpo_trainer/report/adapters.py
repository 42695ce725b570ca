"""Analysis of LoRA adapters by layer: the size and the rank of the update s B A, and the angle between two of them.

The product B A, [out, in], is never formed. With r the rank, everything follows from matrices of r x r: the norm and
the cosine from Gram matrices, the singular values from triangular factors of B and A.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import strict_json
from grpo_trainer.report import page
from grpo_trainer.report.page import shown
from grpo_trainer.report.plots import Curve, Panel, draw_panels

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight$")
_UNSUPPORTED = ("use_dora", "alpha_pattern", "rank_pattern")  # the update is not s B A with one s


@dataclasses.dataclass(frozen=True)
class Update:
    """The update scale * b @ a of one weight."""

    a: Tensor  # [r, in] float64
    b: Tensor  # [out, r] float64
    scale: float


@dataclasses.dataclass(frozen=True)
class Measured:
    norm: float
    effective_rank: float  # NaN for an update of 0
    cosine: float  # with the same weight's update in another adapter; NaN without one, or for an update of 0


def read_adapter(folder: Path) -> dict[str, Update]:
    """Updates of a folder saved by peft, by the name of the adapted module."""
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        weights = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise ValueError(
            "adapters: must be a folder with adapters, such as RUN/checkpoints/1-000080/model of a run with "
            f"model.lora, got {str(folder)!r}, which has no {Path(error.filename).name}"
        ) from error
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ValueError(f"adapters: {name} of {str(folder)!r} must be unset, got {config[name]!r}")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if ".lora_" not in key and not config.get("modules_to_save"):
            continue  # the base's own, which peft adds for heads and embeddings that have adapters
        match = _KEY.match(key)
        if match is None or value.dim() != 2:
            raise ValueError(f"adapters: {str(folder)!r} must hold matrices lora_A and lora_B, got {key!r}")
        parts.setdefault(match[1], {})[match[2]] = value.double()
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return {name: Update(pair["A"], pair["B"], scale) for name, pair in sorted(parts.items(), key=_by_layer)}


def measure(update: Update, other: Update | None = None) -> Measured:
    """Frobenius norm and effective rank of an update, and its cosine with another one of the same shape."""
    values = singular_values(update)
    norm = float(values.square().sum().sqrt())
    cosine = math.nan
    if other is not None:
        norms = norm * float(singular_values(other).square().sum().sqrt())
        cosine = inner_product(update, other) / norms if norms > 0 else math.nan
    return Measured(norm, effective_rank(values), cosine)


def inner_product(x: Update, y: Update) -> float:
    """Sum of the products of all entries: tr((B_x' B_y)(A_y A_x')), from Gram matrices [r_x, r_y]."""
    shapes = [(u.b.shape[0], u.a.shape[1]) for u in (x, y)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"adapters: updates must have one shape, got {shapes[0]} and {shapes[1]}")
    return x.scale * y.scale * float(((x.b.T @ y.b) * (x.a @ y.a.T)).sum())


def singular_values(update: Update) -> Tensor:
    """Singular values [min(r, in, out)] of the update.

    B = Q_b R_b and A' = Q_a R_a give B A = Q_b (R_b R_a') Q_a', so they are those of R_b R_a'. The R factors are the
    Cholesky factors of the Gram matrices, without the square of the condition number.
    """
    r_b, r_a = (torch.linalg.qr(matrix, mode="r").R for matrix in (update.b, update.a.T))
    return abs(update.scale) * torch.linalg.svdvals(r_b @ r_a.T)


def effective_rank(values: Tensor) -> float:
    """exp(-sum p log p) with p the singular values divided by their sum; NaN if all are 0.

    1 for a single nonzero singular value, n for n equal ones (Roy and Vetterli, 2007).
    """
    total = float(values.sum())
    if total == 0:
        return math.nan
    return math.exp(float(torch.special.entr(values / total).sum()))


def write_adapters(folders: Sequence[Path], output: Path) -> Path:
    """Writes adapters.html, adapters.json and plots/ of one or two adapters.

    Args:
        folders: folders with adapter_config.json and adapter_model.safetensors.
        output: folder of the page, created if needed.

    Returns:
        Path of the page.
    """
    if not 1 <= len(folders) <= 2:
        raise ValueError(f"adapters: must be one or two folders, got {len(folders)}")
    adapters = [read_adapter(Path(folder)) for folder in folders]
    if adapters[0].keys() != adapters[-1].keys():
        different = sorted(adapters[0].keys() ^ adapters[-1].keys())
        raise ValueError(f"adapters: both must adapt the same modules, these are in one only: {different[:5]}")
    pairs = [(adapter, adapters[1 - i] if len(adapters) == 2 else None) for i, adapter in enumerate(adapters)]
    measured = [
        {name: measure(update, None if others is None else others[name]) for name, update in adapter.items()}
        for adapter, others in pairs
    ]
    output.mkdir(parents=True, exist_ok=True)
    content = [
        {"adapter": str(folder), "modules": {name: dataclasses.asdict(m) for name, m in of_one.items()}}
        for folder, of_one in zip(folders, measured, strict=True)
    ]
    (output / "adapters.json").write_text(strict_json.to_text(content, indent=1) + "\n")
    sections = [page.element("h1", "LoRA adapters")]
    for i, (folder, of_one) in enumerate(zip(folders, measured, strict=True)):
        sections.append(
            _section(output / "plots", f"adapter{i + 1}", str(folder), of_one, has_other=len(adapters) == 2)
        )
    target = output / "adapters.html"
    target.write_text(page.document("LoRA adapters", "\n".join(sections)), "utf-8")
    return target


def _section(folder: Path, name: str, title: str, measured: dict[str, Measured], has_other: bool) -> str:
    caption = (
        "Frobenius norm of the update s B A of each adapted weight, and its effective rank: exp of the entropy of the "
        "singular values divided by their sum."
    )
    titles = ["module", "norm", "effective rank"]
    if has_other:
        caption += " Cosine: between this update and that of the other adapter, 1 for the same direction."
        titles.append("cosine")
    rows = []
    for module, m in measured.items():
        values = [m.norm, m.effective_rank, *([m.cosine] if has_other else [])]
        rows.append([shown(module), *map(page.format_number, values)])
    picture = draw_panels(folder, name, _panels(measured, has_other), "layer")
    figure = page.figure("By layer", picture, shown(caption))
    return page.section(title, page.grid([figure]), page.table(titles, rows))


def _panels(measured: dict[str, Measured], has_other: bool) -> list[Panel]:
    """A curve over the layers for each kind of module; modules outside of layers are at layer 0."""
    kinds: dict[str, dict[int, Measured]] = {}
    for name, m in measured.items():
        layer = re.search(r"\.(\d+)\.", name)
        kind = name.replace(layer[0], ".*.", 1) if layer else name
        kinds.setdefault(kind, {})[int(layer[1]) if layer else 0] = m
    panels = []
    for field in ("norm", "effective_rank", *(["cosine"] if has_other else [])):
        curves = [
            Curve(label, sorted(layers), [getattr(layers[layer], field) for layer in sorted(layers)])
            for label, layers in zip(_labels(list(kinds)), kinds.values(), strict=True)
        ]
        panels.append(Panel(field.replace("_", " "), curves))
    return panels


def _labels(kinds: Sequence[str]) -> list[str]:
    """Last part of each name, with the parts before it where it is not unique."""
    last = [kind.rpartition(".")[2] for kind in kinds]
    rest = [kind.rpartition(".")[0] for kind in kinds]
    return [
        name if last.count(name) == 1 else f"{name} {parent[:3]} {parent.rpartition('.')[2]}"
        for name, parent in zip(last, rest, strict=True)
    ]


def _by_layer(entry: tuple[str, Any]) -> list[Any]:
    """Sort key that orders layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in entry[0].split(".")]
