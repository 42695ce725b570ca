"""Score of a response by a sequence classifier of transformers, such as a reward model trained on preferences.

The score is the logit of the only label, or of a chosen one. The classifier reads prompt and response through the
tokenizer's chat template or a format string. Texts are batched with others of the same number of tokens, so no batch
has padding, and a score depends on the texts beside it at most by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch

from grpo_trainer.data import Prompt, prompt_text
from grpo_trainer.pretrained import loading, whole
from grpo_trainer.rewards.base import BundledReward
from grpo_trainer.section import PathText, Rule

# Pad token of models without one, which refuse batches otherwise. No batch has padding, and an id that occurs would
# hide the last token.
NO_TOKEN = -1
BATCH_TOKENS = 16384  # of a forward pass; a longer text runs alone


class RewardModel(BundledReward):
    path: PathText
    """folder or hub name of the classifier and its tokenizer"""
    template: str | None = None
    """text that the classifier reads, with {prompt} and {response}; null: the tokenizer's chat template"""
    label: str | int | None = None
    """name or number of the label whose logit is the reward; null: the only one"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights"""
    trust_remote_code: bool = False
    """allow code that comes with the model to run"""

    _model: Any = None
    _tokenizer: Any = None
    _label: int = 0

    def rules(self) -> Iterator[Rule]:
        is_template = self.template is None or "{response}" in self.template
        yield "template", is_template, "must contain {response}"
        has_template = self.template is not None or bool(self._tokenizer.chat_template)
        yield "template", has_template, "must be given for a tokenizer without a chat template"

    def model_post_init(self, _: Any) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        kind: Any = AutoModelForSequenceClassification
        code = {"trust_remote_code": self.trust_remote_code}
        with loading("reward_model.path", self.path):
            self._tokenizer = AutoTokenizer.from_pretrained(self.path, **code)
            loaded = kind.from_pretrained(self.path, dtype=self.dtype, output_loading_info=True, **code)
        model = whole("reward_model.path", self.path, loaded)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        config = self._model.config.get_text_config()
        if config.pad_token_id is None:
            config.pad_token_id = NO_TOKEN
        self._label = _label_index(self._model.config, self.label)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str], **_: Any) -> list[float | None]:
        rows = [tuple(self._ids(prompt, response)) for prompt, response in zip(prompts, completions, strict=True)]
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        for i, ids in enumerate(rows):
            if longest is not None and len(ids) > longest:
                raise ValueError(
                    f"reward_model: texts must have at most {longest} tokens, the model's context, got {len(ids)} for "
                    f"response {i}; shorten rl.rollout.max_completion_length"
                )
        scores: dict[tuple[int, ...], float] = {}
        for length, group in itertools.groupby(sorted(dict.fromkeys(rows), key=len), key=len):
            texts = list(group)
            size = max(1, BATCH_TOKENS // max(length, 1))
            for start in range(0, len(texts), size):
                batch = texts[start : start + size]
                tokens = torch.tensor(batch, device=self._model.device)
                logits = self._model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, self._label]
                scores |= zip(batch, logits.double().tolist(), strict=True)
        return [scores[ids] for ids in rows]

    def _ids(self, prompt: Prompt, response: str) -> list[int]:
        if self.template is None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            answered = [*messages, {"role": "assistant", "content": response}]
            text = self._tokenizer.apply_chat_template(answered, tokenize=False)
            # the template writes its own special tokens
            return cast(list[int], self._tokenizer(text, add_special_tokens=False)["input_ids"])
        # not str.format, which would fail at other braces
        whole_prompt = prompt_text(prompt)
        text = response.join(part.replace("{prompt}", whole_prompt) for part in self.template.split("{response}"))
        return cast(list[int], self._tokenizer(text)["input_ids"])


def _label_index(config: Any, label: str | int | None) -> int:
    names = {config.id2label[i]: i for i in range(config.num_labels)}
    if label is None and config.num_labels == 1:
        return 0
    if isinstance(label, str) and label in names:
        return names[label]
    if type(label) is int and 0 <= label < config.num_labels:
        return label
    raise ValueError(f"label: must be one of {list(names)} or its number, got {label!r}")
