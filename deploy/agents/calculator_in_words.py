"""A calculator for a model whose chat template knows no tools: it is asked in words, and answers in the next message.

    user: What is 37 times 48? Let the calculator say it. ▸ policy: CALC(37*48) ▸ user: 1776 ▸ policy: 1776

`run` plays the rows of the task `products`. Needs nothing beside Python.
"""

import json
import re
import urllib.request
from typing import Any

CALL = re.compile(r"CALC\((\d{1,6})\s*\*\s*(\d{1,6})\)")
"""Of numbers so short that nobody has to wait for their product."""


def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Half a point for the right call, half for the right answer after it."""
    messages = list(data["prompt"])
    messages.append(ask(messages, base_url, api_key))
    call = CALL.search(messages[-1]["content"] or "")
    if call is None:
        return 0.0
    product = int(call[1]) * int(call[2])
    messages.append({"role": "user", "content": str(product)})
    answer = ask(messages, base_url, api_key)["content"] or ""
    is_right = answer.strip().rstrip(".") == str(data["answer"])
    return 0.5 * (product == data["answer"]) + 0.5 * is_right


def ask(messages: list[dict[str, Any]], base_url: str, api_key: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:  # the learner kills what takes too long
        return json.load(reply)["choices"][0]["message"]
