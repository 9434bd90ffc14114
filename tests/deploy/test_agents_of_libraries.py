"""Agents of other libraries, each in its own environment, with a scripted policy: correct answers are rewarded."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.commands import AGENTS
from tests.learner.environments.chat_tokenizer import call
from tests.learner.environments.scripted_conversation import script_of
from tests.learner.gateway.scripted_gateway import play_with_agent
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

START_TIMEOUT_S = 120
TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Saying(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class Sayings(vf.Taskset[Saying]):
    def load(self):
        return [Saying(Data(prompt=f"Say {number}", answer=str(number)), self.config.task) for number in range(5)]

__all__ = ["Sayings"]
"""


OPENENV = """
import sys
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    number: int

class Told(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **more):
        self._secret = seed
        return Told(text="guess")

    def step(self, action, timeout_s=None, **more):
        is_right = action.number == self._secret
        return Told(text="right" if is_right else "wrong", reward=float(is_right), done=is_right)

class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server = FastMCP("shop")

        @server.tool
        def price(item: str) -> str:
            "What it costs."
            return f"a {item} costs 7"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **more):
        return Observation(done=False, reward=0.25)

    def _step_impl(self, action, timeout_s=None, **more):
        raise ValueError("a tool, please")

kind = {"game": (Game, Guess, Told), "shop": (Shop, CallToolAction, CallToolObservation)}[sys.argv[1]]
uvicorn.run(create_fastapi_app(*kind, max_concurrent_envs=8), port=int(sys.argv[2]), log_level="warning")
"""


@contextmanager
def openenv_server(python: str, directory: Path, kind: str) -> Iterator[str]:
    """Yield the address of an environment of OpenEnv."""
    (directory / "server.py").write_text(OPENENV)
    port, give_up_at = free_port(), time.monotonic() + START_TIMEOUT_S
    with subprocess.Popen([python, str(directory / "server.py"), kind, str(port)]) as server:
        try:
            with socket.socket() as probe:
                while probe.connect_ex(("127.0.0.1", port)):
                    assert server.poll() is None and time.monotonic() < give_up_at, "the server did not start"
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def rows_of(python: str, *command: str) -> list[dict[str, Any]]:
    printed = subprocess.run([python, *command], check=True, capture_output=True, text=True, timeout=600).stdout
    return [json.loads(line) for line in printed.splitlines()]


def test_a_task_of_reasoning_gym_is_answered_and_scored(interpreter: Callable[..., str]) -> None:
    python, script = interpreter("reasoning-gym"), AGENTS / "reasoning_gym_tasks.py"
    rows = rows_of(python, str(script), "chain_sum", "spell_backward", "--size", "3", "--seed", "1")
    assert [row["entry"]["metadata"]["source_dataset"] for row in rows] == ["chain_sum"] * 3 + ["spell_backward"] * 3
    for row in rows[2:4]:
        entry = row["entry"]
        for reply, is_right in ((entry["answer"], True), ("nothing", False)):
            answer = script_of(f"Well. <answer>{reply}</answer>")
            group = play_with_agent({"entry": entry}, row["prompt"], answer, agent=f"{script}:run", python=python)
            for episode in group.episodes:
                assert episode.reward is not None and (episode.reward == 1.0) == is_right


def test_an_environment_of_skyrl_gym_is_played_turn_by_turn(interpreter: Callable[..., str]) -> None:
    python = interpreter("skyrl-gym")
    columns = {
        "env_class": "gsm8k_multi_turn", "reward_spec": {"method": "rule", "ground_truth": "72"},
        "extra_info": {"max_turns": 5},
    }  # fmt: skip
    script = script_of("I think #### 5", "It is #### 72")
    group = play_with_agent(columns, script=script, agent=f"{AGENTS / 'skyrl_gym_envs.py'}:run", python=python)
    for episode in group.episodes:
        assert episode.reward == pytest.approx(1.0 + 0.2 / 5)
        assert (episode.stats.num_turns, len(episode.branches)) == (2, 1)
        assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"]


