"""Start host.py in an interpreter without Slipstream's packages.

The interpreter needs msgspec and the environment's own packages.

    own_interpreter.py PIPE LIFELINE FACTORY TAKES_TEXT TOOL…        process.py is the other end

Invariant: only `learner` itself can be imported, not what is installed alongside it.
"""

import importlib.util
import io
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def main(pipe: str, lifeline: str, factory: str, takes_text: str, *tools: str) -> None:
    """Serve until the learner is gone. sandbox/start.py made this process a group leader."""
    sys.path[0] = os.getcwd()  # not the folder of this file
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the process may be killed at any moment
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the learner acts on signals sent to all, as by systemd
    spec = importlib.util.spec_from_file_location("learner", PACKAGE / "__init__.py")
    assert spec is not None
    sys.modules["learner"] = importlib.util.module_from_spec(spec)
    from learner.sandbox.descendants import adopt_orphans, end_with_descendants

    adopt_orphans()
    threading.Thread(target=end_with, args=(int(lifeline),), daemon=True).start()
    try:
        from learner.environments.host import serve
    except ImportError as error:
        sys.exit(f"learner.environment.python: {sys.executable} has no {error.name}; install it there")
    serve(Connection(int(pipe)), factory or None, tools, takes_text == "True")
    end_with_descendants()  # the learner is gone


def end_with(lifeline: int) -> None:
    """End this process when the learner closes the other end of the lifeline."""
    from learner.sandbox.descendants import end_with_descendants

    os.read(lifeline, 1)
    end_with_descendants()


if __name__ == "__main__":
    main(*sys.argv[1:])
