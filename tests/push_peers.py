"""Both sides of a push as separate processes, for tests that kill or stop them at a state of the transfer (peer.py).

test ── Pipe ──▶ learner: Rollouts, WeightSync ══ zmq, tcp ══ server: Server, InPlaceEngine ◀── Pipe
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

import inference_server.server
import learner.servers.link
import learner.servers.sync_source
import protocol.transports.tcp
from inference_server.config import ServerConfig
from inference_server.engine.interface import EngineDead, PushOrder
from learner.config import LearnerRun
from learner.prompts.prompts import Prompt, Prompts
from learner.rewards.scoring import Scorer
from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.rollouts.rollout_group import RolloutGroup
from learner.rollouts.rollouts import Rollouts
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from learner.servers.weight_sync import WeightSync
from protocol.errors import SlipstreamError
from protocol.messages import PROTOCOL_VERSION, Hello, ModelFingerprint, Sampling, new_learner_id
from protocol.weights.buckets import make_manifest
from tests.fakes import ScriptedEngine, serving
from tests.fingerprint import MODEL
from tests.learner.runs import make_run
from tests.push_traps import PUSH_TIMEOUT_S, TRAPS, Trap, TrappedTcp

ANSWER_TIMEOUT_S = 120.0
DEAD_AFTER_S = 1.0
"""Replaces the link's 3 s. Heartbeats are ten times as frequent."""
PAUSE_TIMEOUT_S = 4.0
"""Longer than a trap that hangs a call and then lets its engine continue."""
NUM_TENSORS = 6
TENSOR_BYTES = 2 << 20
"""Large enough that all tensors exceed the kernel's buffers, so that a sender cannot finish before its receiver."""

NamedTensors = list[tuple[str, torch.Tensor]]


def weights(version: int) -> NamedTensors:
    """Return tensors that each start with their version."""
    steps_N = torch.arange(TENSOR_BYTES // 4, dtype=torch.float32)
    return [(f"layer.{i}", steps_N * (i + 1) + version) for i in range(NUM_TENSORS)]


def gpt2_weights(version: int) -> NamedTensors:
    """Return the weights of a tiny model with this seed, for the real server."""
    from tests.inference_server import tiny_gpt2

    return tiny_gpt2.named_tensors(tiny_gpt2.make_model(seed=version))


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a digest that is independent of the checksums in a push."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensor.contiguous().numpy())
    return sha.hexdigest()


class InPlaceEngine(ScriptedEngine):
    """Loads every bucket on arrival, as vLLM does. Its completions show the current version of each tensor."""

    def __init__(self) -> None:
        super().__init__(complete=self._show)
        self.num_seen = self.num_torn = 0

    def _show(self, prompt: list[int], index: int) -> list[int]:
        return [int(tensor.flatten()[0]) % self.limits.vocab_size for _, tensor in sorted(self.weights.items())]

    async def evaluate(self) -> None:
        """Sample continuously, as an evaluation does, and compare tokens with labels."""
        while True:
            await asyncio.sleep(0.01)
            if self.version is None:
                continue
            sampling = Sampling(num_completions=1, max_tokens=NUM_TENSORS)
            try:
                (completion,), _ = await self.sample(np.array([1], np.int32), sampling)
            except EngineDead:
                continue
            self.num_seen += 1
            label = completion.versions[0][0] % self.limits.vocab_size
            self.num_torn += completion.token_ids.tolist() != [label] * NUM_TENSORS

    async def pause(self) -> None:
        await asyncio.sleep(TRAPS.reach("pausing"))
        await super().pause()

    async def stage_push(self, order: PushOrder) -> Any:
        await asyncio.sleep(TRAPS.reach("joining"))
        return await super().stage_push(order)

    async def load_push(self, order: PushOrder) -> Any:
        await asyncio.sleep(TRAPS.reach("joining"))
        return await super().load_push(order)

    def _take(self, views: Iterable[tuple[str, torch.Tensor]], weights: dict[str, torch.Tensor]) -> None:
        super()._take(views, weights)
        self.weights |= weights

    async def set_version(self, version: int) -> None:
        await asyncio.sleep(TRAPS.reach("labelling"))
        await super().set_version(version)


def run_server(pipe: Connection, log: Path, endpoint: str, overlap_weight_loading: bool) -> None:
    """Run the server's process, which answers `status` and sets traps."""
    _begin(log)
    inference_server.server.PULSE_INTERVAL_S = DEAD_AFTER_S / 10
    config = ServerConfig(overlap_weight_loading=overlap_weight_loading, pause_timeout_s=PAUSE_TIMEOUT_S)
    asyncio.run(_serve(pipe, endpoint, config))


async def _serve(pipe: Connection, endpoint: str, config: ServerConfig) -> None:
    engine = InPlaceEngine()
    async with serving(engine, config, endpoint=endpoint) as running:

        def answer() -> None:
            match _next_command(pipe):
                case Trap() as trap:
                    TRAPS.set(trap)
                case "status":
                    status = running.server.status()
                    weights = digest(engine.weights.items())
                    pipe.send(status | {"digest": weights, "seen": engine.num_seen, "torn": engine.num_torn})

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        evaluation = asyncio.create_task(engine.evaluate())
        pipe.send("ready")
        await asyncio.gather(running.task, evaluation)


class _LocalScorer:
    """Scores in the learner's process, so that its resource counts do not depend on reward workers."""

    def submit(
        self, prompt: Prompt, texts_G: list[str], *_of_call: object, **_of_episodes: object
    ) -> "Future[GroupRewards]":
        rewards = [float(index) for index in range(len(texts_G))]
        future: Future[GroupRewards] = Future()
        future.set_result(
            GroupRewards(rewards=rewards, functions=[FunctionRewards(name="exact_match", rewards=list(rewards))])
        )
        return future


class _FakeTokenizer:
    """Replaces a tokenizer."""

    bos_token_id = None

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2 + ord(character) % 8 for character in text] for text in texts]}

    def batch_decode(self, token_ids_G: list[list[int]], **options: Any) -> list[str]:
        return [str(token_ids) for token_ids in token_ids_G]


class LearnerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a test's learner."""

    endpoint: str
    weight_sync: dict[str, Any]
    """Keys of [learner.weight_sync]."""
    model: ModelFingerprint = MODEL
    weights: Callable[[int], NamedTensors] = weights
    bucket_bytes: int = TENSOR_BYTES
    """Smaller than the config allows, so that small models have several buckets."""
    dead_after_s: float = DEAD_AFTER_S


class Sampled(msgspec.Struct, frozen=True):
    """A completion as the learner received it."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]


class ScriptedWeights:
    """Replaces a policy: the weights of the current version."""

    wire_dtype, device, copy_device = torch.float32, torch.device("cpu"), None
    adapter = why_merged = None

    def __init__(self, weights: Callable[[int], NamedTensors]) -> None:
        self._weights, self.version = weights, 0

    def tensors(self) -> NamedTensors:
        return self._weights(self.version)


def run_learner(pipe: Connection, log: Path, setup: LearnerSetup) -> None:
    """Run the learner's process, which answers a version with the result of its push, and `take` with two groups."""
    _begin(log)
    learner.servers.link.DEAD_AFTER_S, learner.servers.link.HELLO_INTERVAL_S = setup.dead_after_s, DEAD_AFTER_S / 10
    learner.servers.sync_source.make_manifest = lambda tensors, dtype, _, wire, adapter: make_manifest(
        tensors, dtype, setup.bucket_bytes, wire, adapter
    )
    run = _learner_run(log.parent, setup)
    config, tokenizer, scorer = run.learner, cast(Any, _FakeTokenizer()), cast(Any, _LocalScorer())
    ledger = Ledger(log.with_suffix(".db"))
    hello = Hello(run="run", protocol_version=PROTOCOL_VERSION, model=setup.model, learner=new_learner_id())
    fleet = Fleet(run, hello, LoopThread("learner"))
    prompts = Prompts(config.data, tokenizer, run.seed)
    buffer = RolloutBuffer(run, prompts, ledger)
    rollouts = Rollouts(run, fleet, buffer, Scorer(config, tokenizer, scorer), ledger)
    rollouts.start(0)
    scripted = ScriptedWeights(setup.weights)
    pusher = WeightSync(fleet, scripted, config.weight_sync)
    pipe.send("ready")
    while True:
        match _next_command(pipe):
            case Trap() as trap:
                TRAPS.set(trap)
            case int(version):
                scripted.version = version
                pipe.send(
                    _push(pusher, rollouts, version, config.weight_sync.overlap_with_training)
                    or digest(setup.weights(version))
                )
            case "take":
                pipe.send(_sampled(rollouts.next_batch(scripted.version, ANSWER_TIMEOUT_S) or []))


def _sampled(groups: list[RolloutGroup]) -> list[Sampled]:
    return [
        Sampled(group.prompt_token_ids.tolist(), c.token_ids.tolist(), c.behavior_logprobs.tolist(), list(c.versions))
        for group in groups
        for c in group.completions
    ]


def _push(pusher: WeightSync, rollouts: Rollouts, version: int, overlap: bool) -> Exception | None:
    try:
        if overlap:
            pusher.begin(version, lambda: None)
            pusher.wait()
        else:
            pusher.send(version)
    except SlipstreamError as error:
        return error
    rollouts.publish(version, *(member.link.welcome.server_id for member in pusher.holders() if member.link.welcome))
    return None


def _learner_run(directory: Path, setup: LearnerSetup) -> LearnerRun:
    return make_run(
        directory, setup.endpoint, steps=10**6, groups_per_step=2, max_staleness=1, connect_timeout_s=ANSWER_TIMEOUT_S,
        reward={"functions": ["exact_match"]}, sampling={"group_size": 2, "max_tokens": NUM_TENSORS},
        weight_sync={"timeout_s": PUSH_TIMEOUT_S} | setup.weight_sync,
    )  # fmt: skip


def _begin(log: Path) -> None:
    logging.basicConfig(filename=log, level=logging.INFO, format="%(message)s")
    protocol.transports.tcp.TcpCollective = TrappedTcp  # type: ignore[misc]


def _next_command(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the test has ended or died
        os._exit(0)
