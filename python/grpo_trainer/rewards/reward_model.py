"""Score of a response by a sequence classifier of transformers, such as a reward model trained on preferences.

The score is the logit of the only label, or of a chosen one. The classifier reads prompt and response through the
tokenizer's chat template or a format string. Texts are batched with others of the same number of tokens, so no batch
has padding, and a score depends on the texts beside it at most by rounding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from pydantic import NonNegativeInt, PositiveInt

from grpo_trainer.data import equal_length_batches
from grpo_trainer.pretrained import loading, whole

# Pad token of models without one, which refuse batches otherwise. No batch has padding, and an id that occurs would
# hide the last token.
NO_TOKEN = -1


def make(
    *,
    path: str,
    template: str | None = None,
    label: str | int | None = None,
    batch_tokens: PositiveInt = 16384,
    max_length: PositiveInt | None = None,
    on_long: Literal["raise", "truncate"] = "raise",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str | None = None,
    trust_remote_code: bool = False,
    cache: NonNegativeInt = 65536,
) -> RewardModel:
    """Creates the reward.

    Args:
        path: folder or hub name of the classifier and its tokenizer.
        template: text that the classifier reads, with {prompt} and {response}; None: the tokenizer's chat template.
        label: name or number of the label whose logit is the reward; None: the only one.
        batch_tokens: largest number of tokens of a forward pass; a longer text runs alone.
        max_length: largest number of tokens of a text; None: that of the model.
        on_long: "raise" for longer texts, or "truncate": their first tokens are left out, so that the end of the
            response is read.
        dtype: float32, bfloat16 or float16.
        device: device of the classifier; None: a GPU if there is one.
        trust_remote_code: run code that comes with the model.
        cache: number of scores kept in memory.
    """
    if template is not None and "{response}" not in template:
        raise ValueError(f"reward_model.template: must contain {{response}}, got {template!r}")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with loading("reward_model.path", path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    if template is None and not tokenizer.chat_template:
        raise ValueError(f"reward_model.template: must be given for a tokenizer without a chat template, {path!r}")
    loaded: Any = AutoModelForSequenceClassification
    with loading("reward_model.path", path):
        model = loaded.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    model = whole("reward_model.path", path, model)
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval().requires_grad_(False)
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        config.pad_token_id = NO_TOKEN
    reward = RewardModel(model, tokenizer, _label_index(model.config, label))
    reward.template, reward.batch_tokens, reward.cache_size = template, batch_tokens, cache
    reward.max_length = max_length or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    reward.truncates = on_long == "truncate"
    return reward


class RewardModel:
    """The reward; `counters` describe its last call."""

    template: str | None = None
    batch_tokens, cache_size = 16384, 65536
    max_length: int | None = None
    truncates = False

    def __init__(self, model: Any, tokenizer: Any, label: int) -> None:
        self.__name__ = "reward_model"  # TRL logs a reward under its function's name
        self.model, self.tokenizer, self.label = model, tokenizer, label
        self.cache: OrderedDict[tuple[int, ...], float] = OrderedDict()
        self.counters = {"truncated": 0, "cached": 0}

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
        texts = [self._ids(prompt, response) for prompt, response in zip(prompts, completions, strict=True)]
        rows, truncated = [], 0
        for i, ids in enumerate(texts):
            is_long = self.max_length is not None and len(ids) > self.max_length
            if is_long and not self.truncates:
                raise ValueError(
                    f"reward_model.max_length: texts must have at most {self.max_length} tokens, got {len(ids)} for "
                    f"response {i}; shorten rl.rollout.max_completion_length or set on_long: truncate"
                )
            truncated += is_long
            rows.append(tuple(ids[-self.max_length :] if is_long and self.max_length else ids))
        known = {ids: self.cache[ids] for ids in rows if ids in self.cache}
        self.counters = {"truncated": truncated, "cached": sum(ids in known for ids in rows)}
        known |= self._scores([ids for ids in dict.fromkeys(rows) if ids not in known])
        for row in rows:
            self.cache[row] = known[row]
            self.cache.move_to_end(row)
        while len(self.cache) > self.cache_size:
            self.cache.popitem(last=False)
        return [known[ids] for ids in rows]

    def _ids(self, prompt: str, response: str) -> list[int]:
        if self.template is None:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            # the template writes its own special tokens
            return cast(list[int], self.tokenizer(text, add_special_tokens=False)["input_ids"])
        # not str.format, which would fail at other braces
        text = response.join(part.replace("{prompt}", prompt) for part in self.template.split("{response}"))
        return cast(list[int], self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def _scores(self, texts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        scores: dict[tuple[int, ...], float] = {}
        for rows in equal_length_batches([len(ids) for ids in texts], self.batch_tokens):
            ids = torch.tensor([texts[row] for row in rows], device=self.model.device)
            logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, self.label]
            scores |= zip((texts[row] for row in rows), logits.double().tolist(), strict=True)
        return scores


def _label_index(config: Any, label: str | int | None) -> int:
    names = {config.id2label[i]: i for i in range(config.num_labels)}
    if label is None and config.num_labels == 1:
        return 0
    if isinstance(label, str) and label in names:
        return names[label]
    if type(label) is int and 0 <= label < config.num_labels:
        return label
    raise ValueError(f"reward_model.label: must be one of {list(names)} or its number, got {label!r}")
