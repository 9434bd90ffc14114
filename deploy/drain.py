"""Wait until a server has nothing under way: `python -m deploy.drain [URL] [TIMEOUT_S]`, before it is ended.

Asks /status until no group runs, none waits for its acknowledgement and no push is under way, or the time is over. Then nothing
has to be sampled anew; what is cut off is lost for nobody either, for the learner asks for it again. Always exits 0 but for wrong
arguments: whoever ends a server would end it all the same.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 2.0
POLL_S = 0.5


def under_way(status: dict[str, Any]) -> str | None:
    """What a server would leave undone; None if nothing."""
    if status["push_state"] not in ("idle", "torn"):
        return f"a push ({status['push_state']})"
    num_groups = status["groups_running"] + status["groups_unacked"]
    return f"{num_groups} groups" if num_groups else None


def drain(url: str, timeout_s: float) -> str:
    """Wait; return how it ended, in one line."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/status", timeout=ASK_TIMEOUT_S) as answer:
                left = under_way(json.load(answer))
        except (urllib.error.URLError, OSError) as error:
            return f"{url}/status does not answer ({error}): nothing to wait for"
        if left is None:
            return "drained: nothing is under way"
        if time.monotonic() > deadline:
            return f"not drained after {timeout_s:g} s: {left}; a longer time is the second argument"
        time.sleep(POLL_S)


def main() -> None:
    arguments = sys.argv[1:]
    try:
        url, timeout_s = (arguments + [URL, str(TIMEOUT_S)][len(arguments) :])[:2]
        print(drain(url.rstrip("/"), float(timeout_s)))
    except ValueError:
        print("usage: python -m deploy.drain [URL] [TIMEOUT_S]", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
