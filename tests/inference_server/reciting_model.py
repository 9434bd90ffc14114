"""A Llama that recites a script: each word is followed by the next word of the script, whatever the context.

Its layers add nothing, and the head maps each word's vector to that of the next, so vLLM's answers are known.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, EOS = "<unknown>", "<eos>"
SHARPNESS = 40.0


def save(scripts: Sequence[Sequence[str]], path: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write a checkpoint. A word in two scripts must have the same successor in both.

    `tokenizer`: has tokens for other texts too, and gets one for each word.
    """
    followers = {word: after for script in scripts for word, after in zip(script, [*script[1:], ""], strict=True)}
    tokenizer = tokenizer or _tokenizer_of_words()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in followers])
    tokenizer.save_pretrained(path)
    _model(tokenizer, followers).save_pretrained(path)


def _tokenizer_of_words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN: 0, EOS: 1}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=UNKNOWN)


def _model(tokenizer: PreTrainedTokenizerFast, followers: dict[str, str]) -> LlamaForCausalLM:
    number, end = tokenizer.get_vocab(), tokenizer.eos_token_id
    size = -(-len(number) // 64) * 64  # each token has its own direction
    config = LlamaConfig(
        vocab_size=len(number), hidden_size=size, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=2048, bos_token_id=None, eos_token_id=end, pad_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        (layer,) = model.model.layers
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: len(number)])
        model.lm_head.weight.zero_()
        for word, index in number.items():
            model.lm_head.weight[number.get(followers.get(word, ""), end), index] = SHARPNESS / size**0.5
    return model
