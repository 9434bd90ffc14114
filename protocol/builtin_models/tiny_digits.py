"""`tiny:digits`: a random GPT-2 of 0.1M parameters with one token per character.

It is for a first run in seconds.
"""

from pathlib import Path
from typing import Any

CHARACTERS = "0123456789>+=, "
SEED = 0
# Concatenates the messages' texts, so that the server's chat API can be tried on this model.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tiny_digits(path: Path, cache: Path) -> None:
    """Write the model, with the same weights on every machine.

    It has 2 layers of width 64, 2 heads and 64 positions.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    tokenizer = _tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # The function of GPT-2 itself. Under its name gelu_new, vLLM computes it with a slow pow().
        activation_function="gelu_pytorch_tanh",
        # The default of 0.02 is for widths near 1,000. At 64, learning anything takes over twice the steps.
        initializer_range=0.1,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = GPT2LMHeadModel(config)
    disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _tokenizer() -> Any:
    """Return a tokenizer with one token per character and lossless decoding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # No other special token: an untrained model would sample it, and decoding would drop it from the text.
    vocab = {token: i for i, token in enumerate(["<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<eos>",
        eos_token="<eos>",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
