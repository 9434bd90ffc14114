"""Requests for groups and turns: sampling options, seeds, and the check of answers."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.config import LearnerRun
from learner.environments.player import TurnPrompt
from learner.prompts.prompts import Prompt
from learner.rollouts.group_requests import GroupRequest, check_completions, seed_of
from protocol.errors import ProtocolError
from protocol.messages import Generate, Sampling
from tests.learner.rollouts.hand_server import group_of
from tests.learner.runs import make_run

NUM_COMPLETIONS, MAX_TURNS = 4, 5


def a_run(tmp_path: Path, **sampling: Any) -> LearnerRun:
    settings = {"group_size": NUM_COMPLETIONS, "max_tokens": 8} | sampling
    environment = {"factory": "guess", "max_turns": MAX_TURNS}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", sampling=settings, environment=environment)
    return msgspec.structs.replace(run, seed=7)


def message_of(run: LearnerRun, slot: int = 0, attempt: int = 0) -> Generate:
    prompt = Prompt(prompt_id=0, prompt="1", token_ids=[1], columns={})
    return GroupRequest(slot=slot, attempt=attempt, prompt=prompt).message(run)


def seed_of_turn(run: LearnerRun, slot: int, attempt: int, episode: int, number: int) -> int | None:
    ids = np.array([3], np.int32)
    turn = TurnPrompt(episode=episode, number=number, token_ids=ids, max_tokens=2, salt="", stays_at="")
    return seed_of(run, slot, attempt, turn)


def test_sampling_options_are_in_the_message(tmp_path: Path) -> None:
    set_by_the_user = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["</a>", "\n\n"], "allow_partial_support": True,
    }  # fmt: skip
    assert message_of(a_run(tmp_path, group_size=3, max_tokens=7, **set_by_the_user)).sampling == Sampling(
        num_completions=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, stop=("</a>", "\n\n")
    )


def test_first_attempts_have_the_seeds_of_earlier_versions(tmp_path: Path) -> None:
    run = a_run(tmp_path, seeded=True)
    assert [message_of(run, slot).sampling.seed for slot in (0, 1, 10**9)] == [7_000_021, 7_000_025, 1_859_516_373]
    assert [seed_of_turn(run, 1, 0, 2, number) for number in (0, 4)] == [35_000_135, 35_000_139]
    assert message_of(a_run(tmp_path), 0, 1).sampling.seed is None


def test_the_seeds_of_all_completions_differ_in_the_bits_that_a_generator_uses(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path, seeded=True)
    groups = [seed_of(run, slot, attempt) or 0 for slot in range(1000) for attempt in range(6)]
    completions = [(first + i) % 2**32 for first in groups for i in range(NUM_COMPLETIONS)]
    assert len(set(completions)) == 1000 * 6 * NUM_COMPLETIONS and max(groups) < 2**32
    turns = {
        seed_of_turn(run, slot, attempt, episode, number)
        for slot in range(100) for attempt in range(6)
        for episode in range(NUM_COMPLETIONS) for number in range(MAX_TURNS)
    }  # fmt: skip
    assert len(turns) == 100 * 6 * NUM_COMPLETIONS * MAX_TURNS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"num_completions": 3}, "has 4 completions; expected at most 3"),
        ({"max_tokens": 4}, "has a completion of 5 tokens; expected at most 4"),
        ({"vocab_size": 5}, r"has token ids from 1 to 5; expected ids of the model, from 0 to 4"),
        ({"first_id": -1}, "has token ids from -1 to"),
    ],
)
def test_a_group_that_does_not_match_its_request_is_rejected(
    tmp_path: Path, changes: dict[str, int], expected: str | None
) -> None:
    requested = {"num_completions": 4, "max_tokens": 5, "vocab_size": 6} | changes
    group = group_of(message_of(a_run(tmp_path)), 0)
    group.completions[0].token_ids[0] = requested.pop("first_id", 1)
    if expected is None:
        check_completions(group, **requested)
    else:
        with pytest.raises(ProtocolError, match=expected):
            check_completions(group, **requested)
