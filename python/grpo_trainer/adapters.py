"""LoRA adapters and the model that they belong to: on another one they load without an error and mean nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from grpo_trainer import pretrained
from grpo_trainer.messages import nearest
from grpo_trainer.recipe import Model

BASE = "base"  # folder in that of a run which has made its model


def with_adapters(lm: Any, settings: Model) -> Any:
    """The model with new adapters on the layers that `model.lora` names."""
    import peft
    from transformers.pytorch_utils import Conv1D

    assert settings.lora is not None
    lora = settings.lora
    layers = [name for name, layer in lm.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)]
    names = sorted({name.rpartition(".")[2] for name in layers})
    for target in lora.targets or []:  # peft would leave out an unknown one beside others
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            rule = f"must be names of linear layers, such as {', '.join(names)}"
            raise ValueError(f"model.lora.targets: {rule}, got {lora.targets}{nearest(target, names)}")
    if settings.four_bit:
        lm = peft.prepare_model_for_kbit_training(lm, use_gradient_checkpointing=settings.gradient_checkpointing)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.targets or "all-linear"
    )
    with warnings.catch_warnings():
        # transformers 5.24 has renamed an attribute that peft reads
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return peft.get_peft_model(lm, config)


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
    rule = f"must be {repr(base) if base else 'the model'}, which the adapters in {str(folder)!r} were trained on"
    if settings.path != "tiny":
        if base and not _is_same(base, settings.path):
            way_out = "if that is a copy, name it in their adapter_config.json"
            raise ValueError(f"model.path: {rule}, got {settings.path!r}; {way_out}")
        return settings
    beside = (folder / "../../.." / BASE).resolve()  # first in its own run, which may have been moved
    for place in (beside, *([Path(base)] if base and Path(base).name == BASE else [])):
        if (place / "config.json").exists():
            return settings.model_copy(update={"path": str(place)})
    raise ValueError(f"model.path: {rule}, got 'tiny', whose weights are new")


def _is_same(base: str, path: str) -> bool:
    """Whether two paths mean the same model; one that is not there may be of another working folder, or of the hub."""
    if pretrained.is_gguf(path):
        path = pretrained.source(path)["pretrained_model_name_or_path"]
    if Path(base).exists() and Path(path).exists():
        return Path(base).resolve() == Path(path).resolve()
    shorter, longer = sorted((Path(base).parts, Path(path).parts), key=len)
    return longer[-len(shorter) :] == shorter


def load_adapter(policy: Any, settings: Model, folder: Path) -> None:
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
    weights = {  # without the base's own, of which peft adds those of heads and embeddings that have adapters
        name: value
        for name, value in load_file(folder / "adapter_model.safetensors").items()
        if name not in own or not torch.equal(value.to(own[name]), own[name])
    }
    expected = peft.get_peft_model_state_dict(policy.lm, save_embedding_layers=False)
    if weights.keys() != expected.keys():
        missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
        raise ValueError(
            f"model.lora.targets: must be the layers of the adapters in {str(folder)!r}, {config['target_modules']!r}, "
            f"got {settings.lora.targets!r}: missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    peft.set_peft_model_state_dict(policy.lm, weights)


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config
