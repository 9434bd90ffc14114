"""Arguments of vLLM: the server's own, and those in `[server.vllm]` that keep the server's guarantees.

    ServerRun ─▶ own ──────────────────────────────────────────────┐
    [server.vllm] ─▶ known? not ours? allowed? ─▶ of vLLM's type? ─┴─▶ AsyncEngineArgs

Invariant: `[server.vllm]` replaces nothing that the server sets, and each of its values has vLLM's type.
"""

import dataclasses
import difflib
import sys
import textwrap
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import ConfigDict, ValidationError, create_model
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from inference_server.config import INT8, ServerConfig, ServerRun
from inference_server.engine.adapter import with_adapters
from inference_server.engine.cpu_experts import ArgsWithExperts
from inference_server.engine.guests import SCHEDULER
from inference_server.engine.int8_linear import INT8_LINEAR
from inference_server.engine.openai_options import check_openai_options
from protocol.errors import ConfigError

TOKENS_PER_STEP = 2048
"""Default of vLLM's max_num_batched_tokens. vLLM refuses to start with more sequences than that."""
SHARE_TO_START = 0.05
"""Share of a GPU that must be free for a server whose KV cache has a given size. Weights and KV cache fail with
their own errors if they do not fit."""
MAX_EXPLANATION = 400
"""Maximum length of an explanation, in characters. vLLM lists all valid names: 40 paths for an attention
backend."""


class ServerArgument(NamedTuple):
    """Argument that the server sets."""

    value: Any
    remedy: str
    """Advice to a user who sets it in [server.vllm]."""


class Refusal(NamedTuple):
    """Arguments that would break a guarantee to the learner."""

    names: tuple[str, ...]
    reason: str
    remedy: str


REFUSED = (
    Refusal(
        ("model_weights", "hf_config_path", "model_class_overrides", "config_format", "revision", "tokenizer",
         "tokenizer_revision", "skip_tokenizer_init", "tokens_only", "load_format", "runner", "convert"),
        "the server would run another model than the learner, which reads only `model`",
        "set `model` to a directory with the config, weights and tokenizer that you want",
    ),
    Refusal(
        ("trust_remote_code", "code_revision"),
        "the server does not run the code of a model repository (SECURITY.md)",
        "set `model` to a model that vLLM and transformers support natively",
    ),
    Refusal(
        ("quantization_config",),
        "some of its methods cannot quantize the weights of a weight sync again",
        "set server.quantization",
    ),
    Refusal(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "a draft model receives no weight syncs, and the logprobs and versions of its tokens are not checked",
        "remove it",
    ),
    Refusal(
        ("watermark_config", "logits_processors", "diffusion_config"),
        "tokens would be sampled from another distribution than the one whose logprobs the learner computes",
        "set learner.sampling, which the learner takes into account",
    ),
    Refusal(("kv_sharing_fast_prefill",), "it omits the prompt logprobs that the learner requests", "remove it"),
    Refusal(
        ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras", "lora_dtype", "lora_target_modules",
         "default_mm_loras"),
        "the server has one adapter, that of the weight syncs",
        "set learner.lora, or server.max_lora_rank for a learner with another config file",
    ),
    Refusal(
        ("pipeline_parallel_size", "prefill_context_parallel_size"),
        "a weight sync pauses between two steps of all workers, but pipeline stages and context ranks work on "
        "different steps or parts of a step, which is not tested",
        "raise server.tensor_parallel_size, over several nodes with server.nnodes",
    ),
    Refusal(
        ("offload_backend", "cpu_offload_gb", "offload_group_size", "enable_eplb", "enable_sleep_mode",
         "enable_cumem_allocator"),
        "a weight sync would load into weights that are stored elsewhere at that moment",
        "to save memory, raise server.tensor_parallel_size",
    ),
    Refusal(
        ("weight_transfer_config", "worker_cls"),
        "weights arrive through the server's own weight syncs, in vLLM's own worker",
        "remove it, and configure the transfer in learner.weight_sync",
    ),
    Refusal(
        ("kv_transfer_config", "kv_offloading_size", "ec_transfer_config"),
        "the KV cache of old weights would return from memory that a weight sync does not clear",
        "for a larger KV cache, set server.kv_cache_memory_mib or server.gpu_memory_utilization",
    ),
    Refusal(
        ("max_num_queued_reqs", "max_num_queued_tokens"),
        "vLLM would reject groups that the server has accepted",
        "set learner.max_staleness or learner.groups_per_step, which limit the number of waiting groups",
    ),
    Refusal(
        ("aux_output_config",),
        "the server itself decides which additional outputs vLLM returns",
        "set server.return_routed_experts",
    ),
    Refusal(
        ("enable_elastic_ep", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
            "data_parallel_address", "data_parallel_rpc_port",
         "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb",
         "data_parallel_backend"),
        "one server is one engine, whose replicas run on one node",
        "start several servers and list them in `endpoints`",
    ),
    Refusal(
        ("enable_fault_tolerance", "fault_tolerance_config"),
        "the server itself restarts a dead engine",
        "set server.max_engine_restarts",
    ),
)  # fmt: skip


