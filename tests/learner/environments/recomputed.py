"""Recorded turns of a run with logprobs recomputed from the weights of the versions on their labels.

    weights of each version, kept before the push ─┬─▶ transformers in float64, which shares no code with either side
    episodes of the ledger ────────────────────────┘

For tests on real vLLM. The learner's own pass is compared with the server's by the metric policy/mismatch_abs_logprob.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.environments.episode import EpisodeGroup, TokenSequence
from learner.rollouts.ledger import Ledger
from learner.run_inputs import RunInputs
from learner.servers.weight_sync import WeightSync
from protocol.codec import unpack
from tests.learner.ledgers import consumed_groups

TOLERANCE = 1e-5
"""Largest difference of a logprob in float32. vLLM's CPU build, the learner and float64 differ by at most 1e-6; the
weights of another version differ by 0.2."""
Weights = dict[int, dict[str, torch.Tensor]]
"""Weights by version."""


class RecordedTurn(msgspec.Struct, frozen=True, eq=False):
    """A turn of T sampled tokens."""

    versions_T: np.ndarray
    of_server_T: np.ndarray
    exact_T: np.ndarray
    """Logprobs in float64, with the weights of each token's version."""
    of_others_T: np.ndarray
    """Logprobs in float64, with the weights of the previous version, or of the second version for the first."""
    is_fresh: bool
    """Whether the KV cache of all preceding tokens is of the turn's own version."""


def assert_labels_match_logprobs(turns: list[RecordedTurn]) -> None:
    """Check that each turn has the logprobs of the versions on its labels, and of no other version."""
    for turn in turns:
        np.testing.assert_allclose(turn.exact_T, turn.of_server_T, rtol=0, atol=TOLERANCE)
    others_N = np.concatenate([np.abs(turn.of_others_T - turn.of_server_T) for turn in turns])
    assert np.mean(others_N > 100 * TOLERANCE) > 0.95


def keep_all(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Make the ledger keep its payloads. Return a dict that will hold the weights of all versions."""
    weights: Weights = {}
    push = WeightSync._send_until_done

    def keep(pusher: WeightSync, version: int, tensors: Any, *members: Any) -> Any:
        weights[version] = {name: tensor.detach().clone() for name, tensor in tensors(adapter_alone=False)}
        return push(pusher, version, tensors, *members)

    monkeypatch.setattr(WeightSync, "_send_until_done", keep)
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)
    return weights


def recorded_turns(run: LearnerRun, weights: Weights) -> list[RecordedTurn]:
    """Return the turns of all trained episodes."""
    run_inputs = RunInputs(run)
    exact = policy_in_float64(run_inputs.model_path)
    turns: list[RecordedTurn] = []
    for row, payload in consumed_groups(run):
        group, prompt = unpack(payload, EpisodeGroup), run_inputs.prompts.prompt_at(row.position).token_ids
        for branch in (branch for episode in group.episodes for branch in episode.branches):
            before = prompt if branch.prompt_token_ids is None else branch.prompt_token_ids.tolist()
            turns += turns_of(branch, before, group.entered_version, weights, exact)
    return turns


def turns_of(
    branch: TokenSequence, before: list[int], entered_version: int, weights: Weights, exact: Any
) -> Iterable[RecordedTurn]:
    versions_T = branch.versions_T
    logprobs: dict[str, np.ndarray] = {name: np.full(len(versions_T), np.nan) for name in ("exact", "of_others")}
    for version in set(branch.sampled_versions):
        other = version - 1 if version - 1 in weights else version + 1
        is_its_T = versions_T == version
        load(exact, weights[version])
        logprobs["exact"][is_its_T] = in_float64(exact, before, branch)[is_its_T]
        load(exact, weights[other])
        logprobs["of_others"][is_its_T] = in_float64(exact, before, branch)[is_its_T]
    sampled_T = np.flatnonzero(branch.is_sampled_T)
    for places in np.split(sampled_T, np.flatnonzero(np.diff(sampled_T) > 1) + 1):
        up_to_T = versions_T[: places[-1] + 1][branch.is_sampled_T[: places[-1] + 1]]
        yield RecordedTurn(
            versions_T=versions_T[places],
            of_server_T=branch.behavior_logprobs[places],
            exact_T=logprobs["exact"][places],
            of_others_T=logprobs["of_others"][places],
            is_fresh=bool((up_to_T == entered_version).all()),
        )


def policy_in_float64(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def load(policy: Any, weights: dict[str, torch.Tensor]) -> None:
    policy.load_state_dict(weights, strict=False)  # a tied head is missing
    policy.tie_weights()


@torch.no_grad()
def in_float64(policy: Any, before: list[int], branch: TokenSequence) -> np.ndarray:
    ids_S = torch.tensor(before + branch.token_ids.tolist())
    logprobs_SV = policy(ids_S[None]).logits[0, len(before) - 1 : -1].log_softmax(-1)
    return logprobs_SV.gather(1, ids_S[len(before) :, None])[:, 0].numpy()
