"""Tiny random models of every causal family of the installed transformers, made from config classes with small sizes.

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES ─▶ family ─▶ default config ─▶ size keys, shrunk ─▶ config ─▶ model

Invariant: every part of a config takes effect. Windows, chunks and top-k selections are shorter than the sweep's rows,
and there are enough layers for each layer type of a family.
"""

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NUM_LAYERS = 4
VOCAB_SIZE = 64
MAX_PARAMETERS = 5_000_000
"""A larger model means that a size was not shrunk."""
WINDOW = 24

LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks",
)  # fmt: skip
_KEYS_BY_SIZE: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCAB_SIZE, ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input")),
    (64, (
        "hidden_size", "d_model", "n_embd", "emb_dim", "word_embed_proj_dim", "embedding_dim", "embedding_size",
        "input_embedding_size", "output_embedding_size", "lru_width", "attention_hidden_size", "mamba_d_ssm",
    )),
    (96, (
        "intermediate_size", "d_inner", "dff", "dim_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim",
        "ffn_hidden_size",
        "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size",
        "n_inner",
    )),
    (32, (
        "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank", "kv_lora_rank", "o_lora_rank",
        "index_head_dim",
        "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "hc_lowrank", "router_hidden_size",
        "mamba_d_head",
        "mamba_head_dim",
    )),
    (4, (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
        "num_decoder_attention_heads",
        "attention_heads", "swa_num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts",
        "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads",
    )),
    (2, (
        "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk", "moe_k", "top_k_experts", "sliding_window_pattern", "attn_layer_period", "no_rope_layer_interval",
        "global_attn_every_n_layers", "max_window_layers", "index_topk_blocks", "linear_num_key_heads",
        "num_kv_shared_layers", "zero_expert_num", "n_groups", "o_groups",
    )),
    (1, (
        "n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_dense_layers", "n_shared_experts",
        "moe_num_shared_experts", "num_shared_experts", "num_layers_per_stack", "attn_layer_offset",
    )),
    (16, (
        "head_dim", "dim_head", "d_head", "swa_head_dim", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim",
        "index_topk", "index_n_heads", "mamba_chunk_size", "chunk_size", "hidden_size_per_layer_input",
        "index_block_size", "laurel_rank",
    )),
    (8, ("mamba_d_state", "state_size", "ssm_state_size", "rotary_dim")),
    (WINDOW, (
        "sliding_window", "attention_window_size", "attention_chunk_size", "window_size", "local_attention",
        "sliding_window_size", "floor_scale", "log_scaling_n_floor", "keep_window_size",
    )),
    (1024, ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx",
        "context_length")),
    (NUM_LAYERS, LAYERS),
)  # fmt: skip
SIZES = {key: size for size, keys in _KEYS_BY_SIZE for key in keys}
MLA = {"num_key_value_heads": 4}
"""Multi-head latent attention has as many key heads as query heads."""
PAIRS = ["sliding_attention", "full_attention"] * 2
MORE_KEYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4"), MLA),
    **dict.fromkeys(("kimi_linear", "longcat_flash", "minicpm3", "youtu"), MLA),
    "deepseek_v2": MLA | {"num_experts_per_tok": 2},
    "cohere_compass_text": {
        "layer_types": PAIRS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4,
            "mrope_section": [4, 2, 2]} for kind in PAIRS[:2]},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.1},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": PAIRS, "intermediate_size": 96,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gemma4_text": {"layer_types": PAIRS, "global_head_dim": 32},
    "gemma4_unified_text": {"layer_types": PAIRS, "global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"max_position_embeddings": 1 << 16},  # vLLM scales the queries of long models alone
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": MLA | {"head_dim": 16},
    "mamba2": {"head_dim": 32, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "phimoe": {"input_jitter_noise": 0.1, "router_jitter_noise": 0.1},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4, "ngram_vocab_size_base": 128,
        "ple_layer_ids": [1], "ple_embed_dim": 64, "split_ngram_parts": 2,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "roc_bert": {
        "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 64, "shape_embed_dim": 16, "shape_vocab_size": 64,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


TIMES = {"mamba": 2, "minicpm3": 2, "youtu": 2}
"""Factor of the weights. A larger one makes these families chaotic: float32 itself exceeds the bound of the sweep."""


class CannotBuild(Exception):
    """No tiny model of the family can be made generically; the message says why."""


def tiny_config(family: str, **more: Any) -> PreTrainedConfig:
    """Return a config with small sizes. Raises CannotBuild."""
    kind = CONFIG_MAPPING[family]
    try:
        return kind(**_tiny_keys(kind) | MORE_KEYS.get(family, {}) | more)
    except Exception as error:  # config classes raise errors of many types
        raise CannotBuild(_in_a_line(error)) from error


def tiny_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """Return a model whose weights are large enough that each part matters. Raises CannotBuild."""
    torch.manual_seed(seed)
    try:
        with torch.device("meta"):
            num_parameters = sum(
                parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
            )
        if num_parameters > MAX_PARAMETERS:
            raise CannotBuild(f"{num_parameters / 1e6:.0f}M parameters: some sizes have unknown names")
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(_in_a_line(error)) from error
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms, biases, sinks and gates start as zeros or ones, which hides their effect.
            parameter.mul_(TIMES.get(config.model_type, 3)) if parameter.ndim > 1 else parameter.add_(
                torch.randn_like(parameter) * 0.1
            )
    return model


def _tiny_keys(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    default = kind()
    num_layers = next((value for name in LAYERS if isinstance(value := vars(default).get(name), int)), None)
    keys: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        # Not by attribute: a value that differs between layers has no attribute of the whole config.
        value = vars(default).get(kind.attribute_map.get(name, name))
        if name in SIZES and (_is_int(value) or name in ("head_dim", "num_key_value_heads")):
            keys[name] = SIZES[name]
        elif name == "use_sliding_window":
            keys |= {name: True, "sliding_window": WINDOW}
        elif isinstance(value, list) and len(value) == num_layers > 1 and not hasattr(default, "use_sliding_window"):
            keys[name] = _one_of_each(value)
        elif name == "text_config" and type(default.get_text_config()) is not kind:
            text = type(default.get_text_config())
            keys[name] = _tiny_keys(text) | MORE_KEYS.get(text.model_type, {})
        elif name == "is_decoder":
            keys[name] = True
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            keys[name] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}[name]
    return keys


def _one_of_each(of_layers: list[Any]) -> list[Any]:
    """Shorten a list with an entry per layer to NUM_LAYERS entries, with every kind at least once."""
    distinct: list[Any] = []
    for one in of_layers:
        if one not in distinct:
            distinct.append(one)
    return [distinct[i % len(distinct)] for i in range(NUM_LAYERS)]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
