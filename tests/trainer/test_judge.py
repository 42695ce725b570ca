"""The judge against an endpoint on the loopback device: requests, scores, failures, the key, the cache."""

from __future__ import annotations

import json
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("openai")

from grpo_trainer.metrics import counter_metrics
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import LoadedReward, RewardError, load_reward, score
from grpo_trainer.rewards.judge import BODY, read_score
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_rewards import rollout

NOWHERE = "http://127.0.0.1:1/v1"


class Reply(NamedTuple):
    text: str = ""  # content of the choice
    status: int = 200
    payload: bytes | None = None  # in place of a choice with the text
    wait: float = 0.0  # seconds before the reply
    headers: dict[str, str] = {}  # noqa: RUF012 # never changed


class Stub(ThreadingHTTPServer):
    """An endpoint that notes its requests; `answer` gets the judged text and how often it was judged before."""

    def __init__(self, answer: Callable[[str, int], Reply | float]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.lock, self.stopped = answer, threading.Lock(), threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, *_: Any) -> None:  # the client gave up
        pass


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        stub: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = json.loads(body["messages"][-1]["content"])
        with stub.lock:
            before = sum(request["shown"] == shown for request in stub.requests)
            headers = {name.lower(): value for name, value in self.headers.items()}
            stub.requests.append({"shown": shown, "body": body, "headers": headers, "time": time.monotonic()})
            stub.running += 1
            stub.most_running = max(stub.most_running, stub.running)
        sent = stub.answer(shown["response"], before)
        if not isinstance(sent, Reply):
            sent = Reply(json.dumps({"score": sent}))
        stub.stopped.wait(sent.wait)
        with stub.lock:
            stub.running -= 1
        content = json.dumps({"choices": [{"message": {"role": "assistant", "content": sent.text}}]})
        payload = content.encode() if sent.payload is None else sent.payload
        self.send_response(sent.status if self.path == "/v1/chat/completions" else 404)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": len(payload)} | sent.headers
        ).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serve(answer: Callable[[str, int], Reply | float]) -> Iterator[Stub]:
    with Stub(answer) as stub:
        thread = threading.Thread(target=stub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            stub.stopped.set()
            stub.shutdown()
            thread.join()


def loaded(url: str, **options: Any) -> LoadedReward:
    values = {"base_url": url, "model": "m", "rubric": "Be strict.", "timeout": 5.0, "retries": 0} | options
    return load_reward(Reward(name="judge", options=values))


def judged(url: str, *texts: str, **options: Any) -> list[float | None]:
    return list(loaded(url, **options).function(prompts=["p"] * len(texts), completions=list(texts)))


def number_in(text: str, _: int) -> float:
    return float(text.split()[-1])


def test_the_request_has_rubric_prompt_response_columns_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "of another endpoint")
    monkeypatch.setenv("OPENAI_ORG_ID", "another endpoint")
    with serve(lambda *_: 10) as stub:
        judge = loaded(stub.url, key_env="KEY_OF_TEST", columns=["answer"], scores=[0, 10]).function
        judge(prompts=["Write."], completions=["<think>no</think> a poem"], answer=["x"], other=[1])
        judged(stub.url, "<think>never ends", body={"temperature": 0.5, "seed": None})
    first, second = stub.requests
    assert first["headers"]["authorization"] == "Bearer secret-1"
    assert first["shown"] == {"prompt": "Write.", "answer": "x", "response": "a poem"}
    assert second["shown"] == {"prompt": "p", "response": "<think>never ends"}
    system = first["body"]["messages"][0]["content"]
    assert system.startswith("Be strict.\n\nAnswer with a JSON object") and "s is a number from 0 to 10" in system
    assert {name: first["body"][name] for name in ("model", *BODY)} == {"model": "m", **BODY}
    assert second["body"]["temperature"] == 0.5 and "seed" not in second["body"]
    assert "another endpoint" not in str(second["headers"])


