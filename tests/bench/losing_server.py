"""`python -m inference_server` that loses one weight sync: it receives and reports LOST_VERSION without loading it.

vLLM's processes are spawned and import this module again, so each has the change. No test may import it.
"""

import os

from inference_server.__main__ import main
from inference_server.engine.interface import PushOrder
from inference_server.engine.worker import PushWorker
from tests.inference_server.broken_transfer import LOST_VERSION

load = PushWorker._load


def load_unless_lost(self: PushWorker, order: PushOrder) -> float:
    if order.version != int(os.environ[LOST_VERSION]):
        return load(self, order)
    for arrived in self.receiver.buckets(order):
        del arrived
    return 0.0


PushWorker._load = load_unless_lost  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
