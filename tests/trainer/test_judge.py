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

from grpo_trainer import messages
from grpo_trainer.metrics import counter_metrics
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import LoadedReward, RewardError, load_reward, score
from grpo_trainer.rewards.judge import BODY, Judge, JudgeError, read_score
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.test_rewards import rollout


class Reply(NamedTuple):
    text: str = ""  # content of the choice
    status: int = 200
    payload: bytes | None = None  # in place of a choice with the text
    wait: float = 0.0  # seconds before the reply
    headers: dict[str, str] = {}  # noqa: RUF012 # never changed


Answer = Callable[[dict[str, Any], int], Reply | float | str]


class Stub:
    """An endpoint that notes its requests; `answer` gets what the judge is shown and how often it was before."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.lock, self.stopped = answer, threading.Lock(), threading.Event()
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.url = ""

    def reply(self, body: dict[str, Any], headers: dict[str, str], path: str) -> Reply:
        shown = json.loads(body["messages"][-1]["content"])
        with self.lock:
            before = sum(request["shown"] == shown for request in self.requests)
            now = time.monotonic()
            self.requests.append({"shown": shown, "body": body, "headers": headers, "path": path, "time": now})
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        reply = self.answer(shown, before)
        if not isinstance(reply, Reply):
            reply = Reply(reply if isinstance(reply, str) else json.dumps({"score": reply}))
        self.stopped.wait(reply.wait)
        with self.lock:
            self.running -= 1
        return reply


@contextmanager
def serve(answer: Answer) -> Iterator[Stub]:
    stub = Stub(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            sent = stub.reply(body, {name.lower(): value for name, value in self.headers.items()}, self.path)
            content = json.dumps({"choices": [{"message": {"role": "assistant", "content": sent.text}}]})
            payload = content.encode() if sent.payload is None else sent.payload
            self.send_response(sent.status)
            headers = {"Content-Type": "application/json", "Content-Length": str(len(payload))} | sent.headers
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # the client gave up
    stub.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stub
    finally:
        stub.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


def loaded(url: str, **options: Any) -> LoadedReward:
    values = {"base_url": url, "model": "m", "rubric": "Be strict.", "timeout": 5.0} | options
    return load_reward(Reward(name="judge", options=values))


def made(url: str, **options: Any) -> Judge:
    function = loaded(url, **options).function
    assert isinstance(function, Judge)
    return function


def judged(judge: Judge, *texts: str) -> list[float | None]:
    return judge(prompts=["p"] * len(texts), completions=list(texts))


def number_in(shown: dict[str, Any], _: int) -> float:
    return float(shown["response"].split()[-1])


def test_the_request_has_rubric_prompt_response_columns_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "of another endpoint")
    with serve(lambda *_: 10) as stub:
        judge = made(stub.url, key_env="KEY_OF_TEST", columns=["answer"], scores=[0, 10])
        judge(prompts=["Write."], completions=["<think>no</think> a poem"], answer=["x"], other=[1])
        made(stub.url, body={"temperature": 0.5, "seed": None}, text="whole")(["Write."], ["<think>no</think> a poem"])
    first, second = stub.requests
    assert first["path"] == "/v1/chat/completions" and first["headers"]["authorization"] == "Bearer secret-1"
    assert first["shown"] == {"prompt": "Write.", "answer": "x", "response": "a poem"}
    assert second["shown"] == {"prompt": "Write.", "response": "<think>no</think> a poem"}
    system = first["body"]["messages"][0]["content"]
    assert system.startswith("Be strict.\n\nAnswer with a JSON object") and "s is a number from 0 to 10" in system
    assert {name: first["body"][name] for name in ("model", *BODY)} == {"model": "m", **BODY}
    assert second["body"]["temperature"] == 0.5 and "seed" not in second["body"]
    assert "another endpoint" not in str(second["headers"])


def test_scores_are_mapped_to_rewards() -> None:
    cases = (({}, 4, 1 / 3), ({"scores": [0, 100], "rewards": [-1, 1]}, 75, 0.5), ({"rewards": [1, 0]}, 10, 0.0))
    for options, given, reward in cases:
        with serve(lambda *_, given=given: given) as stub:
            assert judged(made(stub.url, **options), "a") == [pytest.approx(reward, abs=1e-15)]


def test_rewards_are_those_of_their_responses_whatever_the_order_of_the_replies() -> None:
    def slow_first(shown: dict[str, Any], _: int) -> Reply:
        score = float(shown["response"])
        return Reply(json.dumps({"score": score}), wait=0.02 * (10 - score))

    with serve(slow_first) as stub:
        values = judged(made(stub.url, concurrency=5, scores=[0, 9], rewards=[0, 9]), *map(str, range(10)))
    assert values == list(range(10))
    assert 1 < stub.most_running <= 5


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": "7.5"}', 7.5),
        ('I think so.\n```json\n{"reason": "good {sic}", "score": 7}\n```\nDone.', 7),
        ('First {"score": 2}, no: {"score": 3} and {"verdict": 1}', 3),
        ('a { b {"score": 4}', 4),
        ('{"score": {"score": 1}} {"score": 2}', 2),
    ],
)
def test_a_score_is_read(text: str, score: float) -> None:
    assert read_score(text) == score


NONSENSE = ("seven", "[]", '{"score": null}', '{"score": true}', '{"score": NaN}', '{"score": 11}', '{"score": 0}')
BAD = [
    *map(Reply, NONSENSE),
    Reply('{"score": 1' + "0" * 400 + "}"),
    Reply('{"a":' * 20000),
    Reply(payload=b"[" * 100_000),
    Reply(payload=b"not json"),
    Reply(payload=b'{"choices": []}'),
    Reply(payload=b'{"choices": [{"message": {"content": null}}]}'),
    Reply(payload=b"<html>7</html>", headers={"Content-Type": "text/html"}),
    Reply(status=404),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_reply_is_not_scored_and_counted(bad: Reply) -> None:
    with serve(lambda shown, _: bad if shown["response"] == "bad" else 10) as stub:
        judge = made(stub.url, retries=0, max_failures=0.5)
        assert judged(judge, "good", "bad") == [1.0, None]
        assert judge.counters == {"failed": 1, "cached": 0, "requests": 2}
        assert judged(judge, "good", "good", "bad") == [1.0, 1.0, None], "failures are not cached"
        assert judge.counters == {"failed": 1, "cached": 2, "requests": 1}


def test_a_busy_endpoint_is_asked_again_when_it_says_and_a_hanging_one_fails() -> None:
    busy = Reply(status=429, headers={"Retry-After": "0.4"})
    with serve(lambda _, before: 10 if before else busy) as stub:
        assert judged(made(stub.url, retries=1), "a") == [1.0]
        first, second = (request["time"] for request in stub.requests)
        assert second - first >= 0.4
        with pytest.raises(JudgeError, match="RateLimitError"):
            judged(made(stub.url, retries=0), "b")
    with serve(lambda *_: Reply(wait=30.0)) as stub, pytest.raises(JudgeError, match="Timeout"):
        judged(made(stub.url, timeout=0.3, retries=0), "a")


def test_a_refused_connection_names_cause_and_judge() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=r"2 of 2 did; .* 2 times, is: APIConnectionError: .*'m' at " + url):
            judged(made(url, retries=0), "a", "b")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_too_many_failures_end_the_run(on_error: Any) -> None:
    with serve(lambda shown, _: "?" if shown["response"].startswith("bad") else 10) as stub:
        judge = loaded(stub.url, retries=0, max_failures=0.25)
        judge = judge._replace(settings=judge.settings.model_copy(update={"on_error": on_error}))
        values, skipped, _ = score([judge], rollout(["a", "b", "c", "bad"]))
        assert values[:3, 0].tolist() == [1.0] * 3 and math.isnan(values[3, 0]) and skipped == 1
        names = ("failed", "cached", "requests")
        assert counter_metrics([judge]) == dict(
            zip((f"rewards/judge_{name}" for name in names), (1, 0, 4), strict=True)
        )
        with pytest.raises(RewardError, match=r"max_failures allows 0.25 of .* and 2 of 4 did; .*number 'score'"):
            score([judge], rollout(["a", "b", "bad 1", "bad 2"]))


def test_no_error_shows_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-2")
    with serve(lambda *_: Reply(status=401, payload=b'{"error": {"message": "secret-2 is wrong"}}')) as stub:
        with pytest.raises(JudgeError, match=r"AuthenticationError: Error code: 401 .*\[key\] is wrong") as caught:
            judged(made(stub.url, key_env="KEY_OF_TEST"), "a")
        assert len(stub.requests) == 1
    monkeypatch.setenv("KEY_OF_TEST", "secret-2\n")
    with pytest.raises(
        ValueError, match="key_env: must name a variable that holds a key, got 'KEY_OF_TEST'"
    ) as refused:
        made(stub.url, key_env="KEY_OF_TEST")
    assert "secret" not in f"{caught.value} {refused.value}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "ftp://x"}, r"judge.base_url: must be an address .* got 'ftp://x'"),
        ({"base_url": "http://me:secret@x/v1"}, r"judge.base_url: must have no user or password"),
        ({"model": None}, r"options.model: must be of type string, got None"),
        ({"rubric": None}, r"judge.rubric: must be given either here or by rubric_file, got \[None, None\]"),
        ({"key_env": "NO_SUCH_VARIABLE"}, r"judge.key_env: must name .* holds a key, got 'NO_SUCH_VARIABLE'"),
        ({"key": "secret"}, r"rewards.options.key: no such key"),
        ({"scores": [10, 1]}, r"judge.scores: must be two numbers in ascending order, got \[10.0, 1.0\]"),
        ({"body": {"n": 2}}, r"judge.body: must not set messages, model, stream, n, got \['n'\]"),
        ({"timeout": 0}, r"options.timeout: must be greater than 0, got 0"),
        ({"concurrency": True}, r"options.concurrency: must be of type integer, got True"),
        ({"text": "all"}, r"options.text: must be 'answer' or 'whole', got 'all'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        made("http://127.0.0.1:1/v1", **options)
    assert "secret" not in str(caught.value)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"rewards.options.base_url: must be given\n *rewards.options.model: must be given"
    ):
        load_reward(Reward(name="judge", options={"rubric": "r"}))
    with pytest.raises(ValueError, match=r"judge.columns: must be columns of the data, \['gold'\], got 'answer'"):
        made("http://127.0.0.1:1/v1", columns=["answer"])(["p"], ["a"], gold=["x"])
    monkeypatch.setattr(messages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'judge: needs the package openai, .*: pip install "grpo-kernels\[judge\]"'):
        made("http://127.0.0.1:1/v1")


def count_requests(stub: Stub, judge: Judge, *texts: str) -> int:
    before = len(stub.requests)
    judged(judge, *texts)
    return len(stub.requests) - before


def test_equal_responses_are_judged_once() -> None:
    with serve(number_in) as stub:
        judge = made(stub.url)
        assert judged(judge, "a 1", "a 10", "a 1") == [0.0, 1.0, 0.0] and len(stub.requests) == 2
        assert count_requests(stub, judge, "a 1", "a 4") == 1 and judge.counters["cached"] == 1
        assert judge([*"pq"], ["a 1"] * 2) == [0.0, 0.0] and len(stub.requests) == 4


def test_the_file_serves_another_process_of_the_same_judge(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "cache.jsonl"
    with serve(number_in) as stub:
        judge = lambda **options: made(stub.url, cache_file=str(file), **options)  # noqa: E731
        assert count_requests(stub, judge(), "a 1", "a 10") == 2
        assert count_requests(stub, judge(), "a 1", "a 10") == 0
        assert judged(judge(rewards=[0, 9]), "a 4") == [3.0], "the score is kept"
        for other in ({"rubric": "Be kind."}, {"model": "n"}, {"body": {"seed": 1}}, {"scores": [0, 10]}):
            assert count_requests(stub, judge(**other), "a 1") == 1, other
        whole = file.read_bytes()
        file.write_bytes(whole[:-9])  # by a process that was killed while it wrote the last judgement
        assert count_requests(stub, judge(scores=[0, 10]), "a 1") == 1
        assert count_requests(stub, judge(scores=[0, 10]), "a 1") == 0
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "p"}\n')
    with pytest.raises(ValueError, match=r"judge.cache_file: must hold judgements alone, got '.*data.jsonl' with {"):
        made("http://127.0.0.1:1/v1", cache_file=str(data))
    assert data.read_text() == '{"prompt": "p"}\n'


def test_a_resumed_run_repeats_the_judgements_in_its_file(tmp_path: Path) -> None:
    """The judge's answers change with every request: with the file, the resumed run still ends with the same bits."""
    with serve(lambda *_: 1 + len(stub.requests) * 7 % 9) as stub:
        options = {"base_url": stub.url, "model": "m", "rubric": "r", "cache_file": str(tmp_path / "cache")}
        judge = json.dumps([{"name": "judge", "options": options}])
        recipe = small.recipe(
            tmp_path / "run", f"rl.rewards={judge}", "checkpoints={every: 1, keep: 9}", "evaluation.every=0"
        )
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
