"""The audit of version labels: recomputes every token's behavior logprob from the weights that its label names.

The learner's process keeps the weights of every version before it pushes them, and every group before it commits it. A
resume trains some versions again, so a label is correct if any weights of its version give the logprob.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.environments.episode import AnyGroup, TokenSequence, episodes_of
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from protocol.codec import unpack
from protocol.model_files import resolve_model
from tests.chaos.episodes import Groups
from tests.chaos.learner_process import RECEIVED, WEIGHTS

TOLERANCE = 2e-4
"""vLLM and torch differ by 4e-5 in float32. One optimizer step moves most tokens by more than 1e-3."""


def audit_versions(directory: Path, config: LearnerRun, groups: Groups) -> tuple[int, list[str]]:
    """Return the number of checked completions, or branches of episodes, and a description of each wrong label."""
    prompts = _prompts(directory / "run" / "ledger.db", config)
    weights = defaultdict(list)
    for path in (directory / WEIGHTS).glob("*.safetensors"):
        weights[int(path.name.partition("-")[0])].append(path)
    sequences = [
        (name, prompts[group.group_id] if branch.prompt_token_ids is None else branch.prompt_token_ids.tolist(), branch)
        for name, group in groups
        for episode in episodes_of(group)
        for branch in episode.branches
    ]
    wanted = defaultdict(list)
    for index, (_, _, branch) in enumerate(sequences):
        for version in set(branch.sampled_versions):
            wanted[version].append(index)
    model = AutoModelForCausalLM.from_pretrained(resolve_model(config.model), dtype=torch.float32)
    errors: dict[tuple[int, int], np.ndarray] = {}
    for version, indices in wanted.items():
        for path in weights[version]:
            model.load_state_dict(load_file(path), strict=False)
            for index, logprobs in _logprobs(model, {index: sequences[index][1:] for index in indices}):
                error = np.abs(logprobs - sequences[index][2].behavior_logprobs)
                errors[version, index] = np.minimum(errors.get((version, index), np.inf), error)
    wrong = [
        f"group {name}, labelled {branch.versions}: {problem}"
        for index, (name, _, branch) in enumerate(sequences)
        if (problem := _problem(branch.versions, {v: errors.get((v, index)) for v in branch.sampled_versions}))
    ]
    return len(sequences), wrong


def received_groups(directory: Path) -> Groups:
    """Return every received group with the name of its file."""
    paths = sorted((directory / RECEIVED).glob("*-*"))
    return [(path.name, unpack(path.read_bytes(), cast(type[AnyGroup], AnyGroup))) for path in paths]


def _problem(versions: list[tuple[int | None, int]], errors: dict[int, np.ndarray | None]) -> str | None:
    start = 0
    for version, num_tokens in versions:
        start += num_tokens
        if version is None:
            continue
        error = errors[version]
        if error is None:
            return f"version {version} was never published"
        worst = float(error[start - num_tokens : start].max())
        if not worst <= TOLERANCE:
            return f"the weights of version {version} give logprobs that differ by {worst:.1e}"
    return None


@torch.no_grad()
def _logprobs(model: Any, sequences: dict[int, tuple[list[int], TokenSequence]]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the logprobs of each branch's tokens. Branches of one length are one batch."""
    by_length = defaultdict(list)
    for index, (prompt, branch) in sequences.items():
        by_length[len(prompt), len(branch.token_ids)].append(index)
    for (prompt_length, _), indices in by_length.items():
        ids_BT = torch.tensor([sequences[i][0] + sequences[i][1].token_ids.tolist() for i in indices])
        logits_BTV = model(ids_BT, attention_mask=torch.ones_like(ids_BT)).logits[:, prompt_length - 1 : -1]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, prompt_length:, None])[..., 0]
        yield from zip(indices, logprobs_BT.numpy(), strict=True)


def _prompts(ledger: Path, config: LearnerRun) -> dict[str, list[int]]:
    """Return the prompt tokens of each group id."""
    prompts = Prompts(config.learner.data, load_tokenizer(resolve_model(config.model)), config.seed)
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as db:
        rows = db.execute("SELECT group_id, position FROM groups").fetchall()
    return {group_id: prompts.prompt_at(position).token_ids for group_id, position in rows}
