"""The headers in which an answer of the server's OpenAI side names the policy that sampled it: its run, and versions of it.

inference_server/http.py writes them, learner/evaluation reads them: the oldest token's version, and the newest's.
"""

from urllib.parse import quote

NO_VERSION = -1
"""What the model's own weights are called, before a learner has pushed, as in /metrics."""
START, END = "X-Slipstream-Policy-Version-Start", "X-Slipstream-Policy-Version-End"
RUN = "X-Slipstream-Run"
"""The run whose weights answered; two, with a comma between them, when another run's came meanwhile; absent: no run's."""


def header_of_runs(*runs: str | None) -> dict[str, str]:
    """Return the header that names these runs, which may be equal, percent-encoded where a header may not hold them."""
    names = dict.fromkeys(quote(run) for run in runs if run is not None)
    return {RUN: ", ".join(names)} if names else {}
