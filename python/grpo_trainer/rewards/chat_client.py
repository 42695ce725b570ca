"""A client of OpenAI-compatible chat endpoints: deadlines, retries, and failures that state their cause."""

from __future__ import annotations

import dataclasses
import email.utils
import http.client
import io
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
# 429: too many requests; 529: overloaded, of some providers. Other 4xx would fail again in the same way.
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
LONGEST_REPLY = 1 << 22  # bytes
LONGEST_DELAY = 60.0  # of the back-off; a server's Retry-After may be longer


class RequestError(Exception):
    """A request failed; the message says why.

    Attributes:
        is_permanent: whether the same request would fail again.
        retry_after: seconds that the server asks to wait.
    """

    def __init__(self, message: str, *, is_permanent: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.is_permanent, self.retry_after = is_permanent, retry_after


@dataclasses.dataclass(frozen=True)
class Answer(Generic[T]):
    value: T | None
    cause: str = ""  # why there is no value
    requests: int = 0


class ChatClient:
    """Posts chat requests; threads may share it.

    Args:
        base_url: address that "/chat/completions" is appended to.
        key: bearer token, or None. No message contains it.
        timeout: seconds for one request, from connecting to the last byte.
        retries: how often a failed request is repeated.
        backoff: largest delay before the first retry, which doubles with each further one.
    """

    def __init__(self, base_url: str, key: str | None, *, timeout: float, retries: int, backoff: float) -> None:
        self.url, self.key = urlsplit(base_url), key
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.pause_until = 0.0  # a server that asks one request to wait means all of them
        self.jitter = random.Random()  # changes delays only, and must not draw from the random numbers of the run

    def ask(
        self, body: Mapping[str, Any], read: Callable[[str], T], deadline: float, stop: threading.Event
    ) -> Answer[T]:
        """Sends a request until its reply can be read.

        Args:
            body: the request. A retry adds 1 to its seed: a deterministic server would repeat an unreadable reply.
            read: returns the value of a reply's text, or raises RequestError.
            deadline: time by `time.monotonic` at which to give up.
            stop: gives up when set.
        """
        cause, requests = "", 0
        for attempt in range(self.retries + 1):
            delay = self._delay(attempt)
            if time.monotonic() + delay >= deadline:
                return Answer(None, "batch_seconds ran out" + (f" after {cause}" if cause else ""), requests)
            if stop.wait(delay):
                return Answer(None, "stopped", requests)
            requests += 1
            try:
                return Answer(read(self._post(_reseeded(body, attempt), deadline)), "", requests)
            except RequestError as error:
                cause = str(error)
                self.pause_until = max(self.pause_until, time.monotonic() + error.retry_after)
                if error.is_permanent:
                    break
        return Answer(None, cause, requests)

    def _delay(self, attempt: int) -> float:
        """Seconds to wait before an attempt: exponential back-off with full jitter, or the server's Retry-After."""
        largest = min(LONGEST_DELAY, self.backoff * 2.0 ** (attempt - 1)) if attempt else 0.0
        return max(self.jitter.uniform(0, largest), self.pause_until - time.monotonic(), 0.0)

    def _post(self, body: Mapping[str, Any], batch_deadline: float) -> str:
        deadline = min(time.monotonic() + self.timeout, batch_deadline)
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection: Any = kind(self.url.hostname or "", self.url.port, timeout=max(deadline - time.monotonic(), 1e-3))
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        sock = None
        try:
            connection.connect()
            sock = connection.sock
            connection.sock = _DeadlineSocket(sock, deadline)
            connection.request("POST", self.url.path.rstrip("/") + "/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            payload = response.read(LONGEST_REPLY + 1)
        except TimeoutError:
            limit = f"{self.timeout:g} s" if deadline < batch_deadline else "batch_seconds"
            raise RequestError(f"no complete reply within {limit}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{type(error).__name__}: {error}") from error
        finally:
            if sock is not None:
                sock.close()
        return self._content(response, payload)

    def _content(self, response: http.client.HTTPResponse, payload: bytes) -> str:
        """Text of a reply's first choice."""
        if response.status != 200:
            raise RequestError(
                f"HTTP {response.status}: {self._excerpt(payload)}{self._about_key(response.status)}",
                is_permanent=response.status not in RETRIED,
                retry_after=_seconds(response.headers.get("Retry-After")),
            )
        if len(payload) > LONGEST_REPLY:
            raise RequestError(f"the reply must have at most {LONGEST_REPLY} bytes, got more")
        kind = response.headers.get_content_type() if "Content-Type" in response.headers else "none"
        if kind != "application/json":
            raise RequestError(f"the reply's content type must be application/json, got {kind}")
        try:
            content = json.loads(payload)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise RequestError(
                f"the reply must be JSON with choices[0].message.content, got {self._excerpt(payload)}"
            ) from None
        if not isinstance(content, str):
            raise RequestError(f"choices[0].message.content must be a text, got {type(content).__name__}")
        return content

    def _about_key(self, status: int) -> str:
        if status not in (401, 403):
            return ""
        return "; no key was sent, as key_env is not set" if self.key is None else "; the key of key_env was sent"

    def _excerpt(self, payload: bytes) -> str:
        text = payload.decode(errors="replace")
        if self.key is not None:  # before the cut, which could leave a part of it
            text = text.replace(self.key, "[key]")
        return repr(" ".join(text.split())[:200])


class _DeadlineSocket:
    """The part of a socket that http.client uses, with one deadline for all operations.

    A socket's own timeout starts anew with every byte, so a slow drip would never end.
    """

    def __init__(self, sock: Any, deadline: float) -> None:
        self.sock, self.deadline = sock, deadline

    def sendall(self, data: Any) -> None:
        self._limit()
        self.sock.sendall(data)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self))

    def recv_into(self, buffer: Any) -> int:
        self._limit()
        return int(self.sock.recv_into(buffer))

    def close(self) -> None:
        """Leaves the socket open: http.client closes it before the reply is read, and `_post` afterwards."""

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.sock.settimeout(left)


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock: _DeadlineSocket) -> None:
        self.sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.sock.recv_into(buffer)


def _reseeded(body: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    seed = body.get("seed")
    return {**body, "seed": seed + attempt} if isinstance(seed, int) else dict(body)


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After header, which is a number or a date; 0 if it is neither."""
    if retry_after is None:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0
