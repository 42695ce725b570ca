"""1 for the right answer after the last `####`, else 0."""

from __future__ import annotations

from grpo_trainer.rewards import RewardFunction


def answer_of(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def make() -> RewardFunction:
    def exact(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
        return [float(answer_of(text) == right) for text, right in zip(completions, answer, strict=True)]

    return exact
