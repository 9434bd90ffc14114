"""Names and signatures read from a package without importing it, from a folder and from a wheel."""

import zipfile
from pathlib import Path

import pytest

from inference_server.engine.package_source import Definition, PackageSource

FILES = {
    "__init__.py": """
        from .core import Engine as PublicEngine, run
        from .plain import *
        import heavy_library_that_is_not_there
        raise RuntimeError("this must not be imported")
    """,
    "core.py": """
        from __future__ import annotations
        import pkg.base as base
        from pkg import flags
        from pkg.base import Base
        from elsewhere import Stranger

        class Engine(base.Middle["int"]):
            def run(self, first, /, second, *, third=None, **rest): ...
            @property
            def state(self): ...
            @staticmethod
            def start(place, speed=1): ...

        class Options(Base):
            size: int
            colour: str = "red"

        class Foreign(Stranger):
            pass

        async def run(engine, *, deadline): ...
    """,
    "base.py": """
        from typing import ClassVar, TYPE_CHECKING
        class Base:
            registry: ClassVar[dict] = {}
            name: str
        class Middle(Base):
            def __init__(self, config, mode="a"):
                self.config = config
                if mode:
                    self.queue, self.mode = [], mode
            def stop(self, timeout): ...
        if TYPE_CHECKING:
            from pkg.plain import Chosen
        else:
            try:
                from fast import Chosen
            except ImportError:
                def chosen(x): ...
    """,
    "plain.py": """
        LIMIT: int = 3
        FIRST, SECOND = 1, 2
        def chosen_by_star(x, *more): ...
        class Chosen: ...
    """,
    "flags/__init__.py": "",
    "flags/deep.py": "from ..core import Engine\nfrom . import missing",
    "circle.py": "from pkg.circle import around",
}


@pytest.fixture(params=["folder", "wheel"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> PackageSource:
    files = {
        f"pkg/{name}": "\n".join(line[8:] if line.startswith(" " * 8) else line for line in text.splitlines())
        for name, text in FILES.items()
    }
    if request.param == "wheel":
        with zipfile.ZipFile(tmp_path / "pkg-1-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
        return PackageSource("pkg", zipfile.Path(tmp_path / "pkg-1-py3-none-any.whl"))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return PackageSource("pkg", tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("pkg.core", "run", Definition(("engine", "deadline"))),
        ("pkg", "run", Definition(("engine", "deadline"))),
        ("pkg", "PublicEngine.run", Definition(("first", "second", "third"), takes_any=True)),
        ("pkg.flags.deep", "Engine.start", Definition(("place", "speed"))),
        ("pkg.core", "Engine", Definition(("config", "mode"))),
        ("pkg.core", "Engine.stop", Definition(("timeout",))),
        ("pkg.core", "Engine.queue", Definition()),
        ("pkg.core", "Engine.name", Definition()),
        ("pkg.core", "Options", Definition(("name", "size", "colour"))),
        ("pkg", "chosen_by_star", Definition(("x",))),
        ("pkg", "SECOND", Definition()),
        ("pkg.base", "chosen", Definition(("x",))),
        ("pkg.base", "Chosen", Definition()),
        ("pkg.core", "base", Definition()),
        ("pkg", "flags", Definition()),
    ],
)
def test_a_name_is_found_wherever_it_is_defined(
    source: PackageSource, module: str, name: str, expected: Definition
) -> None:
    assert source.find(module, name) == expected


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pkg.core", "Engine.restart"), ("pkg.core", "engine"), ("pkg.gone", "run"), ("pkg.circle", "around"),
        ("other", "run"),
        ("pkg.core", "run.inner"), ("pkg.flags.deep", "missing"), ("pkg.core", "Foreign.anything"),
    ],
)  # fmt: skip
def test_a_missing_name_is_none(source: PackageSource, module: str, name: str) -> None:
    assert source.find(module, name) is None
