"""Converts posts and replies with their likes to the files of reply-gpu and reply-polychromic-gpu.

    python recipes/reply/prepare.py FILE --output data/replies

All replies to a post are in one part, and the parts have equal shares of each quartile of the likes, which are divided
by those of the post if the file has them.
"""

from collections.abc import Sequence
from typing import Annotated

from grpo_trainer import prepare
from grpo_trainer.tasks import Item
from pydantic import Field

Count = Annotated[float, Field(ge=0, multiple_of=1)]  # CSV files may hold 3.0


class Line(prepare.Line):
    tweet: prepare.Text
    reply: prepare.Text
    reply_likes: Count
    tweet_likes: Count | None = None

    def converted(self) -> Item:
        prompt, likes = f"Post: {self.tweet}\nReply:", int(self.reply_likes)
        converted = {"prompt": prompt, "post": self.tweet, "reply": self.reply, "likes": likes}
        return converted if self.tweet_likes is None else converted | {"post_likes": int(self.tweet_likes)}


def popularity(line: Item) -> float:
    return float(line["likes"] / max(line.get("post_likes", 1), 1))


def main(arguments: Sequence[str] | None = None) -> None:
    shares = {"phase1": 0.45, "phase2": 0.45, "validation": 0.1}
    prepare.run(str(__doc__), Line, lambda line: str(line["post"]), shares, popularity, arguments)


if __name__ == "__main__":
    main()
