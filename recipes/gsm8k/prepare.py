"""Converts GSM8K, with `question` and `answer`, to the files of gsm8k-gpu and group_ppo-gpu.

    python recipes/gsm8k/prepare.py train.jsonl --output data/gsm8k
    python recipes/gsm8k/prepare.py test.jsonl --output data/gsm8k --into test=1

The calculator's annotations, such as <<48/2=24>>, are removed from the solutions.
"""

import re
from collections.abc import Sequence

from grpo_trainer import prepare
from grpo_trainer.rewards.numbers import parse_number
from grpo_trainer.tasks import Item

ANNOTATION = re.compile(r"<<[^<>\n]*>>")


class Line(prepare.Line):
    question: prepare.Text
    answer: prepare.Text

    def converted(self) -> Item:
        _, mark, number = self.answer.rpartition("####")
        if not mark or parse_number(number) is None:
            raise ValueError(f"answer: must end in #### and a number, got {self.answer[-80:]!r}")
        solution = ANNOTATION.sub("", self.answer)
        if "<<" in solution or ">>" in solution:
            raise ValueError(f"answer: annotations must have the form <<48/2=24>>, got {solution[:200]!r}")
        return {"question": self.question, "answer": solution}


def main(arguments: Sequence[str] | None = None) -> None:
    shares = {"train": 0.95, "validation": 0.05}
    prepare.run(str(__doc__), Line, lambda line: str(line["question"]), shares, arguments=arguments)


if __name__ == "__main__":
    main()
