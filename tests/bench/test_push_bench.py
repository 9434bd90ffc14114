"""The push benchmark's own parts, run small: what it reports fits together."""

import argparse
from collections.abc import Iterator

import pytest
import torch
from transformers import GPT2Config

from learner.servers.weight_transfer import SyncReport
from tests.bench import push_delta, push_fleet, push_gpu, push_transport
from tests.bench.push import as_text, headlines, parse_options
from tests.bench.push_engine import cost, medians
from tests.bench.push_peer import Order, Peer

pytestmark = pytest.mark.system

CPU = torch.device("cpu")
BUCKET_BYTES = 8 << 20


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer("tcp", CPU, CPU)
    yield peer
    peer.close()


def test_the_transport_of_one_layer_is_measured_against_as_many_raw_bytes() -> None:
    result = push_transport.measure(1, 2, BUCKET_BYTES)
    layer = push_transport.model_tensors(1, torch.bfloat16, CPU)
    assert result["num_bytes"] == pytest.approx(sum(tensor.nbytes for _, tensor in layer), abs=1000)
    low, high = sorted(result["dense_over_raw_by_round"])
    assert 0 < low <= result["dense_over_raw"] <= high
    assert result["cast_over_raw"] > 0 and result["over_raw_without_checksums"] > 0


def test_a_size_is_made_of_whole_layers_of_the_published_config() -> None:
    # hidden 896, intermediate 4864, two heads of 64 for keys and for values: q and o, k and v, three of the MLP
    matrices = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    layer = matrices + 896 + 2 * 128 + 2 * 896
    tensors = push_transport.model_tensors(2 * 2 * layer, torch.bfloat16, CPU)
    assert sum(tensor.numel() for _, tensor in tensors) == 2 * layer
    assert {name.split(".")[2] for name, _ in tensors} == {"0", "1"}


def test_a_push_that_the_peer_cannot_have_got_right_is_an_error(peer: Peer) -> None:
    transfers = push_transport.Transfers(peer, [("weight", torch.ones(1000))], BUCKET_BYTES)
    assert transfers.seconds("push") > 0
    transfers._peer = _Lying(peer)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="arrived other"):
        transfers.seconds("push")


class _Lying:
    """A peer that has always got something else."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self.collective = peer, peer.collective

    def order(self, order: Order) -> None:
        self._peer.order(order)

    def answer(self) -> str:
        self._peer.answer()
        return "other"


def test_the_delta_of_small_steps_is_small_and_both_ways_carry_the_same_weights() -> None:
    config = GPT2Config(vocab_size=500, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    result = push_delta.measure(2, BUCKET_BYTES, config)
    assert result["num_parameters"] * 2 <= result["dense_bytes"] <= result["num_parameters"] * 2 + 2000
    assert 0 < result["delta_bytes"] < 0.2 * result["dense_bytes"]
    assert len(result["delta_bytes_over_dense_by_step"]) == 2
    assert result["delta_wins_below_gbit_per_s"] == pytest.approx(
        result["dense_bytes"] * 8e-9 / result["delta_seconds"]
    )


def test_the_learner_is_blocked_for_a_share_of_the_push_that_its_copy_is_part_of() -> None:
    report = SyncReport(total_s=0.8, transfer_s=0.3, load_s=0.2, stall_s=0.25, num_bytes=10, pause_s=0.01)
    numbers = cost(report, blocked_s=0.2, before_s=0.2)
    assert numbers["learner_blocked_over_push"] == pytest.approx(0.2)
    assert numbers["stall_over_push"] == pytest.approx(0.25)
    assert medians([numbers, numbers])["num_pushes"] == 2


@pytest.mark.slow
def test_a_push_to_two_servers_is_measured_at_each() -> None:
    result = push_fleet.run(most=2, size_mib=8, num_pushes=1)
    assert result["by_servers"].keys() == {"1", "2"}
    for num_servers, of_them in result["by_servers"].items():
        assert len(of_them["stall_seconds"]) == int(num_servers) and all(
            0 < stall <= of_them["seconds"] for stall in of_them["stall_seconds"]
        )


def test_what_was_left_out_is_none_among_the_headlines_and_every_number_is_in_the_table() -> None:
    result = {
        "transport": [{"size_mib": 1024, "dense_over_raw": 0.5, "cast_over_raw": 0.25}],
        "engine": "skipped",
        "delta": {"delta_bytes_over_dense": 0.02},
    }
    found = headlines(result)
    assert found["dense_over_raw"] == 0.5 and found["stall_over_push"] is None and found["tiny_stall_ms"] is None
    assert "transport.1024.cast_over_raw" in as_text(result) and "0.250" in as_text(result)


def test_without_a_gpu_that_part_says_so() -> None:
    if not torch.cuda.is_available():
        assert push_gpu.measure(1, 1, BUCKET_BYTES) == "skipped: no GPU"


def test_sizes_are_options() -> None:
    options: argparse.Namespace = parse_options(["--sizes-mib", "64", "128", "--skip-engine"])
    assert options.sizes_mib == [64, 128] and options.skip_engine and not options.json
