"""The channel over real sockets: delivery, malformed peers, lost peers."""

import asyncio
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from protocol.channel.keys import learner_keys, make_keys, server_keys
from protocol.channel.loop_socket import MAX_TURN_S, LoopSocket
from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.errors import ConfigError, DeadlineExceeded
from protocol.messages import Ack, Refused
from tests.event_loop import in_event_loop

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0


@contextmanager
def channels() -> Iterator[tuple[ServerChannel, LearnerChannel]]:
    """Yield both ends, for use in an event loop."""
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server, closing(LearnerChannel(server.endpoint)) as learner:
        yield server, learner


@in_event_loop
async def test_a_send_that_ends_during_its_cancellation_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    with channels() as (_, learner):
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(LoopSocket, "send", lambda *args: sent)
        sending = asyncio.create_task(learner.send(Ack(group_ids=[]), TIMEOUT_S))
        await asyncio.sleep(0)
        sent.set_result(None)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending


@in_event_loop
async def test_a_frame_above_the_limit_closes_the_connection_of_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_FRAME_BYTES", 1000)
    with channels() as (server, learner), zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ended:
            stranger.connect(server.endpoint)
            stranger.send(b"x" * 2000)
            assert ended.poll(int(1000 * TIMEOUT_S))
        stranger.close(linger=0)
        await learner.send(Ack(group_ids=["mine"]), TIMEOUT_S)
        _, message = await server.receive()
        assert isinstance(message, Ack) and message.group_ids == ["mine"]


def put_a_file_in_place_of(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def make_the_keys_unreadable_in(folder: Path) -> None:
    for key in list(folder.glob("*.pub")):
        key.unlink()
        key.symlink_to("/proc/self/mem")  # reading it gives EIO


@pytest.mark.parametrize("break_folder", [put_a_file_in_place_of, make_the_keys_unreadable_in])
@in_event_loop
async def test_a_learner_is_admitted_while_the_keys_cannot_be_read(
    tmp_path: Path, break_folder: Callable[[Path], None]
) -> None:
    make_keys(tmp_path / "keys")
    keys, of_learner = server_keys(str(tmp_path / "keys")), learner_keys(str(tmp_path / "keys"))
    with closing(ServerChannel("tcp://127.0.0.1:*", keys)) as server:
        break_folder(keys.allowed_in)
        with closing(LearnerChannel(server.endpoint, of_learner)) as learner:
            await learner.send(Ack(group_ids=["mine"]), 5.0)
            _, message = await server.receive()
            assert isinstance(message, Ack)


@in_event_loop
async def test_sending_to_a_lost_peer_reports_it() -> None:
    with channels() as (server, learner):
        await learner.send(Ack(group_ids=[]), TIMEOUT_S)
        peer, _ = await server.receive()
        learner.close()
        while await server.send(peer, Refused(reason="are you there?")):
            await asyncio.sleep(0.05)


@in_event_loop
async def test_a_full_queue_does_not_starve_other_tasks() -> None:
    with channels() as (server, learner):
        for _ in range(50):
            await learner.send(Ack(group_ids=[]), TIMEOUT_S)
        await asyncio.sleep(0.5)  # all messages are in the queue now
        num_received = 0
        had_its_turn_after = []

        async def other() -> None:
            while num_received < 50:
                had_its_turn_after.append(num_received)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(50):
            await server.receive()
            num_received += 1
            time.sleep(MAX_TURN_S / 4)  # the handling of a message
        turns = [0, *had_its_turn_after, 50]
        assert max(later - earlier for earlier, later in itertools.pairwise(turns)) < 10
        await task


def test_a_peer_that_fills_the_queue_and_disconnects_does_not_end_the_server() -> None:
    """If the server sent pings, libzmq 4.3.5 would abort its process; so the server runs in another process here."""
    script = f"""
import asyncio, zmq
from protocol.channel.sockets import HEARTBEAT_INTERVAL_MS, SERVER_RECEIVE_HIGH_WATER_MARK, ServerChannel

async def run():
    server = ServerChannel("tcp://127.0.0.1:*")
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDHWM, 1)
    peer.connect(server.endpoint)
    num_sent = 0
    while num_sent <= SERVER_RECEIVE_HIGH_WATER_MARK or peer.poll(500, zmq.POLLOUT):
        peer.send(b"x" * {10**5})
        num_sent += 1
    peer.close(linger=0)
    context.term()
    await asyncio.sleep(3 * HEARTBEAT_INTERVAL_MS / 1000)
    server.close()
    print("the queue was full after", num_sent)

asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "the queue was full" in done.stdout, done.stderr


@in_event_loop
async def test_sending_without_a_server_ends_at_the_deadline() -> None:
    with (
        closing(LearnerChannel("tcp://127.0.0.1:9")) as learner,
        pytest.raises(DeadlineExceeded, match=r"Ack could not be sent to tcp://127.0.0.1:9 within 0.2 s"),
    ):
        await learner.send(Ack(group_ids=[]), 0.2)


@in_event_loop
async def test_sending_ends_with_the_channel() -> None:
    channel = LearnerChannel("tcp://127.0.0.1:9")
    sending = asyncio.create_task(channel.send(Ack(group_ids=[]), timeout_s=30))
    await asyncio.sleep(0.1)
    channel.close()
    with pytest.raises(DeadlineExceeded, match=r"Ack was not sent: the channel to tcp://127.0.0.1:9 is closed"):
        await sending


@in_event_loop
async def test_an_invalid_or_used_endpoint_is_an_error_with_the_endpoint() -> None:
    with channels() as (first, _):
        with pytest.raises(ConfigError, match=f"cannot listen on {first.endpoint}.*already in use.*`endpoint`"):
            ServerChannel(first.endpoint)
        for channel in (ServerChannel, LearnerChannel):
            with pytest.raises(ConfigError, match="endpoint = 'ipc:///tmp/x' is not valid; expected tcp://HOST:PORT"):
                channel("ipc:///tmp/x")
