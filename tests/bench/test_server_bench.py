"""The server benchmark at a small size: its results are consistent, and both sides get the same requests."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from protocol.codec import encode
from protocol.messages import Sampling
from tests.bench import server_channel, server_generation
from tests.bench.bare_vllm import Generated, Order
from tests.bench.server import headlines, parse_options

pytestmark = pytest.mark.system

CASE = server_generation.CASES[0]


@pytest.fixture
def sender() -> Iterator[server_channel.Sender]:
    sender = server_channel.Sender()
    yield sender
    sender.close()


def test_every_size_is_measured_with_and_without_keys_and_the_cores_are_restored() -> None:
    cores = os.sched_getaffinity(0)
    result = server_channel.measure(2, {"tiny": (3, 5)})
    assert os.sched_getaffinity(0) == cores
    assert set(result) == {"tiny plain", "tiny with keys"}
    for one in result.values():
        assert one["message_bytes"] > 8 * 3 * (4 + 4)
        assert one["over_pyzmq"] == pytest.approx(one["messages_per_s"]["channel"] / one["messages_per_s"]["bare"])
        assert all(rate > 0 for rates in one["messages_per_s_by_repetition"].values() for rate in rates)


def test_messages_that_arrive_changed_are_an_error(
    sender: server_channel.Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = server_channel.Order("channel", num_tokens=3, num_messages=2, keys=None)
    assert sender.turn(order) > 0
    other = server_channel.group(4)
    monkeypatch.setattr(server_channel, "group", lambda num_tokens: other)  # only in the receiving process
    with pytest.raises(AssertionError, match="not what was sent"):
        sender.turn(order)


def test_the_channel_is_compared_by_medians() -> None:
    result = server_channel.compare({"channel": [80.0, 1.0, 90.0], "bare": [100.0, 100.0, 1.0]}, num_tokens=2)
    assert result["over_pyzmq"] == pytest.approx(0.8)
    num_bytes = sum(len(frame) for frame in encode(server_channel.group(2)))
    assert result["bytes_per_s"] == {"channel": 80 * num_bytes, "bare": 100 * num_bytes}


def generated(seconds: float, cpu_seconds: float, *lengths: int) -> Generated:
    return Generated(seconds, cpu_seconds, [[[7] * length] for length in lengths])


def test_generation_is_compared_by_medians_of_the_repetitions() -> None:
    through = [generated(2.0, 1.0, 6, 4), generated(4.0, 2.0, 10), generated(10.0, 3.0, 10)]
    alone = [generated(1.6, 0.5, 6, 4), generated(1.0, 1.6, 10), generated(9.0, 0.9, 10)]
    result = server_generation.compare(through, alone)
    assert result["over_bare_vllm"] == pytest.approx(1.6 / 2)
    assert result["bare_cpu_over_servers"] == pytest.approx(0.5)
    assert result["tokens_per_s"] == {"server": pytest.approx(10 / 4), "bare": pytest.approx(10 / 1.6)}
    assert result["same_tokens"] and result["num_tokens"] == {"server": [10, 10, 10], "bare": [10, 10, 10]}
    assert not server_generation.compare(through, [*alone[:2], generated(1.0, 1.0, 9, 1)])["same_tokens"]


def test_no_prompt_and_no_seed_is_used_twice() -> None:
    orders = [CASE.order(repetition, seeded=True) for repetition in range(3)]
    prompts = [tuple(prompt) for order in orders for prompt in order.prompts]
    assert len(set(prompts)) == len(prompts) == 3 * CASE.num_groups
    seeds = [
        sampling.seed + completion
        for order in orders
        for sampling in order.samplings
        for completion in range(sampling.num_completions)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(sampling.seed is None for sampling in CASE.order(0, seeded=False).samplings)


class _Side:
    """A side that records its requests."""

    def __init__(self, name: str, requests: list[tuple[str, int | None]]) -> None:
        self._name, self._asked = name, requests

    def generate(self, order: Order) -> Generated:
        sampling: Sampling = order.samplings[0]
        self._asked.append((self._name, sampling.seed))
        return generated(1.0, 1.0, len(self._asked))


@contextmanager
def _sides(requests: list[tuple[str, int | None]]) -> Iterator[tuple[_Side, _Side]]:
    requests.append(("started", None))
    yield _Side("server", requests), _Side("bare", requests)


def test_each_repetition_has_new_processes_whose_first_turn_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests: list[tuple[str, int | None]] = []
    firsts: list[bool] = []

    def both_sides(model: str, directory: Path, *, server_first: bool) -> AbstractContextManager[tuple[_Side, _Side]]:
        firsts.append(server_first)
        return _sides(requests)

    monkeypatch.setattr(server_generation, "both_sides", both_sides)
    monkeypatch.setattr(server_generation, "save", lambda config, directory: str(directory))
    result = server_generation.measure(CASE, tmp_path, 2)
    first, second = (repetition * CASE.num_groups * server_generation.NUM_COMPLETIONS for repetition in (1, 2))
    assert firsts == [True, False]
    assert requests == [
        ("started", None), ("server", 0), ("bare", 0), ("server", first), ("bare", first), ("server", None),
        ("bare", None),
        ("started", None), ("bare", 0), ("server", 0), ("bare", second), ("server", second), ("bare", None),
        ("server", None),
    ]  # fmt: skip
    assert result["seeded"]["num_tokens"] == {"server": [4, 12], "bare": [5, 11]}
    assert result["unseeded"]["num_tokens"] == {"server": [6, 14], "bare": [7, 13]}


def test_the_headlines_are_of_the_smallest_model_and_of_all_messages_together() -> None:
    channel = {"small plain": {"over_pyzmq": 0.5}, "large plain": {"over_pyzmq": 0.98}}
    of_case = {"over_bare_vllm": 0.9, "same_tokens": True}
    generation = {"small": {"seeded": of_case}, "large": {"seeded": of_case | {"over_bare_vllm": 1.0}}}
    found = headlines({"channel": channel, "generation": generation})
    assert found["over_bare_vllm"] == 0.9 and found["same_tokens"]
    assert found["channel_over_pyzmq"] == pytest.approx(0.7) and found["channel_over_pyzmq_worst"] == 0.5
    skipped = headlines({"channel": channel, "generation": "skipped"})
    assert skipped["over_bare_vllm"] is None and skipped["same_tokens"] is None


def test_generation_can_be_skipped() -> None:
    options = parse_options(["--skip-generation", "--repetitions", "5", "--json"])
    assert options.skip_generation and options.repetitions == 5 and options.json
