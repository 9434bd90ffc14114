"""Environments in processes of their own: real ones, asked, and broken in every way that a user's class can break."""

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from learner.config import EnvironmentConfig
from learner.environments.builtin import HIGHER, LOWER, NO_DIGIT, RIGHT
from learner.environments.contract import BUILT_IN
from learner.environments.host import Rate, Reset, RewardResult, StepResult, Turn
from learner.environments.process import EnvironmentProcess, Environments, tools_of
from learner.sandbox.process import ProcessFailure
from protocol.errors import ConfigError
from protocol.signals import SHUTDOWN_SIGNALS

ROOT = Path(__file__).parents[3]
USER = "tests.learner.environments.user_environments"
TIMEOUT_S = 1.0
CPU_TIMES = """
import sys, psutil
from learner.config import EnvironmentConfig
from learner.environments.process import EnvironmentProcess
if __name__ == "__main__":
    for python in (None, sys.executable):
        process = EnvironmentProcess(EnvironmentConfig(factory="guess", python=python), takes_text=True)
        assert process.load() is None
        print(sum(psutil.Process(process.pid).cpu_times()[:2]))
        process.kill()
"""
"""Of a forked process, which imports this script, and of an interpreter of its own, until the class is there."""


def environment(name: str, timeout_s: float = TIMEOUT_S, python: str | None = None) -> EnvironmentProcess:
    factory = name if name in BUILT_IN else f"{USER}:{name}"
    return EnvironmentProcess(EnvironmentConfig(factory=factory, timeout_s=timeout_s, python=python), takes_text=True)


@pytest.fixture
def treacherous() -> Iterator[EnvironmentProcess]:
    """In an interpreter of its own. tests/learner/sandbox has the life of a forked process."""
    process = environment("Treacherous", python=sys.executable)
    assert process.command(Reset({})) == StepResult("")
    yield process
    process.kill()


def test_one_instance_plays_one_episode_after_another() -> None:
    process = environment("Echo")
    assert process.command(Reset({"prompt": "p", "greeting": "hello"})) == StepResult("hello")
    assert process.command(Turn("a")) == StepResult("<a>")
    assert process.command(Turn("stop")) == StepResult("<stop>", is_done=True)
    assert process.command(Rate()) == RewardResult(2.0)
    assert process.command(Reset({})) == StepResult("")
    assert process.command(Rate()) == RewardResult(0.0)
    assert process.is_usable
    process.kill()
    assert not process.is_usable


PLAY_ONE = """
import os
from learner.config import EnvironmentConfig
from learner.environments.host import Reset
from learner.environments.process import EnvironmentProcess
if __name__ == "__main__":
    process = EnvironmentProcess(EnvironmentConfig(factory="mine.py:Mine"), takes_text=True)
    print(process.command(Reset({})).text, os.environ.get("PYTHONSAFEPATH"))
    process.kill()
"""


