"""Programs as answers: `passes_tests` runs what a completion has written against the tests of its row. In the reward workers.

    completion ─▶ code_of ─▶ run, once for each check ─▶ program_host.py, in a process of its own ─▶ how it ended, what it printed, its token
    `tests`    ─▶ checks_of ┘

Invariant: one that ends before its tests (`sys.exit(0)`) has not passed them. But it shares the interpreter with them, and may meddle with what they
use: an object that equals everything, an `all` that says yes. Checks by input and output know no such tricks.
"""

import ast
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from learner.config import RewardConfig
from learner.descendants import kill_with_descendants
from learner.rewards.builtin.answers import answer_of
from learner.user_code import shorten

HOST = Path(__file__).with_name("program_host.py")
MAX_MEMORY_MIB = 1024
MAX_OUTPUT_BYTES = 16 << 20
SHARED_OUT = 0.9
"""Of timeout_s; the rest is for starting processes."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
CAN_FAIL = (ast.Assert, ast.Raise, ast.For, ast.While, ast.If, ast.With, ast.Try)
EXPECTED = 'Python that raises if the program is wrong, a list of such, or a list of {"input": …, "output": …}'


class Check(msgspec.Struct, frozen=True):
    """One run of a program: Python to run after it, or what it reads and has to print."""

    tests: str | None = None
    given: str = ""
    expected: str = ""


def passes_tests(
    completions: Sequence[Any],
    tests: Sequence[Any],
    timeout_s: float,
    reward_config: RewardConfig,
    opens_reasoning: bool = False,
    log_metric: Callable[[str, float], None] = lambda name, value: None,
    **kwargs: Any,
) -> list[float | None]:
    """1 if the last code block of the answer passes the `tests` column; else 0; None if the column is empty.

    The column holds Python that raises if the program is wrong (`assert f(1) == 2`; HumanEval's `test` with its call), a list of such
    statements (MBPP), or what the program reads and prints: a list of `{"input": …, "output": …}`, or APPS' `{"inputs": […], "outputs":
    […]}`. Each program has its share of what is left of timeout_s, and 1 GiB of memory a process.
    """
    deadline, num_late = time.monotonic() + SHARED_OUT * timeout_s, 0
    rewards: list[float | None] = []
    for place, (completion, column) in enumerate(zip(completions, tests, strict=True)):
        share_s = (deadline - time.monotonic()) / (len(completions) - place)
        checks = checks_of(column)
        code = code_of(answer_of(completion, opens_reasoning=opens_reasoning))
        try:
            is_right = _passes(code, checks, share_s, unconfined=reward_config.unconfined_programs)
        except TimeoutError:
            is_right, num_late = False, num_late + 1
        rewards.append(float(is_right) if checks else None)
    log_metric("programs_out_of_time", num_late / len(completions))
    return rewards


def code_of(answer: str) -> str:
    """Return the last code block that is Python or says nothing of its language, or the whole answer where there is none."""
    blocks = [code for language, code in _BLOCK.findall(answer) if language.lower() in ("", "python", "python3", "py")]
    return blocks[-1] if blocks else answer


def checks_of(column: Any) -> list[Check]:
    """Return the runs that a row's tests ask for. Raises ValueError for what is none, and for Python that cannot fail."""
    if isinstance(column, str) and column.lstrip()[:1] in ("[", "{"):
        column = _read(column)
    if column in (None, "", [], {}):
        return []
    match column:
        case str():
            return [Check(_checked(column))]
        case list() if all(isinstance(one, str) for one in column):
            return [Check(_checked("\n".join(column)))]
        case list() if all(isinstance(one, dict) and {"input", "output"} <= one.keys() for one in column):
            return [Check(None, _text(one["input"]), _text(one["output"])) for one in column]
        case {"inputs": list(inputs), "outputs": list(outputs), **more} if len(inputs) == len(outputs) and not more.get(
            "fn_name"
        ):
            return [Check(None, _text(one), _text(other)) for one, other in zip(inputs, outputs, strict=True)]
    raise ValueError(f"the column tests holds {shorten(column)}; expected {EXPECTED}")


def _read(text: str) -> Any:
    """As datasets keep lists in texts: JSON, or what Python prints of them."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def _checked(tests: str) -> str:
    try:
        statements = ast.parse(tests).body
    except SyntaxError as error:
        raise ValueError(
            f"the column tests holds {shorten(tests)}, which is no Python ({error}); expected {EXPECTED}"
        ) from error
    if not any(
        isinstance(one, CAN_FAIL) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call))
        for one in statements
    ):
        raise ValueError(
            f"the column tests holds {shorten(tests)}, which asserts and calls nothing, so it cannot fail; expected {EXPECTED}"
        )
    return tests


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _passes(code: str, checks: Sequence[Check], timeout_s: float, *, unconfined: bool) -> bool:
    """Whether a program passes all of its checks, in so much time together. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    return all(run(code, check, deadline - time.monotonic(), unconfined=unconfined) for check in checks)


def run(code: str, check: Check, timeout_s: float, *, unconfined: bool = False) -> bool:
    """Whether a program passes a check. Raises TimeoutError, and OSError where it cannot be confined."""
    token = secrets.token_hex(16)
    ended = _hosted(code, check, token, timeout_s, unconfined=unconfined)
    if check.tests is not None:
        return ended.reported.startswith(token)  # twice from one that has forked
    return ended.exit_code == 0 and _lines(ended.printed) == _lines(check.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def why_not_confined() -> str | None:
    """Return why programs cannot be confined on this machine; None: they can."""
    try:
        has_run = run("import decimal", Check("assert decimal.Decimal(1) == 1"), timeout_s=30.0)
    except OSError as error:  # TimeoutError is one
        return str(error) or "it does not start in time"
    return None if has_run else "it has no standard library"


class Ended(msgspec.Struct, frozen=True):
    """What became of a process."""

    exit_code: int
    printed: str
    reported: str


def _hosted(code: str, check: Check, token: str, timeout_s: float, *, unconfined: bool = False) -> Ended:
    """Raises TimeoutError, and OSError where it cannot be confined."""
    mark = secrets.token_hex(16)  # no program can tell a problem of ours
    with ExitStack() as cleanup:
        files = [os.memfd_create(name) for name in ("given", "printed", "reported")]
        for descriptor in files:
            cleanup.callback(os.close, descriptor)
        given, printed, reported = files
        with open(given, "wb", closefd=False) as file:
            file.write(check.given.encode(errors="surrogateescape"))
        os.lseek(given, 0, os.SEEK_SET)
        folder = cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="slipstream-program-", ignore_cleanup_errors=True)
        )
        order = {
            "program": code,
            "tests": check.tests,
            "token": token,
            "mark": mark,
            "folder": folder,
            "unconfined": unconfined,
            "parent": os.getpid(),
            "max_memory_mib": MAX_MEMORY_MIB,
            "timeout_s": timeout_s,
        }
        exit_code = _run_host(json.dumps(order).encode(), files, folder, timeout_s)
        ended = Ended(exit_code, _content(printed), _content(reported))
        if ended.reported.startswith(mark):
            raise OSError(ended.reported.removeprefix(mark))
        return ended


def _run_host(order: bytes, files: Sequence[int], folder: str, timeout_s: float) -> int:
    process = subprocess.Popen(
        [sys.executable, "-I", str(HOST), *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
        cwd=folder,
        env=ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
        start_new_session=True,
    )
    try:
        process.communicate(order, max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            kill_with_descendants(process.pid)
            process.wait()
            with suppress(ChildProcessError):  # the first process of its namespace has become a child of this one
                while True:
                    os.waitpid(-process.pid, 0)
        with suppress(ProcessLookupError, PermissionError):  # what an unconfined one has left behind
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def _content(descriptor: int) -> str:
    return os.pread(descriptor, MAX_OUTPUT_BYTES, 0).decode(errors="replace")
