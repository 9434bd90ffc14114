"""A fake server or rank: `python part.py NAME DIRECTORY VERB BEHAVIOR [BEHAVIOR ...]`, one behavior per start.

serve      until a signal comes
end N      after a moment, with exit code N
end N NAME some time after the part NAME has ended, with exit code N
deaf       notes signals and lives on
Every event is a line of DIRECTORY/events; a start is `NAME VERB`.
"""

import os
import signal
import sys
import time
from pathlib import Path

A_MOMENT_S, SOME_TIME_S = 0.3, 1.0
LIFE_S = 60.0


def main() -> None:
    name, directory, verb, *behaviors = sys.argv[1:]
    events = Path(directory, "events")

    def note(what: str) -> None:
        with events.open("a") as file:
            file.write(f"{name} {what}\n")

    def on_signal(number: int, frame: object) -> None:
        note(signal.Signals(number).name)
        if behavior != "deaf":
            sys.exit(0)

    earlier = events.read_text().splitlines() if events.exists() else []
    num_lives = sum(line in (f"{name} started", f"{name} resumed") for line in earlier)
    behavior = behaviors[min(num_lives, len(behaviors) - 1)]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    Path(directory, f"{name}.pid").write_text(str(os.getpid()))
    note(verb)
    print(f"{name} says hello", flush=True)
    if behavior.startswith("end"):
        _, code, *after = behavior.split()
        while not {f"{name} ended" for name in after} <= set(events.read_text().splitlines()):
            time.sleep(0.05)
        time.sleep(SOME_TIME_S if after else A_MOMENT_S)
        note("ended")
        sys.exit(int(code))
    end_at = time.monotonic() + LIFE_S
    while time.monotonic() < end_at:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
