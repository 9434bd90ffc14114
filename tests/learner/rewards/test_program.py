"""`passes_tests`: rewards of programs, their confinement, and the end of their child processes. Uses real processes."""

import os
import shutil
import socket
import subprocess
import textwrap
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from learner.config import RewardConfig
from learner.rewards import function
from learner.rewards.builtin.program import Check, _is_same_output, checks_of, code_of, passes_tests, run
from learner.rewards.call import RewardAnswer, RewardCall
from learner.rewards.call_queues import Job, SerialCalls
from learner.rewards.function import load_all
from learner.rewards.workers import RewardWorkers
from learner.sandbox.process import ProcessFailure
from protocol.errors import RewardError
from tests.learner.rewards.scored_groups import DEADLINE_S, STATE, prompt
from tests.waiting import until

TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
RIGHT = "def add(a, b):\n    return a + b"
TIMEOUT_S = 10.0
CONFIG = RewardConfig(functions=("passes_tests",))
# Checks the system, not the product: a check of the product would skip the tests when the product is broken.
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--pid", "--fork", "true"]
pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(UNSHARE, capture_output=True).returncode != 0,
    reason="this machine allows no namespaces",
)


def paid(code: str, tests=TESTS) -> float | None:
    return passes_tests([f"```python\n{code}\n```"], [tests], TIMEOUT_S, CONFIG)[0]


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        (RIGHT, 1.0), ("def add(a, b): return a - b", 0.0), ("def subtract(a, b): return a - b", 0.0),
        ("def add(a, b) return", 0.0),
        (f"{RIGHT}\nif __name__ == '__main__': add(input())", 1.0),
        ("import sys; sys.exit(0)", 0.0), ("import os; os._exit(0)", 0.0),
        ("import os; os._exit = lambda code: None", 0.0),
        ("import builtins; builtins.exec = lambda *a: None", 0.0),
        ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'passed')\n    except OSError: pass", 0.0),
        (f"from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: "
         f"int\n{RIGHT}", 1.0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 0.0), ("raise KeyboardInterrupt", 0.0),
        (f"{RIGHT}\nimport sys; sys.stdout.close(); sys.stderr.close()", 1.0),
        (f"{RIGHT}\nimport atexit; atexit.register(lambda: 1 / 0)", 1.0), (f"import os\nos.fork()\n{RIGHT}", 1.0),
        ("\udc80", 0.0), ("\0", 0.0), ("(" * 10_000, 0.0),
    ],
    ids=lambda value: repr(value)[:60],
)  # fmt: skip
def test_a_program_is_rewarded_only_for_passing_its_tests(code, reward):
    assert paid(code) == reward


def test_tests_can_be_python_statements_or_inputs_with_outputs_also_as_text():
    reads = "a, b = map(int, input().split())\nprint(a + b)"
    pairs = [
        {"input": "1 2\n", "output": "3\n", "type": "stdin_stdout"},
        {"input": "2 2", "output": "4", "fn_name": ""},
    ]
    apps = {"inputs": ["1 2", "0 0"], "outputs": ["3\n", ["0"]]}
    assert paid(RIGHT, TESTS.splitlines()) == paid(reads, pairs) == paid(reads, apps) == 1.0
    assert paid(RIGHT, "['assert add(1, 1) == 3']") == 0.0 and paid(reads, "[{'input': '1 1', 'output': '2'}]") == 1.0
    assert paid(reads, '{"inputs": ["1 2"], "outputs": ["3"]}') == paid(RIGHT, '["assert add(1, 1) == 2"]') == 1.0
    assert paid(reads, [*pairs, {"input": "1 1", "output": "3"}]) == 0.0
    assert paid("print(3)", pairs) == 0.0
    assert paid(f"{reads}\nraise SystemExit(1)", pairs) == 0.0 and paid(f"{reads}\nraise SystemExit", pairs) == 1.0
    body = reads.replace("\n", "\n    ")
    threaded = f"import threading\ndef main():\n    {body}\nthreading.Thread(target=main).start()"
    by_file = "out = open(1, 'w')\nout.write(str(sum(map(int, input().split()))))"
    assert paid(threaded, pairs) == paid(by_file, pairs) == 1.0
    assert [paid(RIGHT, nothing) for nothing in (None, "", [], {})] == [None] * 4


def test_a_long_output_without_a_number_is_compared_in_linear_time():
    assert not _is_same_output("1" * 100_000 + "x", "0.5")


