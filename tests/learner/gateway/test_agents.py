"""Good and bad agents in processes, with a real gateway and a scripted policy: every episode ends as expected.

The lifetime of processes with user code is tested in tests/learner/sandbox, and the end with the learner in
test_agent_host.py.
"""

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from learner.config import EnvironmentConfig
from learner.environments.episode import EpisodeGroup
from learner.gateway.players import AgentProcess, AgentReward, EpisodeRequest, start_agent_pool
from learner.sandbox.pool import ProcessPool
from protocol.errors import ConfigError
from tests.learner.gateway.scripted_gateway import FirstTurnPolicy, play_with_agent
from tests.learner.sandbox.processes import wait_until_gone

USER = "tests.learner.gateway.user_agents"


def play_group(agent: str | None = None, columns: dict[str, Any] | None = None, **more: Any) -> EpisodeGroup:
    """Play a group of two episodes. An agent without a module is one of user_agents.py."""
    if agent is not None:
        more["agent"] = agent if ":" in agent else f"{USER}:{agent}"
    return play_with_agent(columns, **more)


def assert_ended(group: EpisodeGroup, state: str, reward: float | None, num_turns: int) -> None:
    for episode in group.episodes:
        assert (episode.stats.state, episode.reward, episode.stats.num_turns) == (state, reward, num_turns)


def test_an_agent_plays_episodes_in_sequence_and_reports_their_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):  # an agent must reach its endpoint without a proxy
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    group = play_group("two_turns", {"worth": 0.25}, times=2, max_concurrent=1)
    assert (group.group_id, group.entered_version, len(group.episodes)) == ("3.0", 4, 2)
    assert_ended(group, "finished", 0.25, 2)
    for episode in group.episodes:
        (branch,) = episode.branches
        assert branch.sampled_versions == [4, 5] and branch.prompt_token_ids is None
        assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"]
        assert episode.stats.environment_s > 0


def test_agents_that_end_slowly_are_a_warning_at_the_end_of_a_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = ProcessPool.close

    def close_slowly(pool: ProcessPool[AgentProcess]) -> None:
        close(pool)
        time.sleep(1)

    def shorten() -> None:
        monkeypatch.setattr("learner.gateway.players.CLOSE_TIMEOUT_S", 0.1)
        monkeypatch.setattr(ProcessPool, "close", close_slowly)

    play_with_agent({"worth": 0.25}, agent=f"{USER}:two_turns", then=shorten)
    assert "AgentPlayer._close did not finish within 0.1 s" in caplog.text


@pytest.mark.parametrize(
    ("agent", "reward", "num_branches"),
    [("with_openai", 4.0, 1), ("with_loop_of_its_own", 0.25, 1), ("by_completion", 0.5, 2)],
)
def test_agents_can_use_the_openai_client_or_sync_code_and_completion_rewards_are_averaged(
    agent: str, reward: float, num_branches: int
) -> None:
    row = {"worth": 0.25, "prompt": "a column that is not learner.data.prompt_column"}
    for episode in play_group(agent, row).episodes:
        assert (episode.reward, len(episode.branches)) == (reward, num_branches)


def test_rewards_by_completion_are_those_of_turns_if_the_run_may_give_credit_by_turn() -> None:
    """Their sum is then the reward, because a mean would depend on later turns."""
    for advantage, worth in (
        ({"credit": "turn"}, 1.0), ({"credit": "gigpo"}, 1.0), ({"function": "mine.py:f"}, 1.0), ({}, 0.5),
    ):  # fmt: skip
        for episode in play_group("by_completion", advantage=advantage).episodes:
            assert [turn.reward for turn in episode.turns] == [0.0, worth] and episode.reward == worth
            first, second = episode.turns
            assert first.state == second.state, "both requests have the same prompt"
            assert [branch.turns for branch in episode.branches] == [[(0, 5)], [(1, 5)]]