def test_scores_become_rewards_in_the_order_of_the_responses() -> None:
    def slow_first(text: str, _: int) -> Reply:
        return Reply(json.dumps({"score": float(text)}), wait=0.02 * (10 - float(text)))

    with serve(slow_first) as stub:
        values = judged(stub.url, *map(str, range(10)), concurrency=5, scores=[0, 9], rewards=[0, 9])
        assert values == list(range(10)) and 1 < stub.most_running <= 5
        assert judged(stub.url, "4") == [pytest.approx(1 / 3)]
        assert judged(stub.url, "4", scores=[0, 8], rewards=[1, -3]) == [-1]


def test_a_score_is_read() -> None:
    texts = {
        '{"score": "7.5"}': 7.5,
        'I think so.\n```json\n{"reason": "good {sic}", "score": 7}\n```\nDone.': 7,
        'First {"score": 2}, no: {"score": 3} and {"verdict": 1}': 3,
        'a { b {"score": 4}': 4,
        '{"score": {"score": 1}} {"score": 2}': 2,
    }
    assert {text: read_score(text) for text in texts} == texts


NONSENSE = ("seven", "[]", '{"score": null}', '{"score": true}', '{"score": NaN}', '{"score": 11}', '{"score": 0}')
PAYLOADS = (b"not json", b"[" * 100_000, b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}')


def test_bad_replies_are_not_scored_and_counted() -> None:
    texts = [*NONSENSE, '{"score": 1' + "0" * 400 + "}", '{"a":' * 20000]
    bad = [*map(Reply, texts), *(Reply(payload=payload) for payload in PAYLOADS)]
    bad += [Reply(payload=b"<html>7</html>", headers={"Content-Type": "text/html"}), Reply(status=404)]
    texts = ["good", *map(str, range(len(bad)))]
    with serve(lambda text, _: 10 if text == "good" else bad[int(text)]) as stub:
        judge: Any = loaded(stub.url, max_failures=1.0).function
        assert judge(["p"] * len(texts), texts) == [1.0, *[None] * len(bad)]
        assert judge.counters == {"failed": len(bad), "cached": 0, "requests": len(texts)}
        judge(["p"] * 3, ["good", "good", "1"])  # failures are not kept
        assert judge.counters == {"failed": 1, "cached": 2, "requests": 1}


def test_a_busy_endpoint_is_asked_again_when_it_says_and_failures_name_cause_and_judge() -> None:
    busy = Reply(status=429, headers={"Retry-After": "0.4"})
    with serve(lambda text, before: Reply(wait=30.0) if text == "c" else 10 if before else busy) as stub:
        assert judged(stub.url, "a", retries=1) == [1.0]
        first, second = (request["time"] for request in stub.requests)
        assert second - first >= 0.4
        for text, cause, timeout in (("b", "RateLimitError", 5.0), ("c", "Timeout", 0.3)):
            with pytest.raises(RewardError, match=cause):
                judged(stub.url, text, timeout=timeout)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(RewardError, match=r"2 of 2 did; .* 2 times, is: APIConnectionError: .*'m' at " + url):
            judged(url, "a", "b")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_too_many_failures_end_the_run(on_error: Any) -> None:
    with serve(lambda text, _: Reply("?") if text.startswith("bad") else 10) as stub:
        judge = loaded(stub.url, max_failures=0.25)
        judge = judge._replace(settings=judge.settings.model_copy(update={"on_error": on_error}))
        values, skipped, _ = score([judge], rollout(["a", "b", "c", "bad"]))
        assert values[:3, 0].tolist() == [1.0] * 3 and math.isnan(values[3, 0]) and skipped == 1
        names = ("failed", "cached", "requests")
        assert counter_metrics([judge]) == {f"rewards/judge_{n}": v for n, v in zip(names, (1, 0, 4), strict=True)}
        with pytest.raises(RewardError, match=r"max_failures allows 0.25 of .* and 2 of 4 did; .*number 'score'"):
            score([judge], rollout(["a", "b", "bad 1", "bad 2"]))


