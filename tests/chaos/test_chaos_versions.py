"""The audit of versions finds tokens whose label names another version than the one that sampled them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from learner.environments.episode import AnyGroup, Episode, EpisodeGroup, EpisodeStats, TokenSequence
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompt, Prompts
from learner.rollouts.ledger import Ledger
from protocol.messages import Completion, Group
from protocol.model_files import resolve_model
from tests.chaos.learner_process import WEIGHTS
from tests.chaos.run import make_config
from tests.chaos.schedule import schedule
from tests.chaos.versions import audit_versions
from tests.learner.model_engine import sample

pytestmark = pytest.mark.system

LEG = msgspec.structs.replace(schedule(0, 1, "fake")[0], seed=0)


def tiny_model(version: int) -> Any:
    """Return the model with the weights of a version. Those of version 1 differ slightly from those of version 0."""
    path = resolve_model("tiny:digits")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * version
    return model


def first_prompt(directory: Path) -> Prompt:
    config = make_config(LEG, "fake", directory)
    return Prompts(config.learner.data, load_tokenizer(resolve_model(config.model)), config.seed).prompt_at(0)


@pytest.fixture
def sampled(tmp_path: Path) -> tuple[Path, list[Completion]]:
    """Return a directory with the weights of versions 0 and 1, and two completions sampled by version 0."""
    (tmp_path / WEIGHTS).mkdir()
    for version in (0, 1):
        weights = {name: tensor.detach().clone() for name, tensor in tiny_model(version).named_parameters()}
        save_file(weights, tmp_path / WEIGHTS / f"{version}-a.safetensors")
    prompt = first_prompt(tmp_path)
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run" / "ledger.db")
    ledger.admit(slot=0, attempt=0, position=0, epoch=0, prompt_id=prompt.prompt_id, version=0)
    ledger.close()
    completions = []
    for seed in range(2):
        tokens, logprobs = sample(tiny_model(0), prompt.token_ids, seed, 5)
        completions.append(
            Completion(
                token_ids=np.array(tokens, np.int32), behavior_logprobs=np.array(logprobs, np.float32),
                versions=[(0, len(tokens))], finish_reason="length",
            )
        )  # fmt: skip
    return tmp_path, completions


def audit_of(directory: Path, group: AnyGroup) -> tuple[int, list[str]]:
    return audit_versions(directory, make_config(LEG, "fake", directory), [("0.0-1", group)])


def group_of(*completions: Completion) -> Group:
    return Group(group_id="0.0", entered_version=0, completions=list(completions))


def test_the_audit_accepts_correct_labels(sampled: tuple[Path, list[Completion]]) -> None:
    directory, completions = sampled
    assert audit_of(directory, group_of(*completions)) == (2, [])


@pytest.mark.parametrize(("label", "problem"), [(1, "differ by"), (2, "was never published")])
def test_the_audit_finds_a_wrong_label(sampled: tuple[Path, list[Completion]], label: int, problem: str) -> None:
    directory, (right, wrong) = sampled
    num_tokens = len(wrong.token_ids)
    labelled = msgspec.structs.replace(wrong, versions=[(label, num_tokens)])
    num_checked, found = audit_of(directory, group_of(right, labelled))
    assert num_checked == 2 and len(found) == 1 and problem in found[0]


@pytest.mark.parametrize(("label", "num_wrong"), [(1, 0), (0, 1)])
def test_the_audit_finds_a_turn_labelled_with_the_version_of_the_turn_before(
    sampled: tuple[Path, list[Completion]], label: int, num_wrong: int
) -> None:
    directory, (first, _) = sampled
    context = [*first.token_ids.tolist(), 3]
    tokens, logprobs = sample(tiny_model(1), [*first_prompt(directory).token_ids, *context], 2, 5)
    branch = TokenSequence(
        token_ids=np.array([*context, *tokens], np.int32),
        behavior_logprobs=np.array([*first.behavior_logprobs.tolist(), 0.0, *logprobs], np.float32),
        versions=[(0, len(context) - 1), (None, 1), (label, len(tokens))], finish_reason="stop",
    )  # fmt: skip
    episode = Episode(branches=[branch], stats=EpisodeStats(state="finished", num_turns=2), reward=1.0)
    num_checked, found = audit_of(directory, EpisodeGroup(group_id="0.0", entered_version=0, episodes=[episode]))
    assert num_checked == 1 and len(found) == num_wrong
