"""The weights read once for several pushes: everybody gets everything, and a slow one costs the others little."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from learner.servers.fan_out import FanOut, Share
from protocol.errors import PushError

TIMEOUT_S = 60.0
TENSOR_BYTES = 400


def tensors(num: int, read: list[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(num):
        if read is not None:
            read.append(str(index))
        yield str(index), torch.full((TENSOR_BYTES // 4,), float(index))


def values(share: Share) -> list[float]:
    try:
        return [float(tensor[0]) for _, tensor in share]
    finally:
        share.close()


@pytest.mark.parametrize("window_bytes", [1, TENSOR_BYTES, 3 * TENSOR_BYTES, 10**9])
def test_every_share_gives_every_tensor_in_order_and_each_is_read_once(window_bytes: int) -> None:
    fan_out, read = FanOut(4, window_bytes, TIMEOUT_S, TIMEOUT_S), list[str]()
    with ThreadPoolExecutor(4) as threads:
        came = [threads.submit(values, share) for share in fan_out.shares]
        fan_out.read(tensors(30, read))
        assert [one.result(TIMEOUT_S) for one in came] == [list(map(float, range(30)))] * 4
    assert read == list(map(str, range(30)))


def test_the_fastest_is_never_further_ahead_than_the_window() -> None:
    fan_out, read = FanOut(2, 3 * TENSOR_BYTES, TIMEOUT_S, TIMEOUT_S), list[str]()
    fast, slow = fan_out.shares
    reader = threading.Thread(target=fan_out.read, args=(tensors(10, read),), daemon=True)
    reader.start()
    for index in range(3):
        assert next(fast)[0] == str(index)
    time.sleep(0.2)
    assert len(read) == 4, "three wait for the slow one, and the next for room"
    assert next(slow)[0] == "0"
    assert next(fast)[0] == "3"
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(values, (slow, fast))) == [list(map(float, range(first, 10))) for first in (1, 4)]
    reader.join(TIMEOUT_S)


def test_one_that_ends_early_holds_nobody_up_and_when_all_have_nothing_more_is_read() -> None:
    fan_out, read = FanOut(2, TENSOR_BYTES, TIMEOUT_S, TIMEOUT_S), list[str]()
    one, other = fan_out.shares
    reader = threading.Thread(target=fan_out.read, args=(tensors(100, read),), daemon=True)
    reader.start()
    next(one)
    one.close()
    assert [next(other)[0] for _ in range(5)] == list(map(str, range(5)))
    other.close()
    reader.join(TIMEOUT_S)
    assert not reader.is_alive() and len(read) < 10


def test_one_that_keeps_the_others_waiting_is_cut_off() -> None:
    fan_out = FanOut(3, TENSOR_BYTES, TIMEOUT_S, patience_s=1.0)
    with ThreadPoolExecutor(3) as threads:
        came = [threads.submit(values, share) for share in fan_out.shares[:2]]
        fan_out.read(tensors(10))
        assert [one.result(TIMEOUT_S) for one in came] == [list(map(float, range(10)))] * 2
    with pytest.raises(
        PushError, match=r"kept other servers waiting for 1 s \(learner\.weight_sync\.straggler_timeout_s\)"
    ):
        next(fan_out.shares[2])


def test_nobody_is_cut_off_while_all_are_slow() -> None:
    fan_out = FanOut(2, TENSOR_BYTES, TIMEOUT_S, patience_s=0.5)
    reader = threading.Thread(target=fan_out.read, args=(tensors(3),), daemon=True)
    reader.start()
    time.sleep(1.0)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(values, fan_out.shares)) == [[0.0, 1.0, 2.0]] * 2
    reader.join(TIMEOUT_S)


def test_whoever_waits_for_room_looks_about_and_may_cut_off_the_only_one_that_is_late() -> None:
    def look() -> None:
        fan_out.shares[0].cut_off("it is late")

    fan_out = FanOut(1, TENSOR_BYTES, TIMEOUT_S, TIMEOUT_S, look)
    fan_out.read(tensors(3))
    with pytest.raises(PushError, match="it is late"):
        next(fan_out.shares[0])


def test_a_share_moves_by_what_it_takes_and_is_not_blamed_for_what_is_not_there() -> None:
    fan_out = FanOut(1, 10**9, TIMEOUT_S, TIMEOUT_S)
    (share,) = fan_out.shares
    waiting = threading.Thread(target=next, args=(share,), daemon=True)
    waiting.start()
    give_up_at = time.monotonic() + TIMEOUT_S
    while not share.is_starved:
        assert time.monotonic() < give_up_at
    before = time.monotonic()
    assert share.moved_at >= before
    fan_out.read(tensors(1))
    waiting.join(TIMEOUT_S)
    assert not share.is_starved and before <= share.moved_at <= time.monotonic()
    after = share.moved_at
    assert share.moved_at == after


def test_a_policy_that_cannot_be_read_ends_every_push() -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(2)
        raise RuntimeError("no such shard")

    fan_out = FanOut(2, 10**9, TIMEOUT_S, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="no such shard"):
        fan_out.read(broken())
    for share in fan_out.shares:
        with pytest.raises(PushError, match="could not be read: no such shard"):
            next(share)
