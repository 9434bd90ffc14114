"""The server's side of the config file: the `[server]` section."""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from protocol.config import DEFAULT_ENDPOINT, DEFAULT_HTTP_PORT, MAX_SECONDS, PassedOn, Seconds, SharedConfig, Text
from protocol.cores import Cores
from protocol.errors import ConfigError
from protocol.hardware import Dtype, has_gpu

CPU_KV_MIB = 2048
Tokens = Annotated[int, msgspec.Meta(ge=2, lt=1 << 31)]
"""A prompt and a completion; vLLM counts them in 32 bits."""
BlockSize = Annotated[int, msgspec.Meta(gt=0, le=4096)]
Places = Annotated[int, msgspec.Meta(gt=0, le=1 << 16)]
"""vLLM has tables with a row for each."""
Copies = Annotated[int, msgspec.Meta(gt=0, le=1024)]
"""Each is a process, or several."""
Mebibytes = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
"""In bytes they must fit into 64 bits."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys only the inference server reads; --server.vllm.NAME VALUE, or [server.vllm] in the file, is an argument of vLLM's own."""

    max_model_len: Tokens | None = None
    """Longest prompt + completion in tokens; by default what the model's config allows."""
    max_concurrent_sequences: Places = 256
    """Sequences in one decoding step of each replica; further ones wait inside the engine."""
    reserved_sequences: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] | None = None
    """Places beside max_concurrent_sequences, in each replica, for requests of /v1 alone, so that they are answered
    however much the learner asks for. 0: they wait until no group does. Unset: one for each 32 of
    max_concurrent_sequences, at least one."""
    kv_cache_memory_mib: Mebibytes | None = msgspec.field(default_factory=lambda: None if has_gpu() else CPU_KV_MIB)
    """Memory for keys and values on each worker. Unset: what gpu_memory_utilization leaves over; 2,048 on a machine without a GPU, whose
    memory others need too."""
    block_size: BlockSize | None = None
    """Tokens per KV block, the grain in which completions share their prompt. On a CPU a multiple of 32; 32 suits short
    prompts there."""
    dtype: Dtype | None = None
    """In which this server computes, where that is not the run's `dtype`: a fast server in bfloat16 beside an exact one. Weights come in
    the run's dtype all the same, and the learner holds this server to the bounds of the coarser of the two."""
    enforce_eager: bool = msgspec.field(default_factory=lambda: not has_gpu())
    """Skip compilation and CUDA graphs: starts sooner, generates slower. Unset: on a machine without a GPU."""
    tensor_parallel_size: Copies = 1
    """Workers that share one copy of the model."""
    data_parallel_size: Copies = 1
    """Replicas: copies of the model in this one server, each with tensor_parallel_size workers. vLLM gives a request to the one with
    the least to do; a push goes to all. Not for models with experts."""
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Share of the device's memory that the engine may use (on a CPU: of the machine's memory, all replicas together)."""
    kv_on_push: Literal["keep", "recompute"] = "keep"
    """What becomes of the keys and values of sequences in flight when new weights arrive."""
    receive_overlap: bool = False
    """Receive a push while generation goes on and pause only to load it (on a CPU it is loaded beside generation too, and the
    pause only exchanges the two); costs the memory of one more copy of the weights, on a GPU's server host memory. One worker only."""
    http_host: Text = "127.0.0.1"
    """Address of the OpenAI API, /status and /metrics: a name, IPv4 or IPv6 (::1, with or without brackets; :: listens at
    both kinds)."""
    http_port: Annotated[int, msgspec.Meta(ge=0, lt=65536)] = DEFAULT_HTTP_PORT
    """Port of the OpenAI API, /status and /metrics; 0 turns them off."""
    api_key_file: Text | None = None
    """File with the key that clients of the OpenAI API must send, mode 600; by default VLLM_API_KEY of the environment, if
    set. Needed where http_host is not loopback."""
    tool_call_parser: Text | None = None
    """Format of the model's tool calls in the OpenAI API, as in `vllm serve`: hermes, llama3_json, mistral, ... Unset:
    requests with tools are refused."""
    reasoning_parser: Text | None = None
    """Format of the model's reasoning in the OpenAI API, as in `vllm serve`: qwen3, deepseek_r1, ... Unset: part of
    the answer."""
    chat_template: Text | None = None
    """Chat template of the OpenAI API, as in `vllm serve`: a file, or the template itself. Unset: the tokenizer's, in
    which the learner renders its prompts in any case."""
    cpu_cores: Cores | None = None
    """Bind the engine to these positions within the cores this process may use, one compute thread each; the rest of the server
    runs wherever there is room. Several replicas divide them. Unset, without a GPU and at a loopback endpoint: the first half."""
    orphan_timeout_s: Seconds = 30.0
    """How long the server, and the groups in it, are kept for a run whose learner is gone; until then another run waits."""
    drain_timeout_s: Seconds = 60.0
    """How long a server that was told to end (SIGTERM, SIGHUP, Ctrl-C) finishes what it has begun, groups and requests of /v1, before it
    ends all the same. Another SIGTERM or Ctrl-C ends it at once. Whoever kills what does not end must wait for longer than this."""
    start_timeout_s: Annotated[int, msgspec.Meta(gt=0, le=int(MAX_SECONDS))] = 600
    """Longest time for loading the model and warming up, also after the engine has died."""
    max_engine_restarts: Annotated[int, msgspec.Meta(ge=0)] = 3
    """How often within an hour an engine that has died is started again; one death more ends the server."""
    stall_timeout_s: Seconds = 300.0
    """An engine that has groups to work on and gives no token for so long is started again. Pushes do not count, and a piece of a
    long prompt counts as a token."""
    pause_timeout_s: Seconds = 60.0
    """Longest time in which the engine must have paused, taken a version label or resumed around a push; one that has not
    answered by then is started again."""
    vllm: PassedOn = msgspec.field(default_factory=dict)
    """Arguments of vLLM's own, under the names of AsyncEngineArgs, tables for those that are configs. What the server sets itself
    and what would break versions, logprobs or pushes is refused (engine/vllm_args.py)."""

    @property
    def num_workers(self) -> int:
        """Of all replicas; on GPUs each has one of its own."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def openai_keys(self) -> list[str]:
        """Names of the OpenAI options that are set."""
        keys = ("tool_call_parser", "reasoning_parser", "chat_template")
        return [key for key in keys if getattr(self, key) is not None]

    @property
    def num_reserved(self) -> int:
        """Places of each replica for requests of /v1 alone; none where there is no /v1."""
        if self.http_port == 0:
            return 0
        return (
            max(1, self.max_concurrent_sequences // 32) if self.reserved_sequences is None else self.reserved_sequences
        )

    @property
    def capacity(self) -> int:
        """Sequences of groups in one decoding step of all replicas."""
        return self.max_concurrent_sequences * self.data_parallel_size


class ServerRun(SharedConfig):
    """Configuration of `inference-server`."""

    server: ServerConfig = ServerConfig()
    learner: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """The learner's section, unread here."""
    deploy: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Which part of a node each process gets, unread here."""

    @property
    def computes_in(self) -> Dtype:
        return self.server.dtype or self.dtype

    def check(self) -> None:
        if self.endpoints and self.endpoint == DEFAULT_ENDPOINT and self.endpoint not in self.endpoints:
            raise ConfigError(
                f"endpoints = {list(self.endpoints)}: which of them is this server? Say so with --endpoint {self.endpoints[0]}"
            )
