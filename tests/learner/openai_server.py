"""A scripted OpenAI server for evaluations."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from learner.policy.model import load_tokenizer
from protocol.endpoint import NO_VERSION, header_of_runs
from protocol.model_files import resolve_model
from tests.fakes import ScriptedEngine, ServerThread
from tests.ports import free_port

Answer = Callable[[str, int], list[str]]


class OpenAIServer:
    """Answers each prompt with `answer(text, number of samples)`."""

    url = ""

    def __init__(self) -> None:
        self.answer: Answer = lambda prompt, count: [prompt[:-1]] * count
        self.version = 3
        self.engine: ScriptedEngine | None = None
        """Engine whose version the answers name. None: no version."""
        self.run: Callable[[], str | None] = lambda: None
        """Returns the run whose weights answer."""
        self.num_untrained = 0
        """Number of next answers that are of the base model's weights."""
        self.delay_s = 0.0
        self.failures: list[int] = []
        """Status codes of the next responses."""
        self.requests: list[dict[str, Any]] = []
        self.tells_tokens = True
        self.max_model_len: int | None = 64
        self.num_lost = 0
        self._tokenizer = load_tokenizer(resolve_model("tiny:digits"))

    async def models(self, request: web.Request) -> web.Response:
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="no")
        return web.json_response({"data": [{"id": "a model", "max_model_len": self.max_model_len}]})

    async def completions(self, request: web.Request) -> web.Response:
        if self.failures:
            return web.Response(status=self.failures.pop(0), text="no")
        body = await request.json()
        self.requests.append(body)
        first = self.version if self.engine is None else self.engine.version
        await asyncio.sleep(self.delay_s)
        last = self.version + 1 if self.engine is None else self.engine.version
        if self.num_untrained:
            self.num_untrained -= 1
            first = last = NO_VERSION
        prompt = body["prompt"] if isinstance(body["prompt"], str) else self._tokenizer.decode(body["prompt"])
        texts = self.answer(prompt, body["n"])[self.num_lost :]
        choices = [
            {"index": i, "text": text, "finish_reason": "length" if len(text) > 2 else "stop"}
            | ({"token_ids": self._tokenizer.encode(text)} if self.tells_tokens else {})
            for i, text in enumerate(texts)
        ]
        version_headers = header_of_runs(self.run()) | {
            "x-slipstream-policy-version-start": str(first),
            "x-slipstream-policy-version-end": str(last),
        }
        answer = {"choices": choices[::-1], "usage": {"completion_tokens": sum(map(len, texts))}}
        return web.json_response(answer, headers=version_headers if self.tells_tokens else {})

    def of(self, server: ServerThread) -> None:
        """Act as the HTTP API of `server`."""
        self.engine = server.engine
        self.run = lambda: server.running.server.status()["weights_run"]


@contextmanager
def openai_server() -> Iterator[OpenAIServer]:
    server, loop, ready = OpenAIServer(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", server.models), web.post("/v1/completions", server.completions)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port := free_port())
        await site.start()
        server.url = f"http://127.0.0.1:{port}/v1"
        ready.set()
        await ended.wait()
        await runner.cleanup()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()
