"""The seeds of a seeded run: the same for the same attempt, others for a retry, and none for two completions."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from learner.config import LearnerRun
from learner.environments.episode import EpisodeGroup
from learner.environments.player import Ask, TurnPrompt
from learner.prompts.prompts import Prompt
from learner.rollouts.group_requests import GroupRequest, seed_of
from protocol.messages import Generate, GroupFailed, Message
from tests.learner.rollouts.test_dispatcher import until
from tests.learner.rollouts.test_rollouts import (
    TIMEOUT_S,
    HandServer,
    group_of,
    rollouts_of,
    rollouts_on,
    slot_of,
    slots,
)
from tests.learner.runs import make_run

NUM_COMPLETIONS, MAX_TURNS = 4, 5


def a_run(tmp_path: Path, *, seeded: bool = True, **learner: Any) -> LearnerRun:
    sampling = {"group_size": NUM_COMPLETIONS, "max_tokens": 8, "seeded": seeded}
    environment = {"factory": "guess", "max_turns": MAX_TURNS}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", sampling=sampling, environment=environment, **learner)
    return msgspec.structs.replace(run, seed=7)


def seed_of_group(run: LearnerRun, slot: int, attempt: int) -> int | None:
    prompt = Prompt(prompt_id=0, prompt="1", token_ids=[1], columns={})
    return GroupRequest(slot=slot, attempt=attempt, prompt=prompt).message(run).sampling.seed


def seed_of_turn(run: LearnerRun, slot: int, attempt: int, episode: int, number: int) -> int | None:
    return seed_of(run, slot, attempt, turn(episode, number))


def turn(episode: int, number: int) -> TurnPrompt:
    return TurnPrompt(
        episode=episode, number=number, token_ids=np.array([3], np.int32), max_tokens=2, salt="", stays_at=""
    )


def test_first_attempts_have_the_seeds_of_earlier_versions(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert [seed_of_group(run, slot, 0) for slot in (0, 1, 10**9)] == [7_000_021, 7_000_025, 1_859_516_373]
    assert [seed_of_turn(run, 1, 0, 2, number) for number in (0, 4)] == [35_000_135, 35_000_139]
    assert seed_of_group(a_run(tmp_path, seeded=False), 0, 1) is None


def test_no_two_completions_of_any_slots_and_attempts_share_what_a_generator_takes_of_their_seeds(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path)
    groups = [seed_of_group(run, slot, attempt) for slot in range(3000) for attempt in range(6)]
    completions = [((first or 0) + i) % 2**32 for first in groups for i in range(NUM_COMPLETIONS)]
    assert len(set(completions)) == 3000 * 6 * NUM_COMPLETIONS and max(map(int, groups)) < 2**32  # type: ignore[arg-type]
    turns = {
        seed_of_turn(run, slot, attempt, episode, number)
        for slot in range(300) for attempt in range(6) for episode in range(NUM_COMPLETIONS) for number in range(MAX_TURNS)
    }  # fmt: skip
    assert len(turns) == 300 * 6 * NUM_COMPLETIONS * MAX_TURNS


def test_a_group_that_is_asked_again_is_sampled_with_other_seeds(tmp_path: Path) -> None:
    def fails_once(server: HandServer, request: Generate) -> list[Message]:
        if slot_of(request) == 1 and request.group_id.endswith(".0"):
            return [GroupFailed(group_id=request.group_id, code="engine_error", message="scripted", retryable=True)]
        return [group_of(request, server.version)]

    sampling = {"group_size": NUM_COMPLETIONS, "max_tokens": 8, "seeded": True}
    with HandServer(fails_once) as server, rollouts_on(server, tmp_path, sampling=sampling) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
    seeds = {request.group_id: request.sampling.seed for request in server.requests}
    assert len({seeds[group_id] for group_id in ("0.0", "1.0", "1.1", "2.0")}) == 4


class OneTurn:
    """Asks for the first turn of each prompt."""

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup:
        await ask(turn(0, 0))
        raise AssertionError("the server answers only what is asked again, and not that")


def test_a_turn_that_is_asked_again_is_sampled_with_another_seed(tmp_path: Path) -> None:
    def fails_once(server: HandServer, request: Generate) -> list[Message]:
        if request.group_id.endswith(".0"):
            return [GroupFailed(group_id=request.group_id, code="engine_error", message="scripted", retryable=True)]
        return []

    with HandServer(fails_once) as server:
        sampling = {"group_size": NUM_COMPLETIONS, "max_tokens": 8, "seeded": True}
        run = make_run(tmp_path, server.endpoint, steps=10, max_staleness=0, groups_per_step=1, sampling=sampling)
        with rollouts_of(run) as (fleet, rollouts):
            rollouts.start(0, OneTurn())
            fleet.wait()
            rollouts.publish(0, server.server_id)
            until(lambda: len(server.requests) == 2, "the turn is asked again")
    first, second = (request.sampling.seed for request in server.requests)
    assert first == 0 and second is not None and second >= 2**31