def engine_arguments(run: ServerRun, model_path: Path, engine_port: int = 0) -> AsyncEngineArgs:
    """Return the arguments for vLLM, the same on every node of a server but for its rank.

    `engine_port` is the port of node 0 at which the workers of several nodes meet.

    Raises:
        ConfigError: [server.vllm] has an invalid argument, or an OpenAI option is unusable.
    """
    own = own_arguments(run, model_path, engine_port)
    check_openai_options(run.server, model_path)
    arguments = {name: value for name, (value, _) in own.items()} | added_arguments(run.server.vllm, own)
    if (num_sequences := arguments["max_num_seqs"]) > TOKENS_PER_STEP:
        arguments.setdefault("max_num_batched_tokens", num_sequences)
    kind = ArgsWithExperts if run.returns_experts and current_platform.is_cpu() else AsyncEngineArgs
    args = kind(**arguments)
    if run.returns_experts:
        _check_experts(run, args)
    return with_adapters(args, run)


def _check_experts(run: ServerRun, args: AsyncEngineArgs) -> None:
    """Raise ConfigError if vLLM cannot return the routed experts of this model, or would return wrong ones."""
    key = "learner.routing_replay" if run.server.return_routed_experts == "auto" else "server.return_routed_experts"
    if not args.create_model_config().is_moe:
        raise ConfigError(
            f"{key} = true, but model = {run.model!r} has no experts; remove the key, or for the server of a reference "
            "set server.return_routed_experts = false"
        )
    if current_platform.is_cpu() and not run.server.enforce_eager:
        raise ConfigError(
            f"{key} = true with server.enforce_eager = false: compiled code on a CPU records no routed experts; set "
            "server.enforce_eager = true"
        )
    if current_platform.is_cpu() and run.server.tensor_parallel_size > 1:
        raise ConfigError(
            f"{key} = true with server.tensor_parallel_size = {run.server.tensor_parallel_size} is not tested on a "
            "CPU; set server.tensor_parallel_size = 1"
        )


def own_arguments(run: ServerRun, model_path: Path, engine_port: int = 0) -> dict[str, ServerArgument]:
    server = run.server
    executor = "mp" if server.nnodes > 1 else "uni" if is_in_engine_process(server) else None
    of_head = {"head_dtype": "float32"} if run.head_dtype == "float32" and run.computes_in != "float32" else {}
    kv_cache_bytes = None if server.kv_cache_memory_mib is None else server.kv_cache_memory_mib << 20
    return {
        "model": ServerArgument(str(model_path), "set `model`"),
        "served_model_name": ServerArgument([run.model], "set `model`"),
        "dtype": ServerArgument(run.computes_in, "set server.dtype, or `dtype` for all"),
        "quantization": ServerArgument(
            INT8_LINEAR if server.quantization == INT8 else server.quantization, "set server.quantization"
        ),
        "kv_cache_dtype": ServerArgument(server.kv_cache_dtype or "auto", "set server.kv_cache_dtype"),
        "seed": ServerArgument(run.seed, "set `seed`"),
        "hf_overrides": ServerArgument(
            of_head, "set `model` to a directory with the config that you want, and head_dtype for the head"
        ),
        "max_model_len": ServerArgument(server.max_model_len, "set server.max_model_len"),
        "max_num_seqs": ServerArgument(
            server.max_concurrent_sequences + server.num_reserved,
            "set server.max_concurrent_sequences, or server.reserved_sequences for /v1 requests",
        ),
        "max_num_active_seqs": ServerArgument(
            server.max_concurrent_sequences if server.num_reserved else None, "set server.max_concurrent_sequences"
        ),
        "scheduler_cls": ServerArgument(
            SCHEDULER if server.num_reserved else None,
            "remove it: token versions and reserved slots depend on vLLM's own scheduler",
        ),
        "kv_cache_memory_bytes": ServerArgument(kv_cache_bytes, "set server.kv_cache_memory_mib"),
        "block_size": ServerArgument(server.block_size, "set server.block_size"),
        "gpu_memory_utilization": ServerArgument(_memory_share(server), "set server.gpu_memory_utilization"),
        "enforce_eager": ServerArgument(server.enforce_eager, "set server.enforce_eager"),
        "tensor_parallel_size": ServerArgument(server.tensor_parallel_size, "set server.tensor_parallel_size"),
        "data_parallel_size": ServerArgument(server.data_parallel_size, "set server.data_parallel_size"),
        "nnodes": ServerArgument(server.nnodes, "set server.nnodes"),
        "node_rank": ServerArgument(server.node_rank, "set server.node_rank"),
        "master_addr": ServerArgument(server.master_addr, "set server.master_addr"),
        "master_port": ServerArgument(
            engine_port, "remove it: each engine gets a free port; for the port of node 0, set server.master_port"
        ),
        "distributed_executor_backend": ServerArgument(
            executor, "remove it: it follows from server.tensor_parallel_size and server.nnodes"
        ),
        "disable_log_stats": ServerArgument(
            server.http_port == 0, "remove it: statistics are kept unless server.http_port = 0"
        ),
        "enable_return_routed_experts": ServerArgument(
            run.returns_experts and not current_platform.is_cpu(), "set server.return_routed_experts"
        ),
        "use_tqdm_on_load": ServerArgument(
            sys.stderr.isatty(), "remove it: the server shows a progress bar if it has a terminal"
        ),
        "enable_prefix_caching": ServerArgument(
            True, "remove it: it stays on, because the completions of a group share their prompt"
        ),
        "scheduling_policy": ServerArgument(
            "priority", "remove it: groups, scores and /v1 requests are distinguished by their priority"
        ),
        "reasoning_parser": ServerArgument(server.reasoning_parser or "", "set server.reasoning_parser"),
        "logprobs_mode": ServerArgument(
            "processed_logprobs", "remove it: these are the logprobs of the sampled distribution"
        ),
        "generation_config": ServerArgument(
            "vllm", "remove it: each request sets its own sampling; for groups, set learner.sampling"
        ),
        "worker_extension_cls": ServerArgument(
            "inference_server.engine.worker.PushWorker", "remove it: this class receives the learner's weight syncs"
        ),
    }


