"""Ctrl-C and SIGTERM: a run ends at the next boundary of a step, with a checkpoint to continue from.

The first signal asks: all processes stop together at the next `stop_if_asked`, with weights that belong to a step.
Another one ends the run at once; the last checkpoint is complete all the same. Launchers forward the signal that the
terminal has sent to their processes already, so one that follows within a second is taken for the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

from grpo_trainer import distributed

SAME_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The run was asked to stop. The weights are those after a whole step."""


# numbers and times of the signals that count: one that asks to stop, and one that stops at once
_received: list[tuple[int, float]] = []


def signal_number() -> int | None:
    """The signal that asked the run to stop; None: there was none."""
    return _received[0][0] if _received else None


def is_immediate() -> bool:
    """Whether a further signal asked to stop at once."""
    return len(_received) > 1


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Takes signals as requests to stop. Only the main thread can; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, _receive) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _received.clear()


def _receive(number: int, frame: Any) -> None:
    now = time.monotonic()
    if not _received:
        _received.append((number, now))
        if os.environ.get("RANK", "0") == "0":  # without the buffers of sys.stderr, which may be in use
            os.write(2, b"\nstopping after this step; once more stops at once\n")
    elif now - _received[0][1] > SAME_SECONDS:
        _received.append((number, now))
        raise KeyboardInterrupt


def stop_if_asked() -> None:
    """Raises `Stopped` in all processes if one of them was asked to stop; all must call it, at the same point."""
    if distributed.all_reduce_max(int(bool(_received))):
        raise Stopped
