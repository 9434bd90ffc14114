"""A Llama that recites a script: each word is followed by the next word of the script, whatever the context.

Its layers add nothing, and the head maps each word's vector to that of the next, so vLLM's answers are known.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, EOS = "<unknown>", "<eos>"
SIZE = 64
"""Maximum number of words: each has its own direction."""
SHARPNESS = 40.0


def save(scripts: Sequence[Sequence[str]], path: Path) -> None:
    """Write a checkpoint. A word in two scripts must have the same successor in both."""
    followers = {word: after for script in scripts for word, after in zip(script, [*script[1:], EOS], strict=True)}
    words = [UNKNOWN, EOS, *dict.fromkeys(word for script in scripts for word in script)]
    _tokenizer(words).save_pretrained(path)
    _model(words, followers).save_pretrained(path)


def _tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({UNKNOWN: 0, EOS: 1}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words[2:]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=UNKNOWN)


def _model(words: Sequence[str], followers: dict[str, str]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    number = {word: index for index, word in enumerate(words)}
    with torch.no_grad():
        (layer,) = model.model.layers
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE)[: len(words)])
        model.lm_head.weight.zero_()
        for word, index in number.items():
            model.lm_head.weight[number[followers.get(word, EOS)], index] = SHARPNESS / SIZE**0.5
    return model