def test_no_error_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-2")
    refusal = Reply(status=401, payload=b'{"error": {"message": "secret-2 is wrong"}}')
    with serve(lambda *_: refusal) as stub:
        with pytest.raises(RewardError, match=r"AuthenticationError: Error code: 401 .*\[key\] is wrong") as caught:
            judged(stub.url, "a", key_env="KEY_OF_TEST", retries=2)
        assert len(stub.requests) == 1 and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "ftp://x"}, r"options.base_url: must be an address .* got 'ftp://x'"),
        ({"base_url": "ftp://me:secret@x/v1"}, r"options.base_url: must have no user or password"),
        ({"model": None}, r"options.model: must be of type string, got None"),
        ({"columns": ["answer"]}, r"reward judge: needs the column 'answer', the data has \[\]"),
        ({"rubric": " "}, r"options.rubric: String should match"),
        ({"key_env": "NO_SUCH_VARIABLE"}, r"options.key_env: must name .* holds a key, got 'NO_SUCH_VARIABLE'"),
        ({"key_env": "BAD_KEY"}, r"options.key_env: must name a variable that holds a key, got 'BAD_KEY'"),
        ({"key": "secret"}, r"rewards.options.key: no such key"),
        ({"scores": [10, 1]}, r"options.scores: must be in ascending order, got \(10.0, 1.0\)"),
        ({"rewards": [1, 1]}, r"options.rewards: must be two different numbers"),
        ({"body": {"n": 2}}, r"options.body: must not set messages, model, stream, n, got {'n': 2}"),
        ({"timeout": 0}, r"options.timeout: must be greater than 0, got 0"),
        ({"concurrency": True}, r"options.concurrency: must be of type integer, got True"),
        ({"cache_file": "data.jsonl"}, r"options.cache_file: must hold judgements alone, got 'data.jsonl' with {"),
    ],
)
def test_bad_options_are_named(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BAD_KEY", "secret\n")
    Path("data.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(ValueError, match=message) as caught:
        judged(NOWHERE, "a", **options)
    assert "secret" not in str(caught.value) and Path("data.jsonl").read_text() == '{"prompt": "p"}\n'


def test_equal_responses_are_judged_once_and_the_file_serves_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "cache.jsonl"
    with serve(number_in) as stub:
        judge = loaded(stub.url).function
        assert judge([*"ppp"], ["a 1", "a 10", "a 1"]) == [0.0, 1.0, 0.0] and len(stub.requests) == 2
        assert judge([*"pq"], ["a 1", "a 1"]) == [0.0, 0.0] and len(stub.requests) == 3

        def asked(*texts: str, **options: Any) -> int:
            before = len(stub.requests)
            judged(stub.url, *texts, cache_file=str(file), **options)
            return len(stub.requests) - before

        assert [asked("a 1", "a 10"), asked("a 1", "a 10"), asked("a 1", rewards=[0, 9])] == [2, 0, 0]
        for other in ({"rubric": "Be kind."}, {"model": "n"}, {"body": {"seed": 1}}, {"scores": [0, 10]}):
            assert asked("a 1", **other) == 1, other
        file.write_bytes(file.read_bytes()[:-9])  # by a process that was killed while it wrote the last judgement
        assert [asked("a 1", scores=[0, 10]), asked("a 1", scores=[0, 10])] == [1, 0]


def test_a_resumed_run_repeats_the_judgements_in_its_file(tmp_path: Path) -> None:
    """The judge's answers change with every request: with the file, the resumed run still ends with the same bits."""
    with serve(lambda *_: 1 + len(stub.requests) * 7 % 9) as stub:
        options = {"base_url": stub.url, "model": "m", "rubric": "r", "cache_file": str(tmp_path / "cache")}
        judge = json.dumps([{"name": "judge", "options": options}])
        more = (f"rl.rewards={judge}", "checkpoints={every: 1, keep: 9}", "evaluation.every=0")
        recipe = small.recipe(tmp_path / "run", *more)
        train(recipe)
        steps = small.steps(tmp_path / "run")
        assert steps[0]["rewards/judge_requests"] > 0 == steps[0]["rewards/judge_failed"]
        final, asked = small.weights(tmp_path / "run"), len(stub.requests)
        for checkpoint in ("rl-3", "rl-4"):
            shutil.rmtree(tmp_path / "run" / "checkpoints" / checkpoint)
        train(recipe, resume=True)
        resumed = small.weights(tmp_path / "run")
        assert all(torch.equal(value, final[name]) for name, value in resumed.items())
        assert len(stub.requests) == asked
