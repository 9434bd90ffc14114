"""Files of user code that are edited during a run: each kind of process reports them, with one warning per change."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from learner.config import EnvironmentConfig, RewardConfig
from learner.environments.process import EnvironmentProcess
from learner.gateway.players import AgentProcess
from learner.rewards.process import RewardProcess
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import ProcessFailure, SandboxProcess

CODE = """
from helper_of_the_test import VALUE

def reward(completions, **columns):
    return [VALUE] * len(completions)

class Environment:
    def reset(self, **row):
        return str(VALUE)

    def step(self, text):
        return text

def agent(row, **given):
    return VALUE
"""


def process(kind: str, file: Path) -> SandboxProcess:
    match kind:
        case "reward":
            return RewardProcess(RewardConfig(functions=(f"{file}:reward", "exact_match")))
        case "environment":
            return EnvironmentProcess(EnvironmentConfig(factory=f"{file}:Environment"), takes_text=True)
    return AgentProcess(EnvironmentConfig(agent=f"{file}:agent"))


async def load(pool: ProcessPool[Any]) -> None:
    started = pool.start()
    loaded: ProcessFailure | None = await started.load() if isinstance(started, AgentProcess) else started.load()
    assert loaded is None


@pytest.mark.parametrize("kind", ["reward", "environment", "agent"])
def test_a_process_that_loads_an_edited_file_logs_one_warning_per_change(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, helper = tmp_path / "edited.py", tmp_path / "helper_of_the_test.py"
    file.write_text(CODE)
    helper.write_text("VALUE = 1.0\n")
    pool = ProcessPool(partial(process, kind, file), None)

    async def start_processes() -> None:
        try:
            for _ in range(2):
                await load(pool)
            assert not caplog.messages
            helper.write_text("VALUE = 2.50\n")
            for _ in range(2):
                await load(pool)
            file.write_text(CODE + "\n")
            await load(pool)
        finally:
            pool.close()

    asyncio.run(start_processes())
    warnings = [message for message in caplog.messages if "was edited during the run" in message]
    assert [message.split()[0] for message in warnings] == [str(helper), str(file)]
