"""Every turn that a run has recorded, and what the weights of the versions on its labels say of its tokens.

    weights of each version, kept before they are pushed ─┬─▶ transformers' pass in float64, which shares no code with either side
    episodes of the ledger ───────────────────────────────┘

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
"""Of a logprob of about -4.6, in float32. Measured on vLLM's CPU build: at most 6e-7 between the server and float64, 9e-7 between the
learner and float64, 1e-6 between both; the weights of another version give 0.2 more or less."""
Weights = dict[int, dict[str, torch.Tensor]]
"""By version."""


class RecordedTurn(msgspec.Struct, frozen=True, eq=False):
    """Its T tokens, all of which the policy has sampled."""

    versions_T: np.ndarray
    of_server_T: np.ndarray
    exact_T: np.ndarray
    """In float64, by the weights of each token's version."""
    of_others_T: np.ndarray
    """The same by the weights of the version before, or of the one after the first."""
    is_fresh: bool
    """No token that it follows has keys and values of another version than its own."""


def assert_said_by_the_versions_on_the_labels(turns: list[RecordedTurn]) -> None:
    """Turn by turn, and by no other version."""
    for turn in turns:
        np.testing.assert_allclose(turn.exact_T, turn.of_server_T, rtol=0, atol=TOLERANCE)
    others_N = np.concatenate([np.abs(turn.of_others_T - turn.of_server_T) for turn in turns])
    assert np.mean(others_N > 100 * TOLERANCE) > 0.95


def keep_all(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Let the ledger keep its payloads; return where the weights of all versions will be."""
    weights: Weights = {}
    push = WeightSync._push_until_done

    def keep(pusher: WeightSync, version: int, tensors: Any, *members: Any) -> Any:
        weights[version] = {name: tensor.detach().clone() for name, tensor in tensors()}
        return push(pusher, version, tensors, *members)

    monkeypatch.setattr(WeightSync, "_push_until_done", keep)
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)
    return weights


def recorded_turns(run: LearnerRun, weights: Weights) -> list[RecordedTurn]:
    """Of all episodes that were trained on."""
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
    said: dict[str, np.ndarray] = {name: np.full(len(versions_T), np.nan) for name in ("exact", "of_others")}
    for version in set(branch.sampled_versions):
        other = version - 1 if version - 1 in weights else version + 1
        is_its_T = versions_T == version
        load(exact, weights[version])
        said["exact"][is_its_T] = in_float64(exact, before, branch)[is_its_T]
        load(exact, weights[other])
        said["of_others"][is_its_T] = in_float64(exact, before, branch)[is_its_T]
    sampled_T = np.flatnonzero(branch.is_sampled_T)
    for places in np.split(sampled_T, np.flatnonzero(np.diff(sampled_T) > 1) + 1):
        up_to_T = versions_T[: places[-1] + 1][branch.is_sampled_T[: places[-1] + 1]]
        yield RecordedTurn(
            versions_T=versions_T[places],
            of_server_T=branch.behaviour_logprobs[places],
            exact_T=said["exact"][places],
            of_others_T=said["of_others"][places],
            is_fresh=bool((up_to_T == entered_version).all()),
        )


def policy_in_float64(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


def load(policy: Any, weights: dict[str, torch.Tensor]) -> None:
    policy.load_state_dict(weights, strict=False)  # a tied head is not among them
    policy.tie_weights()


@torch.no_grad()
def in_float64(policy: Any, before: list[int], branch: TokenSequence) -> np.ndarray:
    ids_S = torch.tensor(before + branch.token_ids.tolist())
    logprobs_SV = policy(ids_S[None]).logits[0, len(before) - 1 : -1].log_softmax(-1)
    return logprobs_SV.gather(1, ids_S[len(before) :, None])[:, 0].numpy()
