"""The reference stays what it was, whatever happens to the policy, until its time comes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from learner.batch import MicroBatch, Row, micro_batches
from learner.config import ReferenceConfig
from learner.policy import load_policy, token_logprobs
from learner.reference import make_reference
from protocol.messages import Completion
from protocol.model_files import resolve_model

EVERY_TWO = ReferenceConfig(kind="every", every_steps=2)


def a_batch() -> MicroBatch:
    completion = Completion(
        token_ids=np.array([3, 4, 5], np.int32),
        behaviour_logprobs=np.zeros(3, np.float32),
        versions=[(0, 3)],
        finish_reason="stop",
    )
    row = Row(
        prompt_token_ids=np.array([1, 2], np.int32), completion=completion, advantage=1.0, weight=1.0, entered_version=0
    )
    (batch,) = micro_batches([row], 100, torch.device("cpu"))
    return batch


@pytest.fixture(params=["no", "bf16"])
def accelerator(request: pytest.FixtureRequest):
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision=request.param, cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def change(policy: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def test_it_follows_the_policy_only_at_its_cadence(accelerator: Accelerator) -> None:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    reference = make_reference(EVERY_TWO, policy, accelerator, temperature=1.0)
    assert reference is not None
    policy = accelerator.prepare(policy)
    batch = a_batch()
    policy_BT, _ = token_logprobs(policy, batch, 1.0)
    first_BT = reference.logprobs(batch)
    torch.testing.assert_close(first_BT, policy_BT.detach(), atol=1e-6, rtol=0)

    change(policy)
    reference.after_step(accelerator.unwrap_model(policy), version=1)
    assert torch.equal(reference.logprobs(batch), first_BT) and reference.version == 0

    reference.after_step(accelerator.unwrap_model(policy), version=2)
    changed_BT, _ = token_logprobs(policy, batch, 1.0)
    assert (reference.logprobs(batch) - first_BT).abs().max() > 1e-2 and reference.version == 2
    torch.testing.assert_close(reference.logprobs(batch), changed_BT.detach(), atol=1e-6, rtol=0)


def test_a_moving_average_follows_its_formula_and_keeps_steps_that_bfloat16_would_lose(
    accelerator: Accelerator,
) -> None:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    start = {name: parameter.detach().clone().double() for name, parameter in policy.named_parameters()}
    ema = ReferenceConfig(kind="ema", every_steps=2, alpha=0.001)
    reference = make_reference(ema, policy, accelerator, temperature=1.0)
    assert reference is not None
    policy = policy.to(torch.bfloat16)
    change(policy)
    expected = dict(start)
    for version in range(1, 9):
        reference.after_step(policy, version)
        if version % 2 == 0:
            for name, parameter in policy.named_parameters():
                expected[name] = 0.999 * expected[name] + 0.001 * parameter.detach().double()
    for name, parameter in reference._model.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], atol=1e-6, rtol=1e-5)
        assert (parameter.double() - start[name]).abs().max() > 1e-5
    assert reference.version == 8


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "every"}, 'kind = "every" needs every_steps'),
        ({"kind": "ema", "every_steps": 3}, 'kind = "ema" needs alpha'),
        ({"kind": "fixed", "every_steps": 3}, 'every_steps = 3 does nothing with kind = "fixed"'),
        ({"kind": "ema", "every_steps": 3, "alpha": 1.0}, r'alpha = 1\.0 must lie between 0 and 1.*"every"'),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ReferenceConfig(**settings)


def test_a_saved_reference_comes_back_bit_for_bit_with_its_version(accelerator: Accelerator, tmp_path: Path) -> None:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    saved = make_reference(EVERY_TWO, policy, accelerator, temperature=0.7)
    loaded = make_reference(EVERY_TWO, policy, accelerator, temperature=0.7)
    assert saved is not None and loaded is not None
    change(policy)
    saved.after_step(policy, version=4)
    saved.save(tmp_path)
    loaded.load(tmp_path, version=4)
    assert torch.equal(loaded.logprobs(a_batch()), saved.logprobs(a_batch())) and loaded.version == 4


def test_without_a_reference_there_is_none(accelerator: Accelerator) -> None:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    assert make_reference(ReferenceConfig(), policy, accelerator, temperature=1.0) is None
