"""The `[server]` section of the config file."""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from protocol.config import DEFAULT_ENDPOINT, DEFAULT_HTTP_PORT, MAX_SECONDS, Seconds, SharedConfig, Text
from protocol.config_keys import PassedOn, check_section
from protocol.endpoint import is_host, is_loopback
from protocol.errors import ConfigError
from protocol.hardware import Cores, Dtype, has_gpu

CPU_KV_MIB = 2048
Tokens = Annotated[int, msgspec.Meta(ge=2, lt=1 << 31)]
"""Range of a prompt plus its completion, in tokens. vLLM counts them in 32 bits."""
BlockSize = Annotated[int, msgspec.Meta(gt=0, le=4096)]
SequenceCount = Annotated[int, msgspec.Meta(gt=0, le=1 << 16)]
"""Range of a number of sequences. vLLM has tables with one row per sequence."""
Copies = Annotated[int, msgspec.Meta(gt=0, le=1024)]
"""Range of a number of workers or replicas. Each is one or more processes."""
Quantization = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only"]
INT8: Quantization = "int8_per_channel_weight_only"
Mebibytes = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
"""Range of a size in MiB. The size in bytes must fit into 64 bits."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Config keys that only the inference server reads.

    `--server.vllm.NAME VALUE`, or `[server.vllm]` in the file, sets an argument of vLLM itself.
    """

    max_model_len: Tokens | None = None
    """Maximum length of prompt plus completion, in tokens. Unset: the maximum in the model's config."""
    max_concurrent_sequences: SequenceCount = 256
    """Maximum number of sequences in one decoding step of each replica. Further sequences wait inside the
    engine."""
    reserved_sequences: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] | None = None
    """Number of extra slots per replica, in addition to max_concurrent_sequences, that only /v1 requests use.
    These requests are then answered at any learner load. 0: they wait until no group waits. Unset: one per 32
    of max_concurrent_sequences, at least one."""
    kv_cache_memory_mib: Mebibytes | None = msgspec.field(default_factory=lambda: None if has_gpu() else CPU_KV_MIB)
    """KV cache memory of each worker, in MiB. Unset: what gpu_memory_utilization leaves; without a GPU:
    2,048, because other processes need that memory too."""
    block_size: BlockSize | None = None
    """Number of tokens per KV block, the granularity at which completions share their prompt. On a CPU, it
    must be a multiple of 32, and 32 suits short prompts."""
    dtype: Dtype | None = None
    """Compute dtype of this server if it differs from the run's `dtype`, such as a fast bfloat16 server
    alongside an exact one. Weights arrive in the run's dtype regardless. The learner applies the tolerances
    of the coarser dtype to this server."""
    quantization: Quantization | None = None
    """Quantization of the linear layers' weights, repeated on each weight sync. Names are vLLM's.
    fp8_per_tensor, fp8_per_channel, fp8_per_block: 8-bit weights and activations, on GPUs;
    int8_per_channel_weight_only: 8-bit weights, on CPUs. Mixture-of-experts models and latent attention (MLA)
    are not supported. Unset: none."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Dtype of the KV cache. fp8: half the memory of bfloat16, at a scale of 1. Unset: the compute dtype."""
    enforce_eager: bool = msgspec.field(default_factory=lambda: not has_gpu())
    """Skip compilation and CUDA graphs, for a faster start and slower generation. Unset: true only on a
    machine without a GPU."""
    tensor_parallel_size: Copies = 1
    """Number of workers that share one copy of the model, on all nodes of the server together."""
    data_parallel_size: Copies = 1
    """Number of replicas: copies of the model in this server, each with tensor_parallel_size workers. vLLM
    sends a request to the least loaded replica, and a weight sync updates all of them. Mixture-of-experts
    models are not supported."""
    nnodes: Copies = 1
    """Number of nodes that one server spans, if one node has too few GPUs for the model. Each node runs an equal
    share of the tensor_parallel_size workers. Start the same command on every node, each with its own
    node_rank."""
    node_rank: Annotated[int, msgspec.Meta(ge=0, lt=1024)] = 0
    """Rank of this node, with nnodes above 1. Node 0 talks to the learner and serves HTTP; the others only run
    workers."""
    master_addr: Text = "127.0.0.1"
    """Address of node 0, a name or an IP address that all nodes reach. Required with nnodes above 1."""
    master_port: Annotated[int, msgspec.Meta(gt=0, lt=65536)] = 29600
    """Port of node 0 at which the other nodes report, with nnodes above 1. vLLM opens further ports on all
    nodes, so all ports between them must be open, in a private network."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Fraction of the device memory that the engine may use. It must be free at the start. With
    kv_cache_memory_mib, a GPU server takes what weights, KV cache and CUDA graphs need instead. On a CPU:
    fraction of the machine's memory, for all replicas together."""
    kv_cache_on_weight_sync: Literal["keep", "recompute"] = "keep"
    """Treatment of the KV cache of sequences in flight on a weight sync. `"keep"`: continue with it;
    `"recompute"`: compute it again with the new weights."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    """Maximum rank of a LoRA adapter that weight syncs may send without the weights that it adapts, up to 512.
    vLLM then applies an adapter in every request, which slows down generation. 0: weight syncs send merged
    weights. Unset: learner.lora.rank of this file, or 0 if learner.weight_sync.lora is "merged"."""
    return_routed_experts: bool | Literal["auto"] = "auto"
    """Whether vLLM records which experts each token of a mixture-of-experts model has used, so that a learner with
    learner.routing_replay can ask for them. On a CPU, it needs enforce_eager = true. "auto": learner.routing_replay of
    this file."""
    overlap_weight_loading: bool = False
    """Receive new weights during generation, and pause only to load them. On a CPU, loading also overlaps,
    and the pause only swaps the weights. The cost is memory for one more copy of the weights, on a GPU server
    in host memory. Supported with one worker only."""
    http_host: Text = "127.0.0.1"
    """Address of the OpenAI API, /status and /metrics: a name, an IPv4 address or an IPv6 address. `"::1"`,
    with or without brackets: IPv6 loopback; `"::"`: all IPv4 and IPv6 addresses."""
    http_port: Annotated[int, msgspec.Meta(ge=0, lt=65536)] = DEFAULT_HTTP_PORT
    """Port of the OpenAI API, /status and /metrics. 0: HTTP is off."""
    api_key_file: Text | None = None
    """File with the key that clients of the OpenAI API must send, mode 600. Unset: the environment variable
    VLLM_API_KEY, if set. Required if http_host is not a loopback address."""
    tool_call_parser: Text | None = None
    """Format of the model's tool calls in the OpenAI API, as in `vllm serve`: hermes, llama3_json, mistral,
    ... Unset: requests with tools are refused."""
    reasoning_parser: Text | None = None
    """Format of the model's reasoning in the OpenAI API, as in `vllm serve`: qwen3, deepseek_r1, ... Unset:
    the reasoning stays part of the answer."""
    chat_template: Text | None = None
    """Chat template of the OpenAI API, as in `vllm serve`: a file or the template itself. Unset: the
    tokenizer's template. The learner always renders its prompts with the tokenizer's template."""
    cpu_cores: Cores | None = None
    """Cores for the engine, one compute thread each, as positions in the list of cores that this process may
    use. The rest of the server is not bound. Several replicas divide the cores. Unset, without a GPU and with
    a loopback endpoint: the cores that the learner's section leaves, or the first half. Unset otherwise: all
    cores."""
    orphan_timeout_s: Seconds = 30.0
    """Time that the server and its groups are kept for a run after its learner disconnects, in seconds. Other
    runs wait until then."""
    drain_timeout_s: Seconds = 60.0
    """Maximum time to finish running groups and /v1 requests after SIGTERM, SIGHUP or Ctrl-C, in seconds.
    After that, the server exits regardless. A second SIGTERM or Ctrl-C stops the server at once. A supervisor
    must wait longer than this before it sends SIGKILL."""
    start_timeout_s: Annotated[int, msgspec.Meta(gt=0, le=int(MAX_SECONDS))] = 600
    """Maximum time to load the model and warm up, in seconds, at startup and after the engine has died."""
    max_engine_restarts: Annotated[int, msgspec.Meta(ge=0)] = 3
    """Maximum number of engine restarts within an hour. One more death stops the server."""
    stall_timeout_s: Seconds = 300.0
    """Maximum time without a step of an engine that has groups or scores, in seconds. After that, the engine is
    restarted. Weight syncs do not count, and a prefill chunk of a long prompt counts as a token."""
    pause_timeout_s: Seconds = 60.0
    """Maximum time for the engine to pause, set a version or resume around a weight sync, in seconds. After
    that, the engine is restarted."""
    vllm: PassedOn = msgspec.field(default_factory=dict)
    """Arguments of vLLM itself, named as in AsyncEngineArgs. An argument that is a config is a table.
    Arguments that the server sets, or that break versions, logprobs or weight syncs, are refused
    (engine/vllm_args.py)."""

    @property
    def quantized_parts(self) -> str:
        """Description of what is quantized, for learners and people. Empty if nothing is."""
        cache = f"{self.kv_cache_dtype} KV cache" if self.kv_cache_dtype else None
        return " and ".join(filter(None, (self.quantization and f"{self.quantization} weights", cache)))

    @property
    def num_workers(self) -> int:
        """Number of workers of all replicas. On GPUs, each worker has its own GPU."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def workers_per_node(self) -> int:
        return self.num_workers // self.nnodes

    @property
    def openai_keys(self) -> list[str]:
        """Names of the OpenAI options that are set."""
        keys = ("tool_call_parser", "reasoning_parser", "chat_template")
        return [key for key in keys if getattr(self, key) is not None]

    @property
    def num_reserved(self) -> int:
        """Number of slots per replica that only /v1 requests use. 0 if HTTP is off."""
        if self.http_port == 0:
            return 0
        return (
            max(1, self.max_concurrent_sequences // 32) if self.reserved_sequences is None else self.reserved_sequences
        )

    @property
    def capacity(self) -> int:
        """Maximum number of group sequences in one decoding step, over all replicas."""
        return self.max_concurrent_sequences * self.data_parallel_size


class LearnerSection(msgspec.Struct, frozen=True):
    """Keys of [learner] of which the server needs the type. The learner checks the section as a whole."""

    cpu_cores: Cores | None = None


class ServerRun(SharedConfig):
    """Run an inference server: `slipstream serve run.toml`."""

    COMMON = (
        "model", "run_dir", "endpoint", "dtype", "server.max_model_len", "server.max_concurrent_sequences",
        "server.gpu_memory_utilization", "server.kv_cache_memory_mib", "server.tensor_parallel_size",
        "server.http_port",
    )  # fmt: skip
    server: ServerConfig = ServerConfig()
    learner: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """The learner's section, not checked here."""
    deploy: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Resources of each process on a node, not read here."""

    @property
    def computes_in(self) -> Dtype:
        return self.server.dtype or self.dtype

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters to prepare for. 0: none."""
        if self.server.max_lora_rank is not None:
            return self.server.max_lora_rank
        lora, weight_sync = (self.learner.get(name) for name in ("lora", "weight_sync"))
        is_merged = isinstance(weight_sync, dict) and weight_sync.get("lora") == "merged"
        rank = lora.get("rank") if isinstance(lora, dict) else None
        return rank if isinstance(rank, int) and rank > 0 and not is_merged else 0

    @property
    def returns_experts(self) -> bool:
        wanted = self.server.return_routed_experts
        return self.learner.get("routing_replay") is True if wanted == "auto" else wanted

    def check(self) -> None:
        check_section("learner", self.learner, LearnerSection)
        if self.endpoints and self.endpoint == DEFAULT_ENDPOINT and self.endpoint not in self.endpoints:
            raise ConfigError(
                f"endpoints = {list(self.endpoints)} does not identify this server; "
                f"select its endpoint, for example with --endpoint {self.endpoints[0]}"
            )
        _check_nodes(self.server)


def _check_nodes(server: ServerConfig) -> None:
    nodes = f"server.nnodes = {server.nnodes}"
    if server.node_rank >= server.nnodes:
        raise ConfigError(f"server.node_rank = {server.node_rank} is not below {nodes}; number the nodes from 0")
    if server.nnodes == 1:
        return
    if not is_host(server.master_addr):
        raise ConfigError(
            f"server.master_addr = {server.master_addr!r} is neither a host name nor an IP address; set it to that of "
            "node 0, on all nodes"
        )
    if is_loopback(server.master_addr) or server.master_addr in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{nodes} with server.master_addr = {server.master_addr!r}, which other nodes cannot reach; set it to the "
            "address of node 0, on all nodes"
        )
    if server.data_parallel_size > 1:
        raise ConfigError(
            f"{nodes} with server.data_parallel_size = {server.data_parallel_size} is not supported: replicas run on "
            "one node. Start several servers and list them in `endpoints`"
        )
    if server.tensor_parallel_size % server.nnodes:
        raise ConfigError(
            f"server.tensor_parallel_size = {server.tensor_parallel_size} is not a multiple of {nodes}; each node runs "
            "the same number of workers"
        )
