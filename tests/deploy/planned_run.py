"""Setups for tests of deploy/planning, and directories of simulated runs with known rates."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from deploy.planning.rates import Lengths, Rates
from deploy.planning.servers import SimulatedGroup
from deploy.planning.simulation import Setup, Simulation
from inference_server.config import ServerConfig
from learner.config import LearnerConfig, LearnerRun
from learner.rollouts.ledger_storage import SCHEMA
from protocol.config import to_toml

PROMPTS = {"data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}, "steps": 10}


def constant(tokens: float) -> Lengths:
    """Return lengths for which every completion has `num_tokens`."""
    return Lengths(p10=tokens, p50=tokens, p90=tokens, mean=tokens, max=tokens)


CONSTANT = Rates(lengths=constant(100), decode_step_s=0.01, decode_token_s=1e-4, learner_token_s=1e-4)
"""A decoding step takes 10 ms, and 16.4 ms with 64 sequences; a rank trains 10,000 tokens/s."""
SPREAD = Lengths(p10=20, p50=90, p90=230, mean=110, max=256, truncated_frac=0.05)


def setup(
    rates: Rates = CONSTANT, *, servers: int = 1, ranks: int = 1, capacity: int = 64,
    learner: dict[str, Any] | None = None, **rest: Any
) -> Setup:  # fmt: skip
    """Return a setup with 8 groups of 8 per step and 64 slots per server by default."""
    config = PROMPTS | {"groups_per_step": 8, "sampling": {"group_size": 8, "max_tokens": 256}} | (learner or {})
    return Setup(
        learner=msgspec.convert(config, LearnerConfig),
        server=ServerConfig(max_concurrent_sequences=capacity),
        rates=rates,
        num_servers=servers,
        num_ranks=ranks,
        **rest,
    )


def write_run(run_dir: Path, simulated: Setup, steps: int, seed: int = 0) -> None:
    """Write the directory of a run of this setup with one rank."""
    run_dir.mkdir()
    run = LearnerRun(model="tiny:digits", run_dir=str(run_dir), learner=simulated.learner,
                     server={"max_concurrent_sequences": simulated.server.max_concurrent_sequences})  # fmt: skip
    (run_dir / "config.toml").write_text(to_toml(run))
    simulation = _Recorded(simulated, seed, simulated.num_servers)
    simulation.after(steps)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in simulation.lines))
    with sqlite3.connect(run_dir / "ledger.db") as ledger:
        ledger.executescript(SCHEMA)
        for group, scored_at in simulation.scored.values():
            row = (f"{group.slot}.0", group.slot, group.slot, simulation.version_of[group.slot],
                sum(map(int, group.lengths)),
                   group.requested_at, scored_at - simulated.rates.score_s, scored_at)  # fmt: skip
            ledger.execute(
                "INSERT INTO groups (group_id, slot, attempt, position, epoch, prompt_id, state, admitted_version, "
                "num_tokens, admitted_at, received_at, scored_at) VALUES (?, ?, 0, ?, 0, 0, 'consumed', ?, ?, ?, ?, ?)",
                row,
            )


class _Recorded(Simulation):
    """Records what a real run would write."""

    def __init__(self, setup: Setup, seed: int, most_servers: int) -> None:
        self.lines: list[dict[str, float]] = []
        self.scored: dict[int, tuple[SimulatedGroup, float]] = {}
        self.version_of: dict[int, int] = {}
        super().__init__(setup, seed, most_servers)

    def _step(self, version: int):  # type: ignore[no-untyped-def]
        before = msgspec.structs.replace(self._sums)
        yield from super()._step(version)
        sums, rates, num_servers = self._sums.since(before), self._rates, self._num_servers
        wait_s, weight_sync_s = sums.wait_s, rates.weight_sync_seconds(num_servers)
        train_s = rates.learner_token_s * sums.tokens
        lengths = [length for group, _ in self.scored.values() for length in group.lengths]
        p10, p50, p90 = np.percentile(lengths, (10, 50, 90)).tolist()
        prefix = "rollout/completion_length_"
        self.lines.append({
            "step": version + 1, "time": self._env.now, "elapsed_s": self._env.now, "servers/ready": num_servers,
            "time/step": self._env.now - (self.lines[-1]["elapsed_s"] if self.lines else 0.0),
            "time/wait_for_batch": wait_s, "time/forward_backward": train_s, "time/weight_sync": sums.weight_sync_s,
            "rollout/tokens": sums.tokens,
            "rollout/truncated_frac": sum(length == 256 for length in lengths) / len(lengths),
            f"{prefix}p10": p10, f"{prefix}p50": p50, f"{prefix}p90": p90, f"{prefix}max": max(lengths),
            f"{prefix}mean": float(np.mean(lengths)), "staleness/mean": sums.staleness / sums.groups,
            "staleness/max": self.staleness_max, "weight_sync/seconds": weight_sync_s,
            "weight_sync/transfer_seconds": rates.weight_sync_feed_s * num_servers,
            "weight_sync/stall_seconds": rates.stall_seconds(num_servers, overlap_weight_loading=False),
        })  # fmt: skip

    def _publish(self, version: int) -> None:
        first = self._next_to_admit
        super()._publish(version)
        self.version_of |= dict.fromkeys(range(first, self._next_to_admit), version)

    def _scored(self, group: SimulatedGroup) -> None:
        self.scored[group.slot] = group, self._env.now
        super()._scored(group)
