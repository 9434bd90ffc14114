"""Multi-turn SkyRL-Gym environments: `run` plays the environment that a row names, in SkyRL's row format.

    {"prompt": [messages], "env_class": "gsm8k_multi_turn",
     "reward_spec": {"ground_truth": "72"}, "extra_info": {"max_turns": 5}}

This file runs where skyrl-gym is installed (`learner.environment.python`) and needs nothing else.
"""

import json
import urllib.request
from typing import Any

import skyrl_gym


def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Return the sum of the rewards of all turns."""
    extras = {name: value for name, value in data.items() if name not in ("prompt", "env_class")}
    env = skyrl_gym.make(data["env_class"], env_config=extras.get("env_config", {}), extras=extras)
    messages, _ = env.init(list(data["prompt"]))
    reward, is_done = 0.0, False
    try:
        while not is_done:
            reply = ask(messages, base_url, api_key)
            step = env.step(reply["content"] or "")
            reward, is_done = reward + step["reward"], step["done"]
            messages = [*messages, reply, *step["observations"]]
    finally:
        env.close()
    return reward


def ask(messages: list[dict[str, Any]], base_url: str, api_key: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:  # no timeout: the learner kills slow episodes
        return json.load(reply)["choices"][0]["message"]
