"""The reference is what its formula says, step by step, and the policy is untouched by it."""

import copy
import functools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from learner.config import ReferenceConfig
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack, pack
from learner.policy.model import compute_in, load_policy
from learner.policy.reference import Reference, ReferenceState, make_reference
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.checkpoints import save_whole, whole_tensors

Weights = dict[str, torch.Tensor]

TEMPERATURE = 0.7
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "every": {"every_steps": 2, "growth": 1.5, "max_every_steps": 4},
    "ema": {"every_steps": 2, "alpha": 0.3},
    "adaptive": {"kl_threshold": 0.1, "patience": 2},
    "mixture": {"every_steps": 2, "num_snapshots": 3},
}
METRICS = [
    {"reference/kl": kl, "reward/mean": reward}
    for kl, reward in [(0.2, 1.0), (0.05, 1.1), (0.2, 1.1), (0.2, 1.1), (0.0, 0.9), (0.2, 0.5), (0.2, 0.5), (0.2, 3.0)]
]
REFRESHES = {"fixed": [], "every": [2, 5], "ema": [2, 4, 6, 8], "adaptive": [4, 8], "mixture": [2, 4, 6, 8]}
"""Worked out by hand for METRICS."""


PROMPT = (1, 2)


def a_batch(token_ids: tuple[int, ...] = (3, 4, 5)) -> Pack:
    """PROMPT with one completion."""
    return pack([(np.array(PROMPT), [np.array(token_ids)])], torch.device("cpu"))


BATCHES = [a_batch(), a_batch((7, 7, 9, 3, 10))]


def tiny_policy(dtype: torch.dtype = torch.float32) -> nn.Module:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    compute_in(dtype, policy, Accelerator(cpu=True))
    return policy


def move(policy: nn.Module, seed: int) -> None:
    """What an optimizer step does to the weights that are trained, only further."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def weights64(policy: nn.Module) -> Weights:
    return {name: parameter.detach().double().clone() for name, parameter in policy.named_parameters()}


@functools.cache
def separate_model() -> nn.Module:
    return tiny_policy().double()


def probabilities(weights: Weights, batch: Pack) -> torch.Tensor:
    """Of a batch's tokens under a separate float64 model with these weights."""
    model = separate_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        logits_SV = model(batch.token_ids_N[None]).logits[0]
    softmax_TV = (logits_SV[len(PROMPT) - 1 :] / TEMPERATURE).softmax(-1)
    return softmax_TV[torch.arange(len(softmax_TV)), batch.targets_M]