@pytest.mark.parametrize(
    ("printed", "expected", "is_right"),
    [
        ("0.50", "0.5", True), ("5.", "5", True), ("-0.0", "0.0", True), ("1e-05", "0.00001", True),
        ("Case 1: 2.0 \n\nyes", "Case 1: 2\n\nyes\n", True), ("0.5", "0.50000000000000000001", False),
        ("01", "1", False), ("1_0.0", "10", False), ("nan", "nan", True), ("1e5", "1e99999", False),
        ("1.0.0", "1.0", False),
        ("  *", "*", False), ("1.0  2", "1 2", False), ("1.0\n2", "1 2", False), ("1 2", "1", False), ("", "", True),
        ("1", "", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_as_text_and_decimals_by_their_values(printed, expected, is_right):
    assert run(f"print({printed!r})", Check(None, "", expected), TIMEOUT_S) == is_right


@pytest.mark.parametrize(
    "column",
    [
        7, [1, 2], [{"input": "1"}], {"inputs": ["1"], "outputs": ["1"], "fn_name": "add"},
        [{"input": "[1, 2]\n3", "output": "4", "testtype": "functional", "metadata": {"func_name": "add"}}],
        '[{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]',
        [{"input": "1 2", "output": "3", "type": "stdin_stdout"}, {"input": "1", "output": "3", "fn_name": "add"}],
    ],
)  # fmt: skip
def test_an_invalid_test_column_is_rejected_with_the_expected_formats(column):
    with pytest.raises(ValueError, match=r"column tests contains .*; expected Python code that raises"):
        checks_of(column)


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("assert add(1", "is not valid Python"),
        ("X = {}\ndef check(f):\n    assert f(1)", "cannot fail"),
        ("[add(1, 2)]", "cannot fail"),
    ],
)
def test_python_that_cannot_fail_is_rejected_as_a_test(tests, problem):
    with pytest.raises(ValueError, match=problem):
        checks_of(tests)


FORGES = """
import contextlib, os, sys
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    for value in [*frame.f_locals.values(), *frame.f_locals.get("order", {}).values()]:
        for fd in range(2, 64) if len(str(value)) == 32 else ():  # the length of a secret
            with contextlib.suppress(OSError):
                if not os.path.sameopenfile(fd, 1):
                    os.write(fd, (str(value) + "[Errno 111] forged").encode())
print("2")
"""


@pytest.mark.parametrize("unconfined", [False, True])
def test_a_program_cannot_fake_an_error_of_its_host(unconfined):
    assert run(FORGES, Check(None, "", "2"), TIMEOUT_S, unconfined=unconfined)
    run(FORGES, Check("assert True"), TIMEOUT_S, unconfined=unconfined)  # may trick its own test, but raises no error


def test_the_last_python_block_counts_or_the_whole_answer_without_blocks():
    two = "First:\n```python\nx = 1\n```\nBetter:\n```py\nx = 2\n```\nRun it:\n```bash\npython x.py\n```\n"
    assert code_of(two) == "x = 2\n"
    assert code_of("x = 3") == "x = 3"
    assert code_of("```python\nprint(5)\n```\nIt prints\n```\n5\n```\n") == "print(5)\n"
    assert code_of("```\nx = 4\n```") == "x = 4\n"
    assert code_of("```python\nx = 5\n```\nExample:\n```python\n>>> x\n5\n```\n") == "x = 5\n"
    assert code_of("```python\nx = 6\n```\nBetter:\n```python\nx = = 7\n```\n") == "x = = 7\n"


@pytest.mark.parametrize("indent", ["   ", "\t", "  "])
def test_a_block_in_a_list_loses_the_indentation_of_the_list(indent):
    code = "def f(x):\n    if x:\n        return 1\n\n    return 2\n"
    item = textwrap.indent(f"```python\n{code}```\n", indent)
    assert code_of(f"1. The function:\n\n{item}\n2. It is right.") == code
    assert code_of(f"1. The function:\n\n{indent}```python\n{code}{indent}```\n").rstrip() == code.rstrip()
    indented = textwrap.indent(code, indent)
    assert code_of(f"```python\n{indented}```\n") == indented, "an error of the program"
    assert code_of(f"Code: ```python\n{indented}```\n") == indented


def test_a_program_that_does_not_end_uses_only_its_share_of_the_time(tmp_path):
    programs = ["while True: pass", RIGHT, "import time; time.sleep(1e6)", RIGHT]
    completions = [f"```python\n{code}\n```" for code in programs]
    with RewardWorkers(RewardConfig(functions=("passes_tests",), timeout_s=8.0)) as workers:
        began = time.monotonic()
        result = workers.submit(prompt(tests=TESTS), completions, [[1]] * 4, STATE).result(DEADLINE_S)
        took_s = time.monotonic() - began
    assert result.rewards == [0.0, 1.0, 0.0, 1.0]
    assert result.functions[0].outcome == "ok"
    assert took_s < 8.0


@pytest.mark.parametrize(
    "code",
    [
        "held = bytearray(4 << 30)",
        "for _ in range(2000): print('x' * 10_000)",
        "open('large', 'wb').write(bytes(32 << 20))",
        "for name in '12345': open(name, 'wb').write(bytes(15 << 20))",
        "import os, signal\nfor _ in range(40): os.fork() or signal.pause()",
        "files = [open(__import__('os').devnull) for _ in range(200)]",
    ],
)
def test_a_program_over_its_limits_fails(code):
    """Each program ends soon and passes if its limit is gone."""
    logged = {}
    result = passes_tests([f"{code}\n{RIGHT}"], [TESTS], 60.0, CONFIG, log_metric=logged.__setitem__)
    assert result == [0.0]
    assert logged == {"programs_out_of_time": 0.0}, "the clock ended it, not its limit"


def test_a_program_has_no_network_no_environment_variables_and_only_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "key").write_text("secret")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    by_path = socket.socket(socket.AF_UNIX)
    by_path.bind(str(tmp_path / "socket"))
    by_path.listen()
    package = Path(os.__file__)
    tries = {
        f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)": 0.0,
        f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))": 0.0,
        f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'socket')!r})": 0.0,
        f"open({str(tmp_path / 'key')!r})": 0.0,
        f"open({str(tmp_path / 'new')!r}, 'w')": 0.0,
        f"import os; os.chmod({str(tmp_path)!r}, 0)": 0.0,
        f"import os; os.chmod({str(package)!r}, 0)": 0.0,
        f"open({str(package)!r}, 'a')": 0.0,
        "open('/etc/shadow')": 0.0,
        f"open('/proc/{os.getpid()}/environ', 'rb')": 0.0,
        f"import os, signal; os.kill({os.getpid()}, 0)": 0.0,
        "import os; os.setuid(0)": 0.0,
        "import ctypes; assert ctypes.CDLL(None).mount(None, b'/', None, 0x1020, None) == 0": 0.0,
        "import os; assert 'HF_TOKEN' in os.environ": 0.0,
        "open('own', 'w').write('mine'); assert open('own').read() == 'mine'": 1.0,
        "import tempfile; tempfile.TemporaryFile().write(b'mine')": 1.0,
        "import os; assert os.listdir() == [] and os.getcwd() == os.path.expanduser('~')": 1.0,
        "import subprocess, sys; assert subprocess.run([sys.executable, '-c', 'print(1)'], "
        "capture_output=True).stdout == b'1\\n'": 1.0,
        "import numpy; assert numpy.ones(3).sum() == 3": 1.0,
    }
    assert {code: paid(f"{code}\n{RIGHT}") for code in tries} == tries
    assert not (tmp_path / "new").exists()
    for one in (listener, by_path):
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.accept()
        one.close()


