"""1 for the correct answer after the last `####`, else 0; None if the data has no answer."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_trainer.rewards.base import BundledReward


class Exact(BundledReward):
    columns_needed = (("answer",),)

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object], **_: object
    ) -> list[float | None]:
        return [
            None if expected is None else float(answer_of(text) == as_text(expected))
            for text, expected in zip(completions, answer, strict=True)
        ]


def answer_of(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def as_text(answer: object) -> str:
    """Answer as text; files may hold numbers, and 4.0 is 4."""
    return f"{answer:.0f}" if isinstance(answer, float) and answer.is_integer() else str(answer).strip()
