"""Which policy has answered an HTTP request: said in its headers, in the models' list, and at a stream's end.

    TellVersions (around vLLM's app) ─▶ vLLM's routes ─▶ VersionedLLM.generate: what vLLM says of each finished completion

Invariant: an answer that is sent whole names the version of its oldest and of its newest token, and the run they are of; one that is
streamed begins with the version that it cannot be older than, and ends with both.
"""

from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_server.engine.versioned_llm import UNTOUCHED, sampled_by
from protocol.answer_headers import END, NO_VERSION, START, header_of_runs

Serving = Callable[[], tuple[str | None, int | None]]
"""The run and the version whose weights answer now; None: the model's own."""


class TellVersions:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        labels: set[str] = set()
        is_stream = False
        run_before, _ = self._serving()

        def final_headers() -> dict[str, str]:
            """Nothing of what no policy has sampled: a list, an error."""
            run, _ = self._serving()
            return header_of_runs(run_before, run) | _version_headers(labels) if labels else {}

        async def tell(message: Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                is_stream = headers.get("content-type", "").startswith("text/event-stream")
                headers.update(self._initial_headers() if is_stream else final_headers())
            elif is_stream and labels and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + _comment(final_headers())}
            await send(message)

        token = sampled_by.set(labels)
        try:
            await self._app(scope, receive, tell)
        finally:
            sampled_by.reset(token)

    def _initial_headers(self) -> dict[str, str]:
        run, version = self._serving()
        return header_of_runs(run) | {START: str(NO_VERSION if version is None else version)}


def _version_headers(labels: Collection[str]) -> dict[str, str]:
    versions = [NO_VERSION if label == UNTOUCHED else int(label) for label in labels]
    return {START: str(min(versions)), END: str(max(versions))}


def _comment(told: Mapping[str, str]) -> bytes:
    """Lines of server-sent events that clients pass over."""
    return "".join(f": {name}: {value}\n\n" for name, value in told.items()).encode()
