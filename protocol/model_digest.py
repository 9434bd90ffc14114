"""Digest of a model's weights, cheap enough for every start.

It shows which weights a LoRA checkpoint belongs to, whether all ranks have loaded the same weights, and whether
the server of a frozen reference still has the model that the run started with.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

from protocol.model_files import read_header, weight_files

NUM_WINDOWS = 3
WINDOW_BYTES = 256
"""Bytes in each of the NUM_WINDOWS windows of a tensor, which are spread evenly."""
VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Keys of config.json that change nothing. The run has its own dtype."""


def digest_model(path: Path) -> str:
    """Return a digest of config.json and of every tensor.

    It covers the name, dtype, shape and a sample of the values, but not the distribution over files. Training
    changes all matrices and therefore the digest. Few changed values between the windows, such as a row of an
    embedding, go unnoticed.

    Raises:
        ConfigError: A file is not a safetensors file.
    """
    config = json.loads((path / "config.json").read_bytes())
    digest = hashlib.sha256(json.dumps({key: config[key] for key in sorted(config.keys() - set(VOLATILE))}).encode())
    samples: dict[str, bytes] = {}
    loaded = set(weight_files(path))  # the last, so that no file of an earlier save hides their tensors
    for file_path in sorted(path.glob("*.safetensors"), key=lambda file: (file in loaded, file)):
        start, tensors = read_header(file_path)
        with file_path.open("rb", buffering=0) as file:
            samples |= {name: _sample(file, start, tensor) for name, tensor in tensors.items()}
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return digest.hexdigest()[:16]


def _sample(file: BinaryIO, start: int, tensor: dict[str, Any]) -> bytes:
    begin, end = tensor["data_offsets"]
    num_free = max(0, end - begin - NUM_WINDOWS * WINDOW_BYTES)
    sample = f"{tensor['dtype']}{tensor['shape']}".encode()
    for window in range(NUM_WINDOWS):
        offset = begin + window * WINDOW_BYTES + (window + 1) * num_free // (NUM_WINDOWS + 1)
        file.seek(start + offset)
        sample += file.read(max(0, min(WINDOW_BYTES, end - offset)))
    return sample
