"""LoRA adapters and the model that they belong to: on another one they load without an error and mean nothing."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import pretrained
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Model

BASE = "base"  # folder in that of a run which has made its model


def save_without_adapters(lm: Any, folder: Path) -> None:
    """Saves the weights that adapters are added to.

    Args:
        lm: a model of transformers whose layers have adapters.
        folder: folder for safetensors and config.
    """
    weights = lm.state_dict()
    names = {name: name.replace(".base_layer.", ".") for name in weights if ".lora_" not in name}
    with pretrained.without_bars():
        lm.save_pretrained(folder, state_dict={new: weights[name] for name, new in names.items()})


def settings_of_base(settings: Model, folder: Path) -> Model:
    """Settings of the model that adapters were trained on; raises if the recipe names another one."""
    base = _read_config(folder).get("base_model_name_or_path")
    if settings.path != "tiny":
        if base and not _is_same(base, settings.path):
            raise ValueError(
                f"model.path: must be {base!r}, which the adapters in {str(folder)!r} were trained on, got "
                f"{settings.path!r}; if that is a copy, name it in their adapter_config.json"
            )
        return settings
    made = Path(base) if base else Path(BASE)
    for place in ((folder / "../../.." / BASE).resolve(), made):  # first in its own run, which may have been moved
        if made.name == BASE and (place / "config.json").exists():
            return settings.model_copy(update={"path": str(place)})
    raise ValueError(
        f"model.path: must be the model that the adapters in {str(folder)!r} were trained on, "
        f"{repr(base) if base else 'which they do not name'}, got 'tiny', whose weights are new"
    )


def _is_same(base: str, path: str) -> bool:
    """Whether two paths mean the same model; one that is not there may be of another working folder, or of the hub."""
    if pretrained.is_gguf(path):
        path = pretrained.source(path)["pretrained_model_name_or_path"]
    if Path(base).exists() and Path(path).exists():
        return Path(base).resolve() == Path(path).resolve()
    if f"models--{base.replace('/', '--')}" in Path(path).parts:  # the hub's cache
        return True
    shorter, longer = sorted((Path(base).parts, Path(path).parts), key=len)
    return longer[-len(shorter) :] == shorter


def load_adapter(policy: Policy, settings: Model, folder: Path) -> None:
    """Loads adapters onto a policy; raises if they do not match the recipe's LoRA settings."""
    import peft
    from safetensors.torch import load_file

    config = _read_config(folder)
    if settings.lora is None:
        raise ValueError(
            f"model.lora: must be set to load the adapters in {str(folder)!r}, got None; name the recipe of their run, "
            f"or model.lora.rank={config['r']} model.lora.alpha={config['lora_alpha']} beside this one"
        )
    for key, stored in (("rank", config["r"]), ("alpha", config["lora_alpha"])):
        value = getattr(settings.lora, key)
        if value != stored:
            raise ValueError(
                f"model.lora.{key}: must be that of the adapters in {str(folder)!r}, {stored}, got {value}"
            )
    own = policy.lm.state_dict()
    weights = {
        name: value
        for name, value in load_file(folder / "adapter_model.safetensors").items()
        if not _is_of_base(name, value, own)
    }
    expected = peft.get_peft_model_state_dict(policy.lm, save_embedding_layers=False)
    if weights.keys() != expected.keys():
        missing, unexpected = _listed(expected.keys() - weights.keys()), _listed(weights.keys() - expected.keys())
        raise ValueError(
            f"model.lora.targets: must be the layers of the adapters in {str(folder)!r}, "
            f"{config['target_modules']!r}, got {settings.lora.targets!r}: missing {missing}, unexpected {unexpected}"
        )
    peft.set_peft_model_state_dict(policy.lm, weights)


def _listed(names: Set[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{sorted(names)[:3]}{more}"


def _is_of_base(name: str, value: Tensor, own: dict[str, Tensor]) -> bool:
    """Whether a weight is the base's own, of which peft adds those of heads and embeddings that have adapters."""
    return name in own and torch.equal(value.to(own[name]), own[name])


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config
