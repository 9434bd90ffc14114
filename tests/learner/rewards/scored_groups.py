"""Score groups with reward functions in their processes."""

from typing import Any

from learner.config import RewardConfig
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.workers import GroupRewards, RewardWorkers

DEADLINE_S = 60
STATE = TrainerState(global_step=0, max_steps=10)


def prompt(text: Any = "21>", **columns: Any) -> Prompt:
    return Prompt(prompt_id=0, prompt=text, token_ids=[1, 2], columns=columns)


def score(
    functions: list[str], completions: list[str], the_prompt: Prompt | None = None, **config: Any
) -> GroupRewards:
    with RewardWorkers(RewardConfig(functions=tuple(functions), **config)) as workers:
        ids = [[7 + i] for i in range(len(completions))]
        return workers.submit(the_prompt or prompt(answer="12"), completions, ids, STATE).result(DEADLINE_S)
