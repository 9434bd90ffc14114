"""Agents in their processes, good ones and bad ones, against a real gateway with a scripted policy: every episode ends, and in which state."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from learner.config import EnvironmentConfig
from learner.environments.episode import Episode, EpisodeGroup
from learner.gateway.players import AgentReward, EpisodeRequest, start_agent_pool
from protocol.errors import ConfigError
from tests.learner.gateway.asking import OnceOnly, config_of, played_by_agent

USER = "tests.learner.gateway.user_agents"


def played(agent: str | None = None, columns: dict[str, Any] | None = None, **more: Any) -> EpisodeGroup:
    """A group of two episodes of an agent, one of ours if it names no module."""
    if agent is not None:
        more["agent"] = agent if ":" in agent else f"{USER}:{agent}"
    return played_by_agent(columns, **more)


def misbehaved(how: str, **more: Any) -> list[Episode]:
    columns = {"how": how, "log": str(more.pop("log", ""))}
    return played("misbehave", columns, **more).episodes


def test_an_agent_plays_its_episodes_and_says_what_they_are_worth() -> None:
    group = played("two_turns", {"worth": 0.25})
    assert (group.group_id, group.entered_version, len(group.episodes)) == ("3.0", 4, 2)
    for episode in group.episodes:
        assert (episode.course.state, episode.reward, episode.course.num_turns) == ("finished", 0.25, 2)
        (branch,) = episode.branches
        assert branch.sampled_versions == [4, 5] and branch.prompt_token_ids is None
        assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"]
        assert episode.course.environment_s > 0


def test_the_plain_openai_client_and_code_that_is_not_asynchronous_will_do() -> None:
    assert [episode.reward for episode in played("with_openai").episodes] == [4.0, 4.0]
    assert [episode.reward for episode in played("synchronous").episodes] == [0.5, 0.5]
    assert [episode.reward for episode in played("with_loop_of_its_own", {"worth": 0.25}).episodes] == [0.25, 0.25]


def test_a_file_may_import_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("WORTH = 0.75\n")
    (tmp_path / "mine.py").write_text(
        f"from beside_it import WORTH\nfrom {USER} import ask\n\n"
        "async def play(data, *, base_url, api_key, http_client, **extra):\n"
        "    await ask(base_url, api_key, http_client)\n    return WORTH\n"
    )
    assert [episode.reward for episode in played(f"{tmp_path}/mine.py:play").episodes] == [0.75, 0.75]


@pytest.mark.parametrize("when", ["as it starts", "as it plays"])
def test_an_episode_that_is_cancelled_leaves_no_reward_to_the_next(tmp_path: Path, when: str) -> None:
    begun = tmp_path / "begun"

    async def cancel_and_play() -> object:
        agents = start_agent_pool(EnvironmentConfig(agent=f"{USER}:worth_after", max_concurrent=1))
        try:
            async with agents.lease() as agent:
                row = {"after_s": 600, "worth": 0.0, "begun": str(begun)}
                playing = asyncio.create_task(agent.play(EpisodeRequest(row, "", ""), 600.0))
                while not (begun.exists() if when == "as it plays" else agent._streams is not None):
                    await asyncio.sleep(0.01)
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
            async with agents.lease() as agent:
                return await agent.play(EpisodeRequest({"after_s": 0, "worth": 1.0, "begun": str(begun)}, "", ""), 60.0)
        finally:
            agents.close()

    assert asyncio.run(cancel_and_play()) == AgentReward(1.0)


def test_rewards_by_completion_are_averaged() -> None:
    for episode in played("by_completion").episodes:
        assert (episode.reward, len(episode.branches)) == (0.5, 2)


@pytest.mark.parametrize(
    ("how", "state", "num_turns"),
    [
        ("raise", "env_error", 1), ("die", "env_error", 1), ("exit", "env_error", 1), ("leave", "env_error", 1),
        ("word", "env_error", 1), ("infinite", "env_error", 1), ("invented", "env_error", 1), ("go on", "max_turns", 3),
        ("nothing", "finished", 1),
    ],
)  # fmt: skip
def test_an_agent_that_does_wrong_ends_its_episode_in_a_state_and_without_a_reward(
    how: str, state: str, num_turns: int
) -> None:
    for episode in misbehaved(how, max_turns=3, times=2):
        assert (episode.course.state, episode.reward, episode.course.num_turns) == (state, None, num_turns)


@pytest.mark.parametrize("how", ["hang", "block"])
def test_an_agent_that_never_returns_is_killed_at_its_deadline(how: str) -> None:
    for episode in misbehaved(how, episode_deadline_s=10.0):
        assert (episode.course.state, episode.reward, episode.course.num_turns) == ("deadline", None, 1)


def test_an_agent_or_command_that_holds_too_much_memory_is_killed_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for episode in misbehaved("hoard", max_memory_mib=200, times=2):
        assert (episode.course.state, episode.reward, episode.course.num_turns) == ("env_error", None, 1)
    (tmp_path / "agent.py").write_text(f"{SCRIPT}\nheld = bytearray(300 << 20)\nimport time\ntime.sleep(600)\n")
    command = f"'{sys.executable}' '{tmp_path / 'agent.py'}'; echo 1"
    for episode in played(command=command, max_memory_mib=200).episodes:
        assert (episode.course.state, episode.reward, episode.course.num_turns) == ("env_error", None, 1)
    told = "used more than 200 MiB of memory and was killed; make it and what it starts use less or raise learner.environment.max_memory_mib"
    assert caplog.text.count(told) == 6


def test_the_episode_after_one_that_hung_has_a_process_of_its_own(tmp_path: Path) -> None:
    episodes = misbehaved("hang at first", log=tmp_path / "log", times=2, max_concurrent=2, episode_deadline_s=10.0)
    assert [episode.reward for episode in episodes] == [1.0, 1.0]


def test_what_an_agent_prints_is_no_part_of_a_commands_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert [episode.reward for episode in misbehaved("print")] == [1.0, 1.0]
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("said by an agent") == 2


def test_what_an_agent_has_started_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "children"
    misbehaved("child", log=log, episode_deadline_s=10.0, then=lambda: wait_until_gone(log, 2))


def test_a_session_that_an_agent_leaves_open_is_closed_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "answers"
    episodes = misbehaved("open", log=log, times=4)
    assert {episode.course.state for episode in episodes} == {"finished"}
    answers = set(log.read_text().split())
    assert "410" in answers and answers <= {"200", "410"}


def test_an_agent_that_is_never_answered_is_killed_at_its_deadline_and_what_it_asked_given_up() -> None:
    policy = OnceOnly()
    for episode in played("two_turns", script=policy, episode_deadline_s=10.0).episodes:
        assert (episode.course.state, episode.reward, episode.course.num_turns) == ("deadline", None, 1)
    assert policy.num_held == policy.num_given_up == 2


@pytest.mark.parametrize(("how", "state", "reward"), [("returns", "finished", 1.0), ("dies", "env_error", None)])
def test_what_an_agent_still_asks_when_it_goes_is_given_up(
    tmp_path: Path, how: str, state: str, reward: float | None
) -> None:
    asked = tmp_path / "asked"
    policy = OnceOnly(asked.touch)
    group = played("ask_and_go", {"how": how, "asked": str(asked)}, script=policy, times=2, max_concurrent=1)
    for episode in group.episodes:
        assert (episode.course.state, episode.reward, episode.course.num_turns) == (state, reward, 1)
    assert policy.num_given_up == policy.num_held >= 1


def test_one_process_plays_one_episode_after_the_other() -> None:
    group = played("two_turns", {"worth": 1}, times=3, max_concurrent=1)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0]


def test_no_proxy_stands_between_an_agent_and_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert [episode.reward for episode in played("two_turns", {"worth": 1.0}).episodes] == [1.0, 1.0]


LEARNER = f"""
import asyncio, sys
from learner.gateway.players import AgentProcess, EpisodeRequest
from tests.learner.gateway.asking import config_of