def test_mini_swe_agent_repairs_a_repository(
    interpreter: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python, script = interpreter("mini-swe-agent"), AGENTS / "mini_swe_agent.py"
    (row,) = rows_of(python, str(script), "--size", "1")
    edit, _, submit = row["demonstration"].partition(" && ")
    in_two_turns = (f"{edit}\n```", f"Now I submit.\n```mswea_bash_command\n{submit}")
    for turns, reward in (((row["demonstration"],), 1.0), (in_two_turns, 1.0), (("I cannot.",) * 3, 0.0)):
        group = play_with_agent(
            row | {"environment": "local"}, row["prompt"], script_of(*turns), agent=f"{script}:run", python=python
        )
        for episode in group.episodes:
            assert (episode.reward, episode.stats.state) == (reward, "finished")
            assert episode.stats.num_turns == len(turns) and (reward == 0 or len(episode.branches) == 1)
    if shutil.which("bwrap"):
        monkeypatch.setenv("A_SECRET", "x")
        command = f"[ -z $A_SECRET ] && ! kill -0 {os.getpid()} && ! exec 3<>/dev/tcp/127.0.0.1/{{port}}"
        with socket.create_server(("127.0.0.1", 0)) as listening:
            confined = command.format(port=listening.getsockname()[1])
            turn = row["demonstration"].replace("sed -i", f"({confined}) 2> /dev/null && sed -i")
            group = play_with_agent(row, row["prompt"], script_of(turn), agent=f"{script}:run", python=python)
        assert [episode.reward for episode in group.episodes] == [1.0, 1.0]
    docker = row | {"environment": "docker"}
    assert play_with_agent(docker, row["prompt"], agent=f"{script}:run", python=python).episodes == []
    assert "environment = 'docker' is not supported; use 'bubblewrap'" in caplog.text
    monkeypatch.setenv("MSWEA_BUBBLEWRAP_EXECUTABLE", "no-such-command")
    assert play_with_agent(row, row["prompt"], agent=f"{script}:run", python=python).episodes == []
    assert "cannot run commands here; install it" in caplog.text and "no-such-command" in caplog.text


def test_a_taskset_of_verifiers_is_played_by_its_own_loop(interpreter: Callable[..., str]) -> None:
    python, script = interpreter("verifiers", "uv"), AGENTS / "verifiers_tasksets.py"
    (packages,) = Path(python).parent.parent.glob("lib/python*/site-packages")
    (packages / "sayings.py").write_text(TASKSET)
    rows = rows_of(python, str(script), "sayings")
    assert [row["number"] for row in rows] == list(range(5))
    columns = {name: rows[3][name] for name in ("taskset", "number")}
    for reply, reward in (("3", 1.0), ("4", 0.0)):
        group = play_with_agent(columns, rows[3]["prompt"], script_of(reply), agent=f"{script}:run", python=python)
        assert [episode.reward for episode in group.episodes] == [reward, reward]
        assert all(episode.stats.num_turns == 1 for episode in group.episodes)


def test_environments_of_openenv_are_played_by_tools_or_by_actions(
    interpreter: Callable[..., str], tmp_path: Path
) -> None:
    python, agent = interpreter("openenv"), f"{AGENTS / 'openenv_servers.py'}:run"
    with openenv_server(python, tmp_path, "game") as url:
        script = script_of(call("step", number="much"), call("step", number=3), call("step", number=5))
        group = play_with_agent({"url": url, "reset": {"seed": 5}}, script=script, agent=agent, python=python)
    for episode in group.episodes:
        assert (episode.reward, episode.stats.state, episode.stats.num_turns) == (1.0, "finished", 3)
        results = [message["content"] for message in episode.messages if message["role"] == "tool"]
        assert "error" in results[0] and '"wrong"' in results[1], (
            "a rejection is reported; no request follows the last step"
        )
    with openenv_server(python, tmp_path, "shop") as url:
        script = script_of(call("price", item="pear"), "7")
        group = play_with_agent({"url": url}, script=script, agent=agent, python=python)
    for episode in group.episodes:
        assert (episode.reward, episode.stats.state, episode.stats.num_calls) == (0.25, "finished", 1)
        assert "a pear costs 7" in next(one["content"] for one in episode.messages if one["role"] == "tool")
