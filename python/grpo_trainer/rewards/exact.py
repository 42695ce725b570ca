"""1 for the correct answer after the last `####`, else 0; None if the data has no answer."""

from __future__ import annotations

from grpo_trainer.rewards import RewardFunction


def answer_of(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def as_text(answer: str | int | float) -> str:
    """Answer as text; files may hold numbers."""
    is_whole = isinstance(answer, float) and answer.is_integer()
    return str(int(answer) if is_whole else answer).strip()


def make() -> RewardFunction:
    def exact(
        prompts: list[str], completions: list[str], answer: list[str | int | float | None], **columns: object
    ) -> list[float | None]:
        return [
            None if expected is None else float(answer_of(text) == as_text(expected))
            for text, expected in zip(completions, answer, strict=True)
        ]

    return exact
