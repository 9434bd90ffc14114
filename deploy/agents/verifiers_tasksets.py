"""Environments of verifiers 0.4 and later.

`python verifiers_tasksets.py TASKSET` writes rows; `run` plays and scores one of them.

This file runs where verifiers and the taskset are installed (`learner.environment.python`).
verifiers starts the program that queries the policy in an environment that `uv` creates.
Install uv there too (`pip install uv`).
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

KEY = "OPENAI_API_KEY"
HARNESS = "null"
"""Plain chat loop of verifiers, with the tools of the task."""


async def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Return the mean reward of all traces of one episode."""
    os.environ[KEY] = api_key  # verifiers reads it here; this process plays one episode at a time
    environment = environment_of(data["taskset"])
    context = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=base_url, api_key_var=KEY))
    async with environment.serving():
        episode = await environment.run_episode(task_at(data["taskset"], data["number"]), context)
    if not episode.ok:
        raise RuntimeError(f"verifiers: {[*episode.errors, *(trace.errors for trace in episode.traces)]}")
    return sum(trace.reward for trace in episode.traces) / len(episode.traces)


@cache
def environment_of(taskset: str) -> Any:
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for uv
    return load_environment(
        resolve_env_config(
            {"taskset": {"id": taskset}, "agent": {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}}
        )
    )


@cache
def task_at(taskset: str, number: int) -> Any:
    return next(iter(environment_of(taskset).taskset.include(idx=[f"{number}:{number + 1}"])))


def rows(taskset: str, size: int) -> Iterator[dict[str, Any]]:
    """Yield one row per task.

    `prompt` is only for readers and for the order of the data; verifiers builds its own prompt.
    """
    for number, task in enumerate(itertools.islice(environment_of(taskset).taskset, size)):
        prompt = task.data.prompt
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=lambda message: message.model_dump())
        yield {"prompt": [{"role": "user", "content": text}], "taskset": taskset, "number": number}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rows of a taskset of verifiers, one JSON object per line.")
    parser.add_argument("taskset", help="id of an installed taskset")
    parser.add_argument("--size", type=int, default=1000, help="maximum number of rows")
    options = parser.parse_args()
    for row in rows(options.taskset, options.size):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
