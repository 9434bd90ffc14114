"""`judge`: a model behind an OpenAI endpoint says what an answer is worth. In the event loop of the reward workers.

    prompt, answer, completion ─▶ the judge's prompt ─▶ POST chat/completions ─▶ the last number that it says ─▶ a share of best_score

Invariant: only what the judge says after its own reasoning is read. A judge that says no number leaves the completion unscorable; one that
cannot be reached is asked again later (reach.py).
"""

import asyncio
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from learner.config import RewardConfig
from learner.config.rewards import JudgeConfig
from learner.rewards.builtin.answers import answer_of, completion_text, golds_of, last_number_in
from learner.user_code import shorten

IN_TIME = 0.9
"""Of timeout_s; what comes later costs its own completion."""
OF_THE_QUESTION = {400, 413, 422}
"""Statuses: the judge does not take this text, such as one that is too long for it."""


async def judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    reward_config: RewardConfig,
    timeout_s: float,
    answer: Sequence[Any] | None = None,
    opens_reasoning: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    """What the model of learner.reward.judge says of each answer, from 0 to 1; None if it says no number, in time and to its end."""
    import aiohttp  # by those alone who ask a judge

    config, deadline = reward_config.judge, time.monotonic() + IN_TIME * timeout_s
    asked = [
        filled(config.prompt, prompt, answer_of(completion, opens_reasoning=opens_reasoning), gold)
        for prompt, completion, gold in zip(prompts, completions, answer or [None] * len(prompts), strict=True)
    ]
    key = os.environ.get("JUDGE_API_KEY", "").strip()  # from a file it may end with its line
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        model = config.model or await _first_model(session, config)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_verdict(session, config, model, text)) for text in asked]
                _, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
                for task in late:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    if len(late) == len(tasks):
        raise TimeoutError(
            f"none of {len(tasks)} verdicts came in time; raise learner.reward.timeout_s, or lower learner.reward.judge.max_tokens"
        )
    return [None if task in late else task.result() for task in tasks]


def filled(template: str, prompt: Any, said: str, gold: Any) -> str:
    """Return what the judge is asked. What is filled in is not read for further names."""
    parts = {"prompt": _as_text(prompt), "completion": said, "answer": "\n".join(golds_of(gold))}
    return re.sub(r"\{(prompt|completion|answer)\}", lambda match: parts[match[1]], template)


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {completion_text([message | {'role': 'assistant'}])}" for message in prompt)


async def _verdict(session: Any, config: JudgeConfig, model: str, text: str) -> float | None:
    question = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": config.temperature,
        "max_tokens": config.max_tokens,
    }
    async with session.post(f"{config.address}/chat/completions", json=question) as response:
        if response.status in OF_THE_QUESTION:
            return None
        choice = (await _answered(response))["choices"][0]
    if choice.get("finish_reason") == "length":
        return None
    return score(answer_of([choice["message"] | {"role": "assistant"}]), config.best_score)


def score(verdict: str, best: float) -> float | None:
    """Return the last number of a text as a share of the best: of "8/10" the 8. A dash before it, as in "Score - 8", is no sign."""
    plain = re.sub(rf"\s*(?:/|out of)\s*{best:g}\b", "", verdict.replace("####", " "))
    number = last_number_in(re.sub(r"(?:^|(?<=\s))[-–—]\s+", " ", plain, flags=re.MULTILINE))
    return None if number is None else min(1.0, max(0.0, float(number) / best))


async def _first_model(session: Any, config: JudgeConfig) -> str:
    async with session.get(f"{config.address}/models") as response:
        models = (await _answered(response))["data"]
    if not models:
        raise RuntimeError(f"the judge at {config.address} names no model; set learner.reward.judge.model")
    return str(models[0]["id"])


async def _answered(response: Any) -> Any:
    if response.status in (429, 502, 503, 504):
        response.raise_for_status()  # asked again later
    if response.status != 200:
        body = shorten(await response.text(errors="replace"), 300)
        raise RuntimeError(f"the judge at {response.url} answered with status {response.status}: {body}")
    return await response.json()
