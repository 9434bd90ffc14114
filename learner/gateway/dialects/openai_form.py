"""Forms that OpenAI's APIs share: errors, token counts, arguments as JSON text, and the ends of streams."""

import json
from typing import Any

from learner.gateway.dialects.dialect import AgentTurn, Reply, server_sent_event
from learner.gateway.messages import RefusedRequest
from learner.prompts.chat_template import Message

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which every client of server-sent events ignores."""
END_OF_STREAM = b"data: [DONE]\n\n"


def error(refused: RefusedRequest) -> Reply:
    kind = "invalid_request_error" if refused.status == 400 else refused.code
    return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}


def error_event(refused: RefusedRequest) -> bytes:
    return server_sent_event(error(refused))


def usage(turn: AgentTurn) -> Reply:
    """Return the token counts of chat and text completions."""
    num_prompt, num_sampled = len(turn.sampled.prompt), len(turn.sampled.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": turn.sampled.num_cached_tokens},
    }


def calls_as_json_text(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message, whose arguments OpenAI's APIs send as JSON text."""
    return [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
