"""The choice of a policy's attention: each possible defect of a candidate is detected, and probing changes nothing."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from learner.forward import attention as attention_module
from learner.forward import probed_model
from learner.forward.attention import TreeAttention, is_packed, key_layout
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import pack
from learner.forward.packing_check import TIMES_ROUNDING, TOLERANCE, choose_attention
from learner.forward.probe import eager_logprobs, probe_of
from learner.forward.probed_model import PROBE_WINDOW, computing_in, few_layers, listening, loud, short_windows
from learner.forward.tree_attention import plan_of
from learner.policy.model import load_policy
from protocol.errors import ConfigError
from tests.learner.forward.plain_pass import CPU, TEMPERATURE, make_groups, plain, tiny
from tests.learner.forward.spelt_kernel import attend, on_kernel
from tests.sweep.families import FAMILIES, SIZES, WINDOW, CannotBuild, tiny_config, tiny_model
from tests.zoo.families import save_model

FLOAT, BFLOAT = torch.float32, torch.bfloat16
Hidden = Callable[[torch.Tensor], torch.Tensor]
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 8, "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
}  # fmt: skip
CAPPED = {"query_pre_attn_scalar": 32}
OTHERS = "depend on other sequences of the pass"


def test_a_hybrid_whose_state_leaks_between_sequences_is_padded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for words in ("layers of the kind Conv1d, which carry state", OTHERS):
        model = tiny("FalconH1Config", MAMBA)
        choose_attention(model, CPU, FLOAT)
        assert not is_packed(model) and words in caplog.messages[-1]
        monkeypatch.setattr("learner.forward.packing_check._state_problem", lambda model: None)


def leaking(from_where: Hidden, *, layer: int = 0, amount: float = 1e-6) -> Any:
    """Return a model with a layer that mixes a little of other tokens into each."""
    model = tiny("Qwen2Config")

    def leak(_layer: nn.Module, _inputs: Any, hidden_BSE: torch.Tensor) -> torch.Tensor:
        return hidden_BSE + amount * from_where(hidden_BSE)

    model.model.layers[layer].register_forward_hook(leak)
    return model


def three_before(hidden_BSE: torch.Tensor) -> torch.Tensor:
    """Mixes earlier tokens like a convolution, which is correct for padded rows."""
    return nn.functional.pad(hidden_BSE, (0, 0, 3, 0))[:, :-3]


def larger_before(hidden_BSE: torch.Tensor) -> torch.Tensor:
    """Changes a token if the third token before it is larger: a discrete choice, like routers and key selections."""
    is_larger_BS1 = three_before(hidden_BSE).norm(dim=-1, keepdim=True) > hidden_BSE.norm(dim=-1, keepdim=True)
    return hidden_BSE.roll(1, dims=-1) * is_larger_BS1


LEAKS: dict[str, tuple[Hidden, dict[str, Any], torch.dtype]] = {
    "far below rounding": (three_before, {}, FLOAT),
    "in the last layer": (three_before, {"layer": -1}, FLOAT),
    "in the dtype of the run alone": (lambda x: three_before(x) * (x.dtype == BFLOAT), {}, BFLOAT),
    "without a gradient": (lambda x: three_before(x).detach(), {"amount": 1e-3}, FLOAT),
    "a choice": (larger_before, {"amount": 1e-2}, FLOAT),
}


@pytest.mark.parametrize(("from_where", "how", "dtype"), LEAKS.values(), ids=LEAKS)
def test_a_leak_between_sequences_is_found(
    from_where: Hidden, how: dict[str, Any], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = leaking(from_where, **how)
    choose_attention(model, CPU, dtype)
    assert not is_packed(model) and OTHERS in caplog.text


def largest_half(hidden_BSE: torch.Tensor) -> torch.Tensor:
    """Adds to the largest rows of a sequence, like experts that choose their tokens."""
    norm_BS1 = hidden_BSE.norm(dim=-1, keepdim=True)
    return hidden_BSE.roll(1, dims=-1) * (norm_BS1 >= norm_BS1.median(dim=1, keepdim=True).values)


def embedding_more_than_its_rows() -> Any:
    model = leaking(lambda hidden_BSE: model.get_input_embeddings()(torch.arange(1, 8)).mean(0) + 0 * hidden_BSE)
    return model


def dropping_in_training() -> Any:
    model = tiny("Qwen2Config")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.1))
    return model.train()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "chooses tokens among later ones": (
        partial(leaking, largest_half, amount=1e-2), "Qwen2ForCausalLM cannot be trained: its logprobs depend on"
    ),
    "reads later tokens": (
        partial(leaking, lambda x: x.roll(-1, dims=1)),
        "Qwen2ForCausalLM cannot be trained: its logprobs depend on later tokens"
    ),
    "has a gradient that is no number": (
        partial(leaking, lambda x: (0 * x).abs().sqrt()), "the gradient of its logprobs is NaN or inf"
    ),
    "embeds more than its rows": (embedding_more_than_its_rows, "it embeds tokens other than those of its rows"),
    "drops in training": (dropping_in_training,
        r"in training differ by 0\.\d+ nats.* It has dropout, jitter, another routing"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_an_unsupported_model_is_rejected(make: Callable[[], Any], words: str) -> None:
    model = make()
    loaded_with = model.config._attn_implementation
    with pytest.raises(ConfigError, match=words):
        choose_attention(model, CPU, FLOAT)
    assert model.config._attn_implementation == loaded_with or "training" in words


# Arguments that the family's attention passes to every implementation.


@pytest.mark.parametrize(("family", "dtype"), [("Gemma2Config", FLOAT), ("VaultGemmaConfig", BFLOAT)])
def test_a_soft_cap_unsupported_by_packing_and_sdpa_uses_eager_attention(
    family: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(family, CAPPED)
    choose_attention(model, CPU, dtype)
    assert model.config._attn_implementation == "eager"
    (said,) = caplog.messages
    assert "with sdpa attention where its attention scores are large its logprobs differ by" in said


@pytest.mark.parametrize(("family", "wanted"), [("gemma2", "eager"), ("qwen2", "sdpa"), ("gemma2", "sdpa")])
def test_an_attention_named_in_the_config_is_used_if_correct_and_rejected_if_wrong(
    tmp_path: Path, family: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(family, tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=False, attn_implementation=wanted)
    words = (
        r'attn_implementation = "sdpa" is wrong for Gemma2ForCausalLM: its logprobs differ .* Set it to "packed" '
        r'or "eager"'
    )
    is_wrong = (family, wanted) == ("gemma2", "sdpa")
    with pytest.raises(ConfigError, match=words) if is_wrong else nullcontext():
        choose_attention(policy, CPU, FLOAT, wanted)
    assert policy.config._attn_implementation == wanted and not caplog.records


def test_an_attention_of_other_devices_must_support_a_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(functions._global_mapping, "other", functions["sdpa"])
    model = tiny("Gemma2Config", CAPPED)
    model.set_attn_implementation("other")
    words = (
        r'"other" is wrong for .*: where its attention scores are large in torch.float32 on cpu its logprobs are '
        r"off by 0\.\d+"
    )
    with pytest.raises(ConfigError, match=words):
        choose_attention(model, CPU, FLOAT, "other")


def test_a_model_with_its_own_attention_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("Qwen2Config")
    model.set_attn_implementation = lambda _name: None
    choose_attention(model, CPU, FLOAT)
    assert not is_packed(model) and "transformers supports only its own attention" in caplog.text


def without_sinks(q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, _sinks: Any, tree: Any) -> Any:
    return TreeAttention.apply(q_NHD, k_NKD, v_NKD, None, tree)


def wrong_where_scores_are_small(q_NHD: torch.Tensor, k_NKD: torch.Tensor, *rest: Any) -> Any:
    is_loud = q_NHD.norm(dim=-1).max() * k_NKD.norm(dim=-1).max() * rest[-1].scale > probed_model.LOUDEST / 2
    return TreeAttention.apply(q_NHD if is_loud else q_NHD * 2, k_NKD, *rest)


def wrong_in_bfloat16(q_NHD: torch.Tensor, *rest: Any, wrong_from: float) -> Any:
    if q_NHD.dtype == BFLOAT:
        is_wrong_N = torch.arange(len(q_NHD)) >= wrong_from * len(q_NHD)
        q_NHD = torch.where(is_wrong_N[:, None, None], 8 * q_NHD, q_NHD)
    return TreeAttention.apply(q_NHD, *rest)


SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
OFF_IN_BFLOAT = "in torch.bfloat16 on cpu its logprobs are off by"
WRONG: dict[str, tuple[Callable[..., Any], Callable[[], Any], torch.dtype, str]] = {
    "forgets sinks": (without_sinks, partial(tiny, "GptOssConfig", SINKS), FLOAT, "its logprobs differ by"),
    "small scores": (wrong_where_scores_are_small, partial(tiny, "Qwen2Config"), FLOAT, " (its logprobs differ by"),
    "bfloat16": (partial(wrong_in_bfloat16, wrong_from=0.0), partial(tiny, "Qwen2Config"), BFLOAT, OFF_IN_BFLOAT),
    "last groups": (partial(wrong_in_bfloat16, wrong_from=0.7), partial(tiny, "Qwen2Config"), BFLOAT, OFF_IN_BFLOAT),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "make", "dtype", "words"), WRONG.values(), ids=WRONG)
def test_every_defect_of_a_packed_attention_is_found(
    wrong: Callable[..., Any], make: Callable[[], Any], dtype: torch.dtype, words: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    class Wrong:
        apply = staticmethod(wrong)

    monkeypatch.setattr(attention_module, "TreeAttention", Wrong)
    model = make()
    choose_attention(model, CPU, dtype)
    assert not is_packed(model) and words in caplog.text


def test_a_window_ignored_by_packing_is_found_although_it_exceeds_the_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention_module, "plan_of", lambda batch, window, **how: plan_of(batch, None, **how))
    model = tiny("MistralConfig", {"sliding_window": 4096})
    choose_attention(model, CPU, FLOAT)
    assert not is_packed(model) and "its logprobs differ by" in caplog.text


GPU = torch.device("cuda")
spelt_out = partial(on_kernel, kernel=attend)
"""Nothing is compiled here, so no torch operator is needed. Defining one in a process of many tests has failed."""


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the packed path of GPUs on the CPU."""

    @contextmanager
    def on_any_device(model: Any, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
        with computing_in(model, dtype, CPU), monkeypatch.context() as patch:
            if device == GPU:
                patch.setattr(attention_module, "_keys_of", key_layout)
            yield

    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr("learner.forward.packing_check.computing_in", on_any_device)
    monkeypatch.setattr(attention_module, "varlen_attention", spelt_out)


def test_sinks_unsupported_by_the_gpu_kernel_are_padded(with_a_gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(tiny_config("gpt_oss")).eval()
    choose_attention(model, GPU, BFLOAT)
    assert not is_packed(model) and "has attention sinks, which the kernel for cpu does not support" in caplog.text


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=["float32", "bfloat16"])
def test_windows_supported_by_the_gpu_kernel_are_packed_unless_wrong(
    dtype: torch.dtype, with_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forgetful(*inputs: Any) -> torch.Tensor:
        *most, _window, scale = inputs
        return spelt_out(*most, None, scale)

    model = tiny("MistralConfig", {"sliding_window": 64})
    choose_attention(model, GPU, dtype)
    assert is_packed(model)
    monkeypatch.setattr(attention_module, "varlen_attention", forgetful)
    model = tiny("MistralConfig", {"sliding_window": 64})
    choose_attention(model, GPU, dtype)
    assert not is_packed(model) and "its logprobs are off by" in caplog.text


@pytest.mark.parametrize(
    ("error", "is_hit"),
    [
        (MemoryError("std::bad_alloc"), is_packed),
        (torch.OutOfMemoryError("CUDA out of memory"), lambda model: not is_packed(model)),
    ],
    ids=["packed", "eager"],
)
def test_an_out_of_memory_error_is_not_a_decision(error: Exception, is_hit: Callable[[Any], bool]) -> None:
    model = tiny("Qwen2Config")

    def run_out(*_: Any) -> None:
        if is_hit(model):
            raise error

    model.model.register_forward_pre_hook(run_out)
    with pytest.raises(ConfigError, match=rf"out of memory while comparing the model's passes .*{error}"):
        choose_attention(model, CPU, FLOAT)


def chaotic(model: Any, amount: float) -> Any:
    """Like many experts of which rounding selects others: the output of the layer depends on the last bits of its
    input."""
    model.model.layers[0].register_forward_hook(lambda _layer, _inputs, out: out + amount * (1e6 * out).sin())
    return model


def test_a_model_with_large_rounding_errors_gets_a_larger_bound(caplog: pytest.LogCaptureFixture) -> None:
    model, groups = chaotic(tiny("Qwen2Config"), 0.01), make_groups()
    batch = pack(groups, CPU)
    with torch.no_grad():
        right_M = plain(model, groups)[0]
    choose_attention(model, CPU, FLOAT)
    found_M = token_logprobs(model, batch, TEMPERATURE)[0].detach()[batch.is_token_BT]
    assert is_packed(model) and not caplog.records
    assert float((found_M - right_M).abs().mean()) > TOLERANCE / TIMES_ROUNDING


def test_eager_attention_is_used_if_rounding_could_hide_a_missing_soft_cap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = chaotic(tiny("Gemma2Config", CAPPED), 0.1)
    choose_attention(model, CPU, FLOAT)
    assert model.config._attn_implementation == "eager"
    assert "with sdpa attention rounding alone changes its logprobs by" in caplog.text


# Probing.


def a_gemma() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    return tiny("Gemma3TextConfig", {"num_hidden_layers": 9, "layer_types": kinds, "sliding_window": 512})


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=["float32", "bfloat16"])
def test_probing_does_not_change_the_model_or_the_random_state(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_gemma().to(dtype)
    model.model.layers[1].eval()
    tensors = [(tensor, tensor.dtype, tensor.clone()) for tensor in (*model.parameters(), *model.buffers())]
    config, is_training = model.config.to_dict(), [module.training for module in model.modules()]
    windows, random = [layer.self_attn.sliding_window for layer in model.model.layers], torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        choose_attention(model, CPU, BFLOAT)
    assert all(
        now is before for now, (before, _, _) in zip((*model.parameters(), *model.buffers()), tensors, strict=True)
    )
    assert all(tensor.dtype == dtype and torch.equal(tensor, value) for tensor, dtype, value in tensors)
    assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())
    assert model.config.to_dict() == config and [module.training for module in model.modules()] == is_training
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == windows and len(model.model.layers) == 9
    assert torch.equal(torch.get_rng_state(), random) and "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    assert not caplog.records, "a model without problems must not log"


def test_random_numbers_of_a_probe_are_not_taken_from_the_run() -> None:
    model = leaking(torch.randn_like, amount=0.0)
    random = torch.get_rng_state()
    choose_attention(model, CPU, FLOAT)
    assert is_packed(model) and torch.equal(torch.get_rng_state(), random)


def test_a_deep_model_is_probed_with_enough_layers_for_each_kind() -> None:
    model = a_gemma()
    with few_layers(model):
        assert len(model.model.layers) == model.config.num_hidden_layers == 3
    calls: list[int] = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: calls.append(i))
    choose_attention(model, CPU, FLOAT)
    assert set(calls) == {0, 1, 2}
    # Layers that differ in a switch of 0 or 1 are of different kinds.
    model = tiny("SmolLM3Config", {"num_hidden_layers": 8})
    assert [layer.self_attn.use_rope for layer in model.model.layers] == [1, 1, 1, 0] * 2
    with few_layers(model):
        assert [layer.self_attn.use_rope for layer in model.model.layers] == [1, 1, 1, 0]
    # The last layer has the kind of the model's last layer, which the pass removes: one more than both kinds need.
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    model = tiny("Gemma3TextConfig", {"num_hidden_layers": 8, "layer_types": kinds, "sliding_window": 512})
    with few_layers(model):
        assert len(model.model.layers) == model.config.num_hidden_layers == 7


