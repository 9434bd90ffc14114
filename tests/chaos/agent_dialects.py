"""One turn of a conversation in each dialect of the gateway, as an agent of a chaos run requests it.

tiny:digits joins the texts of messages, so that all dialects sample from the same tokens.
"""

import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

Reply = dict[str, Any]


class Dialect(NamedTuple):
    """How to ask for a turn, and where the reply has its text and the reason of its end."""

    path: str
    body: Callable[[list[str]], dict[str, Any]]
    text: Callable[[Reply], str]
    end: Callable[[Reply], str]


def messages_of(texts: list[str]) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


DIALECTS = (
    Dialect(
        "completions", lambda texts: {"prompt": "".join(texts)},
        lambda reply: reply["choices"][0]["text"], lambda reply: reply["choices"][0]["finish_reason"],
    ),
    Dialect(
        "chat/completions", lambda texts: {"messages": messages_of(texts)},
        lambda reply: reply["choices"][0]["message"]["content"], lambda reply: reply["choices"][0]["finish_reason"],
    ),
    Dialect(
        "responses", lambda texts: {"input": messages_of(texts)},
        lambda reply: "".join(part["text"] for item in reply["output"] for part in item["content"]),
        lambda reply: reply["status"],
    ),
    Dialect(
        "messages", lambda texts: {"messages": messages_of(texts), "max_tokens": 2},
        lambda reply: "".join(block["text"] for block in reply["content"]), lambda reply: reply["stop_reason"],
    ),
)  # fmt: skip
TRUNCATED = ("length", "incomplete", "max_tokens")


def dialect_of(api_key: str) -> Dialect:
    """Return the dialect of an episode. Each episode has its own key."""
    return DIALECTS[zlib.crc32(api_key.encode()) % len(DIALECTS)]


async def ask(dialect: Dialect, base_url: str, api_key: str, client: httpx.AsyncClient, texts: list[str]) -> str | None:
    """Return the text of the next turn, or None if it was truncated. `texts` alternate, and the user begins."""
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = await client.post(f"{base_url}/{dialect.path}", headers=headers, json=dialect.body(texts))
    reply = json.loads(answer.raise_for_status().content)
    return None if dialect.end(reply) in TRUNCATED else dialect.text(reply)
