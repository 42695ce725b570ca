"""Converts ConvAI2, with `question` ("persona: ... context: ...") and `answers`, to the files of dialogue-gpu.

    python recipes/dialogue/prepare.py FILE --output data/convai2

All dialogues of a persona are in one part.
"""

import re
from collections.abc import Sequence
from typing import Annotated

from grpo_trainer import prepare
from grpo_trainer.tasks import Item
from pydantic import Field

PERSONA = re.compile(r"persona:(.*?)context:", re.IGNORECASE | re.DOTALL)


class Line(prepare.Line):
    question: prepare.Text
    answers: Annotated[list[Annotated[str, Field(pattern=r"\S")]], Field(min_length=1)]

    def converted(self) -> Item:
        return {"prompt": self.question, "answers": self.answers}


def persona(line: Item) -> str:
    found = PERSONA.search(line["prompt"])
    return found[1] if found else str(line["prompt"])


def main(arguments: Sequence[str] | None = None) -> None:
    prepare.run(str(__doc__), Line, persona, {"train": 0.9, "validation": 0.1}, arguments=arguments)


if __name__ == "__main__":
    main()
