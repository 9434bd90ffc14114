"""Routed experts on their way from a server's groups and turns to the rows of a step."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from learner.environments.episode import Recording
from learner.environments.player import TurnPrompt, TurnResult
from learner.gateway.session import Session
from learner.prompts.prompts import Prompt
from learner.rollouts.group_requests import check_routed_experts
from learner.rollouts.rollout_group import RolloutGroup
from learner.training.batch import micro_batch, step_rows
from protocol.codec import pack, unpack
from protocol.errors import ProtocolError
from protocol.messages import Completion, Generate, Group, Message, RoutingShape
from tests.learner.gateway.scripted_gateway import config_of
from tests.learner.rollouts.hand_server import HandServer, dropped, group_of, rollouts_on
from tests.learner.training.batch_rows import make_row
from tests.learner.training.fixed_groups import make_run
from tests.waiting import TIMEOUT_S

CPU = torch.device("cpu")
SHAPE = RoutingShape(num_layers=2, num_experts=100, num_per_token=1)


def rows(*numbers: int) -> np.ndarray:
    """Return experts of two layers: a number, and the next one."""
    return np.stack([np.array(numbers), np.array(numbers) + 1], 1).astype(np.uint8)[..., None]


def turn_of(prompt_experts: np.ndarray, token_ids: list[int], experts: np.ndarray) -> Group:
    count = len(token_ids)
    completion = Completion(
        token_ids=np.array(token_ids, np.int32), behavior_logprobs=np.zeros(count, np.float32), versions=[(1, count)],
        finish_reason="stop", experts=experts,
    )  # fmt: skip
    return Group(group_id="t", entered_version=1, completions=[completion], prompt_experts=prompt_experts)


def test_each_turn_adds_the_experts_of_the_tokens_that_the_turns_before_lacked() -> None:
    recording = Recording(np.array([1, 2], np.int32))
    assert recording.experts is None
    recording.add_turn(turn_of(rows(1, 2), [3, 4, 5], rows(3, 4)))
    recording.add_observation([6, 7])
    assert recording.experts is not None and recording.experts.tolist() == rows(1, 2, 3, 4).tolist()
    # The next turn is asked for later tokens only: the last one of the first turn, and the observation.
    recording.add_turn(turn_of(rows(5, 6, 7), [8, 9], rows(8)))
    recording.add_observation([10])
    (branch,) = recording.branches()
    assert branch.token_ids.tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert branch.prompt_experts is not None and branch.prompt_experts.tolist() == rows(1, 2).tolist()
    assert branch.experts is not None and branch.experts.tolist() == rows(3, 4, 5, 6, 7, 8).tolist()


def test_a_branch_without_experts_is_recorded_as_before() -> None:
    recording = Recording(np.array([1, 2], np.int32))
    turn = turn_of(rows(1, 2), [3, 4], rows(3))
    without = msgspec.structs.replace(turn.completions[0], experts=None)
    recording.add_turn(msgspec.structs.replace(turn, completions=[without], prompt_experts=None))
    (branch,) = recording.branches()
    assert branch.experts is None and branch.prompt_experts is None and b"experts" not in pack(branch)


def test_each_branch_of_an_agent_has_the_experts_of_all_its_tokens_whatever_the_order_of_the_answers() -> None:
    """A token's experts are its place. A second answer to the same prompt begins a branch, whose start was not sent."""

    async def ask(prompt: TurnPrompt) -> TurnResult:
        num_known = 0 if prompt.experts is None else len(prompt.experts)
        num_prompt = len(prompt.token_ids)
        asked_from.append(num_known)
        answer = [7 + len(asked_from), 1]
        turn = turn_of(rows(*range(num_known, num_prompt)), answer, rows(num_prompt))
        return TurnResult(turn, "tcp://a:1")

    async def play() -> None:
        session = Session(config_of(), Prompt(prompt_id=0, prompt="p", token_ids=[1, 2], columns={}), 0, ask, 100)
        first = await session.turn(np.array([1, 2], np.int32), 5, ())
        session.record(first)
        follow_up = np.array([1, 2, *first.token_ids, 5], np.int32)
        for turn in await asyncio.gather(*(session.turn(follow_up, 5, ()) for _ in range(2))):
            session.record(turn)
        session.end(1.0)
        one, other = session.episode.branches
        for branch, num_prompt in ((one, 2), (other, 5)):
            assert branch.prompt_experts is not None and branch.experts is not None
            experts = np.concatenate([branch.prompt_experts, branch.experts])
            assert len(branch.prompt_experts) == num_prompt
            assert experts.tolist() == rows(*range(num_prompt + len(branch.token_ids) - 1)).tolist()

    asked_from: list[int] = []
    asyncio.run(play())
    assert asked_from == [0, 3, 3]


