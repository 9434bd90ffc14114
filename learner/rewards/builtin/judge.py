"""Reward function `judge`: a model behind an OpenAI endpoint rates each answer.

    prompt, answer, completion ─▶ judge prompt ─▶ POST chat/completions ─▶ last number ─▶ share of best_score

It runs in the event loop of the reward workers. A call that cannot reach the judge is retried (`call.py`).
Invariant: only the text after the judge's own reasoning counts. A verdict without a number leaves its
completion unscorable.
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
from learner.sandbox.user_code import shorten

IN_TIME = 0.9
"""Share of timeout_s within which verdicts must arrive. A later one leaves only its completion unrated."""
OF_THE_QUESTION = {400, 413, 422}
"""HTTP statuses with which a judge rejects this text, for example because it is too long."""


async def judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    reward_config: RewardConfig,
    timeout_s: float,
    answer: Sequence[Any] | None = None,
    opens_reasoning: bool = False,
    **kwargs: Any,
) -> list[float | None]:
    """Return the judge's rating of each answer, from 0 to 1.

    learner.reward.judge names the model. A rating is None if the judge rejects the text, or if its verdict is
    late, cut off or without a number.
    """
    import aiohttp  # imported only for runs with a judge

    config, deadline = reward_config.judge, time.monotonic() + IN_TIME * timeout_s
    questions = [
        filled(config.prompt, prompt, answer_of(completion, opens_reasoning=opens_reasoning), gold)
        for prompt, completion, gold in zip(prompts, completions, answer or [None] * len(prompts), strict=True)
    ]
    key = os.environ.get("JUDGE_API_KEY", "").strip()  # a key from a file may end with a line break
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        model = config.model or await _first_model(session, config)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_verdict(session, config, model, text)) for text in questions]
                _, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))
                for task in late:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
    if len(late) == len(tasks):
        raise TimeoutError(
            f"none of {len(tasks)} verdicts arrived in time; raise learner.reward.timeout_s, or lower "
            "learner.reward.judge.max_tokens"
        )
    return [None if task in late else task.result() for task in tasks]


def filled(template: str, prompt: Any, completion: str, gold: Any) -> str:
    """Fill in the judge prompt. Placeholders in the inserted texts stay as they are."""
    parts = {"prompt": _prompt_text(prompt), "completion": completion, "answer": "\n".join(golds_of(gold))}
    return re.sub(r"\{(prompt|completion|answer)\}", lambda match: parts[match[1]], template)


def _prompt_text(prompt: Any) -> str:
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
    """Return the last number of a verdict as a share of `best`, from 0 to 1, or None.

    "8/10" and "8.0/10.0" count as 8. The dash in "Score - 8" is not a sign.
    """
    of_best = rf"\s*(?:/|out of)\s*[*_]*{re.escape(f'{best:g}')}(?:\.0+)?(?![\w.]*\d)"
    plain = re.sub(of_best, "", verdict.replace("####", " "))
    number = last_number_in(re.sub(r"(?:^|(?<=\s))[-–—]\s+", " ", plain, flags=re.MULTILINE))
    return None if number is None else min(1.0, max(0.0, float(number) / best))


async def _first_model(session: Any, config: JudgeConfig) -> str:
    async with session.get(f"{config.address}/models") as response:
        models = (await _answered(response))["data"]
    if not models:
        raise RuntimeError(f"the judge at {config.address} lists no model; set learner.reward.judge.model")
    return str(models[0]["id"])


async def _answered(response: Any) -> Any:
    if response.status in (429, 502, 503, 504):
        response.raise_for_status()  # retried later
    if response.status != 200:
        body = shorten(await response.text(errors="replace"), 300)
        raise RuntimeError(f"the judge at {response.url} returned status {response.status}: {body}")
    return await response.json()
