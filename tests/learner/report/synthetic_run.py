"""Write the directory of a synthetic run, similar to the demo's, for tests of summary and report."""

import json
import math
import random
from pathlib import Path
from typing import Any

from learner.rollouts.ledger import Ledger
from tests.learner.ledgers import receive

GROUPS_PER_STEP = 4


def write_run(run_dir: Path, steps: int = 60, seed: int = 0, num_completions: int = 6) -> list[dict[str, float]]:
    """Fill `run_dir` and return the lines of its metrics.jsonl."""
    run_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    metrics = [metrics_of(step, steps, rng) for step in range(1, steps + 1)]
    write_lines(run_dir / "metrics.jsonl", metrics)
    write_lines(run_dir / "samples.jsonl", [sample_of(line, num_completions, rng) for line in metrics])
    (run_dir / "config.toml").write_text(
        'run_dir = "runs/synthetic"\n\n[learner.loss]\nclip_low = 0.2\nclip_high = 0.28\n'
    )
    write_ledger(run_dir / "ledger.db", steps, rng)
    return metrics


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_of(step: int, steps: int, rng: random.Random) -> dict[str, float]:
    """Return plausible metrics: the reward rises in an S curve, entropy falls, KL grows until each refresh."""
    done = step / steps
    skill = 0.11 + 0.87 / (1 + math.exp(-12 * (done - 0.45)))
    reward = min(1.0, max(0.0, rng.gauss(skill, 0.035)))
    stall_s = abs(rng.gauss(0.065, 0.008))
    wait_s, forward_s, optimizer_s, other_s = (abs(rng.gauss(mean, 0.01)) for mean in (0.08, 0.12, 0.012, 0.02))
    step_s = wait_s + forward_s + optimizer_s + other_s + stall_s + 0.025
    since_refresh = step % max(1, steps // 5)
    line = {
        "step": step,
        "time": 1_790_000_000.0 + 0.31 * step,
        "elapsed_s": 2.0 + 0.31 * step,
        "reward/mean": reward,
        "reward/std": rng.uniform(0.05, 0.2),
        "reward/share_right": reward,
        "reward/exact_match": max(0.0, reward**6 + rng.gauss(0, 0.01)),
        "loss/policy": rng.gauss(0, 0.02),
        "loss/total": rng.gauss(0, 0.02),
        "loss/clipped_frac": abs(rng.gauss(0.02, 0.008)),
        "policy/entropy": 2.3 * (1 - done) ** 1.5 + abs(rng.gauss(0.05, 0.03)),
        "policy/behavior_kl": 1e-9,
        "reference/kl": 0.004 * since_refresh * abs(rng.gauss(1, 0.15)),
        "reference/version": float(step - since_refresh),
        "staleness/mean": rng.uniform(1.4, 2.0),
        "staleness/max": 2.0,
        "rollout/completion_length_mean": rng.gauss(8.4, 0.2),
        "rollout/truncated_frac": 0.0,
        "rollout/tokens": float(rng.randint(2000, 2300)),
        "weight_sync/seconds": stall_s + 0.025,
        "weight_sync/stall_seconds": stall_s,
        "time/wait_for_batch": wait_s,
        "time/forward_backward": forward_s,
        "time/optimizer": optimizer_s,
        "time/weight_sync": stall_s + 0.025,
        "time/other": other_s,
        "time/step": step_s,
        "bottleneck/server": 0.75 * wait_s,
        "bottleneck/reward": 0.25 * wait_s,
        "bottleneck/link": 0.0,
        "bottleneck/weight_sync": 0.0,
        "bottleneck/learner": 0.1 * (step_s - wait_s),
        "perf/learner_idle_frac": wait_s / step_s,
        "perf/server_idle_frac": stall_s / step_s,
        "optim/lr": 2e-3,
        "optim/grad_norm": abs(rng.gauss(0.5, 0.15)) + (2.0 if step % 53 == 0 else 0.0),
    }
    if step % 3:
        line["policy/mismatch_abs_logprob"] = abs(rng.gauss(4e-7, 1e-7))
    if step % 20 == 1:
        line["parity/abs_logprob"] = abs(rng.gauss(3e-7, 1e-7))
    return line


def sample_of(line: dict[str, float], num_completions: int, rng: random.Random) -> dict[str, Any]:
    digits = "".join(rng.choice("0123456789") for _ in range(8))
    completions = [
        "".join(right if rng.random() < line["reward/mean"] else rng.choice("0123456789") for right in reversed(digits))
        for _ in range(num_completions)
    ]
    rewards = [sum(a == b for a, b in zip(c, reversed(digits), strict=True)) / 8 for c in completions]
    return {
        "step": line["step"],
        "prompt": f"{digits}=",
        "completions": completions,
        "rewards": rewards,
        "answer": digits[::-1],
    }


def admit(ledger: Ledger, slot: int, attempt: int, version: int) -> None:
    epoch, prompt_id = divmod(slot, 100)
    ledger.admit(slot=slot, attempt=attempt, position=slot, epoch=epoch, prompt_id=prompt_id,
                 version=version)  # fmt: skip


def write_ledger(path: Path, steps: int, rng: random.Random) -> None:
    """Slot 5 is dropped as stale and retried, slot 9 fails for good, the last three groups are still in flight."""
    ledger = Ledger(path)
    ledger._db.execute("PRAGMA synchronous = OFF")  # these rows need no durability
    slot = 0
    for step in range(1, steps + 1):
        ready: list[tuple[str, int]] = []
        while len(ready) < GROUPS_PER_STEP:
            group_id = f"{slot}.0"
            admit(ledger, slot, 0, max(0, step - 2))
            if slot == 9:
                ledger.drop(group_id, "failed")
                slot += 1
                continue
            if slot == 5:
                ledger.drop(group_id, "stale")
                group_id = f"{slot}.1"
                admit(ledger, slot, 1, step)
            receive(ledger, group_id, b"payload", max(0, step - 2), 500)
            ledger.score(group_id, "[0.5]", 0.5)
            ready.append((group_id, rng.choice([0, 1, 1, 2, 2, 2])))
            slot += 1
        ledger.consume(ready, step)
    for late in range(slot, slot + 3):
        admit(ledger, late, 0, steps)
    ledger.close()
