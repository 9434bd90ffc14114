"""Several workers of a host decode deltas onto one baseline: each bucket once, versions complete, failures shared."""

import errno
import fcntl
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from protocol.errors import PushError
from protocol.weights import delta, shared_baseline
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.delta import Baseline, receive_changes, send_changes
from protocol.weights.shared_baseline import DIRECTORY, PREFIX, SharedBaseline, worker_baseline
from tests.protocol.local_ranks import joined

pytestmark = pytest.mark.skipif(not DIRECTORY.is_dir(), reason=f"needs {DIRECTORY}")

FIRST = [("weight", torch.randn(700, 500)), ("bias", torch.zeros(7)), ("index", torch.arange(5))]
MANIFEST = make_manifest(FIRST, torch.float32, 1 << 20, "delta")
BUCKETS = split_into_buckets(MANIFEST)
NUM_WORKERS = 2
NOBODY = 65534


def files() -> list[Path]:
    return [*DIRECTORY.glob(f"{PREFIX}-{os.getpid()}-*")]


@pytest.fixture
def shared() -> Iterator[list[SharedBaseline]]:
    baselines = [SharedBaseline(os.getpid(), "a session", MANIFEST) for _ in range(NUM_WORKERS)]
    yield baselines
    for baseline in baselines:
        baseline.close()
    assert not files()


def test_every_version_reaches_all_and_is_decoded_once(
    shared: list[SharedBaseline], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []

    def counted(changes: object, base: torch.Tensor, element_bytes: int) -> None:
        decoded.append(len(base))
        decode(changes, base, element_bytes)

    decode = delta.decode
    monkeypatch.setattr(delta, "decode", counted)
    later = [(name, tensor.clone()) for name, tensor in FIRST]
    later[0][1][::50, ::2] *= 1.5
    mine = Baseline()
    with joined(NUM_WORKERS) as (host, *workers), ThreadPoolExecutor(NUM_WORKERS) as threads:
        for version, tensors in enumerate([FIRST, later, FIRST]):
            receiving = [
                threads.submit(lambda pair: [*receive_changes(pair[0], MANIFEST, pair[1])], pair)
                for pair in zip(workers, shared, strict=True)
            ]
            send_changes(host, BUCKETS, tensors, mine)
            for arrived in (each.result() for each in receiving):
                got = {name: tensor for one in arrived for name, tensor in one.bucket.views(one.buffer)}
                assert all(torch.equal(got[name], tensor) for name, tensor in tensors)
            assert len(decoded) == version * len(BUCKETS) and len(BUCKETS) > 1
            assert len(files()) == (1 if version == 0 else 0), "the file is unlinked once all workers have opened it"


def die_in_the_middle(session: str) -> None:
    with SharedBaseline(os.getppid(), session, MANIFEST).changing(BUCKETS[0]):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_partial_change_of_one_worker_fails_the_push_of_the_others(shared: list[SharedBaseline]) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_in_the_middle, args=("a session",))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    one, other = shared
    with pytest.raises(PushError, match="must start a new session"), one.changing(BUCKETS[0]):
        pytest.fail("it was taken for whole")
    with one.changing(BUCKETS[1]) as is_ours:  # the dead worker's lock is released
        assert is_ours
    with pytest.raises(ValueError, match="checksum"), one.changing(BUCKETS[1]):
        raise ValueError("checksum")
    with pytest.raises(PushError, match="failed during the change"), other.changing(BUCKETS[1]):
        pytest.fail("it was taken for whole")


def test_holding_the_lock_too_long_is_an_error(shared: list[SharedBaseline], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_baseline, "LOCK_TIMEOUT_S", 0.1)
    one, other = shared
    with (
        one.changing(BUCKETS[0]),
        pytest.raises(PushError, match="has held the shared baseline for"),
        other.changing(BUCKETS[1]),
    ):
        pytest.fail("both have it")


def test_without_space_each_worker_has_its_own_baseline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert type(worker_baseline(os.getpid(), 1, "e", MANIFEST)) is Baseline and not caplog.messages
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert type(worker_baseline(os.getpid(), 2, "e", MANIFEST)) is Baseline
    (message,) = caplog.messages
    assert "No space left" in message and "--shm-size" in message and not files()


def test_files_of_killed_servers_are_removed_and_those_of_running_servers_kept(shared: list[SharedBaseline]) -> None:
    """Process ids are not unique: servers in two containers may both be process 1."""
    not_here = 1 << 22  # more than the kernel assigns
    living = SharedBaseline(not_here, "of a container", MANIFEST)
    SharedBaseline(os.getpid(), "another session", MANIFEST).close()
    (file,) = DIRECTORY.glob(f"{PREFIX}-{not_here}-*")
    assert len(files()) == 1
    descriptor = living._file
    del living
    os.close(descriptor)  # as the kernel does at a kill
    SharedBaseline(os.getpid(), "another session", MANIFEST).close()
    assert not file.exists()


def test_a_file_removed_before_its_lock_is_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    flock, removed = fcntl.flock, []

    def remove_first(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not removed:
            removed.extend(files())
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    baseline = SharedBaseline(os.getpid(), "a session", MANIFEST)
    assert files() == removed
    baseline.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_files_of_another_user_do_not_prevent_a_shared_baseline() -> None:
    left = DIRECTORY / f"{PREFIX}-another-users"
    left.touch(mode=0o600)
    os.seteuid(NOBODY)
    try:
        baseline = worker_baseline(os.getpid(), 2, "a session", MANIFEST)
        baseline.close()
        assert isinstance(baseline, SharedBaseline) and left.exists()
    finally:
        os.seteuid(0)
        left.unlink()
