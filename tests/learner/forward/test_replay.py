"""Routing replay: value and gradient of a pass with given experts, against a loop over experts."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack, pack
from learner.forward.packing_check import choose_attention
from learner.forward.replay import OWN, lay_out, routed_by, routers, routing_shape
from learner.forward.replay_check import find_routers
from learner.policy.model import checkpoint_layers
from protocol.errors import ConfigError
from tests.learner.forward.plain_experts import plain_experts
from tests.learner.forward.plain_pass import CPU, Gradients, gradients, tiny
from tests.zoo.families import make_model, make_near_ties

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]
SHAPES = [(40, (9, 1, 7)), (3, (5, 12))]
"""Length of a prompt, and of its completions. The first makes the last layer leave rows out."""


def a_model(family: str, attention: str = "packed") -> Any:
    model = make_model(family).train()
    choose_attention(model, CPU, torch.float32, attention)
    shape = routing_shape(model.config)
    assert shape is not None
    find_routers(model, shape)
    return model


def make_groups() -> list[tuple[np.ndarray, list[np.ndarray]]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(1, 16, p), [rng.integers(1, 16, c) for c in lengths]) for p, lengths in SHAPES]


def given_experts(groups: list[tuple[np.ndarray, list[np.ndarray]]]) -> list[np.ndarray]:
    """Return experts of each sequence: random ones, alike for the prompt of a group, and none for some last tokens."""
    rng = np.random.default_rng(2)

    def choices(count: int) -> np.ndarray:
        return rng.random((count, 2, 4)).argsort(-1)[..., :2].astype(np.uint8)

    found = []
    for prompt, completions in groups:
        of_prompt = choices(len(prompt))
        found += [np.concatenate([of_prompt, choices(max(0, len(one) - 3))]) for one in completions]
    return found


def weighted(logprobs_M: torch.Tensor) -> torch.Tensor:
    return (torch.linspace(-1, 2, len(logprobs_M)) * logprobs_M).sum()


def by_loops(family: str, model: Any, groups: Any, experts_B: list[np.ndarray]) -> tuple[torch.Tensor, Gradients]:
    """Return logprobs and gradients, one sequence after the other."""
    model.set_attn_implementation("eager")
    sequences = [(prompt, completion) for prompt, completions in groups for completion in completions]
    found = []
    for (prompt, completion), experts in zip(sequences, experts_B, strict=True):
        ids_1S = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        with plain_experts(family, model, experts.astype(np.int64)):
            logprobs_SV = model(ids_1S, use_cache=False).logits[0].log_softmax(-1)
        found.append(logprobs_SV[len(prompt) - 1 : -1].gather(1, ids_1S[0, len(prompt) :, None])[:, 0])
    logprobs_M = torch.cat(found)
    return logprobs_M.detach(), gradients(model, weighted(logprobs_M))


@pytest.mark.parametrize("way", ["packed", "packed, computed again", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradient_are_those_of_a_loop_over_the_given_experts(family: str, way: str) -> None:
    model, groups = a_model(family, way.split(",")[0]), make_groups()
    oracle, experts_B = copy.deepcopy(model), given_experts(groups)
    if "again" in way:
        checkpoint_layers(model)
    batch = pack(groups, CPU)
    routing = lay_out(batch, experts_B)
    assert routing is not None
    logprobs_BT, _ = token_logprobs(model, batch, 1.0, routing=routing)
    logprobs_M = logprobs_BT[batch.is_token_BT]
    found = gradients(model, weighted(logprobs_M))
    right_M, right = by_loops(family, oracle, groups, experts_B)
    torch.testing.assert_close(logprobs_M.detach(), right_M, atol=2e-5, rtol=0)
    own_M = token_logprobs(model, batch, 1.0)[0][batch.is_token_BT].detach()
    assert float((own_M - right_M).abs().mean()) > 0.1, "the given experts change too little to prove anything"
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4 * float(gradient.abs().max()) + 1e-6, rtol=0)
    router = [name for name in right if "gate.weight" in name or "router.weight" in name]
    assert len(router) == 2 and all(right[name].abs().max() > 0 for name in router)
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_tokens_without_given_experts_choose_their_own() -> None:
    model, batch = a_model("mixtral"), pack(make_groups(), CPU)
    assert lay_out(batch, [None] * 5) is None
    nothing = np.zeros((0, 2, 2), np.uint8)
    routing = lay_out(batch, [nothing] * 5)
    assert routing is not None and bool((routing.experts_NLK == OWN).all())
    own_BT, _ = token_logprobs(model, batch, 1.0)
    replayed_BT, _ = token_logprobs(model, batch, 1.0, routing=routing)
    assert torch.equal(own_BT, replayed_BT)
    num_choices, num_changed = routing.pop_counts()
    # All tokens in the first layer, and in the last only those that predict.
    assert num_choices == batch.num_tokens + len(batch.read_R) and num_changed == 0
    assert routing.pop_counts() == (0, 0.0)


def test_the_first_sequence_that_knows_a_shared_token_decides() -> None:
    prompt = np.array([1, 2, 3])
    batch = pack([(prompt, [np.array([4, 5]), np.array([6, 7, 8])])], CPU)
    first = np.full((2, 1, 1), 1, np.uint8)  # knows two of three prompt tokens
    second = np.full((5, 1, 1), 2, np.uint8)
    routing = lay_out(batch, [first, second])
    assert routing is not None
    assert routing.experts_NLK[:, 0, 0].tolist() == [1, 1, 2, OWN, 2, 2]


def as_a_server(model: Any, batch: Pack) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Return logprobs_M and experts of each sequence, as a server in bfloat16 computes them."""
    served, chosen, logprobs, experts = copy.deepcopy(model).bfloat16(), {}, [], []
    served.set_attn_implementation("eager")

    def record(layer: int, _scores: torch.Tensor, own: Any) -> Any:
        chosen[layer] = own.indices
        return own

    for path, num_predicted in zip(batch.paths_B, batch.is_token_BT.sum(1).tolist(), strict=True):
        rows = np.concatenate([segment.rows for segment in path])
        with torch.no_grad(), routed_by(list(served.model.layers), record):
            logits_SV = served(batch.token_ids_N[rows][None], use_cache=False).logits[0]
        logprobs.append(logits_SV[-num_predicted:].float().log_softmax(-1))
        experts.append(torch.stack([chosen[0], chosen[1]], 1).numpy().astype(np.uint8))
    logprobs_MV = torch.cat(logprobs)
    return logprobs_MV.gather(1, batch.targets_M[:, None])[:, 0], experts


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_closes_the_gap_to_a_bfloat16_server_whose_routers_choose_between_near_ties(family: str) -> None:
    model = make_near_ties(a_model(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    rng = np.random.default_rng(0)
    batch = pack([(rng.integers(1, 16, 50), [rng.integers(1, 16, 40) for _ in range(8)])], CPU)
    right_M, experts_B = as_a_server(model, batch)
    routing = lay_out(batch, experts_B)
    assert routing is not None and bool((routing.experts_NLK != OWN).all())
    gaps = []
    for one in (None, routing):
        with torch.no_grad():
            found_BT, _ = token_logprobs(model, batch, 1.0, routing=one)
        gaps.append(float((found_BT[batch.is_token_BT] - right_M).abs().mean()))
    assert routing.num_changed > 0.005 * routing.num_choices
    assert gaps[1] < gaps[0] / 2.5, gaps


def test_a_model_without_experts_or_without_topk_routers_is_refused() -> None:
    assert routing_shape(tiny("Qwen2Config").config) is None
    keys = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    model = tiny("PhimoeConfig", keys).eval()
    shape = routing_shape(model.config)
    assert shape is not None and str(shape) == "2 of 4 experts in 2 layers"
    choose_attention(model, CPU, torch.float32)
    with pytest.raises(ConfigError, match="not supported for PhimoeForCausalLM: no layer chooses 2 of 4 experts"):
        find_routers(model, shape)
    assert model not in routers


def test_a_router_that_did_not_choose_for_the_tokens_of_the_pass_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = a_model("mixtral"), make_groups()
    batch = pack(groups, CPU)
    routing = lay_out(batch, given_experts(groups))
    monkeypatch.setattr(model.model.layers[1], "mlp", torch.nn.Identity())
    with pytest.raises(RuntimeError, match=r"layers \[1\] did not replay"):
        token_logprobs(model, batch, 1.0, routing=routing)
