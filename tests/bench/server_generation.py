"""Compare groups of completions from the server with bare vLLM, with the same weights on the same cores.

    GroupLink ── Generate ──▶ `python -m inference_server` ── Group ──▶ GroupLink      seconds, token ids
    BareVllm  ── the same prompts, sampling and seeds ──▶ vllm.LLM.generate            seconds, token ids

The two alternate. Every completion has its own seed, so that both must sample the same tokens: this is the oracle, and
makes the lengths equal. Each repetition has new processes, because with a single pair the ratio of the same code varied
from 0.86 to 1.02 for an unknown reason.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from learner.config import WeightSyncConfig
from learner.policy.model import load_policy
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.weight_sync import WeightSync
from protocol.errors import SlipstreamError
from protocol.messages import PROTOCOL_VERSION, Generate, Group, GroupFailed, Hello, Sampling
from protocol.model_files import fingerprint, resolve_model
from tests.bench.bare_vllm import BareVllm, Generated, Order
from tests.bench.push_engine import Trainer
from tests.bench.push_server import ServedModel, bench_run, server_run

EOS = 0
PROMPT_TOKENS = 13
NUM_COMPLETIONS = 8
DEADLINE_S = 200.0
LOOK_EVERY_S = 1.0
MAX_SEQUENCES = 256
SERVER_CORES = (0,)
"""Cores of the server. The client uses the others, as the learner does in the recipes."""


class Case(NamedTuple):
    """A model and its requests."""

    name: str
    config: Qwen2Config
    num_groups: int
    max_tokens: int

    def order(self, repetition: int, *, seeded: bool) -> Order:
        """Return random prompts, new ones each time, so that neither side has a cache hit."""
        prompts = np.random.default_rng(repetition).integers(
            1, self.config.vocab_size, (self.num_groups, PROMPT_TOKENS)
        )
        samplings = [
            Sampling(
                num_completions=NUM_COMPLETIONS, max_tokens=self.max_tokens,
                seed=(repetition * self.num_groups + group) * NUM_COMPLETIONS if seeded else None,
            )
            for group in range(self.num_groups)
        ]  # fmt: skip
        return Order(prompts.tolist(), samplings)


def qwen2(vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads, num_key_value_heads=num_heads, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=EOS, pad_token_id=EOS, tie_word_embeddings=True,
    )  # fmt: skip


CASES = [
    Case("2.7m", qwen2(128, 256, 512, 4, 4), num_groups=32, max_tokens=256),
    Case("49m", qwen2(8192, 768, 2048, 6, 12), num_groups=8, max_tokens=64),
]
"""The first case is the headline. Its completions end with a probability of 1/128 per token: 111 tokens on average."""


class Turn(NamedTuple):
    """The results of both sides for the same order."""

    through: Generated
    alone: Generated


class GroupLink:
    """The learner's real link to a server, without ledger and rewards."""

    def __init__(self, server: ServedModel) -> None:
        self._processes = server.processes
        hello = Hello(
            run=f"bench-{time.monotonic_ns()}", protocol_version=PROTOCOL_VERSION, learner="bench",
            model=fingerprint(resolve_model(server.model)),
        )  # fmt: skip
        self.fleet = Fleet(bench_run(server), hello, LoopThread("bench-link"))
        self._num_asked = 0
        self._groups: dict[str, Group] = {}
        self._missing: set[str] = set()
        self._came = threading.Event()
        self.fleet.start(self._on_group)

    def generate(self, order: Order) -> Generated:
        """Generate all groups of an order."""
        requests = [
            self._request(prompt, sampling) for prompt, sampling in zip(order.prompts, order.samplings, strict=True)
        ]
        self._groups, self._missing = {}, {request.group_id for request in requests}
        self._came.clear()
        began_at, cpu_began_at = time.perf_counter(), self._cpu_seconds()
        self.fleet.loop.spawn(self._ask(requests))
        while not self._came.wait(LOOK_EVERY_S):
            self.fleet.loop.raise_failure()
            if time.perf_counter() - began_at > DEADLINE_S:
                raise SlipstreamError(
                    f"{len(self._missing)} of {len(requests)} groups did not arrive; see the server's log"
                )
        seconds, cpu_seconds = time.perf_counter() - began_at, self._cpu_seconds() - cpu_began_at
        groups = [self._groups[request.group_id] for request in requests]
        return Generated(
            seconds, cpu_seconds, [[one.token_ids.tolist() for one in group.completions] for group in groups]
        )

    def close(self) -> None:
        self.fleet.loop.stop()
        self.fleet.close()

    def _cpu_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def _request(self, prompt: list[int], sampling: Sampling) -> Generate:
        self._num_asked += 1
        return Generate(
            group_id=str(self._num_asked), prompt_token_ids=np.array(prompt, dtype=np.int32), sampling=sampling,
            deadline_s=DEADLINE_S,
        )  # fmt: skip

    async def _ask(self, requests: list[Generate]) -> None:
        for request in requests:
            await self.fleet.members[0].link.generate(request)

    def _on_group(self, member: Member, group: Group | GroupFailed) -> None:
        assert isinstance(group, Group), group
        self._groups[group.group_id] = group
        self._missing.discard(group.group_id)
        self.fleet.loop.spawn(member.link.acknowledge([group.group_id]))
        if not self._missing:
            self._came.set()


