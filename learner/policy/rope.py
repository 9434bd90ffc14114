"""Pin RoPE factors that depend on length to the server's choice, which is made once.

transformers chooses again in every pass, by the longest position in it.

    config, max_model_len ─▶ check_rope: same as vLLM, or an error ─▶ pin_rope: fixed in the rotary modules

Invariant: the logprobs of a sequence do not depend on other sequences of the pass. The rotary embedding is
the one that vLLM uses for every token of every request. The model's config, and therefore an export, stays
unchanged.
"""

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from protocol.errors import ConfigError

WITH_ROPE_OF_ITS_OWN = ("minicpm3",)
"""Families with multi-head latent attention for which vLLM does not use DeepSeek's RoPE."""
DEPENDS_ON_LENGTH = ("longrope", "dynamic")
SCALES_LLAMA4_ABOVE = 32768
"""max_model_len above which vLLM scales the queries of Llama 4, whatever its config says."""
Rope = dict[str, Any]
"""Entries of `rope_parameters`, for the whole model or for one type of its layers."""


def pin_rope(model: Any, max_model_len: int | None) -> None:
    """Give the rotary modules of a loaded model the factors of the server.

    `max_model_len` is the server's; None: what vLLM derives from the config.

    Raises:
        ConfigError: vLLM computes this RoPE differently, or it cannot be pinned.
    """
    config = model.config.get_text_config()
    check_rope(config, max_model_len)
    for layer_type, rope in _ropes(config):
        if rope["rope_type"] not in DEPENDS_ON_LENGTH:
            continue
        is_long = _is_long(config, rope, max_model_len)
        modules = [module for module in model.modules() if _type_in(module, layer_type) == rope["rope_type"]]
        for module in modules:
            _pin(module, config, layer_type, rope, is_long=is_long)
        if not modules:
            raise ConfigError(
                f"model: {type(model).__name__} implements RoPE of type {rope['rope_type']} itself, with factors that "
                "depend on the length of a pass; expected an implementation of transformers.modeling_rope_utils. Use "
                "another model"
            )


