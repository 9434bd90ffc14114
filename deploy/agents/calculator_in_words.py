"""A calculator for models whose chat template has no tools: the policy calls it in text.

    user: What is 37 times 48? … ▸ policy: CALC(37*48) ▸ user: 1776 ▸ policy: 1776

The next user message has the result. `run` plays the rows of the task `products` and needs only Python.
"""

import json
import re
import urllib.request
from typing import Any

CALL = re.compile(r"CALC\((\d{1,6})\s*\*\s*(\d{1,6})\)")
"""Pattern of a call, with numbers short enough for an instant product."""


def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Return 0.5 for the right call, plus 0.5 for the right answer after it."""
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
    with urllib.request.urlopen(request) as reply:  # no timeout: the learner kills slow episodes
        return json.load(reply)["choices"][0]["message"]
