"""The agents of other libraries, each in an environment of its own that the test makes, against a scripted policy: what is right is rewarded."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Completion
from tests.learner.environments.chat_tokenizer import END, chat_tokenizer
from tests.learner.environments.play import completion
from tests.learner.gateway.asking import played_by_agent
from tests.test_layering import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

AGENTS = ROOT / "deploy" / "agents"
INSTALL_TIMEOUT_S = 1200
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


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., str]:
    def made(*packages: str) -> str:
        """Of a fresh environment with these packages."""
        python = tmp_path / "env" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=INSTALL_TIMEOUT_S)
        install = [str(python), "-m", "pip", "install", "-q", *packages]
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        if done.returncode:
            pytest.skip(f"{' '.join(packages)} cannot be installed here: {done.stderr[-500:]}")
        return str(python)

    return made


def says(*turns: str) -> Callable[[Any], Completion]:
    return lambda asked: completion(chat_tokenizer().encode(turns[asked.number] + END, add_special_tokens=False), 4)


def rows_of(python: str, *command: str) -> list[dict[str, Any]]:
    printed = subprocess.run([python, *command], check=True, capture_output=True, text=True, timeout=600).stdout
    return [json.loads(line) for line in printed.splitlines()]


def test_a_task_of_reasoning_gym_is_answered_and_scored(interpreter: Callable[..., str]) -> None:
    python, script = interpreter("reasoning-gym"), AGENTS / "reasoning_gym_tasks.py"
    rows = rows_of(python, str(script), "chain_sum", "spell_backward", "--size", "3", "--seed", "1")
    assert [row["entry"]["metadata"]["source_dataset"] for row in rows] == ["chain_sum"] * 3 + ["spell_backward"] * 3
    for row in rows[2:4]:
        entry = row["entry"]
        for said, is_right in ((entry["answer"], True), ("nothing", False)):
            group = played_by_agent(
                {"entry": entry},
                row["prompt"],
                says(f"Well. <answer>{said}</answer>"),
                agent=f"{script}:run",
                python=python,
            )
            for episode in group.episodes:
                assert episode.reward is not None and (episode.reward == 1.0) == is_right


def test_an_environment_of_skyrl_gym_is_played_turn_by_turn(interpreter: Callable[..., str]) -> None:
    python = interpreter("skyrl-gym")
    columns = {
        "env_class": "gsm8k_multi_turn", "reward_spec": {"method": "rule", "ground_truth": "72"}, "extra_info": {"max_turns": 5},
    }  # fmt: skip
    script = says("I think #### 5", "It is #### 72")
    group = played_by_agent(columns, script=script, agent=f"{AGENTS / 'skyrl_gym_envs.py'}:run", python=python)
    for episode in group.episodes:
        assert episode.reward == pytest.approx(1.0 + 0.2 / 5)
        assert (episode.course.num_turns, len(episode.branches)) == (2, 1)
        assert [message["role"] for message in episode.messages] == ["assistant", "user", "assistant"]


def test_a_taskset_of_verifiers_is_played_by_its_own_loop(interpreter: Callable[..., str]) -> None:
    python, script = interpreter("verifiers", "uv"), AGENTS / "verifiers_tasksets.py"
    packages = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    Path(packages.stdout.strip(), "sayings.py").write_text(TASKSET)
    rows = rows_of(python, str(script), "sayings")
    assert [row["number"] for row in rows] == list(range(5))
    columns = {name: rows[3][name] for name in ("taskset", "number")}
    for said, reward in (("3", 1.0), ("4", 0.0)):
        group = played_by_agent(columns, rows[3]["prompt"], says(said), agent=f"{script}:run", python=python)
        assert [episode.reward for episode in group.episodes] == [reward, reward]
        assert all(episode.course.num_turns == 1 for episode in group.episodes)