@pytest.mark.parametrize("when", ["as it starts", "as it plays"])
def test_a_cancelled_episode_leaves_no_reward_to_the_next(tmp_path: Path, when: str) -> None:
    started = tmp_path / "begun"

    async def cancel_and_play() -> object:
        agents = start_agent_pool(EnvironmentConfig(agent=f"{USER}:worth_after", max_concurrent=1))
        try:
            async with agents.lease() as agent:
                row = {"after_s": 600, "worth": 0.0, "begun": str(started)}
                playing = asyncio.create_task(agent.play(EpisodeRequest(row, "", ""), 600.0))
                while not (started.exists() if when == "as it plays" else agent._streams is not None):
                    await asyncio.sleep(0.01)
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
            async with agents.lease() as agent:
                return await agent.play(
                    EpisodeRequest({"after_s": 0, "worth": 1.0, "begun": str(started)}, "", ""), 60.0
                )
        finally:
            agents.close()

    assert asyncio.run(cancel_and_play()) == AgentReward(1.0)


@pytest.mark.parametrize(
    ("how", "state", "num_turns", "warning"),
    [
        ("die", "env_error", 1, "lost its process to signal 9"),
        ("invented", "env_error", 1, "returned a reward for 'chatcmpl-mine', which is not the id of one of its "
                                     "completions"),
        ("rate twice", "env_error", 1, "which are the same turn; return one"),
        ("hoard", "env_error", 1, "used more than 200 MiB of memory"),
        ("go on", "max_turns", 3, "raised HTTPStatusError"),
    ],
)  # fmt: skip
def test_a_misbehaving_agent_ends_its_episode_with_a_state_and_no_reward(
    how: str, state: str, num_turns: int, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert_ended(
        play_group("misbehave", {"how": how}, max_turns=3, max_memory_mib=200, times=2), state, None, num_turns
    )
    assert caplog.text.count(warning) == 4


def test_an_agent_without_an_answer_is_killed_at_its_deadline_and_its_request_is_cancelled() -> None:
    policy = FirstTurnPolicy()
    assert_ended(play_group("two_turns", script=policy, episode_deadline_s=6.0), "deadline", None, 1)
    assert policy.num_held == policy.num_given_up == 2


SCRIPT = """
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": json.loads(os.environ["SLIPSTREAM_ROW"])["prompt"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print("I was told", json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def test_a_command_line_agent_leaves_no_process_behind(tmp_path: Path) -> None:
    script, log = tmp_path / "agent.py", tmp_path / "children"
    script.write_text(SCRIPT)

    def is_alone() -> None:
        children = [int(line) for line in log.read_text().split()]
        assert len(children) == 2
        wait_until_gone(*children)

    command = f"sleep 3600 & echo $! >> '{log}'; '{sys.executable}' '{script}'; echo 0.75"
    assert_ended(play_group(command=command, then=is_alone), "finished", 0.75, 1)


def test_numbers_that_a_command_logs_by_other_names_are_no_rewards(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(SCRIPT)
    command = f"'{sys.executable}' '{script}'; echo '{{\"tokens\": 512, \"cost\": 0.01}}'"
    assert_ended(play_group(command=command), "finished", None, 1)


def test_the_event_loop_does_not_wait_while_an_agent_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    names, kill = [], AgentProcess.kill

    def record_and_kill(process: AgentProcess) -> None:
        if not process._is_killed:
            names.append(threading.current_thread().name)
        kill(process)

    monkeypatch.setattr(AgentProcess, "kill", record_and_kill)
    play_group(command="echo 0.5")
    assert len(names) == 2 and "test" not in names


ALONE = """
import importlib.util, json, urllib.request

async def run(data, *, base_url, api_key, http_client, **extra):
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    body = json.dumps({"messages": data["prompt"]}).encode()
    json.load(urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)))
    has_more = http_client is not None or importlib.util.find_spec("msgspec") is not None
    return 1.0 if has_more else 0.25
"""


def test_an_agent_can_run_in_an_empty_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(ALONE)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S \"$@\"\n")  # -S: without its site-packages
    python.chmod(0o755)
    group = play_group(f"{script}:run", python=str(python))
    assert [episode.reward for episode in group.episodes] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"agent": f"{USER}:nobody"}, r"agent = .*nobody': .* holds nothing under the name 'nobody'"),
        ({"agent": f"{USER}:two_turns", "python": "/no/such/python"},
            r"learner.environment.python = '/no/such/python'"),
        ({"agent": f"{USER}:two_turns", "gateway_host": "203.0.113.7"},
            r"gateway_host = '203.0.113.7'.* set gateway_host to an address of this machine"),
    ],
)  # fmt: skip
def test_an_agent_that_cannot_start_is_rejected_with_a_remedy(environment: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        play_group(**environment)
