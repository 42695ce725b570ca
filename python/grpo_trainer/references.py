"""Checks of the reference model that a recipe names, before the first step."""

from __future__ import annotations

from typing import Any

from grpo_trainer import pretrained
from grpo_trainer.recipe import Model

_KEY = "model.reference_model_path"


def check_reference(settings: Model, tokenizer: Any, lm: Any) -> None:
    """Raises if the reference of the KL term is no model, or does not read the policy's tokens.

    Args:
        settings: the model settings.
        tokenizer: that of the policy.
        lm: the policy's model; a tokenizer may have more tokens than it has embeddings.
    """
    path = settings.reference_model_path
    if path is None:
        return
    from transformers import AutoConfig

    try:
        where = pretrained.source(path)
        with pretrained.loading(_KEY, path):
            config = AutoConfig.from_pretrained(**where, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"{_KEY}: {str(error).removeprefix(f'{_KEY}: ').removeprefix('model.path: ')}") from error
    rule = f"{_KEY}: must read the tokens of model.path, got {path!r}"
    size, needed = config.get_text_config().vocab_size, lm.get_input_embeddings().num_embeddings
    if size < min(needed, len(tokenizer)):
        raise ValueError(f"{rule} with {size} tokens, fewer than the policy's {min(needed, len(tokenizer))}")
    try:
        theirs = pretrained.load_tokenizer(path, settings.trust_remote_code).get_vocab()
    except (OSError, ValueError):  # a reference needs none
        return
    ours = tokenizer.get_vocab()
    others = sorted(token for token in ours if theirs.get(token, ours[token]) != ours[token])
    if others:
        token = others[0]
        raise ValueError(f"{rule}, where {token!r} is token {theirs[token]} and not {ours[token]}")
