"""Token ids with a role: those that end a response, and those that the policy cannot produce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_KEY = "model.banned"


def stop_ids(lm: Any, eos_id: int) -> list[int]:
    """Tokens that end a response: the tokenizer's and the generation config's, such as a chat's end of turn."""
    configured = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [eos_id if configured is None else configured]
    return sorted({eos_id, *(i for i in ids if 0 <= i < lm.get_input_embeddings().num_embeddings)})


def count_logits(lm: Any) -> int:
    """Size of the vocabulary of a model's head, which may be padded beyond the tokenizer's."""
    return int(lm.get_output_embeddings().out_features)


def banned_ids(banned: Sequence[int | str], lm: Any, tokenizer: Any) -> list[int]:
    """The ids of `model.banned`, in ascending order.

    Args:
        banned: ids, or tokens as the tokenizer spells them.
        lm: the model of transformers.
        tokenizer: its tokenizer.
    """
    size, ends = count_logits(lm), stop_ids(lm, int(tokenizer.eos_token_id))
    known = tokenizer.get_vocab() if any(isinstance(token, str) for token in banned) else {}
    ids = set()
    for number, token in enumerate(banned):
        key = f"{_KEY}.{number}"
        if isinstance(token, str) and token not in known:
            read = tokenizer.convert_ids_to_tokens(tokenizer(token, add_special_tokens=False)["input_ids"])
            raise ValueError(
                f"{key}: must be a token of the tokenizer as that spells it, got {token!r}, which it reads as {read}"
            )
        i = known[token] if isinstance(token, str) else token
        if not 0 <= i < size:
            raise ValueError(f"{key}: must be a token in [0, {size}), the model's vocabulary, got {token!r}")
        if i in ends:
            raise ValueError(f"{key}: must not end responses, as {ends} do, got {token!r}")
        ids.add(i)
    if len(ids) + len(ends) >= size:
        raise ValueError(f"{_KEY}: must leave one of {size} tokens that does not end responses, got {len(ids)}")
    return sorted(ids)


def refuse_banned(banned: Sequence[int], tokenizer: Any, demonstration: Sequence[int]) -> None:
    """Raises if a demonstrated response has a banned token, whose log-prob would be minus infinity."""
    clashes = sorted({*banned} & {*demonstration})
    if clashes:
        token, text = tokenizer.convert_ids_to_tokens(clashes[0]), tokenizer.decode(demonstration)
        shown = f"{token!r}, token {clashes[0]} of {text[:80]!r}"
        raise ValueError(f"{_KEY}: must not hold a token of a demonstration, got {shown}")
