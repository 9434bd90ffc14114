"""Location of a model's files, and the fingerprint that both sides compare.

Both processes resolve the same `model` key of the config, each on its own machine, and compare fingerprints
in the handshake. A fingerprint needs only the files, and importing this file loads neither torch nor
transformers.
Invariant: a returned directory is complete. Built-in models are renamed into place, and downloads are
snapshots.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from protocol.builtin_models import builtin_model, is_at_hand, is_builtin
from protocol.errors import ConfigError
from protocol.messages import ModelFingerprint

# Files that map token ids to text. Chat templates and generation settings do not.
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
_QUANTIZED_KEYS = ("quantization_config", "compression_config")
_QUANTIZED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of ModelOpt, AutoGPTQ and AutoAWQ. vLLM reads them too."""
_TEXT_FILES = ["*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "*.tiktoken"]
MAX_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself."""
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
_UNQUANTIZED = ("embed", "lm_head", "wte", "wpe")
"""Parts of the names of embeddings and heads."""
_DOWNLOADED = [*_TEXT_FILES, "*.safetensors"]


def resolve_model(name: str) -> Path:
    """Return the directory of a model.

    The name is a local directory, a built-in model or a hub name. A built-in model is made at first use, and
    a hub model is downloaded.

    Raises:
        ConfigError: The name is none of these, or the model's weights cannot be read or trained.
    """
    path = _as_directory(name)
    if is_builtin(name) and path is None:
        return builtin_model(name)
    if path is not None:
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model = {name!r} is a directory without config.json; expected the files of a Hugging Face model, "
                "as `save_pretrained` writes them"
            )
        return _trainable(path.resolve(), name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"model = {name!r} is not an existing directory; set model to an existing directory or to a hub name"
        )
    return _trainable(_download(name), name)


def local_model(name: str) -> Path | None:
    """Return what `resolve_model` returns, without downloading.

    Return None for a model that is not on this machine.

    Raises:
        ConfigError: As in `resolve_model`.
    """
    if _as_directory(name) is not None:
        return resolve_model(name)
    if is_builtin(name):
        return builtin_model(name) if is_at_hand(name) else None
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(name, allow_patterns=_DOWNLOADED, local_files_only=True))
    except (OSError, ValueError):  # not in the hub's cache, or not a hub name
        return None
    # The hub's cache may hold only a part of the model: a tokenizer that another program requested, or some shards.
    files = weight_files(path)
    return _trainable(path, name) if files and all(file.is_file() for file in files) else None


def _as_directory(name: str) -> Path | None:
    """Return the directory of this name, or None if there is none.

    Raises:
        ConfigError: The directory cannot be read.
    """
    try:
        path = Path(name).expanduser()
        if not path.is_dir():
            return None
        # Fails without permission to list the directory. The next line fails without permission to enter it.
        next(path.iterdir(), None)
        (path / "config.json").is_file()
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: the user of ~USER is unknown
        raise ConfigError(
            f"model = {name!r} cannot be read ({error}); set model to a directory that this user can read"
        ) from error


def _trainable(path: Path, name: str) -> Path:
    """Return the path of a model whose weights can be read and trained.

    Raises:
        ConfigError: The weights are not in safetensors files, are incomplete or are quantized.
    """
    # Older weight files are pickles, which may run code when they are read.
    if not any(path.glob("*.safetensors")):
        raise ConfigError(
            f"model = {name!r} has no weights in *.safetensors, the only supported format; load it in a trusted "
            "environment and save it again with `save_pretrained`"
        )
    if (method := quantization(path)) is not None:
        raise ConfigError(
            f"model = {name!r} is quantized ({method}), but only bfloat16, float16 and float32 weights can be trained; "
            "set model to the original checkpoint, and server.quantization if the server should quantize"
        )
    for file in weight_files(path):
        read_header(file)
    return path


def fingerprint(path: Path) -> ModelFingerprint:
    """Return the fingerprint that must be equal on both sides.

    It depends only on the contents of the files, not on their order or dates.

    Raises:
        ConfigError: The config or the tokenizer is missing or invalid.
    """
    config = _read_config(path)
    text_config = config.get("text_config")
    if not isinstance(text_config, dict) or not text_config:
        text_config = config
    architectures = config.get("architectures") or [config.get("model_type", "unknown")]
    vocab_size = config.get("vocab_size", text_config.get("vocab_size"))
    layers = text_config.get("num_hidden_layers", text_config.get("n_layer", "unknown"))
    width = text_config.get("hidden_size", text_config.get("n_embd", "unknown"))
    if not isinstance(vocab_size, int):
        raise ConfigError(
            f"{path / 'config.json'} has vocab_size {vocab_size!r}; expected an int, as a language model has"
        )
    return ModelFingerprint(
        architecture=architectures[0],
        size=f"{layers} layers of width {width}",
        vocab_size=vocab_size,
        tokenizer_hash=_hash_tokenizer(path),
    )


def text_files(path: Path) -> list[Path]:
    """Return a model's files other than weights: configs, tokenizer, chat templates."""
    files = {file for pattern in _TEXT_FILES for file in path.glob(pattern)}
    return sorted(file for file in files if not file.name.endswith(".safetensors.index.json"))


def end_token_ids(path: Path) -> set[int]:
    """Return the ids of the tokens that end a turn.

    The generation config takes precedence: for chat models, it has more of them than the tokenizer names.

    Raises:
        ConfigError: A file cannot be read, or its ids are no numbers.
    """
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        if eos is not None:
            tokens = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(token, int) for token in tokens):
                raise ConfigError(f"{path / name} has eos_token_id {eos!r}; expected an int or a list of ints")
            return {token for token in tokens if token >= 0}
    return set()


