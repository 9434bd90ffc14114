"""Tasks of reasoning-gym: `python reasoning_gym_tasks.py TASK…` writes rows, `run` plays and scores one.

This file runs where reasoning-gym is installed (`learner.environment.python`) and needs nothing else.
"""

import argparse
import json
import urllib.request
from typing import Any

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer


def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Send one question to the policy and return reasoning-gym's score, from 0 to 1."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"messages": data["prompt"]}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:  # no timeout: the learner kills slow episodes
        text = json.load(reply)["choices"][0]["message"]["content"]
    entry = data["entry"]
    score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return score(answer=extract_answer(text or ""), entry=entry)


def rows(task: str, size: int, seed: int) -> Any:
    for entry in reasoning_gym.create_dataset(task, size=size, seed=seed):
        prompt = [
            {"role": "system", "content": SYSTEM_PROMPTS["default"]},
            {"role": "user", "content": entry["question"]},
        ]
        yield {"prompt": prompt, "entry": entry}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows of reasoning-gym's tasks, one JSON object per line.")
    parser.add_argument("tasks", nargs="+", help="such as chain_sum, basic_arithmetic, spell_backward")
    parser.add_argument("--size", type=int, default=1000, help="number of rows per task")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for task in options.tasks:
        for row in rows(task, options.size, options.seed):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
