"""HTTP endpoint for agents: chat and text completions, responses and Anthropic's messages, and /v1/models.

    agent ─▶ key ─▶ dialect ─▶ tokens (prefix_index.py) ─▶ Session: turn ─▶ text, calls ─▶ recorded ─▶ dialect ─▶ agent

It runs in the learner's event loop, and its work on tokens in threads (tokenizer_threads.py). The API key identifies
the episode. `dialects/` has the APIs; everything else is the same for all of them.
Invariant: a turn is recorded before its reply is sent, and only if the agent still waits. A key is valid only
during its episode.
"""

import json
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler

from learner.config import LearnerConfig
from learner.environments.answer import UnreadableAnswer, calls_of, read_answer
from learner.gateway.dialects.anthropic_messages import ANTHROPIC_MESSAGES
from learner.gateway.dialects.chat_completions import CHAT_COMPLETIONS
from learner.gateway.dialects.dialect import AgentRequest, AgentTurn, Dialect
from learner.gateway.dialects.request_rules import RequestRules
from learner.gateway.dialects.responses import RESPONSES
from learner.gateway.dialects.text_completions import TEXT_COMPLETIONS
from learner.gateway.messages import NO_RETRY, REASONING, RefusedRequest, episode_over, spoken, unknown_key
from learner.gateway.session import Session, SessionTurn
from learner.gateway.streams import refused_by, stream
from learner.prompts.chat_template import ChatTemplate, Message
from learner.prompts.reasoning import opening_of
from learner.prompts.tokenizer_threads import in_tokenizer_thread
from protocol.errors import ConfigError

DIALECTS = (CHAT_COMPLETIONS, TEXT_COMPLETIONS, RESPONSES, ANTHROPIC_MESSAGES)
MAX_BODY_BYTES = 64 << 20
MAX_ENDED = 65536
"""Maximum number of ended episodes whose keys are remembered, to report that they are over."""
SHUTDOWN_TIMEOUT_S = 1.0


