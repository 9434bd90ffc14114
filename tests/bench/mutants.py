"""Mutation testing: break the product at random places and list the mutants that no test notices.

    functions of the product ─▶ mutants ─▶ a sample, determined by a seed
    coverage, record    ─▶ the tests that run the line, fastest first ─▶ pytest -x in a copy of the checkout ─▶ verdicts

The coverage data has the tests of each line, and the record has the duration of each test:

    pip install pytest-cov
    make test ARGS="--record /tmp/record.jsonl --cov=learner --cov=protocol --cov=inference_server --cov-context=test"
    python -m tests.bench.mutants --count 200 --coverage .coverage --record /tmp/record.jsonl --out mutants.jsonl

"noticed": a test that passes without the mutant fails or takes too long. "not run": no test runs the line; the coverage
data excludes processes that tests start. Each copy has a process that has imported torch, transformers and pytest, but
nothing of the product, and forks for every pytest. It is the first process of a PID namespace, so that a broken product
cannot affect other processes.
"""

import argparse
import ast
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

PATHS = ("learner/algorithm", "learner/rollouts", "protocol", "inference_server", "learner/storage")
TIERS = {"test": "not system and not gpu and not slow", "system": "not gpu and not slow"}
FIRST_TESTS, MORE_TESTS = 20, 5
"""Number of tests in a mutant's first pytest, and the factor for the next ones: the first tests notice most mutants."""
TOO_LONG, LOG = "the time limit", "../log"
GRACE_S, SLOWNESS = 60.0, 6.0
"""Time limit of a pytest: GRACE_S plus SLOWNESS × the recorded duration of its tests."""
IMPORTED = (
    "torch.distributed.checkpoint", "transformers.models.auto.modeling_auto", "peft", "hypothesis", "aiohttp",
    "zmq.asyncio",
    "msgspec", "pytest",
)  # fmt: skip
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "TORCH_CPP_LOG_LEVEL": "FATAL"}
"""Variables that tests/conftest.py and tests/peer.py set before torch is imported."""

OTHER: dict[type, Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
"""Replacement of each operator. Unions of dicts and types stay."""
ALONE = (
    "unshare",
    *(() if os.geteuid() == 0 else ("--map-root-user",)),
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)
LOGS = {"log", "logger", "logging", "warnings"}


class Mutant(NamedTuple):
    """A breakage: the bytes from `start` to `end` become `text`."""

    path: str
    line: int
    column: int
    kind: str
    start: int
    end: int
    text: str
    statement: range
    """Lines of the statement, without its body."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.kind}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return the mutants of all functions of a file."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found: list[Mutant] = []

    def visit(node: Any, in_function: bool, statement: range) -> None:
        if _is_excluded(node):
            return
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            statement = range(node.lineno, end + 1)
        for kind, at, old, text in _breakages(node) if in_function else ():
            start, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            found.append(Mutant(path, at.lineno, at.col_offset, kind, start, end, text, statement))
        for child in _children(node):
            visit(child, in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), statement)

    visit(ast.parse(source), False, range(1))
    return found


def _is_excluded(node: ast.AST) -> bool:
    """Return whether a node is a text, a log call, an assertion for mypy, or only for type checkers or `python -m`."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in LOGS
        case ast.Expr(value=value):
            return _is_excluded(value)
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """Return the children, without annotations, defaults, decorators and error messages."""
    match node:
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body) | ast.ClassDef(body=body):
            return body
        case ast.AnnAssign(value=value):
            return [] if value is None else [value]
        case ast.Lambda(body=expression):
            return [expression]
        case ast.Raise():
            return []
    return ast.iter_child_nodes(node)


def _breakages(node: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the kind, the node that names the mutant, the replaced node, and the replacement."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=operands):
            for i, op in enumerate(ops):
                changed = [*ops[:i], OTHER[type(op)](), *ops[i + 1 :]]
                yield "compare", operands[i], node, _text(ast.Compare(left, changed, operands))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER:
            yield "arithmetic", right, node, _text(ast.BinOp(left, OTHER[type(op)](), right))
        case ast.BoolOp(op=op, values=values):
            yield "boolean", values[1], node, _text(ast.BoolOp(OTHER[type(op)](), values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, node, _text(operand)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test, *_]):
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):  # these have other mutants
                yield "condition", test, test, f"(not {_text(test)})"
        case ast.Constant(value=bool() as value):
            yield "constant", node, node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, node, repr(value + 1)
        case ast.Return(value=ast.Constant(value=None) as value):
            yield "return", node, value, "True"
        case ast.Return(value=ast.expr() as value):
            yield "return", node, value, "None"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in OTHER:
            yield "arithmetic", node, node, ast.unparse(ast.AugAssign(target, OTHER[type(op)](), value))
        case ast.Raise() | ast.Expr(value=ast.Await() | ast.Call()) | ast.Assign(targets=[ast.Attribute()]):
            yield "drop", node, node, "pass"
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            yield "drop", node, node, "pass"