def has_latent_attention(path: Path) -> bool:
    """Return whether the model has the attention of DeepSeek's models (MLA)."""
    return bool(_nested(_read_config(path), "kv_lora_rank"))


def weight_files(path: Path) -> list[Path]:
    """Return the weight files to load.

    A repository may hold the same weights again, as in consolidated.safetensors.

    Raises:
        ConfigError: Their index cannot be read.
    """
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(
                f"{index} has no weight_map of tensor names to file names; download it or save the model again"
            )
        return sorted({path / name for name in weight_map.values()})
    return [whole] if whole.is_file() else sorted(path.glob("*.safetensors"))


def weight_bytes(path: Path, dtype: str, *, quantized: bool = False) -> int:
    """Return the bytes of a model's weights when loaded in `dtype`.

    With `quantized`, the matrices of linear layers, all except embeddings and head, have a byte for each number.

    Raises:
        ConfigError: A file cannot be read.
    """
    return sum(_bytes_in(file, _WIDTHS[dtype], quantized) for file in weight_files(path))


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file starts, and the dtype, shape and offsets of each tensor.

    Raises:
        ConfigError: The file is missing, incomplete or of another format.
    """
    try:
        with file.open("rb") as opened:
            if (num_bytes := int.from_bytes(opened.read(8), "little")) > MAX_HEADER_BYTES:
                raise ValueError(f"its header has {num_bytes} bytes; is it a git-lfs pointer?")
            header = json.loads(opened.read(num_bytes))
        header.pop("__metadata__", None)
        start = 8 + num_bytes
        expected = start + max((one["data_offsets"][1] for one in header.values()), default=0)
        if (found := file.stat().st_size) != expected:
            raise ValueError(f"it has {found} bytes, but {expected} by its header")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} of `model` cannot be read as safetensors ({error}); make it readable for this user, or download "
            "it (`git lfs pull` in a clone) or save it again"
        ) from error
    return start, header


def _bytes_in(file: Path, width: int, quantized: bool) -> int:
    _, header = read_header(file)
    return sum(
        math.prod(one["shape"]) * (1 if quantized and _is_linear(name, one["shape"]) else width)
        if "F" in one["dtype"]
        else one["data_offsets"][1] - one["data_offsets"][0]
        for name, one in header.items()
    )


def _is_linear(name: str, shape: list[int]) -> bool:
    return len(shape) == 2 and not any(part in name for part in _UNQUANTIZED)


def quantization(path: Path) -> str | None:
    """Return the quantization method that a checkpoint's files name, or None."""
    config = _read_config(path)
    for key in _QUANTIZED_KEYS:
        if settings := _nested(config, key):
            return _method_of(settings, key)
    for name in _QUANTIZED_FILES:  # written by tools that do not change config.json
        if (path / name).is_file():
            settings = _read_json(path / name)
            return f"{_method_of(settings.get('quantization') or settings, name)}, in {name}"
    return None


def _nested(config: dict[str, Any], key: str) -> Any:
    """Return a key from the config or its parts: text_config, vision_config, ..."""
    parts = (part for name, part in config.items() if name.endswith("config") and name not in _QUANTIZED_KEYS)
    return config.get(key) or next(
        (found for part in parts if isinstance(part, dict) and (found := _nested(part, key))), None
    )


def _method_of(settings: Any, where: str) -> str:
    """Return the name of the method in the settings, or else `where`."""
    if not isinstance(settings, dict):
        return str(settings)
    for key in ("quant_method", "quant_algo", "quant_type", "format"):
        if isinstance(name := settings.get(key), str):
            return name
    return "bitsandbytes" if settings.get("load_in_4bit") or settings.get("load_in_8bit") else where


def _read_config(path: Path) -> dict[str, Any]:
    return _read_json(path / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text("utf-8"))
        if not isinstance(read, dict):
            raise ValueError(f"it holds {type(read).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; expected a Hugging Face model") from error
    return read


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files that map token ids to text. Raises ConfigError if there are none."""
    files = sorted(file for file in path.iterdir() if file.name in _TOKENIZER_FILES or file.suffix == ".tiktoken")
    if not files:
        raise ConfigError(
            f"{path} has no tokenizer; expected tokenizer.json next to config.json; save the tokenizer there"
        )
    return files


def _hash_tokenizer(path: Path) -> str:
    digest = hashlib.sha256()
    for file in tokenizer_files(path):
        content = file.read_bytes()
        digest.update(f"{file.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_DOWNLOADED))
    except (OSError, ValueError) as error:  # errors of huggingface_hub for names, networks and permissions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model = {name!r} is not a local directory and cannot be downloaded from the hub ({reason}); check the "
            "name, the network and `hf auth login`, or set model to a local directory"
        ) from error
