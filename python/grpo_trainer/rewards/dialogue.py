"""How near a reply is to the one that was given: F1 of words, ROUGE-L and BLEU, all within 0 and 1.

The gold is in the column `answers`, several replies, or `answer`, one. F1 is as the evaluation has it, whose normaliser
drops case, punctuation and articles; BLEU is of the sentence, in lower case, with as many orders as the reply has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_trainer.rewards.weighted import Parts, WeightedReward, checked_weights
from grpo_trainer.rewards.words import f1

WEIGHTS = {"f1": 1 / 3, "rouge_l": 1 / 3, "bleu": 1 / 3}


def make(*, weights: Mapping[str, float] | None = None, length_penalty: float = 0.0) -> Dialogue:
    """Weights of the three, and s of a factor exp(-s |1 - words / max(gold's words, 1)|), 2 s for shorter replies."""
    if not 0 <= length_penalty < math.inf:
        raise ValueError(f"dialogue.length_penalty: must be 0 or more, got {length_penalty!r}")
    return Dialogue(checked_weights("dialogue.weights", weights, WEIGHTS), length_penalty)


class Dialogue(WeightedReward):
    columns = ("answers", "answer")

    def __init__(self, weights: Mapping[str, float], length_penalty: float) -> None:
        from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]
        from sacrebleu.metrics.bleu import BLEU

        super().__init__("dialogue", weights)
        self.length_penalty = length_penalty
        self.rouge: Any = RougeScorer(["rougeL"], use_stemmer=False)
        self.bleu: Any = BLEU(lowercase=True, effective_order=True)

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        golds = _golds(row)
        if not golds:
            return None
        reply = reply_of(response)
        return {
            "f1": max(f1(reply, gold) for gold in golds),
            "rouge_l": max(float(self.rouge.score(gold, reply)["rougeL"].fmeasure) for gold in golds),
            # rounding in its exponentials
            "bleu": min(1.0, float(self.bleu.sentence_score(reply, golds).score) / 100) if reply else 0.0,
            "length": max(length_factor(reply, gold, self.length_penalty) for gold in golds),
        }

    def total(self, parts: Parts) -> float:
        return parts["length"] * super().total(parts)


def length_factor(reply: str, gold: str, penalty: float) -> float:
    """1 for as many words as the gold has, less the further from it, twice as fast below it."""
    said, wanted = len(reply.split()), max(len(gold.split()), 1)
    return math.exp(-penalty * (2 if said < wanted else 1) * abs(1 - said / wanted))


def reply_of(text: str) -> str:
    """Without the tag of who speaks, which the prompt may end with or not."""
    return text.strip().removeprefix("R:").strip()


def _golds(row: Mapping[str, Any]) -> list[str]:
    several = row.get("answers")
    found: Sequence[str] = several if several is not None else [row.get("answer") or ""]
    if isinstance(found, str) or not all(isinstance(each, str) for each in found):
        raise TypeError(f"dialogue: the column 'answers' must hold lists of texts, and 'answer' a text, got {found!r}")
    return [reply_of(each) for each in found if each.strip()]
