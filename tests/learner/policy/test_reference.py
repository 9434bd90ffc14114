"""The reference follows its formula at every step and does not change the policy."""

import copy
import functools
from pathlib import Path

import msgspec
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from learner.config import LoraConfig, ReferenceConfig
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack
from learner.policy.lora import add_adapter
from learner.policy.reference import Reference, ReferenceState
from learner.policy.snapshot import trainable
from protocol.errors import ConfigError
from tests.learner.checkpoints import save_whole, whole_tensors
from tests.learner.policy.tiny_policy import (
    BATCHES,
    KINDS,
    METRICS,
    PROMPT,
    TEMPERATURE,
    merged_tensors,
    move,
    tiny_policy,
)

Weights = dict[str, torch.Tensor]

REFRESHES = {"fixed": [], "every": [2, 5], "ema": [2, 4, 6, 8], "adaptive": [4, 8], "mixture": [2, 4, 6, 8]}
"""Computed by hand for METRICS."""


def weights64(policy: nn.Module) -> Weights:
    return {name: parameter.detach().double().clone() for name, parameter in policy.named_parameters()}


@functools.cache
def separate_model() -> nn.Module:
    return tiny_policy().double()


def probabilities(weights: Weights, batch: Pack) -> torch.Tensor:
    """Return the logprobs of a batch under a separate float64 model with these weights."""
    model = separate_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        logits_SV = model(batch.token_ids_N[None]).logits[0]
    softmax_TV = (logits_SV[len(PROMPT) - 1 :] / TEMPERATURE).softmax(-1)
    return softmax_TV[torch.arange(len(softmax_TV)), batch.targets_M]


def assert_is(reference: Reference, policy: nn.Module, references: list[Weights]) -> None:
    """Check that the reference's logprobs are those of the mean distribution of separate models."""
    for batch, logprobs_BT in zip(BATCHES, reference.logprobs(policy, BATCHES), strict=True):
        mean_T = sum(probabilities(weights, batch) for weights in references) / len(references)
        torch.testing.assert_close(logprobs_BT[0].double(), mean_T.log(), atol=1e-5, rtol=0)


def resumed(reference: Reference, config: ReferenceConfig, policy: nn.Module, directory: Path) -> Reference:
    """Return the same reference as in another process that starts with another policy."""
    save_whole(reference.tensors(policy), directory)
    other = Reference(config, policy, reference._accelerator, TEMPERATURE)
    other.load(directory, policy, msgspec.json.decode(msgspec.json.encode(reference.state), type=ReferenceState))
    assert other.state == reference.state
    for before, after in zip(reference.logprobs(policy, BATCHES), other.logprobs(policy, BATCHES), strict=True):
        assert torch.equal(before, after)
    return other


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_follows_its_formula_at_every_step_and_across_a_resume(
    accelerator: Accelerator, tmp_path: Path, kind: str
) -> None:
    config = ReferenceConfig(kind=kind, **KINDS[kind])
    policy = accelerator.prepare(tiny_policy())
    reference = Reference(config, policy, accelerator, TEMPERATURE)
    expected, version_of_it = [weights64(policy)], 0
    assert_is(reference, policy, expected)
    for version, metrics in enumerate(METRICS, 1):
        if version == 7:  # in the middle of a patience, an interval and a mixture
            reference = resumed(reference, config, policy, tmp_path)
        move(policy, seed=version)
        refreshed = reference.after_step(policy, version, metrics)
        assert refreshed == (version in REFRESHES[kind])
        if refreshed:
            now, version_of_it = weights64(policy), version
            if kind == "ema":
                expected = [{name: 0.7 * expected[0][name] + 0.3 * now[name] for name in now}]
            elif kind == "mixture":
                expected = [*expected, now][-3:]
            else:
                expected = [now]
        assert reference.version == version_of_it
        assert_is(reference, policy, expected)
    last = probabilities(weights64(policy), BATCHES[0])
    others = [probabilities(weights, BATCHES[0]) for weights in expected]
    if kind != "adaptive":  # the adaptive reference was just refreshed
        assert max((last.log() - other.log()).abs().max() for other in others) > 0.3


def test_in_bfloat16_each_snapshot_of_a_mixture_computes_with_its_own_weights(accelerator: Accelerator) -> None:
    policy = tiny_policy(torch.bfloat16)
    config = ReferenceConfig(kind="mixture", every_steps=1, num_snapshots=2)
    reference = Reference(config, policy, accelerator, TEMPERATURE)
    probabilities_of = []
    for step in range(3):
        with torch.no_grad():
            logprobs_BT, _ = token_logprobs(copy.deepcopy(policy), BATCHES[0], TEMPERATURE)
        probabilities_of.append(logprobs_BT.double().exp())
        if step == 1:
            reference.after_step(policy, step, {})
        if step < 2:
            move(policy, seed=step)
    first, second, own = probabilities_of
    (found_BT,) = reference.logprobs(policy, BATCHES[:1])
    torch.testing.assert_close(found_BT.double(), ((first + second) / 2).log(), atol=1e-5, rtol=0)
    assert min((second - first).abs().max(), (own - second).abs().max()) > 1e-2
    after_BT, _ = token_logprobs(policy, BATCHES[0], TEMPERATURE)
    torch.testing.assert_close(after_BT.detach().double().exp(), own, atol=1e-6, rtol=0)


