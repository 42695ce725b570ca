"""A limit on the time of a call that may never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float | None, call: Callable[[], T], key: str) -> T:
    """Result of a call, or TimeoutError if it takes longer.

    With a limit, the call runs in a thread of its own. Python cannot end a thread, so one that hangs is left behind; it
    does not keep the process from ending.

    Args:
        seconds: the limit; None: no limit, and the call runs in this thread.
        call: the call.
        key: the setting of the limit, for the error.
    """
    if seconds is None:
        return call()
    ended: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((call(), None))
        except BaseException as error:
            ended.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = ended.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no result within {seconds:g} s ({key})") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
