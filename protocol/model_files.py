"""The files of a model: where they are, and the fingerprint by which server and learner know that they have the same.

Both processes resolve the same `model` key of the config, each on its own machine, and compare fingerprints in the
handshake. Importing this file loads neither torch nor transformers; a fingerprint needs only the files. Invariant: a
directory that is returned is complete: built-in models are written aside and renamed, and downloads are snapshots.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from protocol.builtin_models import builtin_model, is_at_hand, is_builtin
from protocol.errors import ConfigError
from protocol.messages import ModelFingerprint

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


def resolve_model(name: str) -> Path:
    """Return the directory of a model: a local directory, a built-in one (made at first use), or a hub name (downloaded).

    Raises ConfigError if it is none of these.
    """
    path = Path(name).expanduser()
    if is_builtin(name) and not path.is_dir():
        return builtin_model(name)
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
    if Path(name).expanduser().is_dir():
        return resolve_model(name)
    if is_builtin(name):
        return builtin_model(name) if is_at_hand(name) else None
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
