"""Converts posts and replies with their likes to the files of reply-gpu and reply-polychromic-gpu.

    python recipes/reply/prepare.py FILE --output data/replies

All replies to a post are in one part, and the parts have equal shares of each quartile of the likes, which are divided
by those of the post if the file has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_trainer import prepare
from grpo_trainer.tasks import Item

# columns of the file
POST, REPLY, LIKES, POST_LIKES = "tweet", "reply", "reply_likes", "tweet_likes"


def convert(line: Item) -> Item:
    post = prepare.text_of(line, POST)
    reply, likes = prepare.text_of(line, REPLY), count(line, LIKES)
    converted = {"prompt": f"Post: {post}\nReply:", "post": post, "reply": reply, "likes": likes}
    return converted | ({"post_likes": count(line, POST_LIKES)} if POST_LIKES in line else {})


def count(line: Item, column: str) -> int:
    value = prepare.value_of(line, column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0 or value % 1 != 0:
        raise ValueError(f"{column}: must be a whole number of 0 or more, got {value!r}")
    return int(value)


def popularity(line: Item) -> float:
    return float(line["likes"] / max(line.get("post_likes", 1), 1))


def main(arguments: Sequence[str] | None = None) -> None:
    shares = {"phase1": 0.45, "phase2": 0.45, "validation": 0.1}
    prepare.run(str(__doc__), convert, lambda line: str(line["post"]), shares, popularity, arguments)


if __name__ == "__main__":
    main()
