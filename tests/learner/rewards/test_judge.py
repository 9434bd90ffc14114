"""`judge`: the request to a model behind an OpenAI endpoint, which is scripted, and the reward from its verdict."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from learner.config.rewards import JudgeConfig
from learner.rewards.builtin.judge import filled
from learner.rewards.builtin.judge import score as score_of
from tests.learner.rewards.scored_groups import prompt, score


class Endpoint(ThreadingHTTPServer):
    """Returns a scripted verdict for each answer."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.says: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.slow: set[str] = set()
        self.cut_off: set[str] = set()
        self.refused: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "first"}, {"id": "second"}]}, self.server.status)

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(question)
        self.server.keys.append(self.headers["Authorization"])
        rated = re.search("Answer to rate:\n(.*)\n", question["messages"][0]["content"])
        answer = rated[1] if rated else ""
        if answer in self.server.slow:
            time.sleep(5)
        reply, reason = self.server.says.get(answer, "no number"), "length" if answer in self.server.cut_off else "stop"
        choice = {"message": {"role": "assistant", "content": reply}, "finish_reason": reason}
        self.answer({"choices": [choice]}, 400 if answer in self.server.refused else self.server.status)

    def answer(self, body: Any, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def rated(url: str, completions: list[str], the_prompt=None, **config):
    judge = {"url": url} | config.pop("judge", {})
    return score(["judge"], completions, the_prompt, judge=JudgeConfig(**judge), **config)


def test_the_reward_is_the_last_number_of_the_verdict_over_the_best_score():
    with endpoint() as server:
        server.says = {
            "a": "Right, but 2 words too long.\n7", "b": "<think>9</think>3 out of 10.", "c": "<think>it is a 5",
        }  # fmt: skip
        result = rated(server.url, list("abc"), prompt("2+2=", answer="4"))
        assert result.rewards == [0.7, 0.3, None]
        assert {question["model"] for question in server.requests} == {"first"}
        text = next(one for question in server.requests if "\na\n" in (one := question["messages"][0]["content"]))
        assert "Task:\n2+2=\n" in text and "there is one:\n4\n" in text


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("7", 0.7), ("8/10", 0.8), ("**8/10**", 0.8), ("3 out of 10.", 0.3), ("Score - 8", 0.8), ("- 8", 0.8),
        ("8.0/10.0", 0.8), ("8.0/10.00.", 0.8), ("8.5 out of 10.0", 0.85), ("**8** / **10**", 0.8), ("8/_10_", 0.8),
        ("8/10 points", 0.8), ("8/10. Of 9 steps, 2 are right.", 0.2), ("8/10.5", 1.0), ("8/100", 1.0), ("0/10.0", 0.0),
        ("-4", 0.0), ("11", 1.0),
        ("It ends with #### 42, which is wrong.\n2", 0.2), ("2 of 3 steps are right.\n\n6.5", 0.65), ("", None),
        ("good", None),
    ],
)  # fmt: skip
def test_the_last_number_counts(verdict, score):
    assert score_of(verdict, 10.0) == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    ("verdict", "best", "score"),
    [
        ("4.5/5.0", 5.0, 0.9), ("0.8/1.0", 1.0, 0.8), ("0.8/1", 1.0, 0.8), ("2/2.5", 2.5, 0.8),
        ("1/205", 2.5, 1.0), ("0/1.0", 1.0, 0.0),
    ],
)  # fmt: skip
def test_the_best_score_may_be_written_with_decimals(verdict, best, score):
    assert score_of(verdict, best) == pytest.approx(score)


def test_a_truncated_rejected_or_late_verdict_affects_only_its_completion():
    with endpoint() as server:
        server.says = {"a": "7", "b": "There are 3 errors: first", "c": "8"}
        server.cut_off, server.refused, server.slow = {"b"}, {"c"}, {"d"}
        assert rated(server.url, list("abcd"), timeout_s=3.0).rewards == [0.7, None, None, None]
        server.slow = set("abcd")
        result = rated(server.url, list("abcd"), timeout_s=3.0)
    assert result.functions[0].outcome == "failed" and "raise learner.reward.timeout_s" in (
        result.functions[0].message or ""
    )


def test_the_user_controls_the_request_to_the_judge(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-judge\n")
    question = {"model": "large", "temperature": 0.5, "max_tokens": 3}
    own = question | {"prompt": "Answer to rate:\n{completion}\n", "best_score": 5.0}
    with endpoint() as server:
        server.says = {"a": "4 / 5"}
        assert rated(server.url, ["a"], judge=own).rewards == [0.8]
        assert server.requests == [question | {"messages": [{"role": "user", "content": "Answer to rate:\na\n"}]}]
        assert server.keys == ["Bearer sk-judge"]


def test_placeholders_in_inserted_text_stay_unchanged():
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    text = filled("{prompt}|{answer}|{completion}|{other}", talk, "say {answer}", ["4", "four {prompt}"])
    assert text == "system: Be short.\n\nuser: 2+2?|4\nfour {prompt}|say {answer}|{other}"


def test_a_rejection_by_the_judge_is_reported_with_its_message():
    with endpoint() as server:
        server.status = 401
        result = rated(server.url, ["a"])
    assert result.functions[0].outcome == "failed"
    assert re.search(r"the judge at http://\S+ returned status 401: .*first", result.functions[0].message or "")