def save(config: Qwen2Config, directory: Path) -> str:
    """Write a randomly initialised model; return its path."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(directory)
    return str(directory)


def measure(case: Case, directory: Path, repetitions: int) -> dict[str, Any]:
    """Return the results of one case, with seeded and with unseeded completions. Runs use unseeded completions."""
    model = save(case.config, directory.resolve() / case.name)
    came = {"seeded": list[Turn](), "unseeded": list[Turn]()}
    for repetition in range(1, repetitions + 1):
        server_first = repetition % 2 == 1
        with both_sides(model, directory / f"{case.name}-{repetition}", server_first=server_first) as (link, bare):
            turn(link, bare, case.order(0, seeded=True), server_first=server_first)  # cold
            for kind, turns in came.items():
                order = case.order(repetition, seeded=kind == "seeded")
                turns.append(turn(link, bare, order, server_first=server_first))
    measured = {kind: compare(*map(list, zip(*turns, strict=True))) for kind, turns in came.items()}
    return {"num_groups": case.num_groups, "num_completions": NUM_COMPLETIONS, "max_tokens": case.max_tokens} | measured


@contextmanager
def both_sides(model: str, directory: Path, *, server_first: bool) -> Iterator[tuple[GroupLink, BareVllm]]:
    """Yield a server and bare vLLM, started in the given order."""
    settings = {"cpu_cores": SERVER_CORES, "max_concurrent_sequences": MAX_SEQUENCES}
    with ExitStack() as open_things:
        for is_server in (server_first, not server_first):
            if is_server:
                server = ServedModel(model, directory, **settings)
                open_things.callback(server.close)
            else:
                bare = BareVllm(server_run(model, directory, "tcp://127.0.0.1:1", settings), EOS)
                open_things.callback(bare.close)
        open_things.enter_context(cores_of_the_client())
        link = pushed_link(server)
        open_things.callback(link.close)
        yield link, bare


@contextmanager
def cores_of_the_client() -> Iterator[None]:
    """Keep this process off the cores of both servers, if there are other cores."""
    all_cores = sorted(os.sched_getaffinity(0))
    others = [core for position, core in enumerate(all_cores) if position not in SERVER_CORES]
    os.sched_setaffinity(0, others or all_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_cores)


def pushed_link(server: ServedModel) -> GroupLink:
    """Return a link to a server after a push of its own weights, bit for bit."""
    link = GroupLink(server)
    push_own_weights(link.fleet, server.model)
    return link


def push_own_weights(fleet: Fleet, model: str) -> None:
    policy = load_policy(resolve_model(model), gradient_checkpointing=False)
    pusher = WeightSync(fleet, Trainer(policy, num_tokens=1), WeightSyncConfig())
    pusher.send(0)
    pusher.close()


def turn(link: GroupLink, bare: BareVllm, order: Order, *, server_first: bool) -> Turn:
    """Run an order on both sides, one after the other."""
    if server_first:
        through = link.generate(order)
        return Turn(through, bare.generate(order))
    alone = bare.generate(order)
    return Turn(link.generate(order), alone)


def compare(through: list[Generated], alone: list[Generated]) -> dict[str, Any]:
    """Return medians of tokens per second, and of CPU time per token, which is more robust on a busy machine.

    Ratios are medians of per-repetition ratios, because the speed of the machine varies between repetitions.
    """
    tokens_per_s = {
        side: [num_tokens(one) / one.seconds for one in came] for side, came in (("server", through), ("bare", alone))
    }
    cpu_us_per_token = {
        side: [one.cpu_seconds / num_tokens(one) * 1e6 for one in came]
        for side, came in (("server", through), ("bare", alone))
    }
    return {
        "over_bare_vllm": _median_ratio(tokens_per_s["server"], tokens_per_s["bare"]),
        "bare_cpu_over_servers": _median_ratio(cpu_us_per_token["bare"], cpu_us_per_token["server"]),
        "same_tokens": all(one.token_ids == other.token_ids for one, other in zip(through, alone, strict=True)),
        "tokens_per_s": {side: statistics.median(of_side) for side, of_side in tokens_per_s.items()},
        "cpu_us_per_token": {side: statistics.median(of_side) for side, of_side in cpu_us_per_token.items()},
        "tokens_per_s_by_repetition": tokens_per_s,
        "num_tokens": {"server": [num_tokens(one) for one in through], "bare": [num_tokens(one) for one in alone]},
    }


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def num_tokens(generated: Generated) -> int:
    return sum(len(token_ids) for group in generated.token_ids for token_ids in group)
