"""Which versions of the policy have answered an HTTP request: said in its headers, in the models' list, and at a stream's end.

    TellVersions (around vLLM's app) ─▶ vLLM's routes ─▶ VersionedLLM.generate: what vLLM says of each finished completion

Invariant: an answer that is sent whole names the version of its oldest and of its newest token; one that is streamed begins with the
version that it cannot be older than, and ends with both.
"""

from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_server.engine.versioned_llm import UNTOUCHED, sampled_by
from protocol.answer_headers import END, NO_VERSION, START


class TellVersions:
    """ASGI middleware. `version` gives the one that answers now; None: the model's own weights."""

    def __init__(self, app: ASGIApp, version: Callable[[], int | None]) -> None:
        self._app, self._version = app, version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        labels: set[str] = set()
        is_stream = False

        async def tell(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
                told = {START: self._current()} if is_stream else _known(labels)
                headers.update({name: str(version) for name, version in told.items()})
            elif is_stream and labels and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + _comment(_known(labels))}
            await send(message)

        token = sampled_by.set(labels)
        try:
            await self._app(scope, receive, tell)
        finally:
            sampled_by.reset(token)

    def _current(self) -> int:
        version = self._version()
        return NO_VERSION if version is None else version


def _known(labels: Collection[str]) -> dict[str, int]:
    """Nothing of what no policy has sampled: a list, an error."""
    versions = [NO_VERSION if label == UNTOUCHED else int(label) for label in labels]
    return {START: min(versions), END: max(versions)} if versions else {}


def _comment(versions: dict[str, int]) -> bytes:
    """A line of server-sent events that clients pass over."""
    return "".join(f": {name}: {version}\n\n" for name, version in versions.items()).encode()
