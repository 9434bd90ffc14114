"""Loading of user code from a module or a file, and its errors."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.sandbox.user_code import NotLoaded, load_named

FILES = {
    "beside_it.py": "SAYS = 'hello'\n",
    "mine.py": "from beside_it import SAYS\n\nNUMBER = 3\n\ndef say():\n    return SAYS\n",
    "half.py": "first = 1\nraise ValueError('no more')\n",
    "ends.py": "raise SystemExit(3)\n",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    imported = set(sys.modules)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in sys.modules.keys() - imported:
        del sys.modules[name]


def test_user_code_can_import_neighboring_files(directory: Path) -> None:
    for spec in (f"{directory}/mine.py:say", "mine.py:say", "mine:say"):
        assert load_named(spec)() == "hello"


@pytest.mark.parametrize(("first", "helper"), [("mine.py", "beside_it.py"), ("mine", "beside_it/__init__.py")])
def test_user_code_whose_neighbor_has_the_name_of_another_module_is_rejected(
    directory: Path, first: str, helper: str
) -> None:
    for name, text in {"mine.py": FILES["mine.py"], helper: "SAYS = 'goodbye'"}.items():
        (directory / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "b" / name).write_text(text)
    assert load_named(f"{first}:say")() == "hello"
    for _ in range(2):
        with pytest.raises(NotLoaded, match=rf"/b/{helper} and {directory}/.*beside_it.py have the same module name"):
            load_named("b/mine.py:say")


def test_a_neighbor_of_the_same_name_that_is_not_imported_or_is_the_same_file_is_fine(directory: Path) -> None:
    (directory / "b").mkdir()
    (directory / "c").mkdir()
    (directory / "b" / "beside_it.py").write_text("SAYS = 'goodbye'")
    (directory / "b" / "alone.py").write_text("def say(): return 'alone'")
    (directory / "c" / "mine.py").write_text(FILES["mine.py"])
    (directory / "c" / "beside_it.py").symlink_to(directory / "beside_it.py")
    said = [load_named(f"{name}:say")() for name in ("mine.py", "b/alone.py", "c/mine.py")]
    assert said == ["hello", "alone", "hello"]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("mine:nobody", "mine holds nothing under the name 'nobody'; define it there"),
        ("mine.py:NUMBER", "mine.py holds a value of type int under the name 'NUMBER'"),
        ("no.such.module:f", "importing no.such.module failed with ModuleNotFoundError"),
        ("no/such/file.py:f", "importing no/such/file.py failed with FileNotFoundError"),
        ("half.py:first", r"importing half.py failed with ValueError: 'no more' \(.*half.py:2\); expected module:name"),
        ("ends.py:f", "importing ends.py failed with SystemExit"),
    ],
)
def test_code_that_cannot_be_loaded_is_an_error_also_at_a_second_try(directory: Path, spec: str, problem: str) -> None:
    for _ in range(2):
        with pytest.raises(NotLoaded, match=problem):
            load_named(spec)
