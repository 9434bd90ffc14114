"""Every key that a server reads, with many kinds of values. Each is valid, or is rejected before the model is loaded.

(key, value) ─▶ load_config ─▶ prepare ─▶ a ServerRun, or a ConfigError with key, value and remedy
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference_server.config import ServerConfig, ServerRun
from inference_server.preparation import check_block_size, check_quantization, check_room, prepare
from protocol.channel.keys import write_secret
from protocol.config import SharedConfig, load_config
from protocol.errors import ConfigError
from protocol.hardware import GpuChoice
from protocol.model_files import resolve_model
from tests.ports import free_port

UNREAD = {"endpoints_from", "head_dtype", "learner", "deploy", "server", "server.vllm"}
"""Keys of the learner, sections, and arguments of vLLM (test_arguments.py)."""

NUMBERS = [
    -1, 0, 1, 7, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5, 1.0, 1e-300, 1e300, "nan", "inf", "-inf",
]  # fmt: skip
WORDS = [
    "", " ", "x", "²", "8000", "0x10", "true", "::1", "[::1]", "[::", "127.0.0.1", "0.0.0.0:1", "localhost",
    "nowhere.invalid",
    "a" * 300, "..", "~nobody-has-this-name/x", "x/y/z", "a\u0000b", "\n", "\u202e", "🙂", "tcp://127.0.0.1:²",
    "tcp://127.0.0.1:99999", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:", "tcp://:1", "tcp://[::1]", "tcp://::1:1",
    f"tcp://127.0.0.1:{'9' * 5000}", "tcp://é:1", "tcp://" + "a" * 300 + ":1", "udp://127.0.0.1:1", "ipc:///tmp/x",
]  # fmt: skip
OTHERS: list[Any] = [True, False, [], [1], ["x"], [-1], [[]], {}, {"a": 1}, [1.5], [True], [""], ["tcp://127.0.0.1:²"]]
KEYS = sorted(
    {field.name for field in msgspec.structs.fields(SharedConfig)}
    | {f"server.{field.name}" for field in msgspec.structs.fields(ServerConfig)} - UNREAD
)
PATHS = ["missing", "file", "directory", "empty", "secret", "loop", "fifo"]
"""Kinds of paths below a temporary directory."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the model and every kind of path."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(home / "made"))
        shutil.copytree(resolve_model("tiny:digits"), home / "model")
    (home / "file").write_text("text\n")
    (home / "empty").touch()
    (home / "directory").mkdir()
    write_secret(home / "secret", "a-key")
    (home / "loop").symlink_to("loop")
    os.mkfifo(home / "fifo", 0o600)
    return home


def values_of(key: str) -> Iterator[tuple[str, str]]:
    """Yield values as TOML, each with a name."""
    for number in NUMBERS:
        yield str(number), str(number)
    for word in WORDS:
        yield json.dumps(word, ensure_ascii=False), repr(word)[:30]
    for other in OTHERS:
        text = re.sub(r'"(\w+)": ', r"\1 = ", json.dumps(other)) if isinstance(other, dict) else json.dumps(other)
        yield text, text
    for path in PATHS:
        yield f'"HOME/{path}"', path


def attempt(home: Path, key: str, toml: str) -> ServerRun:
    """Run all steps of a server before it loads the model. Raises ConfigError."""
    run = {
        "model": f'"{home}/model"', "run_dir": f'"{home}/run"', "endpoint": f'"tcp://127.0.0.1:{free_port()}"',
        "dtype": '"float32"',
        "server.http_port": str(free_port()), "server.enforce_eager": "true", "server.kv_cache_memory_mib": "64",
        key: toml.replace("HOME", str(home)),
    }  # fmt: skip
    if key == "keys":
        run.pop("server.http_port")
    config = home / "run.toml"
    config.write_text(
        "\n".join(f"{name} = {value}" for name, value in sorted(run.items(), key=lambda item: "." in item[0]))
    )
    loaded = load_config(ServerRun, [str(config)], "inference-server")
    with contextlib.ExitStack() as open_things:
        prepare(loaded, open_things)
    return loaded


