"""Reward function `passes_tests`: run a completion's program against its tests.

    completion ─▶ code_of ─▶ run, once per check ─▶ program_host.py, a process ─▶ exit code, output, token
    `tests`    ─▶ checks_of ┘

It runs in the reward workers.
Invariant: a program that exits before its tests (`sys.exit(0)`) does not pass them. A program shares the
interpreter with Python tests and can trick them: by an object that equals everything, or an `all` that
returns True. Checks by input and output cannot be tricked this way.
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
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from learner.config import RewardConfig
from learner.rewards.builtin.answers import answer_of
from learner.sandbox.descendants import kill_with_descendants
from learner.sandbox.user_code import shorten

HOST = Path(__file__).with_name("program_host.py")
MAX_MEMORY_MIB = 1024
MAX_OUTPUT_BYTES = 16 << 20
SHARED_OUT = 0.9
"""Share of timeout_s for running programs. The rest is for starting processes."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_BLOCK = re.compile(r"(?:^([ \t]+))?```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL | re.MULTILINE)
_SESSION = ">>>"
_WORD = re.compile(r"\S+|\s+")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
CAN_FAIL = (ast.Assert, ast.Raise, ast.For, ast.While, ast.If, ast.With, ast.Try)
FUNCTION_TESTS = ("functional", "function_call")
"""Types of tests that call a function, in LiveCodeBench and DeepCoder."""
EXPECTED = (
    'Python code that raises if the program is wrong, a list of such statements, or a list of {"input": …, "output": …}'
    " of whole programs. Write the calls of a function as Python: assert f(1) == 2"
)


class Check(msgspec.Struct, frozen=True):
    """One run of a program: Python to run after it, or its input and expected output."""

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
    """Return 1 if the program in the answer (`code_of`) passes the `tests` column, else 0.

    An empty column gives None. The column holds one of:
    - Python that raises if the program is wrong (`assert f(1) == 2`, or HumanEval's `test` with its call)
    - a list of such statements (MBPP)
    - inputs and outputs of whole programs: a list of `{"input": …, "output": …}`, or APPS'
      `{"inputs": […], "outputs": […]}`. Decimals are compared by their exact values, all else as text.

    Each program has an equal share of the time left of timeout_s, and 1 GiB of memory per process.
    """
    deadline, num_late = time.monotonic() + SHARED_OUT * timeout_s, 0
    rewards: list[float | None] = []
    for i, (completion, column) in enumerate(zip(completions, tests, strict=True)):
        give_up_at = time.monotonic() + (deadline - time.monotonic()) / (len(completions) - i)
        checks = checks_of(column)
        code = code_of(answer_of(completion, opens_reasoning=opens_reasoning))
        try:
            is_right = all(
                run(code, check, give_up_at - time.monotonic(), unconfined=reward_config.unconfined_programs)
                for check in checks
            )
        except TimeoutError:
            is_right, num_late = False, num_late + 1
        rewards.append(float(is_right) if checks else None)
    log_metric("programs_out_of_time", num_late / len(completions))
    return rewards


def code_of(answer: str) -> str:
    """Return the last Python block, else the last block without a language, else the whole answer.

    A block without a language after the program usually shows its output, and one with `>>>` a session with
    it. In a list, a block is indented.
    """
    found = [
        (language, textwrap.dedent(code) if indent else code)
        for indent, language, code in _BLOCK.findall(answer)
        if not code.lstrip().startswith(_SESSION)
    ]
    blocks = [code for language, code in found if language.lower() in ("python", "python3", "py")]
    blocks = blocks or [code for language, code in found if not language]
    return blocks[-1] if blocks else answer


def checks_of(column: Any) -> list[Check]:
    """Return the checks that a row's tests describe.

    Raises:
        ValueError: The column has another form or holds Python that cannot fail.
    """
    if isinstance(column, str) and column.lstrip()[:1] in ("[", "{"):
        column = _read(column)
    if column in (None, "", [], {}):
        return []
    match column:
        case str():
            return [Check(_checked(column))]
        case list() if all(isinstance(one, str) for one in column):
            return [Check(_checked("\n".join(column)))]
        case list() if all(
            isinstance(one, dict) and {"input", "output"} <= one.keys() and not _calls_function(one) for one in column
        ):
            return [Check(None, _text(one["input"]), _text(one["output"])) for one in column]
        case {"inputs": list(inputs), "outputs": list(outputs)} if len(inputs) == len(outputs) and not _calls_function(
            column
        ):
            return [Check(None, _text(one), _text(other)) for one, other in zip(inputs, outputs, strict=True)]
    raise ValueError(f"column tests contains {shorten(column)}; expected {EXPECTED}")


def _calls_function(tests: dict[str, Any]) -> bool:
    """Return whether tests hold arguments and results of a function, not a program's input and output."""
    return bool(tests.get("fn_name")) or (tests.get("testtype") or tests.get("type")) in FUNCTION_TESTS


def _read(text: str) -> Any:
    """Parse a list that a dataset stores as JSON or as a Python literal."""
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
            f"column tests contains {shorten(tests)}, which is not valid Python ({error}); expected {EXPECTED}"
        ) from error
    if not any(
        isinstance(one, CAN_FAIL) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call))
        for one in statements
    ):
        raise ValueError(
            f"column tests contains {shorten(tests)}, which asserts and calls nothing, so it cannot fail; expected "
            f"{EXPECTED}"
        )
    return tests


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def run(code: str, check: Check, timeout_s: float, *, unconfined: bool = False) -> bool:
    """Return whether a program passes a check.

    Raises:
        TimeoutError: The time is up.
        OSError: The program cannot be confined.
    """
    token = secrets.token_hex(16)
    result = _run_check(code, check, token, timeout_s, unconfined=unconfined)
    if check.tests is not None:
        return result.reported.startswith(token)  # a program that forked may report the token twice
    return result.exit_code == 0 and _is_same_output(result.printed, check.expected)


def _is_same_output(printed: str, expected: str) -> bool:
    """Compare outputs as text, except for white space at the ends of lines and the notation of decimals."""
    texts = ("\n".join(map(str.rstrip, text.rstrip().splitlines())) for text in (printed, expected))
    words = zip_longest(*(_WORD.finditer(text) for text in texts))
    return all(one and other and _is_same_word(one[0], other[0]) for one, other in words)


def _is_same_word(one: str, other: str) -> bool:
    """Compare words as text, or by their exact values if one is a decimal: 0.50 equals 0.5, but 01 is not 1."""
    if one == other:
        return True
    is_decimal = any(mark in one + other for mark in ".eE") and _NUMBER.fullmatch(one) and _NUMBER.fullmatch(other)
    return bool(is_decimal) and Decimal(one) == Decimal(other)


def why_not_confined() -> str | None:
    """Return why this machine cannot confine programs, or None if it can."""
    try:
        has_run = run("import decimal", Check("assert decimal.Decimal(1) == 1"), timeout_s=30.0)
    except OSError as error:  # includes TimeoutError
        return str(error) or "the program does not start in time"
    return None if has_run else "the program has no standard library"


class ProgramResult(msgspec.Struct, frozen=True):
    """Exit code, output and report of a finished process."""

    exit_code: int
    printed: str
    reported: str


def _run_check(code: str, check: Check, token: str, timeout_s: float, *, unconfined: bool = False) -> ProgramResult:
    """Run a check in a host process.

    Raises:
        TimeoutError: The time is up.
        OSError: The program cannot be confined.
    """
    with ExitStack() as cleanup:
        files = [os.memfd_create(name) for name in ("given", "printed", "reported", "problem")]
        for descriptor in files:
            cleanup.callback(os.close, descriptor)
        given, printed, reported, problem = files
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
            "folder": folder,
            "unconfined": unconfined,
            "parent": os.getpid(),
            "max_memory_mib": MAX_MEMORY_MIB,
            "timeout_s": timeout_s,
        }
        exit_code = _run_host(json.dumps(order).encode(), files, folder, timeout_s)
        if text := _content(problem):
            raise OSError(text)
        return ProgramResult(exit_code, _content(printed), _content(reported))


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
            with suppress(ChildProcessError):  # the namespace's first process has become a child of this one
                while True:
                    os.waitpid(-process.pid, 0)
        with suppress(ProcessLookupError, PermissionError):  # left behind by an unconfined program
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def _content(descriptor: int) -> str:
    return os.pread(descriptor, MAX_OUTPUT_BYTES, 0).decode(errors="replace")