def is_in_engine_process(server: ServerConfig) -> bool:
    """Return True if the only worker needs no process of its own."""
    return current_platform.is_cpu() and server.tensor_parallel_size == 1


def _memory_share(server: ServerConfig) -> float:
    """Return each replica's share of memory.

    On a CPU, vLLM applies it to the whole machine, regardless of other replicas. On a GPU, a KV cache of a
    given size leaves only one use of it: vLLM refuses to start unless this share is free. A learner that was
    first on the same GPU may leave less, and still enough.
    """
    if current_platform.is_cpu():
        return server.gpu_memory_utilization / server.data_parallel_size
    is_sized = server.kv_cache_memory_mib is not None
    return min(server.gpu_memory_utilization, SHARE_TO_START) if is_sized else server.gpu_memory_utilization


def added_arguments(given: Mapping[str, Any], own: Mapping[str, ServerArgument]) -> dict[str, Any]:
    """Return the arguments in [server.vllm], with vLLM's types.

    Raises:
        ConfigError: An argument is unknown, set by the server, refused, or of the wrong type.
    """
    annotations = {field.name: field.type for field in dataclasses.fields(AsyncEngineArgs) if field.name[0] != "_"}
    refusals = {name: refusal for refusal in REFUSED for name in refusal.names}
    for name, value in given.items():
        key = f"server.vllm.{name} = {value!r}"
        if name not in annotations:
            near = difflib.get_close_matches(name, annotations, n=1)
            hint = f"did you mean server.vllm.{near[0]}?" if near else "`vllm serve --help` lists them, with - for _"
            raise ConfigError(f"{key} is not an argument of vLLM; {hint}")
        if name in own:
            raise ConfigError(f"{key} is set by the server itself; {own[name].remedy}")
        if name in refusals:
            raise ConfigError(f"{key} is refused: {refusals[name].reason}; {refusals[name].remedy}")
    return _typed(given, annotations)


def _typed(given: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values to the types that vLLM declares.

    AsyncEngineArgs itself accepts any type, and vLLM would fail later.
    """
    fields: dict[str, Any] = {name: (annotations[name], ...) for name in given}
    config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    values = {name: _member(annotations[name], value) for name, value in given.items()}
    try:
        typed = create_model("Arguments", __config__=config, **fields)(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key, value = _key_and_value(given, first["loc"])
        sentence = textwrap.shorten(first["msg"], MAX_EXPLANATION, placeholder=" …")
        raise ConfigError(f"server.vllm.{key} = {value!r}: {sentence}") from error
    return {name: getattr(typed, name) for name in given}


def _member(annotation: Any, value: Any) -> Any:
    """Return the enum member of this name, or the value itself.

    vLLM's flags take FLASH_ATTN, but the type expects a path.
    """
    for choice in get_args(annotation) or (annotation,):
        if isinstance(choice, type) and issubclass(choice, Enum) and isinstance(value, str):
            return choice.__members__.get(value, value)
    return value


def _key_and_value(given: Mapping[str, Any], location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Return the key and the value that an error is about.

    pydantic's location continues into the types that it has tried.
    """
    keys: list[str] = []
    value: Any = given
    for part in location:
        if not isinstance(value, Mapping) or part not in value:
            break
        keys, value = [*keys, str(part)], value[part]
    return ".".join(keys), value
