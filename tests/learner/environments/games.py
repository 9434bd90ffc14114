"""Whole runs of the built-in guessing game, and a second implementation of its rules."""

from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerRun
from learner.environments.builtin import HIGHER, LOWER, NO_DIGIT, RIGHT
from learner.environments.episode import Episode, EpisodeGroup
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from protocol.codec import unpack
from protocol.model_files import resolve_model
from tests.learner.ledgers import consumed_groups
from tests.learner.runs import make_run

DIGITS = "0123456789"


def playing_run(tmp_path: Path, *endpoints: str, steps: int = 4, factory: str = "guess", **learner: Any) -> LearnerRun:
    settings = {
        "steps": steps,
        "data": {"task": "guess", "num_prompts": 32},
        "reward": {"functions": ["environment_reward"]},
        "sampling": {"group_size": 4, "max_tokens": 2, "stop": list(DIGITS)},
        "environment": {"factory": factory, "max_turns": 4, "max_concurrent": 8, "timeout_s": 5.0},
    }
    return make_run(tmp_path, *endpoints, **settings | learner)


def groups_of(run: LearnerRun) -> list[tuple[EpisodeGroup, int]]:
    """Return the consumed groups of the ledger, each with its secret."""
    prompts = Prompts(run.learner.data, load_tokenizer(resolve_model("tiny:digits")), run.seed)
    groups = consumed_groups(run)
    assert groups
    return [
        (unpack(payload, EpisodeGroup), prompts.prompt_at(row.position).columns["secret"]) for row, payload in groups
    ]


def reply_of(secret: int, text: str) -> str:
    """Return the environment's reply, by a second implementation of the rules."""
    if text[-1:] not in set(DIGITS):
        return NO_DIGIT
    return RIGHT if int(text[-1]) == secret else HIGHER if int(text[-1]) < secret else LOWER


def assert_played_by_the_rules(episode: Episode, secret: int, *, is_agent: bool = False) -> None:
    """Check that policy and environment alternate and each reply is correct. An agent omits the last reply."""
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    (branch,) = episode.branches
    texts, was_sampled = [""], True
    for token, is_sampled in zip(branch.token_ids.tolist(), branch.is_sampled_T.tolist(), strict=True):
        if is_sampled != was_sampled:
            texts.append("")
        texts[-1] += tokenizer.decode([token], skip_special_tokens=True)
        was_sampled = is_sampled
    turns, answers = texts[::2], texts[1::2]
    assert len(turns) == episode.stats.num_turns
    assert answers == [reply_of(secret, turn) for turn in turns][: len(answers)]
    assert len(turns) - len(answers) == (is_agent or episode.stats.state == "length")
    is_found = reply_of(secret, turns[-1]) == RIGHT
    assert episode.reward == pytest.approx(float(is_found))
    assert (is_found or is_agent) == (episode.stats.state == "finished") or episode.stats.state == "length"
    assert (branch.behavior_logprobs[~branch.is_sampled_T] == 0).all()