def assert_is(reference: Reference, policy: nn.Module, references: list[Weights], tolerance: float = 1e-5) -> None:
    """The reference's logprobs are those of the mean distribution of separate models with these weights."""
    for batch, logprobs_BT in zip(BATCHES, reference.logprobs(policy, BATCHES), strict=True):
        mean_T = sum(probabilities(weights, batch) for weights in references) / len(references)
        torch.testing.assert_close(logprobs_BT[0].double(), mean_T.log(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_follows_its_formula_step_by_step(accelerator: Accelerator, kind: str, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    config = ReferenceConfig(kind=kind, **KINDS[kind])
    policy = accelerator.prepare(tiny_policy(dtype))
    reference = Reference(config, policy, accelerator, TEMPERATURE)
    expected, version_of_it = [weights64(policy)], 0
    assert_is(reference, policy, expected, tolerance)
    for version, metrics in enumerate(METRICS, 1):
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
        assert_is(reference, policy, expected, tolerance)
    last = probabilities(weights64(policy), BATCHES[0])
    others = [probabilities(weights, BATCHES[0]) for weights in expected]
    if kind != "adaptive":  # which was just refreshed
        assert max((last.log() - other.log()).abs().max() for other in others) > 0.3


def test_in_bfloat16_each_snapshot_of_a_mixture_computes_with_its_own_weights(accelerator: Accelerator) -> None:
    config = ReferenceConfig(kind="mixture", every_steps=1, num_snapshots=2)
    policy = accelerator.prepare(tiny_policy(torch.bfloat16))
    apart = [copy.deepcopy(accelerator.unwrap_model(policy))]
    reference = Reference(config, policy, accelerator, TEMPERATURE)
    move(policy, seed=1)
    reference.after_step(policy, 1, {})
    apart.append(copy.deepcopy(accelerator.unwrap_model(policy)))
    move(policy, seed=2)
    apart.append(copy.deepcopy(accelerator.unwrap_model(policy)))
    separate = []
    for model in apart:
        with torch.no_grad():
            separate.append(token_logprobs(model, BATCHES[0], TEMPERATURE)[0].double().exp())
    (found_BT,) = reference.logprobs(policy, BATCHES[:1])
    after_BT, _ = token_logprobs(accelerator.unwrap_model(policy), BATCHES[0], TEMPERATURE)
    torch.testing.assert_close(found_BT.double(), ((separate[0] + separate[1]) / 2).log(), atol=1e-5, rtol=0)
    torch.testing.assert_close(after_BT.detach().double().exp(), separate[2], atol=1e-6, rtol=0)
    assert all((separate[i] - separate[i - 1]).abs().max() > 1e-2 for i in range(3))


def test_a_moving_average_keeps_steps_that_bfloat16_would_lose(accelerator: Accelerator) -> None:
    policy = tiny_policy(torch.bfloat16)
    expected = start = weights64(policy)
    reference = Reference(ReferenceConfig(kind="ema", every_steps=2, alpha=0.001), policy, accelerator, TEMPERATURE)
    move(policy, seed=1)
    now = weights64(policy)
    for version in range(1, 9):
        reference.after_step(policy, version, {})
        if version % 2 == 0:
            expected = {name: 0.999 * expected[name] + 0.001 * now[name] for name in now}
    (snapshot,) = reference._snapshots
    for name, tensor in snapshot.items():
        torch.testing.assert_close(tensor.double(), expected[name], atol=1e-7, rtol=1e-6)
        assert (tensor.double() - start[name]).abs().max() > 1e-4
    # In bfloat16 itself nearly every one of these steps is rounded away.
    one = next(name for name in snapshot if name.endswith("ln_f.weight"))
    lost = start[one].bfloat16().lerp(now[one].bfloat16(), 0.001)
    assert torch.equal(lost, start[one].bfloat16())
    assert torch.isfinite(reference.logprobs(policy, BATCHES)[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_copies_take_half_the_memory_and_change_no_logprob(
    accelerator: Accelerator, tmp_path: Path, kind: str
) -> None:
    config, policy = ReferenceConfig(kind=kind, **KINDS[kind]), tiny_policy(torch.bfloat16)
    reference = Reference(config, policy, accelerator, TEMPERATURE)
    with torch.no_grad():
        expected = [token_logprobs(policy, batch, TEMPERATURE)[0] for batch in BATCHES]
    move(policy, seed=1)
    found = reference.logprobs(policy, BATCHES)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    (snapshot,) = reference._snapshots
    size = sum(tensor.nbytes for tensor in snapshot.values())
    assert size == sum(parameter.nbytes for parameter in policy.parameters()) // (1 if kind == "ema" else 2)
    save_whole(reference.tensors(policy), tmp_path)
    assert sum(tensor.nbytes for tensor in whole_tensors(tmp_path).values()) == size


def test_only_the_parameters_that_match_are_refreshed(accelerator: Accelerator) -> None:
    for kind in ("every", "ema", "mixture"):
        policy = tiny_policy()
        reference = Reference(ReferenceConfig(kind=kind, only=r"h\.1\.|ln_f", **KINDS[kind]), policy, accelerator, 0.7)
        start = weights64(policy)
        move(policy, seed=1)
        assert reference.after_step(policy, 2, {})
        target = {name: start[name] if name.startswith(("transformer.w", "transformer.h.0")) else now
                  for name, now in weights64(policy).items()}  # fmt: skip
        assert 0 < sum(target[name] is start[name] for name in target) < len(target)
        if kind == "every":
            expected = [target]
        elif kind == "ema":
            expected = [{name: 0.7 * start[name] + 0.3 * target[name] for name in target}]
        else:
            expected = [start, target]
        assert_is(reference, policy, expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"only": "lora_"}, r"only = 'lora_' matches none of the 28 .*, such as transformer\.wte\.weight, "),
        ({"device": "cuda:99"}, r'device = "cuda:99" does not exist: \d+ CUDA devices'),
    ],
)
def test_what_only_the_policy_or_the_machine_can_tell_is_refused(
    accelerator: Accelerator, settings: dict, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        Reference(ReferenceConfig(kind="every", every_steps=2, **settings), tiny_policy(), accelerator, 1.0)


def test_a_name_filter_that_leaves_nothing_out_costs_one_warning(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    Reference(ReferenceConfig(kind="every", every_steps=2, only="transformer"), tiny_policy(), accelerator, 1.0)
    assert "only = 'transformer' has no effect, because it matches all of the 28" in caplog.text


def test_the_reference_may_be_kept_in_host_memory(accelerator: Accelerator) -> None:
    policy = tiny_policy()
    reference = Reference(ReferenceConfig(kind="fixed", device="cpu"), policy, accelerator, TEMPERATURE)
    start = weights64(policy)
    move(policy, seed=1)
    assert_is(reference, policy, [start])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_reference_goes_on_as_if_it_had_not_stopped(
    accelerator: Accelerator, tmp_path: Path, kind: str
) -> None:
    """Weights bit for bit, versions, patience, moving average: stopped within a patience, an interval, a mixture."""
    config = ReferenceConfig(kind=kind, **KINDS[kind])
    policy = tiny_policy()
    whole = Reference(config, policy, accelerator, TEMPERATURE)
    for version, metrics in enumerate(METRICS, 1):
        if version == 7:
            save_whole(whole.tensors(policy), tmp_path)
            state = msgspec.json.decode(msgspec.json.encode(whole.state), type=ReferenceState)
            resumed = Reference(config, policy, accelerator, TEMPERATURE)  # of another policy than the first
            resumed.load(tmp_path, policy, state)
            assert resumed.state == whole.state
        move(policy, seed=version)
        refreshed = whole.after_step(policy, version, metrics)
        assert refreshed == (version in REFRESHES[kind])
        if version >= 7:
            assert resumed.after_step(policy, version, metrics) == refreshed and resumed.state == whole.state
            for ours, theirs in zip(whole.logprobs(policy, BATCHES), resumed.logprobs(policy, BATCHES), strict=True):
                assert torch.equal(ours, theirs)


def test_weights_of_another_policy_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    config = ReferenceConfig(kind="fixed")
    saved = Reference(config, policy := tiny_policy(), accelerator, TEMPERATURE)
    save_whole(saved.tensors(policy), tmp_path)
    policy.transformer.wpe.requires_grad_(False)
    other = Reference(config, policy, accelerator, TEMPERATURE)
    with pytest.raises(
        ConfigError, match=r"another policy: it differs in transformer\.wpe\.weight; resume with the model"
    ):
        other.load(tmp_path, policy, saved.state)


class LowRank(nn.Module):
    """base(x) + x A B, of which only A and B are trained."""

    def __init__(self, base: nn.Module, width: int, num_outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(width, 3))
        self.up = nn.Parameter(torch.zeros(3, num_outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def test_the_reference_of_an_adapter_holds_the_adapter_alone_and_shares_the_base(accelerator: Accelerator) -> None:
    policy = tiny_policy().requires_grad_(False)
    for block in policy.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn, *block.attn.c_attn.weight.shape)
    policy = accelerator.prepare(policy)
    reference = Reference(ReferenceConfig(kind="every", every_steps=2), policy, accelerator, TEMPERATURE)
    (snapshot,) = reference._snapshots
    adapter = {f"transformer.h.{i}.attn.c_attn.{part}" for i in range(2) for part in ("down", "up")}
    assert snapshot.keys() == adapter

    def merged() -> Weights:
        weights = weights64(policy)
        for i in range(2):
            name = f"transformer.h.{i}.attn.c_attn"
            weights[f"{name}.weight"] = weights[f"{name}.base.weight"] + weights[f"{name}.down"] @ weights[f"{name}.up"]
            weights[f"{name}.bias"] = weights[f"{name}.base.bias"]
        return weights

    base = merged()
    move(policy, seed=1)
    assert not reference.after_step(policy, 1, {})
    moved = merged()
    assert_is(reference, policy, [base])
    assert reference.after_step(policy, 2, {})
    move(policy, seed=2)
    assert_is(reference, policy, [moved])
    apart = probabilities(base, BATCHES[0]).log() - probabilities(moved, BATCHES[0]).log()
    assert apart.abs().max() > 1e-2


def test_without_a_reference_there_is_none(accelerator: Accelerator) -> None:
    assert make_reference(ReferenceConfig(), tiny_policy(), accelerator, temperature=1.0) is None
    assert make_reference(ReferenceConfig(kind="fixed"), tiny_policy(), accelerator, temperature=1.0) is not None
