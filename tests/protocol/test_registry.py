"""A transport is a file and a line in the registry: here `pipe`, which nothing else in the code knows."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.errors import ConfigError, PushError
from protocol.transports.collective import Collective, load_transport
from protocol.transports.group import join_collective
from protocol.transports.registry import TRANSPORTS, Entry
from protocol.transports.transport import choose_transport, offered_transports
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.dense import receive_weights, send_weights
from tests.protocol.local_ranks import CPU, joined, rendezvous_host

ROOT = Path(__file__).parent.parent.parent
PIPE = Entry("tests.protocol.pipe_transport:PipeCollective", uses_one_port=True)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "pipe", PIPE)


@pytest.mark.usefixtures("pipe")
def test_weights_travel_over_a_transport_that_was_registered() -> None:
    tensors = [(f"layer {index}", torch.randn(256)) for index in range(5)]
    manifest = make_manifest(tensors, torch.float32, 1024)

    def receive(worker: Collective) -> tuple[list[torch.Tensor], list[int]]:
        arrived = [(bucket.buffer.clone(), bucket.checksum) for bucket in receive_weights(worker, manifest)]
        return [buffer for buffer, _ in arrived], [checksum for _, checksum in arrived]

    with joined(2, "pipe") as (learner, *workers), ThreadPoolExecutor(2) as pool:
        receiving = [pool.submit(receive, worker) for worker in workers]
        sent = send_weights(learner, split_into_buckets(manifest), tensors)
        received = [each.result(60) for each in receiving]
    assert sent.num_bytes >= 5 * 1024 and received[0][1] == received[1][1]
    for buffers, _ in received:
        assert [buffer[:1024].view(torch.float32).tolist() for buffer in buffers] == [t.tolist() for _, t in tensors]


@pytest.mark.usefixtures("pipe")
def test_it_is_offered_and_chosen_by_name_and_says_what_it_cannot_do() -> None:
    assert "pipe" in offered_transports()
    offers = {"learner_transports": ["tcp", "pipe"], "server_transports": ["tcp", "pipe"]}
    assert choose_transport("pipe", "cpu", ["cpu"], **offers) == "pipe"
    assert choose_transport("auto", "cpu", ["cpu"], **offers) == "tcp"
    with pytest.raises(ConfigError, match="over pipe: it connects at most two workers"):
        choose_transport("pipe", "cpu", ["cpu"] * 3, **offers)


@pytest.mark.usefixtures("pipe")
def test_auto_prefers_what_is_first_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    preferred = msgspec.structs.replace(PIPE, is_automatic=True)
    order = {"pipe": preferred} | TRANSPORTS | {"pipe": preferred}
    monkeypatch.setattr("protocol.transports.transport.TRANSPORTS", order)
    offers = {"learner_transports": list(TRANSPORTS), "server_transports": list(TRANSPORTS)}
    assert choose_transport("auto", "cpu", ["cpu"], **offers) == "pipe"


def test_the_config_and_its_help_know_it() -> None:
    script = """
import sys
from protocol.transports.registry import TRANSPORTS, Entry
TRANSPORTS["pipe"] = Entry("tests.protocol.pipe_transport:PipeCollective", uses_one_port=True)
from learner.config import LearnerRun
from protocol.config import load_config
flags = ["deploy/recipes/reverse.toml", "--learner.weight-sync.ports", "29500", "--learner.weight-sync.transport"]
sync = load_config(LearnerRun, [*flags, "pipe"], "test").learner.weight_sync
assert (sync.transport, sync.in_effect().ports) == ("pipe", "29500")
load_config(LearnerRun, ["--help"], "test")
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert f"{{{','.join(['auto', *TRANSPORTS, 'pipe'])}}}" in "".join(ran.stdout.split())


def test_a_transport_that_only_the_learner_knows_is_named_with_those_that_are_known() -> None:
    with rendezvous_host() as hosted:
        rendezvous = msgspec.structs.replace(hosted.rendezvous(1, "tcp"), transport="pigeon")
        with pytest.raises(PushError, match=rf"unknown transport 'pigeon'; expected one of {', '.join(TRANSPORTS)}\. "):
            join_collective("e1", rendezvous, 1, CPU)
        with pytest.raises(PushError, match=r"session e1 was canceled: rank 1 gave up: unknown transport 'pigeon'"):
            hosted.host_collective("e1", msgspec.structs.replace(rendezvous, transport="tcp"), CPU)


@pytest.mark.parametrize(
    ("transport", "secret", "expected"),
    [("ipc", b"extra", 32), ("tcp", b"short", 32), ("tcp", None, 32), ("nccl", None, 128)],
)
def test_a_secret_of_a_wrong_size_is_refused(transport: str, secret: bytes | None, expected: int) -> None:
    with rendezvous_host() as hosted:
        rendezvous = msgspec.structs.replace(hosted.rendezvous(1, "tcp"), transport=transport, secret=secret)
        refusal = rf"transport {transport} expects a secret of {expected} bytes, got {len(secret or b'')}; install"
        with pytest.raises(PushError, match=refusal):
            join_collective("e1", rendezvous, 1, CPU)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_entry_names_a_class(name: str) -> None:
    assert load_transport(name).needs()
