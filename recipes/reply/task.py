"""Short posts with several replies of mixed quality, and their numbers of likes.

    Post: Last night i watched the space movie with friends. It was great.
    Reply:    That sounds great, i am happy for you! What did you like most about the movie?

Good replies ask about the subject in the mood of the post. The others are short, generic, off topic or shouted, and get
fewer likes on average. The reward `reply` prefers the good replies, which are a minority of the demonstrations. Posts
of validation and test have one reply each, with which `evaluation.solved_quantile` decides what counts as correct.
"""

from __future__ import annotations

import dataclasses
import random

from grpo_trainer.section import Share
from grpo_trainer.tasks import Item, Sizes, Splits, held_out
from pydantic import NonNegativeInt, PositiveInt

SUBJECTS = (
    ("tried the new ramen place", "the ramen"),
    ("watched the space movie", "the movie"),
    ("ran my first race", "the race"),
    ("planted tomatoes", "the tomatoes"),
    ("got a puppy", "the puppy"),
    ("read a book about whales", "the book"),
    ("baked bread", "the bread"),
    ("fixed my old bike", "the bike"),
    ("painted the kitchen", "the kitchen"),
    ("built a small robot", "the robot"),
    ("cleaned the garage", "the garage"),
    ("played a new game", "the game"),
)
TIMES = ("Today", "This week", "Last night", "On Sunday", "Yesterday", "This morning")
COMPANY = ("", " with friends", " with my sister", " with my dad", " all alone")
PLEASED = ("It was great.", "I love it.", "It made me so happy.")
UPSET = ("It was awful.", "I hate it.", "It made me so sad.")
GENERIC = ("Nice.", "So true.", "Same here.", "Wow, cool.")
# per like of the post
LIKES = {"good": 0.20, "plain": 0.10, "generic": 0.05, "off_topic": 0.03, "shouted": 0.02}


@dataclasses.dataclass(frozen=True)
class Post:
    time: str
    subject: tuple[str, str]
    company: str
    mood: str

    @property
    def text(self) -> str:
        return f"{self.time} i {self.subject[0]}{self.company}. {self.mood}"

    @property
    def prompt(self) -> str:
        return f"Post: {self.text}\nReply:"

    def reply(self, kind: str, rng: random.Random) -> str:
        if kind == "generic":
            return rng.choice(GENERIC)
        if kind == "shouted":
            return f"{rng.choice(GENERIC)[:-1]}!!!".upper()
        if kind == "plain":
            return f"I know {self.subject[1]}."
        pleased, about = self.mood in PLEASED, self.subject[1]
        if kind == "off_topic":
            pleased, about = not pleased, rng.choice([other for _, other in SUBJECTS if other != about])
        if pleased:
            return f"That sounds great, i am happy for you! What did you like most about {about}?"
        return f"Oh no, i am sorry to hear that. What went wrong with {about}?"


def item(post: Post, kind: str, post_likes: int, rng: random.Random) -> Item:
    """A line with the likes of a reply of the given kind."""
    likes = round(rng.expovariate(1 / (LIKES[kind] * post_likes)))
    return {"prompt": post.prompt, "post": post.text, "post_likes": post_likes, "likes": likes}


class Options(Sizes):
    train: NonNegativeInt = 2000
    validation: NonNegativeInt = 128
    test: NonNegativeInt = 256
    replies: PositiveInt = 4
    """demonstrations per post"""
    good: Share = 0.25
    """share of good replies"""
    plain: Share = 0.25
    """share of replies that only name the subject"""
    generic: Share = 0.25
    """share of generic replies"""
    off_topic: Share = 0.15
    """share of off-topic replies; the rest is shouted"""

    kinds = ("good", "plain", "generic", "off_topic")


def make(seed: int, options: Options) -> Splits:
    rng = random.Random(f"reply {seed}")

    def draw() -> Post:
        mood = rng.choice(PLEASED + UPSET)
        return Post(rng.choice(TIMES), rng.choice(SUBJECTS), rng.choice(COMPANY), mood)

    posts = options.model_copy(update={"demonstrations": -(-options.demonstrations // options.replies)})
    sft_posts, train_posts, *evaluated_posts = held_out(draw, lambda post: post.text, posts)

    def demonstrate(post: Post) -> list[Item]:
        post_likes = rng.randint(20, 400)
        kinds = [options.kind(rng, "shouted") for _ in range(options.replies)]
        return [item(post, kind, post_likes, rng) | {"demonstration": post.reply(kind, rng)} for kind in kinds]

    sft = [line for post in sft_posts for line in demonstrate(post)][: options.demonstrations]
    train = [item(post, options.kind(rng, "shouted"), rng.randint(20, 400), rng) for post in train_posts]
    # one demonstration per post: evaluation.solved_quantile reads them
    validation, test = ([demonstrate(post)[0] for post in posts] for posts in evaluated_posts)
    return Splits(sft, train, validation, test, rewards=("reply",))