def test_a_moving_average_keeps_steps_that_bfloat16_would_lose(accelerator: Accelerator) -> None:
    policy = tiny_policy(torch.bfloat16)
    expected = start = weights64(policy)
    reference = Reference(ReferenceConfig(kind="ema", every_steps=2, alpha=0.001), policy, accelerator, TEMPERATURE)
    move(policy, seed=1)
    now = weights64(policy)
    for version in range(1, 9):
        if reference.after_step(policy, version, {}):
            expected = {name: 0.999 * expected[name] + 0.001 * now[name] for name in now}
    (snapshot,) = reference._snapshots
    for name, tensor in snapshot.items():
        torch.testing.assert_close(tensor.double(), expected[name], atol=1e-7, rtol=1e-6)
        assert (tensor.double() - start[name]).abs().max() > 1e-4
    one = next(name for name in snapshot if name.endswith("ln_f.weight"))
    assert torch.equal(start[one].bfloat16().lerp(now[one].bfloat16(), 0.001), start[one].bfloat16()), "it is lost"


@pytest.mark.parametrize(("kind", "size_of_number"), [("mixture", 2), ("ema", 4)])
def test_in_bfloat16_copies_take_half_the_memory_and_change_no_logprob(
    accelerator: Accelerator, tmp_path: Path, kind: str, size_of_number: int
) -> None:
    policy = tiny_policy(torch.bfloat16)
    reference = Reference(ReferenceConfig(kind=kind, **KINDS[kind]), policy, accelerator, TEMPERATURE)
    with torch.no_grad():
        expected = [token_logprobs(policy, batch, TEMPERATURE)[0] for batch in BATCHES]
    move(policy, seed=1)
    found = reference.logprobs(policy, BATCHES)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    size = size_of_number * sum(parameter.numel() for parameter in policy.parameters())
    save_whole(reference.tensors(policy), tmp_path)
    for copies in (reference._snapshots[0], whole_tensors(tmp_path)):
        assert sum(tensor.nbytes for tensor in copies.values()) == size


@pytest.mark.parametrize("kind", ["every", "ema", "mixture"])
def test_only_the_parameters_that_match_are_refreshed(accelerator: Accelerator, kind: str) -> None:
    policy = tiny_policy()
    config = ReferenceConfig(kind=kind, only=r"h\.1\.|ln_f", **KINDS[kind])
    reference = Reference(config, policy, accelerator, TEMPERATURE)
    start = weights64(policy)
    move(policy, seed=1)
    assert reference.after_step(policy, 2, {})
    moved = weights64(policy)
    target = start | {name: moved[name] for name in moved if name.startswith(("transformer.h.1.", "transformer.ln_f"))}
    average = {name: 0.7 * start[name] + 0.3 * target[name] for name in target}
    assert_is(reference, policy, {"every": [target], "ema": [average], "mixture": [start, target]}[kind])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"only": "lora_"}, r"only = 'lora_' matches none of the 28 .*, such as transformer\.wte\.weight, "),
        ({"device": "cuda:99"}, r'device = "cuda:99" does not exist: \d+ CUDA devices'),
    ],
)
def test_settings_that_the_policy_or_the_machine_contradicts_are_rejected(
    accelerator: Accelerator, settings: dict, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        Reference(ReferenceConfig(kind="every", every_steps=2, **settings), tiny_policy(), accelerator, 1.0)


def test_a_name_filter_without_effect_is_one_warning(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    Reference(ReferenceConfig(kind="every", every_steps=2, only="transformer"), tiny_policy(), accelerator, 1.0)
    assert "only = 'transformer' has no effect, because it matches all of the 28" in caplog.text


def test_weights_of_another_policy_are_rejected(accelerator: Accelerator, tmp_path: Path) -> None:
    config = ReferenceConfig(kind="fixed")
    saved = Reference(config, policy := tiny_policy(), accelerator, TEMPERATURE)
    save_whole(saved.tensors(policy), tmp_path)
    policy.transformer.wpe.requires_grad_(False)
    other = Reference(config, policy, accelerator, TEMPERATURE)
    with pytest.raises(ConfigError, match=r"differs in transformer\.wpe\.weight; resume with the model"):
        other.load(tmp_path, policy, saved.state)


def test_the_reference_of_an_adapter_has_only_the_adapter_and_shares_the_base(accelerator: Accelerator) -> None:
    policy = tiny_policy()
    add_adapter(policy, LoraConfig(rank=3), seed=0)
    reference = Reference(ReferenceConfig(kind="every", every_steps=2), policy, accelerator, TEMPERATURE)
    (snapshot,) = reference._snapshots
    assert snapshot.keys() == trainable(policy).keys() and all(".lora_" in name for name in snapshot)

    def merged64() -> Weights:
        return {name: tensor.double() for name, tensor in merged_tensors(policy).items()}

    base = merged64()
    move(policy, seed=1)
    assert not reference.after_step(policy, 1, {})
    assert_is(reference, policy, [base])
    moved = merged64()
    assert reference.after_step(policy, 2, {})
    move(policy, seed=2)
    assert_is(reference, policy, [moved])
    apart = probabilities(base, BATCHES[0]).log() - probabilities(moved, BATCHES[0]).log()
    assert apart.abs().max() > 1e-2
