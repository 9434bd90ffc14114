"""The configs of both sides that `colocate` places on a node."""

from typing import Any

import msgspec

from inference_server.config import ServerRun
from learner.config import LearnerRun

SHARED = {"model": "tiny:digits", "run_dir": "runs/x"}


def a_server(*endpoints: str, **server: Any) -> ServerRun:
    return msgspec.convert(SHARED | {"endpoints": endpoints, "server": server}, ServerRun)


def a_learner(**learner: Any) -> LearnerRun:
    settings = {"steps": 1, "data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}}
    return msgspec.convert(SHARED | {"learner": settings | learner}, LearnerRun)