async def main():
    process = AgentProcess(config_of(agent="{USER}:wait").environment)
    assert await process.load() is None
    print(process.pid, flush=True)
    await process.play(EpisodeRequest({{}}, "", ""), 3600)

asyncio.run(main())
"""


def test_an_agent_ends_with_the_learner_in_the_midst_of_an_episode() -> None:
    with subprocess.Popen([sys.executable, "-c", LEARNER], stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        agent = int(learner.stdout.readline())
        assert is_running(agent)
        learner.kill()
    wait_until(lambda: not is_running(agent))


SCRIPT = """
import json, os, sys, urllib.request
row = json.loads(os.environ["SLIPSTREAM_ROW"])
def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("I was told", ask(row["prompt"]))
"""


ALONE = """
import importlib.util, json, urllib.request

async def run(data, *, base_url, api_key, http_client, **extra):
    headers = {"Authorization": "Bearer " + api_key, "Content-Type": "application/json"}
    body = json.dumps({"messages": data["prompt"]}).encode()
    json.load(urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)))
    has_more = http_client is not None or importlib.util.find_spec("msgspec") is not None
    return 1.0 if has_more else 0.25
"""


@pytest.mark.parametrize(
    ("end", "state", "reward"),
    [
        ("print(row['worth'])", "finished", 0.75),
        ("print()", "finished", None),
        ("sys.exit(7)", "env_error", None),
        ("print(json.dumps({'chatcmpl-mine': 1}))", "env_error", None),
    ],
)
def test_a_command_line_is_an_agent(tmp_path: Path, end: str, state: str, reward: float | None) -> None:
    script = tmp_path / "agent.py"
    script.write_text(f"{SCRIPT}\n{end}\n")
    group = played(command=f"exec '{sys.executable}' '{script}'", columns={"worth": 0.75})
    for episode in group.episodes:
        assert (episode.course.state, episode.reward, episode.course.num_turns) == (state, reward, 1)


@pytest.mark.parametrize(
    ("end", "state"), [("sleep 3600", "deadline"), ("kill -9 $$", "env_error"), ("kill -9 $PPID", "env_error")]
)
def test_a_command_that_hangs_or_is_killed_ends_its_episode_alone(tmp_path: Path, end: str, state: str) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    command = f"'{sys.executable}' '{tmp_path / 'agent.py'}'; {end}"
    for episode in played(command=command, times=2, max_concurrent=1, episode_deadline_s=10.0).episodes:
        assert (episode.course.state, episode.reward, episode.course.num_turns) == (state, None, 1)


def test_a_command_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tmp_path / "children"
    played(command=f"sleep 3600 & echo $! >> '{log}'; echo 1", then=lambda: wait_until_gone(log, 2))


def test_an_agent_may_live_in_an_interpreter_of_its_own_without_anything_installed(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(ALONE)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S \"$@\"\n")  # -S: without its site-packages
    python.chmod(0o755)
    group = played(f"{script}:run", python=str(python))
    assert [episode.reward for episode in group.episodes] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"agent": f"{USER}:nobody"}, r"agent = .*nobody': .* holds nothing under the name 'nobody'"),
        ({"agent": f"{USER}:not_a_function"}, "holds a value of type int under the name 'not_a_function'"),
        ({"agent": "no_such_module:run"}, "ModuleNotFoundError"),
        ({"agent": f"{USER}:two_turns", "python": "/no/such/python"}, r"learner.environment.python = '/no/such/python'"),
        ({"agent": f"{USER}:two_turns", "gateway_host": "203.0.113.7"}, r"gateway_host = '203.0.113.7'.* set gateway_host to an address of this machine"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused_with_the_remedy(environment: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        played(**environment)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"agent": "a:b", "factory": "guess"}, "factory and agent are set, but an agent has its own loop"),
        ({"agent": "a:b", "tools": ["a:c"]}, "tools and agent are set"),
        ({"agent": "a:b", "command": "x"}, "agent and command are set"),
        ({"agent": "ab"}, "expected module:function"),
        ({"agent": "a:b", "gateway_port": 70000}, "gateway_port = 70000 must be between 0 and 65535"),
        ({"agent": "a:b", "gateway_host": "0.0.0.0"}, "is not an address that agents can connect to"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(environment: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        config_of(**environment)


def test_keys_that_do_nothing_are_reported() -> None:
    assert config_of(agent="a:b", timeout_s=3.0).idle_keys() == {"environment.timeout_s": "factory or tools"}
    assert config_of(command="a", python="b").idle_keys() == {"environment.python": "factory, tools or agent"}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_until_gone(log: Path, num_children: int) -> None:
    """The processes whose numbers were written down."""
    children = [int(line) for line in log.read_text().split()]
    assert len(children) == num_children
    wait_until(lambda: not any(is_running(child) for child in children))
