"""An OpenAI-compatible endpoint on the loopback device, whose replies a test scripts."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reply:
    text: str = ""  # content of the choice
    status: int = 200
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    payload: bytes | None = None  # instead of a choice with the text
    kind: str | None = "application/json"
    wait: float = 0.0  # seconds before the reply
    drip: float = 0.0  # seconds between two bytes of the payload


class Stub:
    """Requests received, and the replies to them.

    Args:
        reply: a function of what the judge is shown, and of the number of earlier requests with the same content.
    """

    def __init__(self, reply: Callable[[dict[str, Any], int], Reply | float | str]) -> None:
        self.reply, self.requests, self.lock = reply, list[dict[str, Any]](), threading.Lock()
        self.running = self.most_running = 0
        self.url = ""

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1

    def answer(self, body: dict[str, Any], headers: dict[str, str], path: str) -> Reply:
        shown = json.loads(body["messages"][-1]["content"])
        with self.lock:
            earlier = sum(request["shown"] == shown for request in self.requests)
            self.requests.append(
                {"shown": shown, "body": body, "headers": headers, "path": path, "time": time.monotonic()}
            )
        reply = self.reply(shown, earlier)
        if isinstance(reply, Reply):
            return reply
        return Reply(reply if isinstance(reply, str) else json.dumps({"score": reply}))


@contextmanager
def serve(reply: Callable[[dict[str, Any], int], Reply | float | str]) -> Iterator[Stub]:
    stub, stopped = Stub(reply), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                self._reply()

        def _reply(self) -> None:
            # until the reply is sent: its reader may make the next request before this thread goes on
            with stub.counted():
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                sent = stub.answer(body, dict(self.headers), self.path)
                stopped.wait(sent.wait)
            choice = {"choices": [{"message": {"role": "assistant", "content": sent.text}}]}
            payload = json.dumps(choice).encode() if sent.payload is None else sent.payload
            self.send_response(sent.status)
            for name, value in sent.headers.items():
                self.send_header(name, value)
            if sent.kind is not None:
                self.send_header("Content-Type", sent.kind)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            for byte in [bytes([byte]) for byte in payload] if sent.drip else [payload]:
                self.wfile.write(byte)
                self.wfile.flush()
                if stopped.wait(sent.drip):
                    return

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()