@pytest.mark.parametrize("key", KEYS)
def test_every_value_of_a_key_is_valid_or_rejected_with_the_key(
    key: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr("protocol.model_files._download", not_downloaded)
    monkeypatch.setattr("inference_server.preparation.check_vllm", lambda: None)  # takes 0.4 s per call
    monkeypatch.chdir(home)
    problems = []
    for toml, name in values_of(key):
        try:
            run = attempt(home, key, toml)
        except ConfigError as error:
            message = str(error)
            if key.rpartition(".")[2] not in message:
                problems.append(f"{name}: the error does not name the key: {message}")
            if not shows(toml, message, home):
                problems.append(f"{name}: the error does not show the value: {message}")
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if not is_valid(run):
                problems.append(f"{name}: accepted")
    assert not problems, "\n".join(problem[:300] for problem in problems)


def not_downloaded(name: str) -> Path:
    raise ConfigError(
        f"model = {name!r} is not a local directory and cannot be downloaded; set model to a local directory"
    )


def shows(toml: str, message: str, home: Path) -> bool:
    """Return whether an error shows the value, as TOML or Python, possibly shortened."""
    value = msgspec.toml.decode(f"value = {toml.replace('HOME', str(home))}")["value"]
    inner = value[0] if isinstance(value, list) and value and isinstance(value[0], str) else value
    forms = {repr(value), repr(inner), str(value), str(inner), json.dumps(value), f"'{value}'", type(value).__name__}
    return any(form in message for form in forms)


def is_valid(run: ServerRun) -> bool:
    """Return whether an accepted config is valid for the rest of the server."""
    server = run.server
    finite = (server.orphan_timeout_s, server.drain_timeout_s, server.stall_timeout_s, server.pause_timeout_s)
    return (
        all(0 < seconds <= 1e6 for seconds in (*finite, server.start_timeout_s))
        and 0 <= run.seed < 2**32
        and 0 < server.max_concurrent_sequences <= 1 << 16
        and (server.max_model_len is None or 1 < server.max_model_len < 1 << 31)
        and (server.block_size is None or (server.block_size % 32 == 0 and 0 < server.block_size <= 4096))
        and 0 < server.gpu_memory_utilization <= 1
        and 0 <= server.http_port < 1 << 16
        and server.http_host != ""
        and run.run_dir != ""
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--seed", "4294967296"], "seed = 4294967296: Expected `int` <= 4294967295"),
        (["--server.drain-timeout-s", "inf"], "server.drain_timeout_s = inf: Expected `float` <= 1000000.0"),
        (["--run-dir", "a\udcffb"], "run_dir = 'a\\udcffb' has a character that no name or path may have"),
    ],
)
def test_flags_have_the_same_checks(flags: list[str], expected: str, home: Path) -> None:
    (home / "flags.toml").write_text(f'model = "{home}/model"\nrun_dir = "r"\n')
    with pytest.raises(ConfigError) as refused:
        load_config(ServerRun, [str(home / "flags.toml"), *flags], "inference-server")
    assert expected in str(refused.value)


def test_more_memory_than_the_machine_has_is_rejected(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.preparation.total_memory_bytes", lambda: 4 << 30)
    server = ServerConfig(kv_cache_memory_mib=1500, data_parallel_size=2)
    run = ServerRun(model=str(home / "model"), run_dir="r", server=server)
    check_room(run, home / "model")
    run = msgspec.structs.replace(run, server=msgspec.structs.replace(server, tensor_parallel_size=2))
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_mib = 1500 .* need 6\.9 GiB, but this machine has 4\.0 GiB\. Lower one"
    ):
        check_room(run, home / "model")


def test_a_block_size_for_latent_attention_is_left_to_vllm(home: Path) -> None:
    run = ServerRun(model=str(home / "model"), run_dir="r", server=ServerConfig(block_size=16))
    with pytest.raises(ConfigError, match=r"server.block_size = 16 is not a multiple of 32, .* set it to 32"):
        check_block_size(run, home / "model")
    (home / "deepseek").mkdir()
    (home / "deepseek" / "config.json").write_text('{"kv_lora_rank": 512}')
    check_block_size(run, home / "deepseek")


@pytest.mark.parametrize(
    ("method", "has_gpu", "dtype", "kv_lora_rank", "expected"),
    [
        (None, False, "float32", 512, None),
        ("fp8_per_block", True, "bfloat16", None, None),
        ("int8_per_channel_weight_only", False, "float32", None, None),
        (
            "fp8_per_tensor",
            False,
            "bfloat16",
            None,
            r"needs a GPU, but there is none \(of the test\)\. Set it to \"int8_",
        ),
        ("int8_per_channel_weight_only", True, "bfloat16", None, r"runs on CPUs only: .* Set it to \"fp8_per_tensor\""),
        ("fp8_per_tensor", True, "float32", None, r"in bfloat16, not in float32\. Set server\.dtype = \"bfloat16\""),
        ("fp8_per_tensor", True, "bfloat16", 512, r"latent attention .* set server\.kv_cache_dtype"),
    ],
)
def test_a_quantization_that_does_nothing_here_or_cannot_be_repeated_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, has_gpu: bool, dtype: Any, kv_lora_rank: int | None,
    expected: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "inference_server.preparation.gpu_choice", lambda: GpuChoice(has_gpu, "of the test", int(has_gpu))
    )
    (tmp_path / "config.json").write_text(json.dumps({"kv_lora_rank": kv_lora_rank}))
    run = ServerRun(model="m", run_dir="r", dtype=dtype, server=ServerConfig(quantization=method))
    if expected is None:
        check_quantization(run, tmp_path)
    else:
        with pytest.raises(ConfigError, match=rf'server\.quantization = "{method}" .*{expected}'):
            check_quantization(run, tmp_path)
