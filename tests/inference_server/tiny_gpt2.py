"""A tiny GPT-2 with a tied head and sharp random logits, and its logprobs from transformers."""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

TOKENS = ["<pad>", "<eos>", *"0123456789abcdefghijklmnopqrst"]
EOS = 1


def make_model(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(TOKENS), n_positions=64, n_embd=64, n_layer=2, n_head=2, initializer_range=0.2,
        bos_token_id=EOS, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def save(model: GPT2LMHeadModel, path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    model.save_pretrained(path)


def named_tensors(model: GPT2LMHeadModel) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors layer by layer, without the tied head."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def logprobs(model: GPT2LMHeadModel, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the logprobs of `token_ids[1:]`."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([token_ids])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].numpy()


def completion_logprobs(
    model: GPT2LMHeadModel, prompt: list[int], completion: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Return the logprobs of the completion's tokens."""
    return logprobs(model, prompt + completion.tolist(), temperature)[len(prompt) - 1 :]
