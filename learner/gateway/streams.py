"""Stream a turn to an agent: signs of life until the turn is complete, then its events.

    turn in progress ─▶ keep-alives ─▶ events

Invariant: an error in the first KEEP_ALIVE_S, as every refusal of a request, has an HTTP status. A later error is an
event, because the status has been sent. When the agent disconnects, the turn is canceled.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from learner.gateway.dialects.dialect import AgentRequest, AgentTurn, Dialect
from learner.gateway.messages import RefusedRequest
from protocol.errors import DataError

KEEP_ALIVE_S = 10.0
"""Pause between two signs of life. It is shorter than the read timeouts of clients and proxies."""
HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


async def stream(
    request: web.Request, dialect: Dialect, asked: AgentRequest, turn: Coroutine[Any, Any, AgentTurn]
) -> web.StreamResponse:
    """Answer a request with the events of its turn.

    Raises:
        Exception: The turn's, if it fails before the first keep-alive.
    """
    response = web.StreamResponse(headers=HEADERS)
    running = asyncio.ensure_future(turn)
    try:
        while not (await asyncio.wait([running], timeout=KEEP_ALIVE_S))[0]:
            if not response.prepared:
                await response.prepare(request)
            await response.write(dialect.keep_alive)
    except BaseException:  # canceled, or the agent no longer reads
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        raise
    if not response.prepared:
        running.result()  # raises the error of a turn that has failed
        await response.prepare(request)
    for event in _events(dialect, asked, running):
        await response.write(event)
    await response.write_eof()
    return response


def _events(dialect: Dialect, asked: AgentRequest, turn: asyncio.Future[AgentTurn]) -> list[bytes]:
    try:
        return list(dialect.events(dialect.reply(turn.result()), asked))
    except Exception as error:
        return [dialect.error_event(refused_by(error))]


def refused_by(error: Exception) -> RefusedRequest:
    """Return an error as a refusal. Raise it if it is neither the agent's nor the episode's."""
    match error:
        case RefusedRequest():
            return error
        case DataError():
            return RefusedRequest(str(error))
        case web.HTTPException():
            return RefusedRequest(error.reason, code="not_possible", status=error.status)
    raise error
