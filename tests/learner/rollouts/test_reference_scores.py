"""Reference logprobs of groups that wait for their step: kept until then, and requested again after a refresh."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.environments.episode import TokenSequence
from learner.policy.server_reference import ReferenceCopy
from learner.rollouts.reference_scores import ReferenceScores
from learner.rollouts.rollout_group import RolloutGroup
from learner.servers.loop_thread import LoopThread
from learner.servers.reference_server import ReferenceServer
from protocol.messages import PROTOCOL_VERSION, Hello
from protocol.model_files import fingerprint, resolve_model
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run

PROMPT = [3, 4, 11]
TIMEOUT_S = 60.0


class Setup(NamedTuple):
    scores: ReferenceScores
    copy: ReferenceCopy
    model: Any


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    path = resolve_model("tiny:digits")
    copy = ReferenceCopy(tmp_path / "reference.safetensors", torch.float32, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    copy.write(model.named_parameters())
    with tiny_server() as served:
        reference = {"kind": "every", "every_steps": 2, "endpoint": served.endpoint}
        run = make_run(tmp_path, "tcp://127.0.0.1:1", reference=reference, kl={"coef": 0.1})
        hello = Hello(run="r", protocol_version=PROTOCOL_VERSION, model=fingerprint(path), learner="l")
        loop = LoopThread("test")
        server = ReferenceServer(run, hello, loop, copy)
        server.expect(0)
        server.start()
        scores = ReferenceScores(server)
        await_ready(scores)
        yield Setup(scores, copy, model)
        server.close(is_over=True)
        loop.stop()
        server.fleet.close()


def await_ready(scores: ReferenceScores) -> None:
    started = time.monotonic()
    while not scores.server.keep_ready(lambda endpoint, welcome: None, started):
        time.sleep(0.02)


def make_group(slot: int, *completions: list[int]) -> RolloutGroup:
    branches = [
        TokenSequence(
            token_ids=np.array(tokens, np.int32),
            behavior_logprobs=np.zeros(len(tokens), np.float32),
            versions=[(0, len(tokens))],
            finish_reason="stop",
        )
        for tokens in completions
    ]
    rewards = [0.0] * len(branches)
    return RolloutGroup(
        group_id=f"{slot}.0", slot=slot, prompt_token_ids=np.array(PROMPT, np.int32), completions=branches,
        rewards_G=list(rewards), rewards_by_function={}, entered_version=0,
    )  # fmt: skip


def take(scores: ReferenceScores, groups: list[RolloutGroup], kept: list[RolloutGroup]) -> list[RolloutGroup]:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if (taken := scores.take(groups, lambda: kept, 0.5)) is not None:
            return taken
    raise AssertionError("no scores")


@torch.no_grad()
def assert_scored_by(model: Any, groups: list[RolloutGroup]) -> None:
    for group in groups:
        for branch in group.completions:
            ids = torch.tensor(PROMPT + branch.token_ids.tolist())
            logprobs_T = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            assert branch.reference_logprobs == pytest.approx(logprobs_T[len(PROMPT) - 1 :].numpy(), abs=1e-5)


def test_groups_get_the_logprobs_of_their_own_tokens_and_later_ones_are_not_requested_twice(setup: Setup) -> None:
    now, later = make_group(0, [5, 6, 7], [8]), make_group(1, [9, 2])
    setup.scores.begin([now, later])
    assert_scored_by(setup.model, take(setup.scores, [now], [later]))
    assert_scored_by(setup.model, take(setup.scores, [later], []))
    metrics = setup.scores.pop_metrics()
    assert metrics["reference/scored_tokens"] == 3 * len(PROMPT) + 6
    assert metrics["reference/score_seconds"] > 0 and metrics["reference/groups_pending"] == 0


def test_a_group_that_is_scored_while_a_step_waits_is_requested_once(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, later = make_group(0, [5, 6, 7], [8]), make_group(1, [9, 2])
    requested, scored = list[str](), list[RolloutGroup]()
    score = ReferenceScores._score

    def recorded(scores: ReferenceScores, group: RolloutGroup) -> Any:
        requested.append(group.group_id)
        return score(scores, group)

    def kept() -> list[RolloutGroup]:
        found = [*scored]
        if not scored:
            scored.append(later)
            setup.scores.begin(scored)  # as the loop does meanwhile
        return found

    monkeypatch.setattr(ReferenceScores, "_score", recorded)
    assert setup.scores.take([now], kept, TIMEOUT_S) is not None
    assert_scored_by(setup.model, take(setup.scores, [later], []))
    assert sorted(requested) == [now.group_id, later.group_id]


def test_a_refresh_discards_the_logprobs_of_the_earlier_reference(setup: Setup) -> None:
    group = make_group(0, [5, 6, 7], [8])
    setup.scores.begin([group])
    deadline = time.monotonic() + TIMEOUT_S
    while setup.scores.num_pending and time.monotonic() < deadline:
        time.sleep(0.02)
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter.mul_(1.1)
    setup.copy.write(setup.model.named_parameters())
    setup.scores.refresh(3)
    setup.scores.begin([group])  # before the server has the new copy
    await_ready(setup.scores)
    assert_scored_by(setup.model, take(setup.scores, [group], []))
