"""Families of models over packs against the plain padded pass of transformers: losses, entropies and gradients in float32."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from learner.config.policy import LoraConfig
from learner.forward import attention
from learner.forward.attention import PackingError, is_packed
from learner.forward.logprobs import logit_map_of, token_logprobs
from learner.forward.pack import pack
from learner.forward.packing_check import choose_attention
from learner.forward.tree_attention import TreePart, TreePlan
from learner.policy.lora import add_adapter
from learner.policy.model import load_policy
from protocol.errors import ConfigError
from tests.zoo.families import FAMILIES, LM, save_model

CPU = torch.device("cpu")
TEMPERATURE = 0.7
PADDED = {"gemma2": "softcap"}
"""Families that do not go packed, and what the log says of it."""
WINDOW = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", WINDOW),
    "phi3": ("Phi3Config", WINDOW),
    "gemma3": ("Gemma3TextConfig", MIXED),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, **MIXED}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, **MIXED}),
}

Groups = list[tuple[np.ndarray, list[np.ndarray]]]


def make_groups() -> Groups:
    """Prompts of 1 to 40 tokens, completions of 1 to 30; below and above a window of 8, some of one length."""
    rng = np.random.default_rng(0)
    shapes = [(5, (1, 7, 3)), (1, (4, 4)), (13, (30, 2, 12, 12)), (40, (1, 9, 18)), (13, (6,)), (8, (1, 1))]
    return [(rng.integers(1, 16, p), [rng.integers(1, 16, c) for c in lengths]) for p, lengths in shapes]


def plain(model: Any, groups: Groups) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logprobs and entropies of each completion: rows padded right, whole logits, a mask; nothing of ours."""
    rows = [(prompt, completion) for prompt, completions in groups for completion in completions]
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    token_ids_BS, mask_BS = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for b, (prompt, completion) in enumerate(rows):
        ids = torch.from_numpy(np.concatenate([prompt, completion]))
        token_ids_BS[b, : len(ids)], mask_BS[b, : len(ids)] = ids, 1
    logits_BSV = model(token_ids_BS, attention_mask=mask_BS, use_cache=False).logits.float() / TEMPERATURE
    logprobs_BSV = logits_BSV.log_softmax(-1)
    logprobs, entropies = [], []
    for b, (prompt, completion) in enumerate(rows):
        here_TV = logprobs_BSV[b, len(prompt) - 1 : len(prompt) + len(completion) - 1]
        logprobs.append(here_TV.gather(1, torch.from_numpy(completion)[:, None])[:, 0])
        entropies.append(-(here_TV.exp() * here_TV).sum(-1))
    return logprobs, entropies


def loss_of(logprobs_M: torch.Tensor, entropy_M: torch.Tensor) -> torch.Tensor:
    use_M = torch.linspace(-1, 1, len(logprobs_M))
    return (use_M * (logprobs_M - logprobs_M.detach()).exp() * 10).sum() - 0.1 * entropy_M.sum() - logprobs_M.sum()


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, *, checkpointing: bool = False) -> None:
    groups = make_groups()
    batch = pack(groups, CPU)
    loaded_with = model.config._attn_implementation
    model.set_attn_implementation("eager")  # transformers' others leave out what they cannot do, such as a soft cap
    logprobs, entropies = plain(model, groups)
    right_logprobs_M, right_entropy_M = torch.cat(logprobs), torch.cat(entropies)
    right = gradients(model, loss_of(right_logprobs_M, right_entropy_M))
    model.set_attn_implementation(loaded_with)
    choose_attention(model, CPU, torch.float32)
    if checkpointing:
        model.gradient_checkpointing_enable()
    logprobs_BT, entropy_BT = token_logprobs(model, batch, TEMPERATURE, entropy="gradient")
    assert entropy_BT is not None
    found_M, entropy_M = logprobs_BT[batch.is_token_BT], entropy_BT[batch.is_token_BT]
    torch.testing.assert_close(found_M, right_logprobs_M, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_M, right_entropy_M, atol=1e-5, rtol=1e-5)
    found_loss, right_loss = loss_of(found_M, entropy_M), loss_of(right_logprobs_M, right_entropy_M)
    assert abs(float(found_loss.detach() - right_loss.detach())) <= 1e-6 * abs(float(right_loss.detach()))
    found = gradients(model, found_loss)
    assert found.keys() == right.keys()
    norm = sum(float(g.square().sum()) for g in right.values()) ** 0.5
    assert sum(float((found[n] - right[n]).square().sum()) for n in right) ** 0.5 <= 1e-5 * norm


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_losses_and_gradients_of_the_plain_pass(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(family, tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=False)
    assert_same(policy)
    assert is_packed(policy) == (family not in PADDED)
    assert [PADDED[family] in said for said in said_of_attention(caplog)] == ([True] if family in PADDED else [])


def said_of_attention(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "learner.forward.packing_check"]


def tiny(name: str, keys: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**LM | keys))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


