"""What a dialect is: it reads a request for a turn, and writes the turn in its own form.

    body ─▶ read ─▶ AgentRequest ─▶ (gateway.py: tokens, turn, record) ─▶ AgentTurn ─▶ reply ─▶ events of a stream

Invariant: requests of any dialect for the same turn give the same AgentRequest, apart from `body`. The tokens
therefore do not depend on the dialect.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from learner.gateway.dialects.request_rules import RequestRules
from learner.gateway.messages import RefusedRequest
from learner.gateway.session import SessionTurn
from learner.prompts.chat_template import ChatTemplate, Message

Reply = dict[str, Any]


class AgentRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request for one turn."""

    conversation: list[Message] | None = None
    """Messages as `read_messages` returns them. None: the prompt is `text`."""
    text: str | list[Any] = ""
    """Text or token ids to complete."""
    adds_special_tokens: bool = True
    """Whether a text that continues no turn gets the tokenizer's special tokens, such as BOS."""
    tools: list[dict[str, Any]] = []
    """Tools of the prompt, in the form of chat completions."""
    template_arguments: dict[str, Any] = {}
    max_tokens: int
    stops: tuple[str, ...]
    """Stop texts of the turn that the run does not have."""
    is_stream: bool
    body: Any
    """The request in its dialect, which shapes the reply."""


class AgentTurn(msgspec.Struct, frozen=True, eq=False):
    """A recorded turn, as the reply to a request."""

    request: AgentRequest
    sampled: SessionTurn
    message: Message
    """The turn as it is recorded, with its reasoning and tool calls."""
    stop: str | None
    """Stop text of the request that ended the turn."""
    model: str
    template: ChatTemplate

    @property
    def is_cut_off(self) -> bool:
        return self.sampled.is_cut_off


class Dialect(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One API, as plain functions."""

    path: str
    count_path: str | None = None
    """Path that counts the tokens of the same request instead of taking a turn."""
    read: Callable[[bytes, RequestRules], AgentRequest]
    """Parses a body. Raises RefusedRequest if it is malformed or requests what the run does not support."""
    reply: Callable[[AgentTurn], Reply]
    events: Callable[[Reply, AgentRequest], Iterable[bytes]]
    """Writes a whole reply as the events of a stream."""
    error: Callable[[RefusedRequest], Reply]
    error_event: Callable[[RefusedRequest], bytes]
    """Writes an error into a stream that has started."""
    keep_alive: bytes
    """What clients ignore while they wait for the first event."""


def server_sent_event(data: Reply, name: str | None = None) -> bytes:
    """Return an event of a stream: one line of JSON, so that no text of the policy can end it.

    `name`: the event's type, in the APIs that send it apart from the data.
    """
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
