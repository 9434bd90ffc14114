"""HTTP endpoint for agents: /v1/chat/completions, /v1/completions and /v1/models.

    agent ─▶ key ─▶ Session ─▶ tokens (places.py) ─▶ turn ─▶ text, calls ─▶ recorded ─▶ reply ─▶ agent

It runs in the learner's event loop. The API key identifies the episode.
Invariant: a turn is recorded before its reply is sent, and only if the agent still waits. A key is valid only
during its episode.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from learner.config import LearnerConfig
from learner.environments.answer import UnreadableAnswer, calls_of, read_answer
from learner.gateway.messages import (
    NO_RETRY,
    REASONING,
    RefusedRequest,
    episode_over,
    read_messages,
    spoken,
    unknown_key,
)
from learner.gateway.openai_api import (
    AnyBody,
    Body,
    ChatBody,
    Reply,
    TextBody,
    chat_reply,
    cut_at,
    events,
    max_tokens_of,
    read_body,
    stops_of,
    text_reply,
)
from learner.gateway.session import Session, SessionTurn
from learner.prompts.chat_template import ChatTemplate, Message
from protocol.errors import ConfigError, DataError

MAX_BODY_BYTES = 64 << 20
MAX_ENDED = 65536
"""Maximum number of ended episodes whose keys are remembered, to report that they are over."""
SHUTDOWN_TIMEOUT_S = 1.0


class Gateway:
    """Gateway of one run. Any thread may create it, but only the event loop uses it."""

    def __init__(self, config: LearnerConfig, template: ChatTemplate, model: str) -> None:
        self._config, self._template, self._model = config, template, model
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.base_url = ""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[refusals])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_TIMEOUT_S, handler_cancellation=True
        )

    async def start(self) -> None:
        """Start to listen. Raises ConfigError if the address or port is unavailable."""
        host, port = self._config.environment.gateway_host, self._config.environment.gateway_port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ConfigError(
                f"learner.environment.gateway_host = {host!r}, gateway_port = {port}: {error}; set gateway_host to an "
                "address of this machine, and gateway_port to a free port or 0"
            ) from error
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    @contextmanager
    def opened(self, session: Session) -> Iterator[str]:
        """Yield the API key of an episode, valid until the context ends."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        try:
            yield key
        finally:
            del self._sessions[key]
            self._ended[key] = session.leave()
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, sampling = self._session_of(request), self._config.sampling
        body = self._body(ChatBody, await request.read())
        template = self._template_of(body)
        stops = stops_of(body, sampling)
        messages, prompt = session.places.of_chat(template, read_messages(body.messages))
        turn = await session.turn(prompt, max_tokens_of(body, sampling), stops)
        message = self._read(template, turn, stops)
        check_connected(request)
        session.record(turn)
        session.num_calls += len(message.get("tool_calls", ()))
        session.places.add_chat(template, [*messages, message], [*turn.prompt, *turn.token_ids], stops)
        return await answered(request, chat_reply(turn, message, body, self._model, template), body)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        session, sampling = self._session_of(request), self._config.sampling
        body = self._body(TextBody, await request.read())
        stops = stops_of(body, sampling)
        prompt, before = self._text_prompt(session, body)
        turn = await session.turn(prompt, max_tokens_of(body, sampling), stops)
        text = self._template.spoken(turn.token_ids)
        check_connected(request)
        session.record(turn)
        if before is not None:
            session.places.add_text(before + text, [*turn.prompt, *turn.token_ids])
        return await answered(request, text_reply(turn, cut_at(text, stops), body, self._model), body)

    def _body(self, kind: type[AnyBody], content: bytes) -> AnyBody:
        """Parse and check a request's body. Raises Refused if it is not accepted."""
        return read_body(kind, content, self._config.sampling, overrides=self._config.environment.override_sampling)

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "slipstream"}
        return web.json_response({"object": "list", "data": [model]})

    def _session_of(self, request: web.Request) -> Session:
        """Return the session of a request's key. Raises Refused if there is none."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key in self._ended:
            raise episode_over(self._ended[key])
        if key not in self._sessions:
            raise unknown_key()
        return self._sessions[key]

    def _template_of(self, body: ChatBody) -> ChatTemplate:
        """Return the run's template with the agent's own tools and arguments."""
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        arguments = self._template.arguments | (body.chat_template_kwargs or {})
        return msgspec.structs.replace(self._template, tools=tools, arguments=arguments)

    def _text_prompt(self, session: Session, body: TextBody) -> tuple[list[int], str | None]:
        """Return the tokens of a prompt, and its text if it is one.

        Raises:
            RefusedRequest: If the prompt is neither one text nor one list of tokens.
        """
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return session.places.of_text(self._template, prompt), prompt
        size = len(self._template.tokenizer)
        if not all(isinstance(token, int) and 0 <= token < size for token in prompt):
            raise RefusedRequest(
                f"prompt is neither one text nor one list of token ids from 0 to {size - 1}; send one prompt per "
                "request",
                parameter="prompt",
            )
        return prompt, None

    def _read(self, template: ChatTemplate, turn: SessionTurn, stops: tuple[str, ...]) -> Message:
        """Return a turn as a message.

        A turn that is cut off, unreadable or calls tools although there are none becomes plain text.
        """
        if not turn.is_cut_off:
            try:
                message = read_answer(template, turn.prompt, turn.token_ids)
                calls = calls_of(message)
            except UnreadableAnswer:
                pass
            else:
                if template.tools or not calls:
                    return spoken(cut_at(message["content"], stops), message.get(REASONING), calls, turn.turn_id)
        return spoken(cut_at(self._template.spoken(turn.token_ids), stops), None, (), turn.turn_id)


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except DataError as error:
        refused = RefusedRequest(str(error))
    except web.HTTPException as error:
        refused = RefusedRequest(
            error.reason, code="not_found" if error.status == 404 else "not_possible", status=error.status
        )
    except RefusedRequest as error:
        refused = error
    return web.json_response(refused.body, status=refused.status, headers=NO_RETRY)


def check_connected(request: web.Request) -> None:
    """Raise Refused if the agent has disconnected.

    The agent would otherwise act on another answer than the recorded one.
    """
    if request.transport is None or request.transport.is_closing():
        raise RefusedRequest("the client has disconnected", code="gone", status=499)


async def answered(request: web.Request, reply: Reply, body: Body) -> web.StreamResponse:
    if not body.stream:
        return web.Response(body=json.dumps(reply), content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    for event in events(reply, includes_usage=body.includes_usage):
        await response.write(event)
    await response.write_eof()
    return response
