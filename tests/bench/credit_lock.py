"""Measure credit by turn where each turn earns its own reward: `python -m tests.bench.credit_lock [--seeds N]`.

    a softmax policy in a table ─▶ groups of episodes of NUM_TURNS turns ─▶ learner/algorithm/credit.py ─▶ Adam

A turn enters a digit of a code, and earns 1 / NUM_TURNS if the digit is right. Nothing else depends on it, so all credit
that a turn gets for other turns is noise. Without a model or a server, a run takes seconds.
Suffixes: P groups, G episodes, K turns, D digits.
"""

import argparse
import statistics

import numpy as np

from learner.algorithm.advantages import StepRewards
from learner.algorithm.credit import advantages_by_turn
from learner.config import AdvantageConfig

NUM_TURNS, NUM_DIGITS = 8, 10
NUM_GROUPS, GROUP_SIZE = 8, 8
LEARNING_RATE = 0.05
TARGET, WINDOW, MAX_STEPS = 0.9, 10, 1000
RULES: dict[str, AdvantageConfig] = {
    "episode": AdvantageConfig(),
    "turn": AdvantageConfig(credit="turn"),
    "turn, gamma 0.5": AdvantageConfig(credit="turn", gamma=0.5),
    "gigpo": AdvantageConfig(credit="gigpo"),
    "gigpo, gamma 0.5": AdvantageConfig(credit="gigpo", gamma=0.5),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.credit_lock", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of runs of each rule")
    options = parser.parse_args()
    print(f"{'credit':<20}{'steps to ' + str(TARGET) + ', by seed':<28}{'median':>8}")
    for name, rule in RULES.items():
        steps = [steps_to_target(rule, seed) for seed in range(options.seeds)]
        print(f"{name:<20}{', '.join(map(str, steps)):<28}{statistics.median(steps):>8g}", flush=True)


def steps_to_target(rule: AdvantageConfig, seed: int) -> int:
    """Return the first step at which the mean reward of the last WINDOW steps is TARGET, at most MAX_STEPS."""
    rng = np.random.default_rng(seed)
    logits_KDD = np.zeros((NUM_TURNS, NUM_DIGITS, NUM_DIGITS))
    mean, square = np.zeros_like(logits_KDD), np.zeros_like(logits_KDD)
    history: list[float] = []
    for step in range(1, MAX_STEPS + 1):
        gradient_KDD, reward = policy_gradient(logits_KDD, rule, rng)
        mean, square = 0.9 * mean + 0.1 * gradient_KDD, 0.999 * square + 0.001 * gradient_KDD**2
        logits_KDD += LEARNING_RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        history.append(reward)
        if len(history) >= WINDOW and statistics.fmean(history[-WINDOW:]) >= TARGET:
            return step
    return MAX_STEPS


def policy_gradient(
    logits_KDD: np.ndarray, rule: AdvantageConfig, rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Return the estimated gradient of a step of sampled groups, and their mean reward."""
    probabilities_KDD = np.exp(logits_KDD - logits_KDD.max(-1, keepdims=True))
    probabilities_KDD /= probabilities_KDD.sum(-1, keepdims=True)
    turns_K = np.arange(NUM_TURNS)
    codes_PGK = np.repeat(rng.integers(NUM_DIGITS, size=(NUM_GROUPS, 1, NUM_TURNS)), GROUP_SIZE, axis=1)
    of_turns_PGKD = probabilities_KDD[turns_K, codes_PGK]
    drawn_PGK1 = rng.random((NUM_GROUPS, GROUP_SIZE, NUM_TURNS, 1))
    entered_PGK = (of_turns_PGKD.cumsum(-1) < drawn_PGK1).sum(-1).clip(max=NUM_DIGITS - 1)
    rewards_PGK = (entered_PGK == codes_PGK) / NUM_TURNS
    states_K: list[str | None] = [str(turn) for turn in turns_K]
    step = StepRewards(
        rewards_PGK.sum(-1).tolist(), [{} for _ in codes_PGK], {}, rewards_PGK.tolist(),
        [[states_K] * GROUP_SIZE] * NUM_GROUPS,
    )  # fmt: skip
    advantages_PGK = np.array(advantages_by_turn(step, rule))
    scores_PGKD = np.eye(NUM_DIGITS)[entered_PGK] - of_turns_PGKD
    gradient_KDD = np.zeros_like(logits_KDD)
    np.add.at(gradient_KDD, (turns_K, codes_PGK), advantages_PGK[..., None] * scores_PGKD)
    return gradient_KDD / advantages_PGK.size, float(rewards_PGK.sum(-1).mean())


if __name__ == "__main__":
    main()