class Gateway:
    """Gateway of one run. Any thread may create it, but only the event loop uses it."""

    def __init__(self, config: LearnerConfig, template: ChatTemplate, model: str) -> None:
        self._config, self._template, self._model = config, template, model
        self._rules = RequestRules(config.sampling, config.environment.override_sampling)
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.base_url = ""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[refusals])
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, partial(self._answer, dialect))
            if dialect.count_path is not None:
                app.router.add_post(dialect.count_path, partial(self._count_tokens, dialect))
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

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a request for a turn in its dialect."""
        session = self._session_of(request)
        asked = dialect.read(await request.read(), self._rules)
        turn = self._chat_turn if asked.conversation is not None else self._text_turn
        if asked.is_stream:
            return await stream(request, dialect, asked, turn(session, asked, request))
        reply = dialect.reply(await turn(session, asked, request))
        return web.Response(body=json.dumps(reply), content_type="application/json")

    async def _chat_turn(self, session: Session, asked: AgentRequest, request: web.Request) -> AgentTurn:
        template = self._template_of(asked)
        messages, prompt = await in_tokenizer_thread(session.prefixes.of_chat, template, asked.conversation or [])
        sampled = await session.turn(prompt, asked.max_tokens, asked.stops)
        message = await in_tokenizer_thread(self._read, template, sampled, asked.stops)
        check_connected(request)
        session.record(sampled)
        session.num_calls += len(message.get("tool_calls", ()))
        session.prefixes.add_chat(template, [*messages, message], sampled.all_token_ids, asked.stops)
        return self._agent_turn(asked, sampled, message)

    async def _text_turn(self, session: Session, asked: AgentRequest, request: web.Request) -> AgentTurn:
        prompt, before = await in_tokenizer_thread(self._text_prompt, session, asked)
        sampled = await session.turn(prompt, asked.max_tokens, asked.stops)
        text = await in_tokenizer_thread(self._template.spoken, sampled.token_ids)
        check_connected(request)
        session.record(sampled)
        if before is not None:
            session.prefixes.add_text(before + text, sampled.all_token_ids)
        return self._agent_turn(asked, sampled, spoken(cut_at(text, asked.stops)[0], None, (), sampled.turn_id))

    def _agent_turn(self, asked: AgentRequest, sampled: SessionTurn, message: Message) -> AgentTurn:
        stop = cut_at(self._template.spoken(sampled.token_ids), asked.stops)[1] if asked.stops else None
        return AgentTurn(asked, sampled, message, stop, self._model, self._template)

    async def _count_tokens(self, dialect: Dialect, request: web.Request) -> web.Response:
        """Return the number of tokens that the prompt of a request has."""
        session = self._session_of(request)
        asked = dialect.read(await request.read(), self._rules)
        template = self._template_of(asked)
        _, prompt = await in_tokenizer_thread(session.prefixes.of_chat, template, asked.conversation or [])
        return web.json_response({"input_tokens": len(prompt)})

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "slipstream"}
        return web.json_response({"object": "list", "data": [model]})

    def _session_of(self, request: web.Request) -> Session:
        """Return the session of a request's key. Raises RefusedRequest if there is none."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        for key in (request.headers.get("x-api-key", ""), bearer):  # Anthropic's header, and everyone else's
            if key in self._ended:
                raise episode_over(self._ended[key])
            if key in self._sessions:
                return self._sessions[key]
        raise unknown_key()

    def _template_of(self, asked: AgentRequest) -> ChatTemplate:
        """Return the run's template with the agent's own tools and arguments."""
        arguments = self._template.arguments | asked.template_arguments
        return msgspec.structs.replace(self._template, tools=asked.tools, arguments=arguments)

    def _text_prompt(self, session: Session, asked: AgentRequest) -> tuple[np.ndarray, str | None]:
        """Return the tokens of a prompt, and its text if it is one.

        Raises:
            RefusedRequest: The prompt is neither one text nor one list of tokens.
        """
        prompt = asked.text
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if isinstance(prompt, str):
            adds = asked.adds_special_tokens
            return session.prefixes.of_text(self._template, prompt, adds_special_tokens=adds), prompt
        size = len(self._template.tokenizer)
        if not all(isinstance(token, int) and 0 <= token < size for token in prompt):
            raise RefusedRequest(
                f"prompt is neither one text nor one list of token ids from 0 to {size - 1}; send one prompt per "
                "request",
                parameter="prompt",
            )
        return np.array(prompt, np.int32), None

    def _read(self, template: ChatTemplate, turn: SessionTurn, stops: tuple[str, ...]) -> Message:
        """Return a turn as a message.

        A turn that is cut off, unreadable or calls tools although there are none becomes plain text, with a
        `<think>` that the prompt ends with.
        """
        prompt = turn.prompt.tolist()
        if not turn.is_cut_off:
            try:
                message = read_answer(template, prompt, turn.token_ids)
                calls = calls_of(message)
                json.dumps([call.arguments for call in calls], allow_nan=False)
            except (UnreadableAnswer, ValueError):  # ValueError: NaN or Infinity, which no reply in JSON can hold
                pass
            else:
                if template.tools or not calls:
                    content, _ = cut_at(message["content"], stops)
                    return spoken(content, message.get(REASONING), calls, turn.turn_id)
        content, _ = cut_at(self._template.spoken(turn.token_ids), stops)
        return spoken(opening_of(template.tokenizer, prompt) + content, None, (), turn.turn_id)


def cut_at(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Cut a text before the stop text that ended the turn, as the APIs do. Return that stop text too, if any."""
    found = [(end, stop) for stop in stops if (end := text.find(stop)) >= 0]
    end, stop = min(found, default=(len(text), None))
    return text[:end], stop


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write errors in the form of the dialect whose path the client has used."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        served = ", ".join(dialect.path for dialect in DIALECTS)
        refused = RefusedRequest(
            f"{request.path} is not served, but {served} are; end the base_url in /v1 for clients of OpenAI, and "
            "before /v1 for those of Anthropic",
            code="not_found",
            status=404,
        )
    except Exception as error:
        refused = refused_by(error)
    dialect = next((one for one in DIALECTS if request.path.startswith(one.path)), CHAT_COMPLETIONS)
    return web.json_response(dialect.error(refused), status=refused.status, headers=NO_RETRY)


def check_connected(request: web.Request) -> None:
    """Raise RefusedRequest if the agent has disconnected.

    The agent would otherwise act on another answer than the recorded one.
    """
    if request.transport is None or request.transport.is_closing():
        raise RefusedRequest("the client has disconnected", code="gone", status=499)
