"""Agents as users write them, good and bad. They run in separate processes."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

MESSAGES = [{"role": "user", "content": "How much?"}]


async def ask(base_url: str, api_key: str, client: httpx.AsyncClient, messages: Any = MESSAGES) -> dict[str, Any]:
    answer = await client.post(
        f"{base_url}/chat/completions", headers={"Authorization": f"Bearer {api_key}"}, json={"messages": messages}
    )
    answer.raise_for_status()
    return answer.json()


async def two_turns(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    """Play a conversation of two turns. The row has the reward."""
    reply = await ask(base_url, api_key, http_client)
    continued = [*MESSAGES, reply["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    await ask(base_url, api_key, http_client, continued)
    return data["worth"]


async def with_openai(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    reply = await client.chat.completions.create(model="default", messages=data["prompt"])
    return float(len(reply.choices[0].message.content))


def with_loop_of_its_own(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Start an event loop, as `run_sync` of many libraries does."""

    async def both() -> float:
        async with httpx.AsyncClient() as client:
            return await two_turns(data, base_url=base_url, api_key=api_key, http_client=client)

    return asyncio.run(both())


async def worth_after(data: dict[str, Any], **extra: Any) -> float:
    Path(data["begun"]).touch()
    await asyncio.sleep(data["after_s"])
    return data["worth"]


async def by_completion(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> Any:
    replies = [await ask(base_url, api_key, http_client) for _ in range(2)]
    return {reply["id"]: float(number) for number, reply in enumerate(replies)}


async def misbehave(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> Any:
    """Misbehave after a turn, as the row says."""
    reply = await ask(base_url, api_key, http_client)
    match data["how"]:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "invented":
            return {"chatcmpl-mine": 1.0}
        case "rate twice":
            return {reply["id"]: 1.0, reply["id"].replace("chatcmpl-", "msg_"): 0.0}
        case "go on":
            while True:
                await ask(base_url, api_key, http_client)
        case "hoard":
            held = bytearray(300 << 20)
            await asyncio.sleep(600)
            return len(held)
    raise AssertionError(data)


async def guess(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    """Play the built-in environment of this name as an agent."""
    from learner.environments.builtin import Guess

    game, text, headers = Guess(), data["prompt"], {"Authorization": f"Bearer {api_key}"}
    game.reset(**data)
    for _ in range(4):
        answer = await http_client.post(f"{base_url}/completions", headers=headers, json={"prompt": text})
        (choice,) = answer.raise_for_status().json()["choices"]
        if choice["finish_reason"] == "length":
            break
        text += choice["text"] + game.guess(choice["text"])
        if game.done:
            break
    return game.get_reward()


async def tell(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    """Play three turns with a tool, as with the environment `Listener`. The reward is the length of the text."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages, total = list(data["prompt"]), 0
    tool: Any = {"type": "function", "function": {"name": "tell", "parameters": {"type": "object", "properties": {}}}}
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[tool])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            num_chars = len(json.loads(call.function.arguments)["text"])
            total += num_chars
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{num_chars} heard"})
        if not message.tool_calls:
            break
    return float(total)
