"""The audit of prompts, from the rows of ledger.db and the order the data demands; it shares no code with the ledger's own.

Prompt p of data epoch e is owed once for every position of the endless sequence of prompts up to the last that was consumed.
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
"""Reasons for which a slot is passed over: its prompt is accounted for."""


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the prompts of a run."""

    expected: int
    """To be consumed: steps · groups_per_step."""
    consumed_once: int
    lost: list[str]
    """In words: prompts that were owed and neither consumed nor passed over, and steps without their groups."""
    duplicated: list[str]
    """Prompts that were consumed, or passed over, more often than they were owed."""
    overtaken: list[str]
    """Slots that were consumed after a later one."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What the audits of the groups that were received have found: versions.py and episodes.py."""

    completions_checked: int
    versions_wrong: list[str]
    """In words: completions whose tokens are not of the versions that they are labelled with."""
    episode_ends: dict[str, int]
    """Of a run that plays: how many ended how."""
    episodes_misjudged: list[str]
    evaluations: EvaluationsFound | None
    """Of a run that is evaluated."""


def audit_received(directory: Path, config: LearnerRun, leg: Leg) -> Received:
    """Audit what was received, in a process that may import torch, which the one that supervises need not."""
    from tests.chaos.answers import AnswerAudit
    from tests.chaos.episodes import audit_episodes, ends_of
    from tests.chaos.versions import WEIGHTS, audit_versions, received_groups

    groups = received_groups(directory)
    num_checked, wrong = audit_versions(directory, config, groups)
    if leg.num_servers > 1 and not wrong:
        shutil.rmtree(directory / WEIGHTS)  # of far more steps than a run on one server has, which waits for it
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
    )


def audit_prompts(ledger: Path, *, num_steps: int, groups_per_step: int, num_prompts: int, seed: int) -> Prompts:
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as db:
        consumed = db.execute(
            "SELECT slot, step, position, epoch, prompt_id FROM groups WHERE state = 'consumed' ORDER BY slot, step"
        ).fetchall()
        passed_over = db.execute(
            f"SELECT DISTINCT slot, position, epoch, prompt_id FROM groups WHERE state = 'dropped' AND reason IN {FINAL}"
        ).fetchall()
    last_position = max((position for _, _, position, _, _ in consumed), default=-1)
    owed = Counter(_prompts_up_to(last_position, num_prompts, seed))
    taken = Counter((epoch, prompt) for _, _, _, epoch, prompt in consumed)
    settled = taken + Counter((epoch, prompt) for _, at, epoch, prompt in passed_over if at <= last_position)
    per_step = Counter(step for _, step, _, _, _ in consumed)
    short = [
        f"step {step} has {per_step[step]} groups, not {groups_per_step}"
        for step in range(1, max(num_steps, max(per_step, default=0)) + 1)
        if per_step[step] != groups_per_step
    ]
    overtaken = [
        f"slot {slot} was consumed at step {step}, a slot before it at step {before}"
        for (_, before, *_), (slot, step, *_) in itertools.pairwise(consumed)
        if step < before
    ]
    return Prompts(
        expected=num_steps * groups_per_step,
        consumed_once=sum(count == 1 for count in taken.values()),
        lost=[f"prompt {prompt} of epoch {epoch}" for epoch, prompt in (owed - settled).elements()] + short,
        duplicated=[f"prompt {prompt} of epoch {epoch}" for epoch, prompt in (settled - owed).elements()],
        overtaken=overtaken,
    )


def _prompts_up_to(position: int, num_prompts: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield (epoch, prompt) for every position: each epoch in an order of its own."""
    for epoch in range(position // num_prompts + 1):
        order = np.random.default_rng([seed % 2**32, epoch]).permutation(num_prompts).tolist()
        yield from ((epoch, prompt) for prompt in order[: position + 1 - epoch * num_prompts])