@pytest.mark.parametrize("timeout_s", [TIMEOUT_S, 2.0])
def test_child_processes_end_with_the_program_in_any_session(timeout_s):
    mark = f"4{os.getpid()}{int(timeout_s)}"
    leaves = f"import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
    stays = "" if timeout_s == TIMEOUT_S else "while True: pass"
    with pytest.raises(TimeoutError) if stays else nullcontext():
        assert run(leaves + stays, Check("assert True"), timeout_s)
    until(lambda: not runs(mark))


def runs(mark: str) -> bool:
    """Return whether a process `sleep MARK` exists."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes() == f"sleep\0{mark}\0".encode():
                return True
    return False


def test_a_program_ends_with_the_worker_that_runs_it():
    mark = f"9{os.getpid()}"
    code = f"```python\nimport subprocess; subprocess.run(['sleep', '{mark}'])\n```"
    with RewardWorkers(RewardConfig(functions=("passes_tests",), timeout_s=60.0)) as workers:
        workers.submit(prompt(tests=TESTS), [code], [[1]], STATE)
        until(lambda: runs(mark))
    until(lambda: not runs(mark))


def test_programs_run_from_any_thread():
    outcomes: list[float | None] = []
    threads = [threading.Thread(target=lambda: outcomes.append(paid(RIGHT))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [1.0] * 4


def test_a_run_without_confinement_must_accept_unconfined_programs(monkeypatch):
    monkeypatch.setattr(function, "why_not_confined", lambda: "unshare: Operation not permitted")
    with pytest.raises(RewardError, match=r"\(unshare: Op.* not permitted\).*\.unconfined_programs = true"):
        load_all(CONFIG)
    accepts = RewardConfig(functions=("passes_tests",), unconfined_programs=True)
    assert load_all(accepts)
    assert passes_tests([RIGHT, "while True: pass"], [TESTS] * 2, 4.0, accepts) == [1.0, 0.0]
    assert load_all(RewardConfig(functions=("exact_match",)))


class LatePool:
    """Stands for a pool with one process, which rates single completions in time, but no groups and no "late"."""

    is_closed = False

    def acquire(self):
        return self

    def release(self, process):
        pass

    def call(self, call):
        if call.completions in (["late"], ["late", *["1"] * 2]):
            return ProcessFailure("timed_out", "is late")
        return RewardAnswer([1.0], {"programs_out_of_time": [0.25]})


def test_completions_rated_one_by_one_keep_their_metrics():
    calls = SerialCalls(CONFIG, LatePool())
    try:
        job = Job("passes_tests", RewardCall("passes_tests", "", {}, ["late", "1", "1"], [[1]] * 3, STATE), Future())
        calls.put(job)
        assert job.future.result(DEADLINE_S) == RewardAnswer([0.0, 1.0, 1.0], {"programs_out_of_time": [0.25] * 2})
    finally:
        calls.stop()


def test_the_number_of_timeouts_is_a_metric():
    logged = {}
    sleeps = "import time\ntime.sleep(600)"
    passes_tests([sleeps, RIGHT], [TESTS] * 2, 16.0, CONFIG, log_metric=logged.__setitem__)
    assert logged == {"programs_out_of_time": 0.5}
