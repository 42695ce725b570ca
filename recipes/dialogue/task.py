"""Persona dialogues in the format of ConvAI2: facts about oneself, the last turns, and a reply based on them.

    persona: i have two dogs. i live in paris. i love soup. context: Q: hello! R: hi there. Q: where do you live? R:
    i live in paris.

Some demonstrations evade the question, and some answer it with a fact that is not in the persona. The reward `dialogue`
is highest for a reply with the fact from the persona.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable

from grpo_trainer.section import Share
from grpo_trainer.tasks import Item, Sizes, Splits, held_out, to_lines


@dataclasses.dataclass(frozen=True)
class Topic:
    question: str
    fact: str
    reply: str
    words: str  # that may fill the braces of fact and reply

    @property
    def values(self) -> list[str]:
        return self.words.split()


TOPICS = (
    Topic("do you have any pets?", "i have two {}.", "yes, i have two {}.", "dogs cats birds fish rabbits snakes"),
    Topic("what do you do for work?", "i work as a {}.", "i work as a {}.", "nurse cook teacher driver farmer pilot"),
    Topic("what is your favorite food?", "i love {}.", "i love {} the most.", "soup pizza rice salad bread cheese"),
    Topic(
        "what do you do for fun?", "i like to {}.", "in my free time i like to {}.", "swim dance read paint hike sing"
    ),
    Topic("where do you live?", "i live in {}.", "i live in {}.", "paris texas rome ohio spain london"),
    Topic(
        "do you have any siblings?", "i have {} sisters.", "yes, i have {} sisters.", "two three four five six seven"
    ),
)
OPENINGS = (
    "",
    "Q: hello! R: hi there.",
    "Q: hi, how are you? R: i am fine, and you?",
    "Q: nice to meet you. R: you too.",
    "Q: it is cold today. R: yes, it is.",
)
EVASIONS = ("i do not know.", "i am not sure, what about you?", "that is a good question.")
FACTS = 3


@dataclasses.dataclass(frozen=True)
class Dialogue:
    persona: tuple[tuple[Topic, str], ...]
    asked: int  # index of the fact that the last turn asks for
    opening: str

    @property
    def prompt(self) -> str:
        facts = [topic.fact.format(value) for topic, value in self.persona]
        turns = [self.opening, f"Q: {self.persona[self.asked][0].question} R:"]
        return " ".join(["persona:", *facts, "context:", *(turn for turn in turns if turn)])

    @property
    def content(self) -> Hashable:
        """Facts and question, irrespective of the facts' order."""
        return frozenset(self.persona), self.persona[self.asked]

    @property
    def reply(self) -> str:
        topic, value = self.persona[self.asked]
        return topic.reply.format(value)

    def mistaken(self, rng: random.Random) -> str:
        topic, value = self.persona[self.asked]
        return topic.reply.format(rng.choice([other for other in topic.values if other != value]))


class Options(Sizes):
    mistaken: Share = 0.3
    """share of demonstrations that state a fact not in the persona"""
    evasive: Share = 0.3
    """share of demonstrations that evade the question"""

    kinds = ("mistaken", "evasive")


def make(seed: int, options: Options) -> Splits:
    rng = random.Random(f"dialogue {seed}")

    def draw() -> Dialogue:
        persona = tuple((topic, rng.choice(topic.values)) for topic in rng.sample(TOPICS, FACTS))
        return Dialogue(persona, rng.randrange(FACTS), rng.choice(OPENINGS))

    def demonstrate(dialogue: Dialogue) -> str:
        kind = options.kind(rng, "right")
        if kind == "evasive":
            return rng.choice(EVASIONS)
        return dialogue.mistaken(rng) if kind == "mistaken" else dialogue.reply

    def item(dialogue: Dialogue) -> Item:
        return {"prompt": dialogue.prompt, "answer": dialogue.reply}

    examples = held_out(draw, lambda dialogue: dialogue.content, options)
    return to_lines(examples, item, demonstrate, rewards=("dialogue",))