@pytest.mark.parametrize(("name", "keys"), WINDOWED.values(), ids=WINDOWED)
def test_a_sliding_window_that_is_shorter_than_the_sequences_is_kept(name: str, keys: dict[str, Any]) -> None:
    model = tiny(name, keys)
    assert_same(model)
    assert is_packed(model)


def test_layers_that_are_computed_again_in_the_backward_pass_see_the_same() -> None:
    assert_same(tiny("Qwen2Config", {}), checkpointing=True)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "lm_head")])
def test_an_adapter_is_trained_through_a_pack_also_one_on_the_head(targets: tuple[str, ...]) -> None:
    model = tiny("LlamaConfig", {})
    add_adapter(model, LoraConfig(rank=2, target_modules=targets), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    assert_same(model)


UNPACKABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state beside its attention": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"]},
        "of the kind conv, Conv1d",
    ),
    "a mask in chunks": (
        "Llama4TextConfig",
        {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "a mask that is neither causal nor a sliding window",
    ),
}


@pytest.mark.parametrize(("name", "keys", "reason"), UNPACKABLE.values(), ids=UNPACKABLE)
def test_a_model_that_cannot_go_packed_is_padded_and_the_log_says_why(
    name: str, keys: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(name, keys)
    assert_same(model)
    (said,) = said_of_attention(caplog)
    assert not is_packed(model) and reason in said and "Padding its sequences instead" in said


def test_a_packed_pass_that_would_mix_sequences_is_found_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def everything_before(batch: Any, window: int | None, *, predicting_only: bool) -> TreePlan:
        rows_1N = np.arange(batch.num_tokens)[None]
        return TreePlan([TreePart(rows_1N, rows_1N, np.zeros(rows_1N.shape, bool), is_causal=True)])

    monkeypatch.setattr(attention, "plan_of", everything_before)
    model = tiny("Qwen2Config", {})
    with caplog.at_level(logging.WARNING):
        choose_attention(model, CPU, torch.float32)
    assert not is_packed(model) and "depend on other sequences of the pass" in caplog.text


def test_a_packed_model_that_is_called_without_a_pack_says_what_to_do() -> None:
    model = tiny("Qwen2Config", {})
    choose_attention(model, CPU, torch.float32)
    with pytest.raises(PackingError, match="called without a pack; compute its logprobs with token_logprobs"):
        model(torch.tensor([[1, 2]]))


def test_an_attention_that_transformers_does_not_have_is_refused_with_those_to_take(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    with pytest.raises(ConfigError, match=r'attn_implementation = "fast".* Set it to "packed", "sdpa" or "eager"'):
        load_policy(tmp_path, gradient_checkpointing=False, attn_implementation="fast")


def test_what_a_model_does_to_its_logits_is_found_out_without_its_config() -> None:
    assert logit_map_of(tiny("Qwen2Config", {})).scale == 1 and logit_map_of(tiny("Qwen2Config", {})).cap is None
    assert logit_map_of(tiny("GraniteConfig", {"logits_scaling": 4.0})).scale == 0.25
    assert logit_map_of(tiny("Gemma2Config", {"final_logit_softcapping": 5.0})).cap == pytest.approx(5.0)


def test_a_model_that_does_anything_else_to_its_logits_is_refused() -> None:
    model = tiny("Qwen2Config", {})
    whole = model.forward

    def squared(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        output.logits = output.logits.square()
        return output

    model.forward = squared
    with pytest.raises(
        ConfigError, match="Qwen2ForCausalLM changes its logits by something other than a scaling or a soft cap"
    ):
        logit_map_of(model)
