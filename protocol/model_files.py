"""The files of a model: where they are, and the fingerprint by which server and learner know that they have the same.

Both processes resolve the same `model` key of the config, each on its own machine, and compare fingerprints in the
handshake. Importing this file loads neither torch nor transformers; a fingerprint needs only the files. Invariant: a
directory that is returned is complete, for `tiny:digits` is written aside and renamed, and downloads are snapshots.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.messages import ModelFingerprint

logger = logging.getLogger(__name__)

TINY_DIGITS = "tiny:digits"
TINY_DIGITS_CHARACTERS = "0123456789>+=, "
TINY_DIGITS_SEED = 0

# The files that fix which text a token id stands for; chat templates and generation settings do not.
_TOKENIZER_FILES = {
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
}
_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_DOWNLOADED = [*_TEXT_FILES, "*.safetensors"]

# Lets the chat API of the server be tried on the tiny model: the messages' texts, one after the other.
_TINY_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def resolve_model(name: str) -> Path:
    """Return the directory of a model: `tiny:digits` (made at first use), a local directory, or a hub name (downloaded).

    Raises ConfigError if it is none of these.
    """
    if name.startswith("tiny:"):
        return _tiny(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model = {name!r} is a directory without config.json; expected the files of a Hugging Face model, "
                "as `save_pretrained` writes them"
            )
        return _with_safetensors(path.resolve(), name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"model = {name!r}: there is no such directory; set model to one that exists or to a hub name"
        )
    return _with_safetensors(_download(name), name)


def local_model(name: str) -> Path | None:
    """Return what `resolve_model` would, without downloading anything; None for a model that is not on this machine.

    Raises ConfigError as `resolve_model` does.
    """
    if name.startswith("tiny:") or Path(name).expanduser().is_dir():
        return resolve_model(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED, local_files_only=True))
    except (OSError, ValueError):  # not in its cache, or no name of the hub
        return None


def _with_safetensors(path: Path, name: str) -> Path:
    """Older weight files are pickles, which may run code when they are read."""
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model = {name!r} has no weights in *.safetensors, the only format that is read; load it where you trust it and "
            "save it again with `save_pretrained`"
        )
    return path


def fingerprint(path: Path) -> ModelFingerprint:
    """Return what must be equal on both sides; it depends on the files' contents only, not on their order or dates."""
    config = _read_config(path)
    text_config = config.get("text_config", config)
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    vocab_size = config.get("vocab_size", text_config.get("vocab_size"))
    layers = text_config.get("num_hidden_layers", text_config.get("n_layer", "unknown"))
    width = text_config.get("hidden_size", text_config.get("n_embd", "unknown"))
    if not isinstance(vocab_size, int):
        raise ConfigError(
            f"{path / 'config.json'} has vocab_size {vocab_size!r}; expected an int as of a language model"
        )
    return ModelFingerprint(
        architecture=architectures[0],
        size=f"{layers} layers of width {width}",
        vocab_size=vocab_size,
        tokenizer_hash=_hash_tokenizer(path),
    )


def text_files(path: Path) -> list[Path]:
    """Return what belongs to a model besides its weights: configs, tokenizer, chat template."""
    files = {file for pattern in _TEXT_FILES for file in path.glob(pattern)}
    return sorted(file for file in files if not file.name.endswith(".safetensors.index.json"))


def cache_dir() -> Path:
    """Return the directory for files that Slipstream makes for itself: `$SLIPSTREAM_HOME` or `~/.cache/slipstream`."""
    home = os.environ.get("SLIPSTREAM_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "slipstream"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'config.json'} cannot be read: {error}; expected a Hugging Face model") from error


def _hash_tokenizer(path: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(file for file in path.iterdir() if file.name in _TOKENIZER_FILES or file.suffix == ".tiktoken")
    if not files:
        raise ConfigError(f"{path} holds no tokenizer; expected tokenizer.json beside config.json (save it there)")
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED))
    except (OSError, ValueError) as error:  # what huggingface_hub raises for names, networks and permissions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model = {name!r} is neither a local directory nor can it be downloaded from the hub ({reason}); check the "
            "name, the network and `hf auth login`, or set model to a local directory"
        ) from error


# --- tiny:digits -------------------------------------------------------------------------------------------------


def _tiny(name: str) -> Path:
    if name != TINY_DIGITS:
        raise ConfigError(f"model = {name!r} is not a built-in model; the only one is {TINY_DIGITS!r}")
    final = cache_dir() / "tiny-digits-v1"
    if final.is_dir():
        return final
    logger.info("making %s in %s", name, final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".tiny-digits-", dir=final.parent))
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be made in {final}: {error}; set SLIPSTREAM_HOME to a directory of yours"
        ) from error
    try:
        _write_tiny_model(aside)
        aside.chmod(0o755)
        aside.rename(final)
    except OSError:
        # Another process was first: a directory that is not empty cannot be replaced by a rename.
        if not final.is_dir():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _write_tiny_model(path: Path) -> None:
    """Write a GPT-2 of 0.1M parameters: 2 layers, width 64, 2 heads, 64 positions, random weights of a fixed seed."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    tokenizer = _tiny_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, which vLLM computes with a slow pow() when called gelu_new
        initializer_range=0.1,  # 0.02 is for widths near 1,000; at 64 it more than doubles the steps to learn anything
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TINY_DIGITS_SEED)
        model = GPT2LMHeadModel(config)
    disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _tiny_tokenizer() -> Any:
    """Return a tokenizer with one token per character, whose decoding gives back the exact string."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # No other special token: an untrained model would sample it, and decoding would make it vanish from the text.
    vocab = {token: i for i, token in enumerate(["<eos>", *TINY_DIGITS_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<eos>",
        eos_token="<eos>",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
        chat_template=_TINY_CHAT_TEMPLATE,
    )
