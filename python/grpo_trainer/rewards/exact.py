"""1 for the right answer after the last `####`, else 0; None where the data has no answer."""

from __future__ import annotations

from grpo_trainer.rewards import RewardFunction


def answer_of(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def as_text(answer: str | int | float) -> str:
    """A file may have numbers."""
    is_whole = isinstance(answer, float) and answer.is_integer()
    return str(int(answer) if is_whole else answer).strip()


def make() -> RewardFunction:
    def exact(
        prompts: list[str], completions: list[str], answer: list[str | int | float | None], **columns: object
    ) -> list[float | None]:
        return [
            None if right is None else float(answer_of(text) == as_text(right))
            for text, right in zip(completions, answer, strict=True)
        ]

    return exact
