"""The workload of both sides of a comparison: a model of 2.66M parameters, its prompts, and the shape of each cell.

The weights are random and the last norm's are small, so that the next token is nearly uniform. A completion ends at
each token with probability 1/128, which fixes the length of completions on both sides (`mean_length`).
"""

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.good_share import CHARACTERS

EOS = "<eos>"
VOCAB_SIZE = 1 + len(CHARACTERS)
FINAL_NORM = 0.1
"""Weights of the last norm. At 1, tied embeddings would make the model repeat its last token half of the time."""
GROUPS_PER_STEP = 32
NUM_COMPLETIONS = 8
NUM_PROMPTS = 4096


class Workload(msgspec.Struct, frozen=True):
    """One cell: prompts of equal length, completions up to a length."""

    name: str
    prompt_tokens: int
    max_tokens: int

    @property
    def samples_per_step(self) -> int:
        return GROUPS_PER_STEP * NUM_COMPLETIONS

    @property
    def mean_length(self) -> float:
        """Mean length of completions of the untrained model, including the end: a truncated geometric distribution."""
        return (1 - (1 - 1 / VOCAB_SIZE) ** self.max_tokens) * VOCAB_SIZE

    def needed_tokens(self, completion_length_mean: float) -> float:
        """Return the tokens that a step must compute: each prompt once, and all completions."""
        return GROUPS_PER_STEP * self.prompt_tokens + self.samples_per_step * completion_length_mean


WORKLOADS = {one.name: one for one in (Workload("a", 6, 6), Workload("b", 13, 256), Workload("c", 256, 8))}


def write_prompts(workload: Workload, path: Path, seed: int = 0) -> None:
    """Write distinct prompts as JSON lines."""
    draw = random.Random(seed)
    texts = {"".join(draw.choices(CHARACTERS[33:], k=workload.prompt_tokens)) for _ in range(NUM_PROMPTS)}
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in sorted(texts)))


def write_model(path: Path, seed: int = 0) -> int:
    """Save a random Qwen2 with its tokenizer as a checkpoint. Return the number of parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0,
        pad_token_id=0, dtype="float32",
    )  # fmt: skip
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    torch.nn.init.constant_(model.model.norm.weight, FINAL_NORM)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    return model.num_parameters()


def _tokenizer() -> Any:
    """Return a byte-level tokenizer like Qwen2's, with one token per ASCII byte and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [chr(256 + byte) if byte < 33 else chr(byte) for byte in map(ord, CHARACTERS)]
    vocab = {token: i for i, token in enumerate([EOS, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=EOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
