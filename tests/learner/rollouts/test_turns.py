"""Turns of episodes with a scripted server: abandoned turns are cancelled at the server."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.environments.episode import EpisodeGroup
from learner.environments.player import Ask, TurnPrompt, TurnResult
from learner.prompts.prompts import Prompt
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollouts import Rollouts
from protocol.codec import pack
from protocol.errors import DataError
from protocol.messages import Generate, GroupFailed, Message
from tests.learner.ledgers import receive
from tests.learner.rollouts.hand_server import HandServer, dropped, fails, group_of, is_silent, rollouts_of
from tests.learner.runs import make_run
from tests.waiting import TIMEOUT_S, until


class ImpatientPlayer:
    """Requests two turns of each prompt, and abandons the first as soon as the server has it."""

    def __init__(self, server: HandServer) -> None:
        self._server = server
        self.num_played = 0

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup:
        first = asyncio.create_task(ask(turn(0)))
        while not any(name.startswith(f"{group_id}/") for name in self._server.generated):
            await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        self.num_played += 1
        await ask(turn(1))
        raise AssertionError("the server is silent")


class LongPlayer:
    """Requests one turn that is too long for the server, then one that is not."""

    def __init__(self) -> None:
        self.results: list[TurnResult | None] = []

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup:
        for num_tokens in (max_tokens, 1):
            self.results.append(await ask(turn(num_tokens, num_tokens)))
        raise AssertionError("the second turn fails")


def turn(number: int, num_tokens: int = 1) -> TurnPrompt:
    token_ids = np.full(num_tokens, 3, np.int32)
    return TurnPrompt(episode=0, number=number, token_ids=token_ids, max_tokens=2, salt="", stays_at="")


@contextmanager
def played(tmp_path: Path, server: HandServer, **learner: object) -> Iterator[tuple[Rollouts, ImpatientPlayer]]:
    run = make_run(tmp_path, server.endpoint, **{"steps": 10, "max_staleness": 1} | learner)
    with rollouts_of(run) as (fleet, rollouts):
        player = ImpatientPlayer(server)
        rollouts.start(0, player)
        fleet.wait()
        rollouts.publish(0, server.server_id)
        yield rollouts, player


def turns(names: list[str]) -> list[str]:
    """Return the turn number and the attempt of each name."""
    return [name.rpartition("/")[2] for name in names]


def test_an_abandoned_turn_is_cancelled_at_its_server_and_no_longer_pending(tmp_path: Path) -> None:
    with HandServer(is_silent) as server:
        with played(tmp_path, server) as (rollouts, player):
            until(lambda: len(server.cancelled) == player.num_played == 6, "every first turn is cancelled")
            assert turns(server.cancelled) == ["0.0.0"] * 6
            until(lambda: rollouts._dispatcher.num_pending.total() == 6, "the second turns are pending")
            assert turns(rollouts._dispatcher.group_ids) == ["0.1.0"] * 6
        until(
            lambda: sorted(turns(server.cancelled)) == ["0.0.0"] * 6 + ["0.1.0"] * 6,
            "all turns are cancelled at the end of the run",
        )


def test_an_answer_that_crosses_its_cancellation_is_only_acknowledged(tmp_path: Path) -> None:
    late: list[Message] = []

    def answers_cancelled(server: HandServer, request: Generate) -> list[Message]:
        late.append(group_of(request, 0))
        return late[:1] if turns([request.group_id]) == ["0.1.0"] else []

    with HandServer(answers_cancelled) as server:
        with played(tmp_path, server):
            until(lambda: server.acked)
        assert set(turns(server.acked)) == {"0.0.0"}


def test_a_turn_that_is_too_long_for_a_server_that_joined_later_ends_only_its_episode(tmp_path: Path) -> None:
    def rejects(server: HandServer, request: Generate) -> list[Message]:
        return [GroupFailed(group_id=request.group_id, code="invalid_prompt", message="no", retryable=False)]

    with HandServer(rejects) as server:
        run = make_run(tmp_path, server.endpoint, steps=10, groups_per_step=1, max_staleness=0)
        with rollouts_of(run) as (fleet, rollouts):
            player = LongPlayer()
            rollouts.start(0, player)
            fleet.wait()
            rollouts.publish(0, server.server_id)
            with pytest.raises(DataError, match="cannot complete a turn: no"):
                rollouts.next_batch(0, TIMEOUT_S)
        assert player.results == [None] and turns(server.generated)[-1] == "0.1.0"


def test_an_episode_retried_by_a_resume_is_played_only_after_a_server_has_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = {"functions": ["tests/learner/rewards/broken_rewards.py:raises"], "max_failed_share": 0.9}
    settings: dict[str, Any] = {"reward": reward, "groups_per_step": 1, "max_staleness": 0}
    with HandServer(is_silent) as server:
        with played(tmp_path, server, **settings):
            until(lambda: server.requests)
        group = msgspec.structs.replace(group_of(server.requests[0], 0), group_id="0.0")
        with closing(Ledger(tmp_path / "ledger.db")) as ledger:
            assert receive(ledger, "0.0", pack(group), 0, 2)
        server.generated.clear()
        monkeypatch.setattr(server, "_answers", lambda message: [])  # as before it runs
        with rollouts_of(make_run(tmp_path, server.endpoint, steps=10, **settings)) as (fleet, rollouts):
            player = ImpatientPlayer(server)
            rollouts.start(0, player)
            until(lambda: dropped(tmp_path) == [("0.0", "unscorable")])
            assert rollouts.next_batch(0, 0.3) is None
            monkeypatch.undo()
            fleet.wait()
            rollouts.publish(0, server.server_id)
            until(lambda: player.num_played == 1)
        assert [name.partition("/")[0] for name in server.generated] == ["0.1", "0.1"]


def test_a_failed_turn_is_retried_with_another_seed(tmp_path: Path) -> None:
    def fails_once(server: HandServer, request: Generate) -> list[Message]:
        return fails(request) if turns([request.group_id]) == ["0.1.0"] else []

    sampling = {"group_size": 4, "max_tokens": 8, "seeded": True}
    with HandServer(fails_once) as server:
        with played(tmp_path, server, sampling=sampling, groups_per_step=1, max_staleness=0):
            until(lambda: len(server.requests) == 3)
        assert turns(server.generated) == ["0.0.0", "0.1.0", "0.1.1"]
    _, first, second = (request.sampling.seed for request in server.requests)
    assert first is not None and second is not None and first < 2**31 <= second