@pytest.mark.parametrize(
    ("prompt_experts", "experts", "expected"),
    [
        (rows(1, 2), rows(3), None),
        (None, rows(3), "no routed experts for some tokens; expected 1 of 100 experts in 2 layers"),
        (rows(1, 2), None, "no routed experts"),
        (rows(1), rows(3), "routed experts of 1 prompt tokens; expected 2"),
        (rows(1, 2), rows(99), "shape"),
        (rows(1, 2)[:, :1], rows(3), r"shape \(2, 1, 1\)"),
    ],
)
def test_experts_that_were_not_asked_for_or_that_the_model_lacks_are_an_error(
    prompt_experts: np.ndarray | None, experts: np.ndarray | None, expected: str | None
) -> None:
    turn = turn_of(rows(1, 2), [3, 4], rows(3))
    completion = msgspec.structs.replace(turn.completions[0], experts=experts)
    group = msgspec.structs.replace(turn, completions=[completion], prompt_experts=prompt_experts)
    if expected is None:
        check_routed_experts(group, 2, SHAPE)
    else:
        with pytest.raises(ProtocolError, match=expected):
            check_routed_experts(group, 2, SHAPE)


def with_experts(group: Group, num_prompt: int) -> Group:
    completions = [
        msgspec.structs.replace(one, experts=rows(*range(num_prompt, num_prompt + len(one.token_ids) - 1)))
        for one in group.completions
    ]
    return msgspec.structs.replace(group, completions=completions, prompt_experts=rows(*range(num_prompt)))


def test_a_run_that_replays_asks_for_all_experts_and_asks_again_where_a_group_lacks_them(tmp_path: Path) -> None:
    def answer(server: HandServer, request: Generate) -> list[Message]:
        group = group_of(request, 0)
        return [group if request.group_id == "1.0" else with_experts(group, len(request.prompt_token_ids))]

    with HandServer(answer) as server, rollouts_on(tmp_path, server, routing_replay=True) as (fleet, rollouts):
        fleet.experts = SHAPE
        rollouts.publish(0, server.server_id)
        groups = rollouts.next_batch(0, TIMEOUT_S)
        assert groups is not None and [group.slot for group in groups] == [0, 1, 2]
    assert ("1.0", "malformed") in dropped(tmp_path)
    assert {request.experts_from for request in server.requests} == {0}
    stored = unpack(pack(groups[1]), RolloutGroup)  # as it travels to the other ranks
    for replays in (False, True):
        (rows_G,) = step_rows([stored], [[[0.0]] * 4], make_run(routing_replay=replays).learner)
        for row in rows_G:
            expected = rows(*range(row.num_tokens - 1)).tolist()
            assert (None if row.experts is None else row.experts.tolist()) == (expected if replays else None)
            assert micro_batch([row], CPU).num_unreplayed == (0 if replays else row.num_tokens - 1)


def test_tokens_after_the_last_sampled_one_need_no_experts() -> None:
    recording = Recording(np.array([1, 2], np.int32))
    recording.add_turn(turn_of(rows(1, 2), [3, 4, 5], rows(3, 4)))
    recording.add_observation([6, 7])
    (branch,) = recording.branches()
    for experts, num_unreplayed in ((branch.experts, 0), (rows(3), 1), (None, 4)):
        row = make_row([1, 2], msgspec.structs.replace(branch, experts=experts), 1.0)
        batch = micro_batch([msgspec.structs.replace(row, prompt_experts=branch.prompt_experts)], CPU)
        assert batch.num_unreplayed == num_unreplayed and (batch.routing is None) == (experts is None)
    assert micro_batch([], CPU).num_unreplayed == 0