def _text(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def sample(root: Path, paths: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Return a sample of mutants, ordered by place. The same files and seed give the same sample."""
    files = {file for path in paths for file in [root / path, *(root / path).rglob("*.py")] if file.is_file()}
    found = [mutant for file in sorted(files) for mutant in mutants_of(str(file.relative_to(root)), file.read_bytes())]
    return sorted(random.Random(seed).sample(found, min(count, len(found))), key=lambda mutant: mutant[:4])


def tests_of(mutants: Iterable[Mutant], coverage_file: str, seconds: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the tests that run the statement of each mutant, by mutant name, fastest first."""
    try:
        from coverage import CoverageData
    except ImportError:
        raise SystemExit("the coverage data cannot be read without coverage: pip install pytest-cov") from None
    data = CoverageData(coverage_file)
    data.read()
    found = {}
    for path, of_file in groupby(mutants, key=lambda mutant: mutant.path):
        measured = next((file for file in data.measured_files() if file.endswith(f"/{path}")), path)  # in any checkout
        contexts = data.contexts_by_lineno(measured)
        for mutant in of_file:
            ran = {context.partition("|")[0] for line in mutant.statement for context in contexts.get(line, ())}
            tests = (test for test in ran if "::" in test)
            found[mutant.name] = sorted(tests, key=lambda test: (seconds.get(test, 1.0), test))
    return found


class Workplace:
    """A private copy of the checkout, and the process that forks pytest in it."""

    def __init__(self, root: Path, marks: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="m"))  # short, for the paths of sockets
        self._copy, self._marks, self._num_writes = self._directory / "copy", marks, 0
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
        for file in filter(None, listed.decode().split("\0")):
            if (root / file).is_file():
                (self._copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / file, self._copy / file)
        (self._directory / "t").mkdir()
        paths = {"PYTHONPATH": str(self._copy), "TMPDIR": str(self._directory / "t")}
        self._process = subprocess.Popen(
            [*ALONE, sys.executable, __file__, "--fork"], cwd=self._copy, env=os.environ | ENVIRONMENT | paths,
            text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._passing: set[str] = set()
        self._failing: set[str] = set()
        """Tests that fail with and without a mutant."""

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def judge(self, mutant: Mutant, tests: list[str], seconds: Mapping[str, float]) -> tuple[str, str]:
        """Return the verdict, and the test or the reason."""
        source = (self._copy / mutant.path).read_bytes()
        has_run, size = False, FIRST_TESTS
        while tests := [test for test in tests if test not in self._failing]:
            self._write(mutant.path, mutant.apply(source))
            code, failed = self._run(tests[:size], seconds)
            self._write(mutant.path, source)
            if code in (0, 5):  # passed, or no test is in this tier
                has_run |= code == 0
                tests, size = tests[size:], size * MORE_TESTS
                continue
            suspects = [failed] if failed else tests[:size]
            without = (0, "") if failed in self._passing else self._run(suspects, seconds)
            if without[0] in (0, 5):
                self._passing |= {failed} - {""}
                return "noticed", failed or f"pytest ended with {code}"
            if not without[1] and without[0] != TOO_LONG:
                log = (self._copy / LOG).read_text()[-3000:]
                raise RuntimeError(f"pytest ends with {without[0]} without a mutant:\n{log}")
            self._failing |= {without[1]} if without[1] else {*suspects}
        return ("unnoticed" if has_run else "not run"), ""

    def _write(self, path: str, source: bytes) -> None:
        """Write a file so that its bytecode is stale, which depends on size and seconds."""
        self._num_writes += 1
        (self._copy / path).write_bytes(source)
        os.utime(self._copy / path, (self._num_writes, self._num_writes))

    def _run(self, tests: list[str], seconds: Mapping[str, float]) -> tuple[int | str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        limit_s = GRACE_S + SLOWNESS * sum(seconds.get(test, 1.0) for test in tests)
        print(json.dumps([tests, self._marks, limit_s]), file=self._process.stdin, flush=True)
        code, failed = json.loads(self._process.stdout.readline())
        return code, failed


class Chosen:
    """A pytest plugin that runs these tests in order, file by file, and records the first failure."""

    def __init__(self, tests: list[str]) -> None:
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        self.files = [file for file in files if Path(file).exists()]
        self._order = sorted(tests, key=lambda test: [*files].index(test.partition("::")[0]))
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        there = {item.nodeid: item for item in items}
        items[:] = [there[test] for test in self._order if test in there]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")


def fork_on_demand() -> None:
    """Answer each line of tests with pytest's exit code and the test that failed, from a process forked for them."""
    assert os.getpid() == 1, "it kills all other processes of its PID namespace"
    for module in IMPORTED:
        importlib.import_module(module)
    sys.path[0] = os.getcwd()  # instead of the folder of this file
    for line in sys.stdin:
        print(json.dumps(_run_forked(*json.loads(line))), flush=True)


def _run_forked(tests: list[str], marks: str, limit_s: float) -> tuple[int | str, str]:
    theirs, ours = os.pipe()
    if os.fork() == 0:
        _be_pytest(tests, marks, ours)
    os.close(ours)
    ended = select.select([theirs], [], [], limit_s)[0]
    answer = os.read(theirs, 1 << 16) if ended else b""
    os.close(theirs)
    os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return tuple(json.loads(answer)) if answer else ("a crash" if ended else TOO_LONG, "")


def _be_pytest(tests: list[str], marks: str, ours: int) -> None:
    import pytest

    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        chosen = Chosen(tests)
        # pytest warns about modules that were imported before it could rewrite them, and warnings are errors.
        options = ["-x", "-q", "-n", "0", "-m", marks, "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*chosen.files, *options], [chosen]) if chosen.files else 5
        os.write(ours, json.dumps([int(code), chosen.failed]).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.bench.mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--paths", nargs="+", default=PATHS, help="folders or files of the product")
    parser.add_argument(
        "--tier", choices=TIERS, default="test", help="tests of `make test`, or of `make test-system` too"
    )
    parser.add_argument("--coverage", default=".coverage", help="coverage data with the tests as contexts")
    parser.add_argument("--record", type=Path, help="durations of tests, from `pytest --record`")
    parser.add_argument("--out", type=Path, help="JSON lines of verdicts, to continue from next time")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    root = Path(__file__).parents[2]
    mutants = sample(root, options.paths, options.count, options.seed)
    seconds: dict[str, float] = defaultdict(float)
    for line in _lines_of(options.record):
        seconds[line["test"]] += line["duration_s"]
    tests = tests_of(mutants, options.coverage, seconds)
    verdicts: dict[str, str] = {line["mutant"]: line["verdict"] for line in _lines_of(options.out)}
    workplaces: SimpleQueue[Workplace] = SimpleQueue()
    for _ in range(options.workers):
        workplaces.put(Workplace(root, TIERS[options.tier]))

    def judge(mutant: Mutant) -> None:
        workplace = workplaces.get()
        verdict, by = workplace.judge(mutant, tests[mutant.name], seconds)
        workplaces.put(workplace)
        verdicts[mutant.name] = verdict
        print(f"{verdict:10} {mutant.name} {by}", flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                print(json.dumps({"mutant": mutant.name, "verdict": verdict, "by": by}), file=file)

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(judge, [mutant for mutant in mutants if mutant.name not in verdicts]))
    for _ in range(options.workers):
        workplaces.get().close()
    print(report(root, mutants, verdicts, options.paths))


def _lines_of(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []


def report(root: Path, mutants: Iterable[Mutant], verdicts: Mapping[str, str], paths: Iterable[str]) -> str:
    """Return a table by folder and the changes of unnoticed mutants."""
    lines = ["| Folder | Noticed | Unnoticed | Not run |", "|---|---:|---:|---:|"]
    for folder in (*paths, ""):
        count = Counter(verdicts[mutant.name] for mutant in mutants if mutant.path.startswith(folder))
        lines.append(f"| {folder or 'all'} | {count['noticed']} | {count['unnoticed']} | {count['not run']} |")
    for mutant in mutants:
        if verdicts[mutant.name] == "unnoticed":
            before = (root / mutant.path).read_bytes()[mutant.start : mutant.end].decode()
            line = (root / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
            lines += ["", f"{mutant.name}    {line}", f"  - {before}", f"  + {mutant.text}"]
    return "\n".join(lines)


if __name__ == "__main__":
    fork_on_demand() if sys.argv[1:] == ["--fork"] else main()
