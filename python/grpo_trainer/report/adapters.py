"""Analysis of LoRA adapters by layer: the size and the rank of the update s B A, and the angle between two of them.

The product B A, [out, in], is never formed. With r the rank, everything follows from matrices of r x r: the norm and
the cosine from Gram matrices, the singular values from triangular factors of B and A.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from grpo_trainer.log import to_json
from grpo_trainer.report.page import Curve, Section, draw_curves, table_of, write_page

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.\w+)?\.weight$")
_UNSUPPORTED = ("use_dora", "alpha_pattern", "rank_pattern")  # the update is not s B A with one s


class Update(NamedTuple):
    """The update scale * b @ a of one weight."""

    a: Tensor  # [r, in] float64
    b: Tensor  # [out, r] float64
    scale: float


def read_adapter(folder: Path) -> dict[str, Update]:
    """Updates of a folder saved by peft, by the name of the adapted module."""
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        weights = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise ValueError(
            "write_adapters: folders must have adapters, such as RUN/checkpoints/rl-80/model of a run with model.lora, "
            f"got {str(folder)!r}, which has no {Path(error.filename).name}"
        ) from error
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ValueError(f"write_adapters: {name} of {str(folder)!r} must be unset, got {config[name]!r}")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        if ".lora_" not in key and not config.get("modules_to_save"):
            continue  # the base's own, which peft adds for heads and embeddings that have adapters
        match = _KEY.match(key)
        if match is None or value.dim() != 2:
            raise ValueError(f"write_adapters: {str(folder)!r} must hold matrices lora_A and lora_B, got {key!r}")
        parts.setdefault(match[1], {})[match[2]] = value.double()
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    return {name: Update(pair["A"], pair["B"], scale) for name, pair in sorted(parts.items(), key=_by_layer)}


def _by_layer(entry: tuple[str, Any]) -> list[tuple[int, str]]:
    """Sort key that orders layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in entry[0].split(".")]


def measure(update: Update, other: Update | None = None) -> dict[str, float]:
    """Frobenius norm and effective rank of an update, and its cosine with another one of the same shape.

    The effective rank is exp(-sum p log p) with p the singular values divided by their sum (Roy and Vetterli, 2007).
    Rank and cosine are NaN for an update of 0.
    """
    values = singular_values(update)
    norm, total = float(values.norm()), values.sum()
    rank = math.exp(float(torch.special.entr(values / total).sum())) if norm > 0 else math.nan
    if other is None:
        return {"norm": norm, "effective rank": rank}
    # the sum of the products of all entries is tr((B_x' B_y) (A_y A_x'))
    product = update.scale * other.scale * float(((update.b.T @ other.b) * (update.a @ other.a.T)).sum())
    norms = norm * float(singular_values(other).norm())
    return {"norm": norm, "effective rank": rank, "cosine": product / norms if norms > 0 else math.nan}


def singular_values(update: Update) -> Tensor:
    """Singular values [min(r, in, out)] of the update.

    B = Q_b R_b and A' = Q_a R_a give B A = Q_b (R_b R_a') Q_a', so they are those of R_b R_a'.
    """
    r_b, r_a = (torch.linalg.qr(matrix, mode="r").R for matrix in (update.b, update.a.T))
    return abs(update.scale) * torch.linalg.svdvals(r_b @ r_a.T)


def write_adapters(folders: Sequence[Path], output: Path) -> Path:
    """Writes adapters.html and adapters.json of one or two adapters of the same weights; returns the page's path."""
    if not 1 <= len(folders) <= 2:
        raise ValueError(f"write_adapters: folders must be one or two, got {len(folders)}")
    adapters = [read_adapter(Path(folder)) for folder in folders]
    shapes = [{name: (u.b.shape[0], u.a.shape[1]) for name, u in adapter.items()} for adapter in adapters]
    if shapes[0] != shapes[-1]:
        different = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
        raise ValueError(f"write_adapters: folders must adapt the same weights, got different ones in {different[:5]}")
    content, sections = {}, []
    for i, (folder, adapter) in enumerate(zip(folders, adapters, strict=True)):
        other = adapters[1 - i] if len(adapters) == 2 else {}
        table = pd.DataFrame({name: measure(update, other.get(name)) for name, update in adapter.items()}).T
        figures = [figure for name in table for figure in draw_curves(name, _by_kind(table[name]), "layer")]
        sections.append(Section(str(folder), figures=figures, table=table_of("module", table)))
        content[str(folder)] = table.T.to_dict()
    lead = (
        "Frobenius norm and effective rank of the update s B A of each adapted weight, and the cosine of two updates."
    )
    page = write_page(output / "adapters.html", "LoRA adapters", lead, sections)
    (output / "adapters.json").write_text(to_json(content, indent=1) + "\n")
    return page


def _by_kind(values: pd.Series) -> dict[str, Curve]:
    """A curve over the layers for each kind of module; modules outside of layers are at layer 0."""
    layers = values.index.str.extract(r"\.(\d+)\.", expand=False).fillna("0").astype(int)
    kinds = values.index.str.replace(r"\.\d+\.", ".*.", n=1, regex=True)
    return {
        kind: Curve(pd.Series(of_kind.to_numpy(), layers[kinds == kind])) for kind, of_kind in values.groupby(kinds)
    }