def test_a_users_own_protocol_beside_the_run_is_not_imported_in_place_of_ours(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/protocol.py").write_text("raise SystemExit('the user\\'s own')")
    (tmp_path / "run/mine.py").write_text(
        "import os\nclass Mine:\n    def reset(self): return str(os.environ.get('PYTHONSAFEPATH'))\n    def step(self, said): ...\n"
    )
    (tmp_path / "play.py").write_text(PLAY_ONE)
    done = subprocess.run(  # a script elsewhere, as `learner` is: the working directory is not on its path
        [sys.executable, str(tmp_path / "play.py")], cwd=tmp_path / "run", env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("None None", 0), done.stderr


def test_a_forked_process_finds_its_modules_imported_and_those_of_the_main_module(tmp_path: Path) -> None:
    (tmp_path / "cpu_times.py").write_text(CPU_TIMES)
    measured = subprocess.run(
        [sys.executable, str(tmp_path / "cpu_times.py")], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    forked_s, own_s = map(float, measured.stdout.split())
    assert forked_s < own_s / 2


def test_guess_says_where_the_secret_is_and_rates_whether_it_was_found() -> None:
    process = environment("guess")
    assert process.command(Reset({"prompt": "=", "secret": 4})) == StepResult("")
    for text, said in (("7", LOWER), ("1", HIGHER), (" >", NO_DIGIT), ("", NO_DIGIT), ("=3", HIGHER)):
        assert process.command(Turn(text)) == StepResult(said)
    assert process.command(Rate()) == RewardResult(0.0)
    assert process.command(Turn("4")) == StepResult(RIGHT, is_done=True)
    assert process.command(Rate()) == RewardResult(1.0)
    process.kill()


@pytest.mark.parametrize(
    ("turns", "answers", "reward"),
    [
        (("37+45=", "82"), ("82>", ""), 1.0),
        (("45+37=", "82"), ("82>", ""), (2 / 6 + 1) / 2),
        (("37+45=", "83"), ("82>", ""), 0.75),
        (("82",), ("",), 0.5),
        (("37+45=", "37+45="), ("82>", "82>"), 0.5),
        (("37+=", ""), (" ", ""), 3 / 6 / 2),
        (("=",), (" ",), 0.0),
        (("37+45+1=", "82"), (" ", ""), (5 / 8 + 1) / 2),
        (("+45=",), (" ",), 0.0),
    ],
)
def test_the_calculator_shows_a_sum_and_rates_the_call_and_the_answer_by_half(
    turns: tuple[str, ...], answers: tuple[str, ...], reward: float
) -> None:
    process = environment("calculator")
    assert process.command(Reset({"prompt": "37,45>", "call": "37+45=", "answer": "82"})) == StepResult("")
    said = [process.command(Turn(turn)) for turn in turns]
    rated = process.command(Rate())
    process.kill()  # before anything is found wrong: who is left alive is waited for at the end
    expected = zip(turns, answers, strict=True)
    assert said == [StepResult(answer, is_done=not turn.endswith("=")) for turn, answer in expected]
    assert rated == RewardResult(pytest.approx(reward))


def test_an_error_of_the_method_is_what_the_policy_reads(treacherous: EnvironmentProcess) -> None:
    assert treacherous.command(Turn("raise")) == StepResult("'no such word'", has_failed=True)
    assert treacherous.command(Turn("again")) == StepResult("<again>")


@pytest.mark.parametrize(
    ("word", "outcome", "problem"),
    [
        ("sleep", "timed_out", "within 1 s and was killed; make it faster or raise learner.environment.timeout_s"),
        ("stay", "timed_out", "within 1 s and was killed; make it faster or raise learner.environment.timeout_s"),
        ("exit", "failed", "exit code 3"),
        ("die", "killed", "signal 9"),
        ("number", "failed", "tell returned 7, expected a text"),
    ],
)
def test_whatever_the_environment_does_a_call_comes_back(
    treacherous: EnvironmentProcess, word: str, outcome: str, problem: str
) -> None:
    trouble = treacherous.command(Turn(word))
    assert isinstance(trouble, ProcessFailure) and trouble.outcome == outcome
    assert re.search(problem, trouble.message)
    assert not treacherous.is_usable


def test_what_an_environment_prints_is_no_part_of_a_commands_answer(
    treacherous: EnvironmentProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(treacherous.command(Turn("print")), StepResult)
    assert capfd.readouterr().out == ""


def test_what_an_environment_has_started_ends_with_it_in_whatever_session(treacherous: EnvironmentProcess) -> None:
    said = treacherous.command(Turn("leave"))
    assert isinstance(said, StepResult)
    assert isinstance(treacherous.command(Turn("sleep")), ProcessFailure)
    wait_until_gone(int(said.text), "what the environment has started outlives it")


def wait_until_gone(pid: int, problem: str) -> None:
    give_up_at = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up_at, problem
        time.sleep(0.05)


def test_an_error_of_reset_or_of_the_rating_is_a_trouble_with_its_place() -> None:
    process = environment("Treacherous")
    trouble = process.command(Reset({"prompt": "raise"}))
    assert isinstance(trouble, ProcessFailure) and trouble.outcome == "failed"
    assert "ValueError: 'no such row'" in trouble.problem and "user_environments.py" in trouble.problem
    process = environment("Overrated")
    process.command(Reset({}))
    trouble = process.command(Rate())
    assert (
        isinstance(trouble, ProcessFailure)
        and "get_reward returned 'much', expected a finite number" in trouble.problem
    )


def test_an_environment_may_rate_nothing() -> None:
    process = environment("Unrated")
    assert [process.command(order) for order in (Reset({}), Turn("a"), Rate())] == [
        StepResult(""),
        StepResult(""),
        RewardResult(None),
    ]
    process.kill()


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("gues", f"it is not built in; known are: {', '.join(BUILT_IN)}"),
        (f"{USER}:Nobody", "holds nothing under the name 'Nobody'"),
        ("no.such.module:Class", "importing no.such.module failed with ModuleNotFoundError"),
        (f"{USER}:not_a_class", "expected a class"),
        (f"{USER}:TwoMethods", r"has 2 public methods besides reset and get_reward \(tell, whisper\); expected one"),
        (f"{USER}:WithoutReset", "no method reset"),
    ],
)
def test_a_class_that_cannot_be_played_ends_the_start_with_the_remedy(factory: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.environment.factory = '{factory}': .*{problem}"):
        Environments(EnvironmentConfig(factory=factory), takes_text=True)


def test_as_many_are_played_at_once_as_may_be_and_one_that_has_ended_is_replaced() -> None:
    config = EnvironmentConfig(factory=f"{USER}:Treacherous", max_concurrent=2, timeout_s=TIMEOUT_S)
    environments = Environments(config, takes_text=True)
    most, now = 0, 0

    async def play(word: str) -> object:
        nonlocal most, now
        async with environments.lease() as lease:
            most, now = max(most, now + 1), now + 1
            await lease.ask(Reset({}))
            answer = await lease.ask(Turn(word))
            now -= 1
            return answer

    async def all_at_once() -> list[object]:
        return await asyncio.gather(*(play(word) for word in ("a", "die", "b", "sleep", "c")))

    answers = asyncio.run(all_at_once())
    environments.close()
    assert [answers[i] for i in (0, 2, 4)] == [StepResult("<a>"), StepResult("<b>"), StepResult("<c>")]
    assert [answers[i].outcome for i in (1, 3)] == ["killed", "timed_out"]
    assert most == 2


def test_an_episode_that_is_cancelled_leaves_no_answer_to_the_next() -> None:
    environments = Environments(EnvironmentConfig(factory=f"{USER}:Slow", timeout_s=TIMEOUT_S), takes_text=True)
    process_ids: list[int] = []

    async def play(word: str) -> object:
        async with environments.lease() as lease:
            process_ids.append(lease.process.pid)
            await lease.ask(Reset({}))
            return await lease.ask(Turn(word))

    async def one_after_the_other() -> list[object]:
        answers = []
        for number in range(3):
            cancelled = asyncio.create_task(play("cancelled"))
            await asyncio.sleep(0.1)  # of the 0.2 s that the environment takes for a turn
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            answers.append(await play(f"{number}"))
        return answers

    answers = asyncio.run(one_after_the_other())
    environments.close()
    assert answers == [StepResult(f"<{number}>") for number in range(3)]
    assert len(set(process_ids)) == 4, "two threads that wait at one pipe each get the answer that comes first"


def test_what_is_asynchronous_shares_one_loop_and_a_reward_may_be_numpys() -> None:
    environment = EnvironmentProcess(EnvironmentConfig(factory=f"{USER}:Asynchronous"), takes_text=True)
    told = [environment.command(order) for order in (Reset({}), Turn("a"), Turn("b"), Rate())]
    environment.kill()
    assert told == [
        StepResult("begun"),
        StepResult("a in the same loop"),
        StepResult("b in the same loop"),
        RewardResult(0.5),
    ]


def test_a_file_may_import_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("SAYS = 'hello'\n")
    (tmp_path / "mine.py").write_text(
        "from beside_it import SAYS\n\nclass Mine:\n    def reset(self, **row):\n        return SAYS\n\n"
        "    def tell(self, text):\n        return text\n"
    )
    environment = EnvironmentProcess(EnvironmentConfig(factory=f"{tmp_path}/mine.py:Mine"), takes_text=True)
    said = environment.command(Reset({}))
    environment.kill()
    assert said == StepResult("hello")


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
    """One that has these packages, and no others."""
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


def test_an_environment_may_live_in_an_interpreter_of_its_own_which_needs_msgspec(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    config = EnvironmentConfig(factory=f"{tmp_path}/alone.py:Alone", python=interpreter(tmp_path, "msgspec"))
    process = EnvironmentProcess(config, takes_text=True)
    assert process.command(Reset({"prompt": "p"})) == StepResult("msgspec")
    assert process.command(Turn("hi")) == StepResult("HI") and process.command(Rate()) == RewardResult(0.5)
    process.kill()


def test_what_an_interpreter_of_its_own_lacks_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    factory, python = f"{tmp_path}/alone.py:Alone", interpreter(tmp_path)
    with pytest.raises(ConfigError, match="ended its process with exit code 1"):
        Environments(EnvironmentConfig(factory=factory, python=python), takes_text=True)
    assert f"learner.environment.python: {sys.executable} has no msgspec; install it there" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="transformers, which describes tools to the policy, is missing in"):
        tools_of(EnvironmentConfig(factory=factory, python=interpreter(tmp_path, "msgspec")))
    with pytest.raises(ConfigError, match=r"learner.environment.python = '/no/python' cannot be started"):
        Environments(EnvironmentConfig(factory=factory, python="/no/python"), takes_text=True)


@pytest.mark.parametrize("number", SHUTDOWN_SIGNALS)
def test_signals_to_end_are_the_learners_and_an_environment_goes_on(
    treacherous: EnvironmentProcess, number: signal.Signals
) -> None:
    """The learner, told to end too, waits for what it plays to finish its step."""
    os.kill(treacherous.pid or 0, number)
    assert treacherous.command(Reset({})) == StepResult("") and treacherous.is_usable


def test_closing_ends_the_processes_and_the_calls_that_wait() -> None:
    environments = Environments(EnvironmentConfig(factory=f"{USER}:Treacherous", timeout_s=600), takes_text=True)

    async def run() -> object:
        async with environments.lease() as lease:
            await lease.ask(Reset({}))
            waiting = asyncio.create_task(lease.ask(Turn("sleep")))
            await asyncio.sleep(0.2)
            environments.close()
            return await asyncio.wait_for(waiting, 30)

    assert isinstance(asyncio.run(run()), ProcessFailure)


def test_an_environment_in_an_interpreter_of_its_own_ends_with_the_learner() -> None:
    config = f"EnvironmentConfig(factory={f'{USER}:Treacherous'!r}, python={sys.executable!r})"
    code = (
        "import os, time\nfrom learner.config import EnvironmentConfig\nfrom learner.environments.process import EnvironmentProcess\n"
        "from learner.environments.host import Reset, Turn\n"
        "if __name__ == '__main__':\n"
        f"    process = EnvironmentProcess({config}, takes_text=True)\n"
        "    process.command(Reset({}))\n    print(process.pid, process.command(Turn('leave')).text, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as learner:
        assert learner.stdout is not None
        pids = [int(pid) for pid in learner.stdout.readline().split()]
        assert all(map(psutil.pid_exists, pids))
        learner.kill()
    for pid in pids:
        wait_until_gone(pid, "the environment, or what it has started, outlives the learner")
