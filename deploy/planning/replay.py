"""How fast servers decode, from the ledger of a run: its groups are asked for again, of simulated servers.

    when each group was asked for, how many tokens it got ─▶ server.py at rates that are tried ─▶ its seconds, beside the real ones

Decoding has two rates, no metric has either, and how long a group takes depends on all that runs beside it. In a replay queues,
full engines and pauses count as they do in the simulation, so the rates that fit are those that it needs.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import simpy

from deploy.planning.rates import Lengths, Rates
from deploy.planning.server import Group, Server

MOST_SEQUENCES = 4096
"""Of a server, the last of the run: more would only take longer."""
NOT_COUNTED_SHARE = 0.2
"""Of the replayed groups, the first: what ran beside them had begun before, and is not replayed."""
STEP_SHARES = (0.0, 0.03, 0.1, 0.25, 0.45, 0.7, 0.9, 1.0)
"""Of a decoding step of a full engine, what it would take for no sequence at all."""
FASTEST = 1e-6
GOLDEN = (5**0.5 - 1) / 2
GOLDEN_STEPS = 16


class Asked(NamedTuple):
    """A group as the ledger has it."""

    version: int
    num_tokens: int
    admitted_at: float
    received_at: float
    scored_at: float


class Servers(NamedTuple):
    """What the groups were asked of."""

    num: int
    capacity: int
    stall_s: float
    """Before each new version."""


def fit_decoding(rates: Rates, asked: Sequence[Asked], num_completions: int, servers: Servers) -> tuple[Rates, float]:
    """Return the rates with those of decoding that come closest, and by what share the median group still misses its seconds."""
    asked = asked[-max(1, MOST_SEQUENCES * servers.num // num_completions) :]
    lengths = lengths_of(asked, rates.lengths, num_completions)
    measured_s = np.array([group.received_at - group.admitted_at for group in asked])
    counted = slice(int(len(asked) * NOT_COUNTED_SHARE), None)
    slowest_s = 4 * float(measured_s.max())

    def errors(full_s: float, share: float) -> np.ndarray:
        tried = with_decoding(rates, full_s, share, servers.capacity)
        return np.abs(np.log(replay(tried, asked, lengths, servers) / measured_s))[counted]

    def mean_error(share: float, full_s: float) -> float:
        return float(errors(full_s, share).mean())

    least, best, median = np.inf, rates, np.inf
    for share in STEP_SHARES:
        full_s = minimum(partial(mean_error, share), slowest_s * FASTEST, slowest_s)
        left = errors(full_s, share)
        if left.mean() < least:
            least, best, median = left.mean(), with_decoding(rates, full_s, share, servers.capacity), np.median(left)
    return best, float(np.expm1(median))


def with_decoding(rates: Rates, full_s: float, share: float, capacity: int) -> Rates:
    """A decoding step of a full server takes so long, and this share of it for no sequence at all."""
    step_s, token_s = share * full_s, (1 - share) * full_s / capacity
    return msgspec.structs.replace(rates, decode_step_s=step_s, decode_token_s=token_s)


def minimum(error_of: Callable[[float], float], low: float, high: float) -> float:
    """Golden section (Kiefer 1953) in logarithms."""
    low, high = np.log(low), np.log(high)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = error_of(np.exp(left)), error_of(np.exp(right))
    for _ in range(GOLDEN_STEPS):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = error_of(np.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = error_of(np.exp(right))
    return float(np.exp((low + high) / 2))


def lengths_of(asked: Sequence[Asked], lengths: Lengths, num_completions: int) -> list[list[float]]:
    """Lengths of each group's completions. The ledger has their sum alone, so groups are drawn and dealt out in its order."""
    drawn = lengths.sampler().draw(np.random.default_rng(0), len(asked) * num_completions).reshape(len(asked), -1)
    drawn = drawn[np.argsort(drawn.sum(1), kind="stable")]
    rank_of_group = np.argsort(np.argsort([group.num_tokens for group in asked], kind="stable"))
    return drawn[rank_of_group].tolist()


def replay(rates: Rates, asked: Sequence[Asked], lengths: list[list[float]], servers: Servers) -> np.ndarray:
    """Seconds that each group would have taken."""
    env = simpy.Environment(asked[0].admitted_at)
    done_at = np.zeros(len(asked))

    def done(group: Group) -> None:
        done_at[group.slot] = env.now

    fleet = [Server(env, rates, servers.capacity, done) for _ in range(servers.num)]

    def until(time: float) -> simpy.Event:
        return env.timeout(max(0.0, time - env.now))

    def ask() -> Generator[simpy.Event, Any, None]:
        version = asked[0].version
        for i, group in enumerate(asked):
            if group.version > version:
                version = group.version
                yield until(group.admitted_at - servers.stall_s)
                for server in fleet:
                    server.pause()
                yield until(group.admitted_at)
                for server in fleet:
                    server.resume(version)
            yield until(group.admitted_at)
            least = min(fleet, key=lambda server: len(server.groups))
            least.submit([Group(i, lengths[i], env.now)])

    env.process(ask())
    env.run()
    return done_at - np.array([group.admitted_at for group in asked])
