"""The audit of prompts, from the rows of ledger.db and the order of the data. It shares no code with the ledger.

Invariant: each position of the endless sequence of prompts, up to the last consumed one, has exactly one result.
"""

import itertools
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from learner.config import LearnerRun
from tests.chaos.evaluations import EvaluationsFound, audit_evaluations
from tests.chaos.events import Events
from tests.chaos.schedule import Leg

FINAL = ("failed", "no_signal")
"""Reasons to skip a slot for good. Its prompt counts as handled."""


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the prompts of a run."""

    expected: int
    """Number of groups to consume: steps · groups_per_step."""
    consumed_once: int
    lost: list[str]
    """Prompts that were neither consumed nor skipped, and steps with missing groups."""
    duplicated: list[str]
    """Prompts that were consumed or skipped too often."""
    overtaken: list[str]
    """Slots that were consumed after a later slot."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """Findings in the received groups: from versions.py, episodes.py and evaluations.py."""

    completions_checked: int
    versions_wrong: list[str]
    """Completions with tokens from other versions than their labels say."""
    episode_ends: dict[str, int]
    """Number of episodes by end state, in a run with an environment or an agent."""
    episodes_misjudged: list[str]
    evaluations: EvaluationsFound | None
    """Findings of a run with evaluations."""
    references_wrong: list[str] = []
    """Steps after which the reference on a server was not the policy of the step that its interval demands."""


def audit_received(directory: Path, config: LearnerRun, leg: Leg) -> Received:
    """Audit the received groups. Runs in a process that may import torch; the supervising process does not."""
    from tests.chaos.answers import AnswerAudit
    from tests.chaos.episodes import audit_episodes, ends_of
    from tests.chaos.versions import WEIGHTS, audit_versions, received_groups

    groups = received_groups(directory)
    num_checked, wrong = audit_versions(directory, config, groups)
    if leg.num_servers > 1 and not wrong:
        shutil.rmtree(directory / WEIGHTS)  # a run on several servers has far more steps than one on a single server
    events = Events({directory / "events": 0}, {}).read()
    misjudged = audit_episodes(groups, events, leg.player) if leg.player is not None else []
    evaluations = None
    if leg.has_evaluations:
        answers = AnswerAudit(directory, config)
        evaluations = audit_evaluations(directory, config, config.learner.steps, answers.problems)
    return Received(
        completions_checked=num_checked,
        versions_wrong=wrong,
        episode_ends=ends_of(groups),
        episodes_misjudged=misjudged,
        evaluations=evaluations,
        references_wrong=audit_references(directory / "run" / "metrics.jsonl", config) if leg.has_reference else [],
    )


def audit_references(metrics: Path, config: LearnerRun) -> list[str]:
    """Return the steps, also those repeated by a resume, with another reference than one without faults would have."""
    every, found = config.learner.reference.every_steps or 0, []
    for line in map(msgspec.json.decode, metrics.read_bytes().splitlines()):
        step, version = line["step"], line["reference/version"]
        if version != step - step % every:
            found.append(f"after step {step} the reference has version {version:g}, not {step - step % every}")
    return found


def audit_prompts(ledger: Path, *, num_steps: int, groups_per_step: int, num_prompts: int, seed: int) -> Prompts:
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as db:
        consumed = db.execute(
            "SELECT slot, step, position, epoch, prompt_id FROM groups WHERE state = 'consumed' ORDER BY slot, step"
        ).fetchall()
        skipped = db.execute(
            f"SELECT DISTINCT slot, position, epoch, prompt_id FROM groups WHERE state = 'dropped' AND reason IN "
            f"{FINAL}"
        ).fetchall()
    last_position = max((position for _, _, position, _, _ in consumed), default=-1)
    expected = Counter(_prompts_up_to(last_position, num_prompts, seed))
    taken = Counter((epoch, prompt) for _, _, _, epoch, prompt in consumed)
    settled = taken + Counter((epoch, prompt) for _, at, epoch, prompt in skipped if at <= last_position)
    per_step = Counter(step for _, step, _, _, _ in consumed)
    short = [
        f"step {step} has {per_step[step]} groups, not {groups_per_step}"
        for step in range(1, max(num_steps, max(per_step, default=0)) + 1)
        if per_step[step] != groups_per_step
    ]
    overtaken = [
        f"slot {slot} was consumed at step {step}, an earlier slot at step {before}"
        for (_, before, *_), (slot, step, *_) in itertools.pairwise(consumed)
        if step < before
    ]
    return Prompts(
        expected=num_steps * groups_per_step,
        consumed_once=sum(count == 1 for count in taken.values()),
        lost=[f"prompt {prompt} of epoch {epoch}" for epoch, prompt in (expected - settled).elements()] + short,
        duplicated=[f"prompt {prompt} of epoch {epoch}" for epoch, prompt in (settled - expected).elements()],
        overtaken=overtaken,
    )


def _prompts_up_to(position: int, num_prompts: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield (epoch, prompt) for every position. Each epoch has its own order."""
    for epoch in range(position // num_prompts + 1):
        order = np.random.default_rng([seed % 2**32, epoch]).permutation(num_prompts).tolist()
        yield from ((epoch, prompt) for prompt in order[: position + 1 - epoch * num_prompts])
