"""Malformed messages by the thousand against a learner that trains: whoever sits on its line mixes them with the server's."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import zmq

from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Group, GroupFailed, Message, Pulse, ServerMessage, Welcome
from tests.learner.model_engine import tiny_server
from tests.learner.runs import GROUPS_PER_STEP, make_run, metrics_of
from tests.malformed import COMPLETION, TO_LEARNER, Frames, without_end
from tests.memory import MemoryWatch

BATCH = 100
NUM_MESSAGES, NUM_STEPS = 3_000, 8


class Meddler:
    """Between learner and server: carries what both say, and says more to the learner until it has said enough."""

    def __init__(self, server: str, num_messages: int) -> None:
        self._context = zmq.Context()
        self._learner = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._learner.bind_to_random_port('tcp://127.0.0.1')}"
        self._server = self._context.socket(zmq.DEALER)
        self._server.connect(server)
        self._messages, self._num_messages = harmless(without_end(TO_LEARNER, seed=0)), num_messages
        self.num_sent = self.num_malformed = 0
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Meddler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        peer, waits_for = b"", b""
        poller = zmq.Poller()
        poller.register(self._learner, zmq.POLLIN)
        poller.register(self._server, zmq.POLLIN)
        while not self.stopped.is_set():
            ready = dict(poller.poll(1))
            if self._learner in ready:
                peer, *frames = self._learner.recv_multipart()
                if waits_for and waits_for in frames[0]:
                    waits_for = b""  # the learner has read the batch
                else:
                    self._server.send_multipart(frames)
            if self._server in ready and peer:
                self._learner.send_multipart([peer, *self._server.recv_multipart()])
            if peer and not waits_for and self.num_sent < self._num_messages:
                waits_for = self._say_more(peer)

    def _say_more(self, peer: bytes) -> bytes:
        """Send a batch; return the id of the group at its end, which the learner did not ask for and so only acknowledges."""
        for _ in range(BATCH):
            frames, is_malformed = next(self._messages)
            self._learner.send_multipart([peer, *frames])
            self.num_sent += 1
            self.num_malformed += is_malformed
        group_id = f"unasked-{self.num_sent}"
        last = Group(group_id=group_id, entered_version=0, completions=[COMPLETION, COMPLETION])
        self._learner.send_multipart([peer, *encode(last)])
        return group_id.encode()


def harmless(messages: Iterator[Frames]) -> Iterator[tuple[Frames, bool]]:
    """Leave out the Welcomes that still are some: by that word of another server all weights would be pushed again; and the word that
    the server ends, after which the learner would wait for another.
    """
    for frames in messages:
        try:
            message: Message = decode(frames, ServerMessage)  # type: ignore[arg-type]
        except ProtocolError:
            yield frames, True
            continue
        ends = isinstance(message, Pulse) and message.is_draining
        ends |= isinstance(message, GroupFailed) and message.code == "draining"
        if not isinstance(message, Welcome) and not ends:
            yield frames, False


def test_malformed_messages_are_refused_and_counted_and_training_goes_on(tmp_path: Path) -> None:
    with tiny_server() as server, Meddler(server.endpoint, NUM_MESSAGES) as meddler:
        run = make_run(tmp_path, meddler.endpoint, steps=NUM_STEPS)
        memory = MemoryWatch(lambda: meddler.num_sent)
        train(run, resume=False)
        growth_mib = memory.stop()
    assert meddler.num_sent == NUM_MESSAGES, "the run was over too soon; give it more steps"
    assert metrics_of(run)[-1]["rollout/messages_refused"] == meddler.num_malformed > 0.5 * NUM_MESSAGES
    with closing(Ledger(Path(run.run_dir) / "ledger.db", read_only=True)) as ledger:
        counts = ledger.counts()
    assert (counts.lost, counts.duplicated, counts.consumed) == (0, 0, GROUPS_PER_STEP * NUM_STEPS)
    assert growth_mib < 100.0  # a run of seconds still finds its size
