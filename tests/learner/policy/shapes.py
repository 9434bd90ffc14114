"""Configs of published models, from which no weights are made."""

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

QWEN_HALF_B = Qwen2Config(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
QWEN_1_5B = Qwen2Config(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
QWEN_32B = Qwen2Config(
    hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
MOE_30B = Qwen3MoeConfig(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
    tie_word_embeddings=False,
)  # fmt: skip
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip
SIZES: dict[str, PretrainedConfig] = {
    "0.5B": QWEN_HALF_B, "1.5B": QWEN_1_5B, "7B": QWEN_7B, "32B": QWEN_32B, "30B-A3B": MOE_30B,
}  # fmt: skip
"""Qwen2.5, and Qwen3 with experts."""
