"""Writes the tables of all losses and advantage estimators, read from the code, into the docs.

python -m tools.variants
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from benchmarks.tables import markdown, replaced
from grpo_kernels import AdvantageConfig, LossConfig
from grpo_kernels.ops.policy_loss import config as loss
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.verl_fields import VERL_LOSSES, VERL_REFUSED

DOCS = Path(__file__).parent.parent / "docs"
MARKS = ("<!-- variants, written by tools/variants.py -->", "<!-- end of variants -->")
FIELDS = {
    "loss": loss.LOSSES,
    "ratio": loss.RATIOS,
    "kl": loss.KLS,
    "aggregation": loss.AGGREGATIONS,
}
# Fields without a default.
REQUIRED = {"dro": {"dro_beta": 1.0}}
# Derived for the kernels, or shown in a column of its own.
HIDDEN = {"settings", "weight_list", "estimator", "loss", "ratio", "aggregation"}

Fields = dict[str, object]


def changed(config: LossConfig | AdvantageConfig, default: LossConfig | AdvantageConfig) -> Fields:
    """Fields of a config that differ from the default's, except those that have a column of their own."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in HIDDEN]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def spelled(fields: Fields) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in fields.items())


def loss_rows(configs: Mapping[str, LossConfig], sentence: str, name: str) -> str:
    """A table of a peer's losses, below a sentence that lists the fields they have in common."""
    changes = {key: changed(config, LossConfig()) for key, config in configs.items()}
    first = next(iter(changes.values()))
    shared = {k: v for k, v in first.items() if all(k in fields and fields[k] == v for fields in changes.values())}
    rows = []
    for key, config in configs.items():
        own = {field: value for field, value in changes[key].items() if field not in shared}
        rows.append((f"`{key}`", f"`{config.loss}`", f"`{config.ratio}`", f"`{config.aggregation}`", spelled(own)))
    header = (name, "loss", "ratio", "aggregation", "other fields")
    in_common = f"All have {spelled(shared)}.\n\n" if shared else ""
    return f"{sentence}\n\n{in_common}{markdown(header, rows)}"


def policy_loss() -> str:
    choices = [(f"`{name}`", ", ".join(f"`{value}`" for value in values)) for name, values in FIELDS.items()]
    trl = {name: LossConfig.trl(loss_type=name) for name in TRL_LOSS_TYPES}
    verl = {name: LossConfig.verl(loss_mode=name, **REQUIRED.get(name, {})) for name in VERL_LOSSES}
    refused = [(f"`{name}`", instead) for name, instead in VERL_REFUSED.items()]
    return "\n\n".join(
        [
            markdown(("field of `LossConfig`", "values"), choices),
            loss_rows(trl, "`LossConfig.trl(loss_type=...)`, with TRL's defaults.", "TRL's `loss_type`"),
            loss_rows(
                verl,
                "`LossConfig.verl(loss_mode=...)`, with verl's defaults; `dro_beta` has none.",
                "verl's `loss_mode`",
            ),
            markdown(("refused `loss_mode`", "instead"), refused),
        ]
    )


def group_advantages() -> str:
    rows = []
    for name in AdvantageConfig.names():
        config = AdvantageConfig(name)
        fields = changed(config, AdvantageConfig())
        center, scale = fields.pop("center", "mean"), fields.pop("scale", "std")
        rows.append((f"`{name}`", f"`{center}`", f"`{scale}`", spelled(fields)))
    return markdown(("name", "center", "scale", "other fields"), rows)


PAGES = {"ops/policy_loss.md": policy_loss, "ops/group_advantages.md": group_advantages}


def updated(page: str, text: str) -> str:
    """The text of a page with its tables written anew."""
    return replaced(text, *MARKS, PAGES[page]())


def main() -> None:
    for page in PAGES:
        (DOCS / page).write_text(updated(page, (DOCS / page).read_text()))


if __name__ == "__main__":
    main()
