"""What reward functions are shown of a completion's tokens."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.config import RewardConfig
from learner.environments.episode import episodes_of
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.scoring import Scorer
from learner.rewards.workers import GroupRewards
from protocol.messages import Completion, Group
from protocol.model_files import resolve_model
from tests.learner.test_train import make_run


class RecordingWorkers:
    """In place of the reward workers."""

    texts: list[str]
    state: TrainerState

    def submit(
        self,
        prompt: Prompt,
        texts_G: list[str],
        token_ids_G: list[list[int]],
        state: TrainerState,
        *of_environments: Any,
    ) -> "Future[GroupRewards]":
        self.texts, self.state = texts_G, state
        future: Future[GroupRewards] = Future()
        future.set_result(GroupRewards(rewards=[0.0] * len(texts_G), functions=[]))
        return future


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_are_shown_on_demand(tmp_path: Path, skips: bool) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    config = make_run(tmp_path, "tcp://127.0.0.1:1").learner
    config = msgspec.structs.replace(config, reward=RewardConfig(functions=("exact_match",), skip_special_tokens=skips))
    ids = [*tokenizer("12")["input_ids"], tokenizer.eos_token_id]
    completion = Completion(
        token_ids=np.array(ids, np.int32),
        behaviour_logprobs=np.zeros(3, np.float32),
        versions=[(0, 3)],
        finish_reason="stop",
    )
    workers = RecordingWorkers()
    scorer = Scorer(config, tokenizer, workers)  # type: ignore[arg-type]
    group = Group(group_id="0.0", entered_version=0, completions=[completion])
    prompt = Prompt(prompt_id=0, prompt="21>", token_ids=[1], columns={})
    asyncio.run(scorer.score(prompt, episodes_of(group), step=2))
    assert workers.texts == ["12" if skips else f"12{tokenizer.eos_token}"]
    assert (workers.state.global_step, workers.state.max_steps) == (2, config.steps)
