"""Similarity of a reply to the demonstrated one: F1 of words, ROUGE-1, -2 and -L, and BLEU, each in [0, 1].

The reference is in the column `answers`, a list of replies, or `answer`, a single one. F1 drops case, punctuation and
articles, as SQuAD's evaluation does. BLEU is sentence BLEU in lower case, with at most as many orders as words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import NonNegativeFloat

from grpo_trainer.messages import require_package
from grpo_trainer.rewards.base import Parts, WeightedReward, sums_to_one
from grpo_trainer.rewards.words import f1
from grpo_trainer.section import Rule, Section, Share

ROUGES = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL"}


class Weights(Section):
    f1: Share = 1 / 3
    rouge_1: Share = 0.0
    rouge_2: Share = 0.0
    rouge_l: Share = 1 / 3
    bleu: Share = 1 / 3


class Dialogue(WeightedReward):
    weights: Weights = Weights()
    """weights of the components, with sum 1"""
    length_penalty: NonNegativeFloat = 0.0
    """s in the factor exp(-s |1 - words / reference words|); 2 s applies to shorter replies"""

    columns_needed = (("answers", "answer"),)
    _rouge: Any = None
    _bleu: Any = None

    def rules(self) -> Iterator[Rule]:
        yield sums_to_one(self.weights)

    def model_post_init(self, _: Any) -> None:
        for package in ("rouge_score", "sacrebleu"):
            require_package("dialogue", package, "text")
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
        from sacrebleu.metrics.bleu import BLEU

        self._rouge = RougeScorer(list(ROUGES.values()), use_stemmer=False)
        self._bleu = BLEU(lowercase=True, effective_order=True)

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        references = _references(row)
        if not references:
            return None
        reply = reply_of(response)
        rouges = [self._rouge.score(reference, reply) for reference in references]
        return {
            "f1": max(f1(reply, reference) for reference in references),
            **{name: max(float(rouge[key].fmeasure) for rouge in rouges) for name, key in ROUGES.items()},
            # rounding can take BLEU above 100
            "bleu": min(1.0, float(self._bleu.sentence_score(reply, references).score) / 100) if reply else 0.0,
            "length": max(length_factor(reply, reference, self.length_penalty) for reference in references),
        }

    def total(self, parts: Parts) -> float:
        return parts["length"] * super().total(parts)


def length_factor(reply: str, reference: str, penalty: float) -> float:
    """Factor that is 1 at the reference's number of words and decays away from it, twice as fast below it."""
    words, expected = len(reply.split()), max(len(reference.split()), 1)
    return math.exp(-penalty * (2 if words < expected else 1) * abs(1 - words / expected))


def reply_of(text: str) -> str:
    """The reply without the speaker tag, which the prompt may already contain."""
    return text.strip().removeprefix("R:").strip()


def _references(row: Mapping[str, Any]) -> list[str]:
    answers = row.get("answers")
    texts: Sequence[str] = answers if answers is not None else [row.get("answer") or ""]
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"dialogue: the column 'answers' must hold lists of texts, and 'answer' a text, got {texts!r}")
    return [reply_of(text) for text in texts if text.strip()]
