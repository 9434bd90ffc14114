"""Environments in separate processes: concurrency, errors, and other interpreters.

The lifetime of such processes is tested in tests/learner/sandbox.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from learner.config import EnvironmentConfig
from learner.environments.host import Rate, Reset, RewardResult, StepResult, Turn
from learner.environments.process import EnvironmentProcess, Environments, tools_of
from protocol.errors import ConfigError
from protocol.signals import SHUTDOWN_SIGNALS
from tests.learner.environments.scripted_player import USER
from tests.learner.sandbox.processes import wait_until_gone


def test_episodes_run_up_to_the_limit_and_a_failed_process_is_replaced_with_a_reason() -> None:
    config = EnvironmentConfig(
        factory=f"{USER}:Treacherous", max_concurrent=2, timeout_s=5.0, max_memory_mib=200, python=sys.executable
    )
    environments = Environments(config, takes_text=True)
    most, now = 0, 0

    async def play(word: str) -> Any:
        nonlocal most, now
        async with environments.lease() as lease:
            most, now = max(most, now + 1), now + 1
            await lease.ask(Reset({}))
            answer = await lease.ask(Turn(word))
            now -= 1
            return answer

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(play(word) for word in ("a", "die", "b", "sleep", "hoard", "number", "c")))

    first, killed, second, late, large, wrong, third = asyncio.run(all_at_once())
    environments.close()
    assert [first, second, third] == [StepResult("<a>"), StepResult("<b>"), StepResult("<c>")] and most == 2
    assert (killed.outcome, late.outcome, large.outcome) == ("killed", "timed_out", "failed")
    assert "see learner.environment.max_memory_mib and max_concurrent" in killed.message
    assert late.message.endswith("within 5 s and was killed; make it faster or raise learner.environment.timeout_s")
    assert large.message.startswith("used more than 200 MiB of memory")
    assert wrong.message == "tell returned 7, expected a text or None"


def test_a_cancelled_episode_leaves_no_answer_to_the_next() -> None:
    environments = Environments(EnvironmentConfig(factory=f"{USER}:Treacherous", timeout_s=600), takes_text=True)
    leased: list[EnvironmentProcess] = []

    async def play(word: str) -> Any:
        async with environments.lease() as lease:
            leased.append(lease.process)
            await lease.ask(Reset({}))
            return await lease.ask(Turn(word))

    async def one_after_the_other() -> Any:
        cancelled = asyncio.create_task(play("sleep"))
        while not (leased and leased[0].has_pending_answer):
            await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return await play("next")

    answer = asyncio.run(one_after_the_other())
    environments.close()
    first, second = leased
    assert answer == StepResult("<next>") and first is not second
    wait_until_gone(first.pid, second.pid)


def test_an_unusable_class_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"learner.environment.factory = '.*:WithoutReset': .* no method reset"):
        Environments(EnvironmentConfig(factory=f"{USER}:WithoutReset"), takes_text=True)
    with pytest.raises(ConfigError, match=r"learner.environment.tools.*Echo.*expected a function"):
        tools_of(EnvironmentConfig(tools=(f"{USER}:Echo",)))


ALONE = """
import importlib.util

class Alone:
    def reset(self, **row):
        return ", ".join(name for name in ("msgspec", "numpy", "torch") if importlib.util.find_spec(name))

    def tell(self, text):
        return text.upper()

    def get_reward(self):
        return 0.5
"""


def interpreter(directory: Path, *packages: str) -> str:
    """Return an interpreter with only these packages."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        (directory / name).symlink_to(Path(spec.origin).parent)
    python = directory / "python"
    python.write_text(
        f"#!/bin/sh\nPYTHONPATH='{directory}' exec '{sys.executable}' -S \"$@\"\n"
    )  # -S: no site-packages
    python.chmod(0o755)
    return str(python)


def test_an_environment_can_run_in_another_interpreter_with_msgspec(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    factory, python = f"{tmp_path}/alone.py:Alone", interpreter(tmp_path)
    with pytest.raises(ConfigError, match="ended its process with exit code 1"):
        Environments(EnvironmentConfig(factory=factory, python=python), takes_text=True)
    assert f"learner.environment.python: {sys.executable} has no msgspec; install it there" in capfd.readouterr().err
    config = EnvironmentConfig(factory=factory, python=interpreter(tmp_path, "msgspec"))
    process = EnvironmentProcess(config, takes_text=True)
    assert process.command(Reset({"prompt": "p"})) == StepResult("msgspec")
    for number in SHUTDOWN_SIGNALS:  # a learner that shuts down waits for its episodes to finish the step
        os.kill(process.pid, number)
    assert process.command(Turn("hi")) == StepResult("HI") and process.command(Rate()) == RewardResult(0.5)
    process.kill()
    with pytest.raises(ConfigError, match="transformers, which describes tools to the policy, is missing in"):
        tools_of(config)
    with pytest.raises(ConfigError, match=r"learner.environment.python = '/no/python' cannot be started"):
        Environments(EnvironmentConfig(factory=factory, python="/no/python"), takes_text=True)


LEARNER = f"""
from learner.config import EnvironmentConfig
from learner.environments.host import Reset, Turn
from learner.environments.process import EnvironmentProcess
config = EnvironmentConfig(factory={f"{USER}:Treacherous"!r}, python={sys.executable!r}, timeout_s=600.0)
process = EnvironmentProcess(config, takes_text=True)
process.command(Reset({{}}))
print(process.pid, process.command(Turn("leave")).text, flush=True)
process.command(Turn("sleep"))
"""


def test_an_environment_in_another_interpreter_ends_with_the_learner() -> None:
    with subprocess.Popen([sys.executable, "-c", LEARNER], stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        pids = [int(pid) for pid in learner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
        learner.kill()
    wait_until_gone(*pids)
