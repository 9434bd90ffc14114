"""HTTP headers that name the policy behind a response of the OpenAI API.

inference_server/http.py writes them, and learner/evaluation reads them. They carry the run and the versions
of the oldest and the newest token.
"""

from urllib.parse import quote

NO_VERSION = -1
"""Version of the model's own weights, before the first weight sync. /metrics uses it too."""
START, END = "X-Slipstream-Policy-Version-Start", "X-Slipstream-Policy-Version-End"
RUN = "X-Slipstream-Run"
"""Run whose weights answered. Two runs, separated by a comma: the weights of another run arrived during the
response. Absent: the weights belong to no run."""


def header_of_runs(*runs: str | None) -> dict[str, str]:
    """Return the header that names these runs, which may be equal.

    Names are percent-encoded where a header cannot hold them.
    """
    names = dict.fromkeys(quote(run) for run in runs if run is not None)
    return {RUN: ", ".join(names)} if names else {}
