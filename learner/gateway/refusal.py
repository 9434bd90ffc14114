"""Errors of the gateway in OpenAI's form.

An agent's client therefore raises its usual error.
Invariant: no error invites a retry. The request would be refused again, and the run itself has already waited
for its servers.
"""

from typing import Any

NO_RETRY = {"x-should-retry": "false"}
"""Header that OpenAI's clients respect."""


class RefusedRequest(Exception):
    """Error response to a request."""

    def __init__(
        self, message: str, *, code: str = "invalid_request", parameter: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.status, self._code, self._parameter = status, code, parameter

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status == 400 else self._code
        return {"error": {"message": str(self), "type": kind, "param": self._parameter, "code": self._code}}


def unknown_key() -> RefusedRequest:
    return RefusedRequest(
        "the API key belongs to no episode; use the agent's key unchanged (api_key, or OPENAI_API_KEY)",
        code="invalid_api_key",
        status=401,
    )


def episode_over(state: str) -> RefusedRequest:
    return RefusedRequest(
        f"the episode is over ({state}); send no more requests for it",
        code="episode_over",
        status=410,
    )
