"""Families of models over packs against the plain padded pass of transformers: losses, entropies and gradients in
float32."""

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config.policy import LoraConfig
from learner.forward.attention import PackingError, is_packed
from learner.forward.logprobs import logit_map_of
from learner.forward.pack import pack
from learner.forward.packing_check import choose_attention
from learner.policy.lora import add_adapter
from learner.policy.model import checkpoint_layers, load_policy
from protocol.errors import ConfigError
from tests.learner.forward.plain_pass import (
    CPU,
    MIXED,
    assert_same,
    gradients,
    loss_of,
    make_groups,
    pass_over,
    plain,
    tiny,
)
from tests.zoo.families import FAMILIES, save_model

PADDED = {"gemma2": "softcap"}
"""Families that do not go packed, and what the log says of it."""
SOON = ("qwen2", "gemma2", "gpt_oss")
"""A plain one, one with a cap, one with sinks and experts."""
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", MIXED),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, **MIXED}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, **MIXED}),
}


def assert_same_as_plain(model: Any) -> None:
    groups = make_groups()
    loaded_with = model.config._attn_implementation
    model.set_attn_implementation("eager")  # transformers' others leave out what they cannot do, such as a soft cap
    right_logprobs_M, right_entropy_M = plain(model, groups)
    right_loss = loss_of(right_logprobs_M, right_entropy_M)
    right = gradients(model, right_loss)
    model.set_attn_implementation(loaded_with)
    choose_attention(model, CPU, torch.float32)
    found_M, entropy_M, *found = pass_over(model, pack(groups, CPU))
    torch.testing.assert_close(found_M, right_logprobs_M.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_M, right_entropy_M.detach(), atol=1e-5, rtol=1e-5)
    assert_same(*found, float(right_loss.detach()), right)


def said_of_attention(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "learner.forward.packing_check"]


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in SOON else pytest.mark.system) for family in FAMILIES]
)
def test_a_family_gives_the_losses_and_gradients_of_the_plain_pass(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(family, tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=False)
    assert_same_as_plain(policy)
    assert is_packed(policy) == (family not in PADDED)
    assert [PADDED[family] in said for said in said_of_attention(caplog)] == ([True] if family in PADDED else [])


@pytest.mark.parametrize(("name", "keys"), WINDOWED.values(), ids=WINDOWED)
def test_a_sliding_window_that_is_shorter_than_the_sequences_is_kept(name: str, keys: dict[str, Any]) -> None:
    model = tiny(name, keys)
    assert_same_as_plain(model)
    assert is_packed(model)


@pytest.mark.parametrize("name", ["Qwen2Config", "MixtralConfig"])
def test_layers_that_are_computed_again_in_the_backward_pass_see_the_same(name: str) -> None:
    model = tiny(name)
    checkpoint_layers(model)
    assert_same_as_plain(model)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("q_proj", "lm_head")])
def test_an_adapter_is_trained_through_a_pack_also_one_on_the_head(targets: tuple[str, ...]) -> None:
    model = tiny("LlamaConfig")
    add_adapter(model, LoraConfig(rank=2, target_modules=targets), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter))
    assert_same_as_plain(model)


def test_a_mask_in_chunks_is_padded_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("Llama4TextConfig", {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 96})
    assert_same_as_plain(model)
    (said,) = said_of_attention(caplog)
    assert not is_packed(model) and "Padding its sequences instead" in said
    assert "a mask that is neither causal nor a sliding window" in said


def test_a_packed_model_that_is_called_without_a_pack_says_what_to_do() -> None:
    model = tiny("Qwen2Config")
    choose_attention(model, CPU, torch.float32)
    with pytest.raises(PackingError, match="called without a pack; compute its logprobs with token_logprobs"):
        model(torch.tensor([[1, 2]]))


def test_an_attention_that_transformers_does_not_have_is_refused_with_those_to_take(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    with pytest.raises(ConfigError, match=r'attn_implementation = "fast".* Set it to "packed", "sdpa" or "eager"'):
        load_policy(tmp_path, gradient_checkpointing=False, attn_implementation="fast")


def test_what_a_model_does_to_its_logits_is_found_out_without_its_config_or_refused() -> None:
    model = tiny("Qwen2Config")
    assert logit_map_of(model).scale == 1 and logit_map_of(model).cap is None
    assert logit_map_of(tiny("GraniteConfig", {"logits_scaling": 4.0})).scale == 0.25
    assert logit_map_of(tiny("Gemma2Config", {"final_logit_softcapping": 5.0})).cap == pytest.approx(5.0)
    whole = model.forward

    def squared(*args: Any, **kwargs: Any) -> Any:
        output = whole(*args, **kwargs)
        output.logits = output.logits.square()
        return output

    model.forward = squared
    words = "Qwen2ForCausalLM changes its logits by something other than a scaling or a soft cap"
    with pytest.raises(ConfigError, match=words):
        logit_map_of(model)