def check_rope(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Raise ConfigError for a RoPE, or scales of queries, that transformers and vLLM compute differently."""
    for layer_type, rope in _ropes(config.get_text_config()):
        if rope["rope_type"] not in (*ROPE_INIT_FUNCTIONS, "default"):
            raise ConfigError(
                f'model: its RoPE is of type "{rope["rope_type"]}", which transformers does not support; expected '
                f"default or one of {', '.join(sorted(ROPE_INIT_FUNCTIONS))}. Use a model with one of those"
            )
        try:
            problem = _disagreement(config.get_text_config(), layer_type, rope, max_model_len)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            problem = (
                f"its parameters cannot be read ({type(error).__name__}: {error}). Complete rope_parameters in its "
                "config.json"
            )
        if problem is not None:
            raise ConfigError(f"model: its RoPE is of type {rope['rope_type']}, and {problem}")


def check_server_rope(config: PreTrainedConfig, max_model_len: int | None, actual: int, *, endpoint: str) -> None:
    """Raise ConfigError if the server has chosen other factors than the learner.

    `actual` is the max_model_len of the server at `endpoint`, `max_model_len` that of the learner's config.
    """
    check_rope(config, actual)
    text = config.get_text_config()
    for _, rope in _ropes(text):
        if rope["rope_type"] == "longrope" and _is_long(text, rope, actual) != _is_long(text, rope, max_model_len):
            assumed = max_model_len or default_max_model_len(text)
            raise ConfigError(
                f"server.max_model_len: the server at {endpoint} has {actual}, the learner assumed {assumed}; only "
                f"one is above original_max_position_embeddings = {rope['original_max_position_embeddings']}, where "
                f"vLLM uses the long factors of longrope for every token. Set server.max_model_len = {actual} in the "
                "learner's config too"
            )


def default_max_model_len(config: PreTrainedConfig) -> int:
    """Return the max_model_len that vLLM derives from a config with such a RoPE."""
    longest = config.max_position_embeddings
    for _, rope in _ropes(config):
        if rope["rope_type"] == "longrope":
            return int(getattr(config, "original_max_position_embeddings", longest))
        if rope["rope_type"] == "dynamic":
            return int(longest * rope.get("factor", 1.0))
    return int(longest)


def _ropes(config: PreTrainedConfig) -> Iterator[tuple[str | None, Rope]]:
    """Yield the RoPE of each type of layers; None as the type stands for all layers."""
    ropes = getattr(config, "rope_parameters", None) or {}
    of_types = {key: value for key, value in ropes.items() if isinstance(value, dict)}
    for layer_type, rope in of_types.items() if of_types else [(None, ropes)]:
        if rope.get("rope_type"):
            yield layer_type, rope


def _is_long(config: PreTrainedConfig, rope: Rope, max_model_len: int | None) -> bool:
    is_longrope = rope["rope_type"] == "longrope"
    return is_longrope and (max_model_len or default_max_model_len(config)) > rope["original_max_position_embeddings"]


def _disagreement(
    config: PreTrainedConfig, layer_type: str | None, rope: Rope, max_model_len: int | None
) -> str | None:
    """Return what vLLM does differently to queries and keys by their positions, or None.

    tests/learner/policy/test_rope.py shows that the other rotary embeddings are equal.
    """
    if problem := _disagreement_of_scales(config, rope, max_model_len):
        return problem
    if getattr(config, "kv_lora_rank", None) and config.model_type not in WITH_ROPE_OF_ITS_OWN:
        return _disagreement_of_deepseek(rope)
    match rope["rope_type"]:
        case "proportional" if rope.get("factor", 1.0) != 1.0:
            return f"vLLM ignores its factor = {rope['factor']}, transformers does not. Use a model without it"
        case "dynamic":
            longest, length = config.max_position_embeddings, max_model_len or default_max_model_len(config)
            if length > longest:
                return (
                    f"vLLM has no rotary embedding beyond max_position_embeddings = {longest}, but "
                    f"server.max_model_len is {length}{'' if max_model_len else ' unless it is set'}. Set "
                    f"server.max_model_len = {longest}"
                )
        case "longrope" if "long_mscale" not in rope:
            _, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), layer_type=layer_type)
            by_vllm = _longrope_scaling(config.max_position_embeddings / rope["original_max_position_embeddings"], rope)
            if not math.isclose(scaling, by_vllm, rel_tol=1e-6):
                return (
                    f"vLLM ignores attention_factor and factor, and scales by {by_vllm:.6g} instead of {scaling:.6g}. "
                    "Use a model without them"
                )
    return None


def _disagreement_of_scales(config: Any, rope: Rope, max_model_len: int | None) -> str | None:
    """Return what vLLM does differently where a model scales its queries by their positions, or None.

    Ministral 3 has the scale among the parameters of its RoPE, which vLLM does not read.
    """
    length = max_model_len or default_max_model_len(config)
    if rope.get("llama_4_scaling_beta"):
        longest = rope["original_max_position_embeddings"]
        scaling = {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": longest}
        if length > longest and not scaling.items() <= (getattr(config, "llama_4_scaling", None) or {}).items():
            return (
                f"vLLM ignores its llama_4_scaling_beta, which scales queries from position {longest} on, but "
                f"server.max_model_len is {length}{'' if max_model_len else ' unless it is set'}. Set "
                f'server.max_model_len = {longest}, or add "llama_4_scaling": {json.dumps(scaling)} to its config.json'
            )
    if config.model_type == "llama4_text" and length >= config.floor_scale:
        is_scaled = length > SCALES_LLAMA4_ABOVE
        if is_scaled != bool(config.attn_temperature_tuning):
            return (
                f"vLLM {'scales' if is_scaled else 'does not scale'} the queries of layers without RoPE with a "
                f'server.max_model_len of {length}, whatever its config says. Set "attn_temperature_tuning": '
                f"{json.dumps(is_scaled)} in its config.json"
            )
    return None


def _disagreement_of_deepseek(rope: Rope) -> str | None:
    """Return what vLLM does differently in multi-head latent attention, or None.

    It uses DeepSeek's yarn, whatever the type.
    """
    if rope["rope_type"] not in ("default", "yarn"):
        return (
            "with multi-head latent attention vLLM computes yarn instead. Use a model with RoPE of type default or yarn"
        )
    if rope.get("attention_factor") is not None:
        factor = rope["attention_factor"]
        return f"with multi-head latent attention vLLM ignores its attention_factor = {factor}. Use a model without it"
    return None


def _dynamic_inv_freq(config: PreTrainedConfig, rope: Rope, dim: int) -> torch.Tensor:
    """Return vLLM's frequencies. transformers knows neither of the optional keys."""
    factor, longest = rope.get("factor", 1.0), config.max_position_embeddings
    stretch = rope.get("alpha") or factor * longest / rope.get("max_trained_positions", longest) - (factor - 1)
    base = rope["rope_theta"] * stretch ** (dim / (dim - 2))
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)


def _longrope_scaling(scale: float, rope: Rope) -> float:
    if scale <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))


def _type_in(module: nn.Module, layer_type: str | None) -> str | None:
    rope_type = getattr(module, "rope_type", None)
    return rope_type if layer_type is None or not isinstance(rope_type, dict) else rope_type.get(layer_type)


def _pin(module: Any, config: PreTrainedConfig, layer_type: str | None, rope: Rope, *, is_long: bool) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq, scaling = getattr(module, f"{prefix}inv_freq"), getattr(module, f"{prefix}attention_scaling", 1.0)
    if rope["rope_type"] == "dynamic":
        inv_freq = _dynamic_inv_freq(config, rope, 2 * len(inv_freq)).to(inv_freq.device)
    if rope["rope_type"] == "longrope":
        length = rope["original_max_position_embeddings"] + 1 if is_long else None
        inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](
            config, inv_freq.device, seq_len=length, layer_type=layer_type
        )
        scaling = rope.get("long_mscale" if is_long else "short_mscale", scaling)
    module.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
    module.register_buffer(f"{prefix}original_inv_freq", inv_freq.clone(), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    # In each pass, transformers updates factors by their type, but not those of the default type.
    module.rope_type = "default" if layer_type is None else module.rope_type | {layer_type: "default"}
    # PhiMoE recomputes its factors in each pass and takes the scaling from its config.
    if hasattr(module, "rope_init_fn"):
        module.rope_init_fn = lambda *_, **__: (inv_freq, scaling)
        module.config = copy.copy(module.config)
        module.config.rope_parameters = rope | {"rope_type": "default"}
