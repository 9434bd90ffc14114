"""Routed experts between server and learner, with a scripted engine: what is asked for, answered and refused."""

from collections.abc import AsyncIterator

import msgspec
import numpy as np

from inference_server.engine.interface import Sampled
from protocol.messages import GroupFailed, RoutingShape, Sampling, Welcome
from tests.fakes import LIMITS, ScriptedEngine
from tests.inference_server.scripted_server import Stage, with_server

SHAPE = RoutingShape(num_layers=2, num_experts=4, num_per_token=1)


class RoutingEngine(ScriptedEngine):
    """An engine whose tokens have used the expert of their own number in the group."""

    def __init__(self) -> None:
        super().__init__(limits=msgspec.structs.replace(LIMITS, experts=SHAPE))
        self.asked: list[int | None] = []

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        self.asked.append(experts_from)
        async for sampled in super().generate(prompt_token_ids, sampling, salt, experts_from):
            if experts_from is None:
                yield sampled
                continue
            with_experts = {
                index: msgspec.structs.replace(one, experts=np.full((len(one.token_ids) - 1, 2, 1), index, np.uint8))
                for index, one in sampled.completions.items()
            }
            rows = np.full((len(prompt_token_ids) - experts_from, 2, 1), 3, np.uint8)
            yield msgspec.structs.replace(sampled, completions=with_experts, prompt_experts=rows)


@with_server(make_engine=RoutingEngine)
async def test_a_group_has_the_experts_of_all_tokens_that_the_learner_lacks(at: Stage) -> None:
    welcome = await at.learner.join()
    assert isinstance(welcome, Welcome) and welcome.experts == SHAPE
    await at.push()
    group = await at.learner.group("0.0", [1, 2, 3], experts_from=1)
    assert group.prompt_experts is not None and group.prompt_experts[:, 0, 0].tolist() == [3, 3]
    assert [c.experts[:, 0, 0].tolist() for c in group.completions if c.experts is not None] == [[], [1]]
    plain = await at.learner.group("0.1", [1, 2, 3])
    assert plain.prompt_experts is None and [c.experts for c in plain.completions] == [None, None]
    await at.learner.generate("0.2", [1, 2, 3], experts_from=4)
    failed = await at.learner.receive(GroupFailed)
    assert "experts_from is 4, expected at most the prompt's 3 tokens" in failed.message and not failed.retryable
    assert at.engine.asked == [1, None]  # type: ignore[attr-defined]


@with_server()
async def test_a_server_without_them_says_so_and_refuses_a_request_for_them(at: Stage) -> None:
    assert (await at.learner.join()).experts is None
    await at.push()
    await at.learner.generate("0.0", [1], experts_from=0)
    failed = await at.learner.receive(GroupFailed)
    assert "set server.return_routed_experts = true" in failed.message and not failed.retryable
