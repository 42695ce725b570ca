"""Converts ConvAI2, with `question` ("persona: ... context: ...") and `answers`, to the files of dialogue-gpu.

    python recipes/dialogue/prepare.py FILE --output data/convai2

All dialogues of a persona are in one part.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from grpo_trainer import prepare
from grpo_trainer.tasks import Item

PERSONA = re.compile(r"persona:(.*?)context:", re.IGNORECASE | re.DOTALL)


def convert(line: Item) -> Item:
    answers = prepare.value_of(line, "answers")
    is_list = isinstance(answers, list) and len(answers) > 0
    if not is_list or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise ValueError(f"answers: must be a list of at least one text, and of no empty one, got {answers!r}")
    return {"prompt": prepare.text_of(line, "question"), "answers": answers}


def persona(line: Item) -> str:
    found = PERSONA.search(line["prompt"])
    return found[1] if found else str(line["prompt"])


def main(arguments: Sequence[str] | None = None) -> None:
    prepare.run(str(__doc__), convert, persona, {"train": 0.9, "validation": 0.1}, arguments=arguments)


if __name__ == "__main__":
    main()
