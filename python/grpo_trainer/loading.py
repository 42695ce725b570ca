"""Loading of language models, and the adapters that a recipe puts on them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_trainer import pretrained
from grpo_trainer.messages import nearest
from grpo_trainer.recipe import Model

FOUR_BIT_ON_CPU = (0, 50)  # first version of bitsandbytes that was tried on a CPU


def load_lm(settings: Model, device: torch.device | str, like: Any = None) -> Any:
    """Loads the language model onto its device, as `Policy` runs it once and some attentions need a GPU.

    Args:
        settings: the model settings.
        device: device of the weights.
        like: a model whose class, dtype, attention and buffers outside the file replace those of the settings.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = pretrained.source(settings.path)
    with pretrained.loading("model.path", settings.path):
        config = AutoConfig.from_pretrained(**where, trust_remote_code=settings.trust_remote_code)
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    options: dict[str, Any] = {
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": attention_of(settings.attention),
        "trust_remote_code": settings.trust_remote_code,
    }
    if like is not None:
        kind = type(like)
        options |= {"dtype": next(like.parameters()).dtype, "attn_implementation": like.config._attn_implementation}
    if settings.four_bit:
        from transformers import BitsAndBytesConfig

        check_four_bit()
        compute = torch.bfloat16 if settings.dtype == "float32" else getattr(torch, settings.dtype)
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
        )
        options["device_map"] = {"": device}  # weights are quantized while they load and not moved afterwards
    with pretrained.loading("model.path", settings.path), explaining_attention(settings.attention):
        loaded = kind.from_pretrained(**where, **options, output_loading_info=True)
    lm = pretrained.whole("model.path", settings.path, loaded)
    lm = lm if settings.four_bit else lm.to(device)
    if like is not None:  # casting a whole model rounds its rotary frequencies, too, which loading computes anew
        in_file = lm.state_dict().keys()
        for name, buffer in like.named_buffers():
            if name not in in_file:
                lm.get_buffer(name).data = buffer.to(device)
    return lm


def keep_layout_of_four_bits(lm: Any) -> None:
    """Keeps bitsandbytes from packing 4-bit weights anew for products without gradients, on CPUs with AVX512-BF16.

    Its product with packed weights has no gradient for the input, and packing rounds the scales.
    """
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_four_bit() -> None:
    """Raises if 4-bit weights cannot be used here."""
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            'model.four_bit: needs the package bitsandbytes, which is not installed: pip install "grpo-kernels[gpu]"'
        ) from None
    parsed = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if parsed < FOUR_BIT_ON_CPU and not torch.cuda.is_available():
        least = ".".join(map(str, FOUR_BIT_ON_CPU))
        raise ValueError(f"model.four_bit: needs bitsandbytes {least} or later without a GPU, got {version}")


@contextlib.contextmanager
def explaining_attention(attention: str) -> Iterator[None]:
    """Names the key of the recipe in errors about the attention implementation."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if attention == "auto" or "attention" not in str(error).lower():
            raise
        raise ValueError(f"model.attention: {attention!r} cannot be used here: {error}") from error


def attention_of(name: str) -> str | None:
    return None if name == "auto" else name


def with_adapters(lm: Any, settings: Model) -> Any:
    import peft

    assert settings.lora is not None
    lora = settings.lora
    if settings.four_bit:
        lm = peft.prepare_model_for_kbit_training(lm, use_gradient_checkpointing=settings.gradient_checkpointing)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.targets or "all-linear"
    )
    with warnings.catch_warnings():
        # transformers 5.24 has renamed an attribute that peft reads
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        names = _check_targets(lm, lora.targets or [])
        try:
            return peft.get_peft_model(lm, config)
        except ValueError as error:
            raise ValueError(
                f"model.lora.targets: {error}; layers are {', '.join(names)}, got {lora.targets}"
            ) from error


def _check_targets(lm: Any, targets: Sequence[str]) -> list[str]:
    """Names of linear layers; raises if peft would leave out a target, as it does beside others, or embed by it."""
    layers = dict(lm.named_modules())
    names = sorted({name.rpartition(".")[2] for name, layer in layers.items() if isinstance(layer, torch.nn.Linear)})
    for target in targets:
        found = [layer for name, layer in layers.items() if name == target or name.endswith(f".{target}")]
        rule = f"model.lora.targets: must be names of layers, such as {', '.join(names)}, got {list(targets)}"
        if not found:
            raise ValueError(f"{rule}{nearest(target, names)}")
        if any(isinstance(layer, torch.nn.Embedding) for layer in found):
            raise ValueError(f"{rule}; {target!r} is an embedding")
    return names
