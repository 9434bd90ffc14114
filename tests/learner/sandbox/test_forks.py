"""User code that forks itself: the fork returns from the code, and only its owner answers."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from learner.config import EnvironmentConfig, RewardConfig
from learner.environments.host import Reset, StepResult
from learner.environments.process import EnvironmentProcess
from learner.gateway.players import AGENT_HOST
from learner.rewards.call import RewardAnswer, RewardCall
from learner.rewards.process import RewardProcess
from tests.learner.rewards.scored_groups import STATE

TIMEOUT_S = 60.0
CODE = """
import os

def owner():
    if child := os.fork():
        os.waitpid(child, 0)
        return True
    try:
        os.execvp("no-such-program", ["no-such-program"])
    except OSError:
        return False

def reward(completions, **columns):
    return [float(owner())] * len(completions)

class Environment:
    def reset(self, **row):
        return str(owner())

    def step(self, text):
        return text

def agent(row, **given):
    return float(owner())

owner()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "forks.py"
    path.write_text(CODE)
    return path


def test_a_fork_of_a_reward_function_does_not_answer(file: Path) -> None:
    function = f"{file}:reward"
    process = RewardProcess(RewardConfig(functions=(function,), timeout_s=TIMEOUT_S))
    try:
        for _ in range(2):
            answer = process.call(RewardCall(function, "question", {}, ["a"], [[1]], STATE, timeout_s=TIMEOUT_S))
            assert answer == RewardAnswer([1.0])
    finally:
        process.close()


def test_a_fork_of_an_environment_does_not_answer(file: Path) -> None:
    config = EnvironmentConfig(factory=f"{file}:Environment", timeout_s=TIMEOUT_S)
    process = EnvironmentProcess(config, takes_text=True)
    try:
        assert [process.command(Reset({})) for _ in range(2)] == [StepResult("True")] * 2
    finally:
        process.close()


def test_a_fork_of_an_agent_does_not_answer(file: Path) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, AGENT_HOST, str(theirs.fileno()), "agent", f"{file}:agent"],
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    try:
        with ours, ours.makefile("rwb", buffering=0) as channel:
            answers = [json.loads(channel.readline())]
            for _ in range(2):
                channel.write(json.dumps({"row": {}, "base_url": "", "api_key": ""}).encode() + b"\n")
                answers.append(json.loads(channel.readline()))
        assert list(answers[0]) == ["file_digests"] and answers[1:] == [{"reward": 1.0}] * 2
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