def test_loud_scores_have_their_size_and_short_windows_are_shorter_than_the_probe() -> None:
    model = tiny("Gemma2Config", CAPPED)
    model.set_attn_implementation("eager")
    with listening() as largest:
        quiet_M = eager_logprobs(model, probe_of(model))
    assert len(largest) == 2 and max(largest.values()) < 10
    with listening() as louder, loud(largest):
        loud_M = eager_logprobs(model, probe_of(model))
    assert min(louder.values()) > probed_model.LOUDEST / 2 and float((loud_M - quiet_M).abs().mean()) > 0.01
    assert max(sum(segment.length for segment in path) for path in probe_of(model).paths_B) / 2 > PROBE_WINDOW


def test_the_probe_has_every_token_except_padding() -> None:
    model = tiny("Qwen2Config")
    assert model.config.pad_token_id == 0
    assert probe_of(model).token_ids_N.unique().tolist() == list(range(1, 16))


LIMITS = [key for key, size in SIZES.items() if size == WINDOW] + ["index_topk", "indexer_budget"]
"""Config keys that limit how many keys a query sees."""
NOT_SHORTENED = {
    "gpt_neo": "its window is a buffer, made with the model; it is padded with eager attention",
    "inkling_text": "its window is the size of a weight, too; it is padded",
    "qwen4_exp_text": "it selects blocks of keys, counted by several numbers; it has a state and is padded",
}
SOON = ("mistral", "llama4_text", "deepseek_v32")
LONG = 512


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in SOON else pytest.mark.system) for family in FAMILIES]
)
def test_key_limits_are_shortened_only_for_the_probe(family: str) -> None:
    """Return how much a limit of PROBE_WINDOW changes eager attention."""
    try:
        config = tiny_config(family)
        limits = [key for key in LIMITS if type(vars(config).get(key)) is int]
        if not limits:
            return
        model, other = (tiny_model(tiny_config(family, **dict.fromkeys(limits, size))) for size in (LONG, PROBE_WINDOW))
    except CannotBuild as error:
        pytest.skip(str(error))
    for one in (model.eval(), other.eval()):
        one.set_attn_implementation("eager")
    long_M = eager_logprobs(model, probe_of(model))
    with short_windows(model):
        short_M = eager_logprobs(model, probe_of(model))
    after_M = eager_logprobs(model, probe_of(model))
    moved, expected = (float((x_M - long_M).abs().mean()) for x_M in (short_M, eager_logprobs(other, probe_of(other))))
    assert torch.equal(after_M, long_M)
    assert (moved >= expected / 3) == (family not in NOT_SHORTENED)
