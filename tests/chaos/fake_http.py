"""The OpenAI API of the fake server: greedy completions of the engine's weights, labeled with their version."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from learner.policy.model import load_tokenizer
from protocol.endpoint import END, NO_VERSION, START, header_of_runs
from protocol.model_files import resolve_model
from tests.learner.model_engine import ModelEngine

ANSWER_S = 0.05
"""Long enough for most completions to be in flight when a process dies."""


async def serve_http(engine: ModelEngine, status: Callable[[], dict[str, Any]], port: int) -> None:
    """Serve until canceled. `status`: the server's status function."""
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny:digits"}]})

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(ANSWER_S)
        await engine.opened()
        run = header_of_runs(status()["weights_run"])
        version = NO_VERSION if engine.version is None else engine.version
        tokens = greedy(engine.model, body["prompt"], body["max_tokens"])
        is_finished = tokens[-1] == engine.model.config.eos_token_id
        choice = {
            "index": 0, "text": tokenizer.decode(tokens, skip_special_tokens=True), "token_ids": tokens,
            "finish_reason": "stop" if is_finished else "length",
        }  # fmt: skip
        answer = {"choices": [choice], "usage": {"completion_tokens": len(tokens)}}
        return web.json_response(answer, headers={START: str(version), END: str(version)} | run)

    @web.middleware
    async def refuse_without_weights(request: web.Request, handler: Handler) -> web.StreamResponse:
        reason = status()["unavailable"]
        return await handler(request) if reason is None else web.Response(status=503, text=reason)

    app = web.Application(middlewares=[refuse_without_weights])
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] != model.config.eos_token_id):
        tokens.append(int(model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
    return tokens
