"""OpenEnv environments behind their servers: `run` plays the environment at the row's `url`.

    {"prompt": [messages], "url": "http://127.0.0.1:8100", "reset": {"seed": 3}}

The policy calls the environment's tools, or its one action. This file runs where openenv is installed
(`learner.environment.python`). Start one or more servers before the run, in a container or not.
"""

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

from openenv.core.generic_client import GenericEnvClient

NO_MORE_TURNS = 410


async def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Return the sum of rewards until the episode ends or the policy makes no call."""
    schema = (await request_json(f"{data['url']}/schema"))["action"]
    async with GenericEnvClient(base_url=data["url"]) as env:
        result = await env.reset(**data.get("reset", {}))
        tools = await tools_of(env, schema)
        messages, reward, is_done = [*data["prompt"], *opening(result.observation)], result.reward or 0.0, result.done
        while not is_done:
            try:
                message = await complete(messages, tools, base_url, api_key)
            except urllib.error.HTTPError as error:
                if error.code != NO_MORE_TURNS:
                    raise
                break
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                text, step_reward, is_done = await step(env, action_of(call["function"], tools))
                reward += step_reward
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
                if is_done:
                    break
    return reward


async def tools_of(env: GenericEnvClient, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the environment's tools; without tools, one tool for its action."""
    if "tool_name" in schema["properties"]:
        listed = (await env.step({"type": "list_tools"})).observation["tools"]
        return [tool(one["name"], one["description"], one["input_schema"]) for one in listed]
    fields = {name: field for name, field in schema["properties"].items() if name != "metadata"}
    return [tool("step", schema.get("description", ""), {**schema, "properties": fields})]


def tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def action_of(function: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    arguments = json.loads(function["arguments"])
    if [one["function"]["name"] for one in tools] == ["step"]:
        return arguments
    return {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}


async def step(env: GenericEnvClient, action: dict[str, Any]) -> tuple[str, float, bool]:
    """Return the observation as text, the reward, and whether the episode is done.

    If the environment rejects the action, the text is the error.
    """
    try:
        result = await env.step(action)
    except RuntimeError as error:
        return json.dumps({"error": str(error)}), 0.0, False
    return json.dumps(result.observation), float(result.reward or 0.0), result.done


def opening(observation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what reset shows, as a user message after the row's prompt."""
    shown = {name: value for name, value in observation.items() if value and name not in ("metadata", "reward", "done")}
    return [{"role": "user", "content": json.dumps(shown)}] if shown else []


async def complete(messages: list[Any], tools: list[Any], base_url: str, api_key: str) -> dict[str, Any]:
    reply = await request_json(f"{base_url}/chat/completions", {"messages": messages, "tools": tools}, api_key)
    return reply["choices"][0]["message"]


async def request_json(url: str, body: Any = None, api_key: str = "") -> Any:
    """Send a request in a thread, so that the environment's connection stays alive.

    No timeout: the learner kills slow episodes.
    """
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    return await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
