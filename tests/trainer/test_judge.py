"""The judge against an endpoint of httpx: requests, scores, failures, the key, the cache."""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")

import httpx
import openai
from grpo_trainer.metrics import counter_metrics
from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import LoadedReward, RewardError, load_reward, score
from grpo_trainer.rewards.judge import BODY

from tests.trainer.test_rewards import rollout

OpenAI = openai.OpenAI


class Endpoint:
    """Replies to the client's requests, which it notes; `answer` gets the judged text and how often it was judged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, int], httpx.Response | float]) -> None:
        self.answer, self.lock, self.requests = answer, threading.Lock(), list[dict[str, Any]]()
        self.running = self.most_running = 0
        client = httpx.Client(transport=httpx.MockTransport(self.reply))
        monkeypatch.setattr(openai, "OpenAI", functools.partial(OpenAI, http_client=client))

    def reply(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        shown = json.loads(body["messages"][-1]["content"])
        with self.lock:
            before = sum(other["shown"] == shown for other in self.requests)
            self.requests.append({"shown": shown, "body": body, "request": request, "time": time.monotonic()})
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        answer = self.answer(shown["response"], before)
        with self.lock:
            self.running -= 1
        return answer if isinstance(answer, httpx.Response) else said(json.dumps({"score": answer}))


def said(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": text}}]})


def loaded(**options: Any) -> LoadedReward:
    values = {"base_url": "http://judge.test/v1", "model": "m", "rubric": "Be strict.", "retries": 0} | options
    return load_reward(Reward(name="judge", options=values))


def judged(*texts: str, **options: Any) -> list[float | None]:
    return list(loaded(**options).function(prompts=["p"] * len(texts), completions=list(texts)))


def test_the_request_has_rubric_prompt_response_columns_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "of another endpoint")
    monkeypatch.setenv("OPENAI_ORG_ID", "another endpoint")
    endpoint = Endpoint(monkeypatch, lambda *_: 10)
    judge = loaded(key_env="KEY_OF_TEST", columns=["answer"], scores=[0, 10], timeout=7.0).function
    judge(prompts=["Write."], completions=["<think>no</think> a poem"], answer=["x"], other=[1])
    judged("<think>never ends", body={"temperature": 0.5, "seed": None})
    first, second = endpoint.requests
    assert str(first["request"].url) == "http://judge.test/v1/chat/completions"
    assert first["request"].headers["authorization"] == "Bearer secret-1"
    assert first["request"].extensions["timeout"]["read"] == 7
    assert first["shown"] == {"prompt": "Write.", "answer": "x", "response": "a poem"}
    assert second["shown"] == {"prompt": "p", "response": "<think>never ends"}
    system = first["body"]["messages"][0]["content"]
    assert system.startswith("Be strict.\n\nAnswer with a JSON object") and "s is a number from 0 to 10" in system
    assert {name: first["body"][name] for name in ("model", *BODY)} == {"model": "m", **BODY}
    assert second["body"]["temperature"] == 0.5 and "seed" not in second["body"]
    assert "another endpoint" not in str(second["request"].headers.raw)
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    score([loaded()], rollout(["Bye."], prompt=chat))
    assert endpoint.requests[-1]["shown"] == {"prompt": chat, "response": "Bye."}


GOOD = {
    '{"score": "7.5"}': 7.5,
    'I think so.\n```json\n{"reason": "good {sic}", "score": 7}\n```\nDone.': 7,
    'First {"score": 2}, no: {"score": 3} and {"verdict": 1}': 3,
    'a { b {"score": 4}': 4,
    '{"score": {"score": 1}} {"score": 2}': 2,
}
NONSENSE = ("seven", "[]", '{"score": null}', '{"score": true}', '{"score": NaN}', '{"score": 11}', '{"score": 0}')
PAYLOADS = (b"not json", b"[" * 100_000, b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}')


def test_scores_are_read_and_bad_replies_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [said(text) for text in (*NONSENSE, '{"score": 1' + "0" * 400 + "}", '{"a":' * 20000)]
    bad += [httpx.Response(200, content=payload) for payload in PAYLOADS]
    bad += [httpx.Response(200, html="<html>7</html>"), httpx.Response(404)]
    texts = [*GOOD, *map(str, range(len(bad)))]
    Endpoint(monkeypatch, lambda text, _: said(text) if text in GOOD else bad[int(text)])
    judge: Any = loaded(max_failures=1.0, rewards=[1, 10]).function
    assert judge(["p"] * len(texts), texts) == [*GOOD.values(), *[None] * len(bad)]
    assert judge.counters == {"failed": len(bad), "cached": 0, "requests": len(texts)}
    judge(["p"] * 3, [texts[0], texts[0], "1"])  # failures are not kept
    assert judge.counters == {"failed": 1, "cached": 2, "requests": 1}


def test_a_busy_endpoint_is_asked_again_when_it_says_and_failures_name_cause_and_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret-2")
    replies = {
        "busy": httpx.Response(429, headers={"Retry-After": "0.4"}),
        "key": httpx.Response(401, json={"error": {"message": "secret-2 is wrong"}}),
    }
    endpoint = Endpoint(monkeypatch, lambda text, before: 10 if before else replies[text])
    assert judged("busy", retries=1) == [1.0]
    first, second = (request["time"] for request in endpoint.requests)
    assert second - first >= 0.4
    with pytest.raises(RewardError, match=r"1 of 1 did; .* AuthenticationError: .*\[key\] is wrong") as caught:
        judged("key", key_env="KEY_OF_TEST", retries=2)
    assert len(endpoint.requests) == 3 and "secret" not in str(caught.value)
    monkeypatch.setenv("BAD_KEY", "secret\n")
    for options, message in (
        ({"key_env": "BAD_KEY"}, r"options.key_env: must name a variable that holds a key, got 'BAD_KEY'"),
        ({"base_url": "ftp://me:secret@x/v1"}, r"options.base_url: must have no user or password"),
        ({"base_url": "ftp://x"}, r"options.base_url: must be an address .* got 'ftp://x'"),
        ({"columns": ["response"]}, r"options.columns: must not have prompt or response, .* got \['response'\]"),
        ({"columns": ["answer"]}, r"reward judge: needs the column 'answer', the data has \[\]"),
    ):
        with pytest.raises(ValueError, match=message) as refused:
            judged("a", **options)
        assert "secret" not in str(refused.value)
    monkeypatch.undo()
    with pytest.raises(RewardError, match=r"1 of 1 did; .* is: APIConnectionError: .*'m' at http://127.0.0.1:9/v1"):
        judged("a", base_url="http://127.0.0.1:9/v1")


def test_too_many_failures_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Endpoint(monkeypatch, lambda text, _: said("?") if text.startswith("bad") else 10)
    judge = loaded(max_failures=0.25)
    values, skipped, _ = score([judge], rollout(["a", "b", "c", "bad"]))
    assert values[:3, 0].tolist() == [1.0] * 3 and math.isnan(values[3, 0]) and skipped == 1
    assert counter_metrics([judge]) == {
        "rewards/judge_failed": 1,
        "rewards/judge_cached": 0,
        "rewards/judge_requests": 4,
    }
    skipping = judge._replace(settings=judge.settings.model_copy(update={"on_error": "skip"}))
    for of in (judge, skipping):
        with pytest.raises(RewardError, match=r"max_failures allows 0.25 of .* and 2 of 4 did; .*number 'score'"):
            score([of], rollout(["a", "b", "bad 1", "bad 2"]))


def test_rewards_are_in_order_equal_responses_judged_once_and_the_file_serves_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_first(text: str, _: int) -> float:
        time.sleep(0.02 * (10 - float(text)))
        return float(text)

    endpoint, file = Endpoint(monkeypatch, slow_first), tmp_path / "folder" / "cache.jsonl"
    values = judged(*map(str, range(10)), concurrency=5, scores=[0, 9], rewards=[0, 9])
    assert values == list(range(10)) and 1 < endpoint.most_running <= 5
    assert judged("4") == [pytest.approx(1 / 3)] and judged("4", scores=[0, 8], rewards=[1, -3]) == [-1]
    endpoint.requests.clear()
    judge = loaded().function
    assert judge([*"ppp"], ["1", "10", "1"]) == [0.0, 1.0, 0.0] and len(endpoint.requests) == 2
    assert judge([*"pq"], ["1", "1"]) == [0.0, 0.0] and len(endpoint.requests) == 3

    def asked(*texts: str, **options: Any) -> int:
        before = len(endpoint.requests)
        judged(*texts, cache_file=str(file), **options)
        return len(endpoint.requests) - before

    assert [asked("1", "10"), asked("1", "10"), asked("1", rewards=[0, 9])] == [2, 0, 0]
    for other in ({"rubric": "Be kind."}, {"model": "n"}, {"body": {"seed": 1}}, {"scores": [0, 10]}):
        assert asked("1", **other) == 1, other
    file.write_bytes(file.read_bytes()[:-9])  # by a process that was killed while it wrote the last judgement
    assert [asked("1", scores=[0, 10]), asked("1", scores=[0, 10])] == [1, 0]
