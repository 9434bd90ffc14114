"""vLLM as the server runs it: requests wait while weights load, and no policy shares another's prefixes.

Every request gets a prefix cache salt with the number of the weight sync, so it never reuses the KV cache of
an older policy. The only exception is explicit: the later turns of an episode send the salt of its first
turn.
"""

import asyncio
import gc
import multiprocessing
import os
import uuid
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.adapter import ADAPTER
from inference_server.engine.data_parallel import replicas_as_ours
from inference_server.engine.guests import FIRST_OF_GUESTS
from inference_server.engine.interface import EngineDead
from inference_server.engine.node_link import ServerNodes
from inference_server.engine.request_limits import refuse_deadly_requests
from inference_server.engine.vllm_args import engine_arguments, is_in_engine_process
from protocol.errors import ConfigError
from protocol.hardware import bound_to_cores
from protocol.signals import signals_blocked

UNTOUCHED = "default"
"""vLLM's version label of the weights that it has loaded itself."""
sampled_by: ContextVar[set[str] | None] = ContextVar("sampled_by", default=None)
"""Set that collects the version labels of an HTTP request's tokens. None: not collected."""


class StepCounter(StatLoggerBase):
    """Counter of engine steps.

    vLLM sends statistics after each step, including a step that gave no request a token.
    """

    def __init__(self, *_: object) -> None:
        self.count = 0

    def record(self, *_: object, **__: object) -> None:
        self.count += 1

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class VersionedLLM(AsyncLLM):
    """AsyncLLM that holds requests during a sync and separates the policies' prefixes."""

    num_pushes = 0
    """Number of weight syncs. The salt has it in place of the version: two runs on one server both have a
    version 3."""
    adapter: LoRARequest | None = None
    """Adapter of every request, which the workers have. None: vLLM serves none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.steps = steps = dict[int, StepCounter]()
        """Step counters by replica."""
        self._has_readers = options["log_stats"]
        self._name = uuid.uuid4().hex[:12]
        """Name of this engine in the salt. An episode may continue on another server, whose syncs have the
        same numbers."""
        super().__init__(
            *args, **options | {"stat_loggers": [lambda _, replica: steps.setdefault(replica, StepCounter())]}
        )
        refuse_deadly_requests(self.input_processor, self.vllm_config)
        self.admitting = asyncio.Event()
        self.admitting.set()
        if self.vllm_config.lora_config is not None:
            self.adapter = ADAPTER

    @property
    def salt(self) -> str:
        """Salt for the KV cache of the current policy."""
        return f"{self._name} push {self.num_pushes}"

    def _run_output_handler(self) -> None:
        """Start the output handler, without statistics unless vLLM's metrics have readers.

        The logger that counts steps would enable statistics of tokens. They take a quarter of the time that
        outputs take here.
        """
        self.log_stats = self.output_processor.log_stats = self._has_readers
        super()._run_output_handler()

    async def generate(
        self, prompt: Any, *args: Any, priority: int = 0, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request of the OpenAI application.

        The request is a guest (engine/guests.py), whatever priority its client sends. A client's salt is
        valid only within the current policy.
        """
        await self.admitting.wait()
        if isinstance(prompt, dict) and (salt := prompt.get("cache_salt")):
            prompt = {**prompt, "cache_salt": f"{self.salt}/{salt}"}
        async for output in self.generate_first(prompt, *args, priority=max(priority, FIRST_OF_GUESTS), **kwargs):
            _note_versions(output)
            yield output

    async def generate_first(self, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        await self.admitting.wait()
        if isinstance(prompt, dict) and not prompt.get("cache_salt"):
            prompt = {**prompt, "cache_salt": self.salt}
        async for output in super().generate(prompt, *args, **kwargs | {"lora_request": self.adapter}):
            yield output

    def __del__(self) -> None:
        """Do nothing.

        VllmEngine.close has shut down already, and AsyncLLM's own method fails while the interpreter shuts
        down.
        """


def _note_versions(output: RequestOutput) -> None:
    """Record the version labels, which vLLM reports when a completion has ended."""
    versions = sampled_by.get()
    if versions is not None:
        versions.update(span.version for part in output.outputs for span in part.weight_versions or ())


def start_llm(run: ServerRun, model_path: Path, nodes: ServerNodes | None = None) -> VersionedLLM:
    """Start vLLM as configured in [server], together with the server's other nodes.

    Raises:
        ConfigError: vLLM cannot serve the model with this config, or a node is missing.
        EngineDead: A node was lost meanwhile.
    """
    server = run.server
    _check_receive_overlap(server)
    disable_envs_cache()  # The cache may come from an earlier engine.
    if is_in_engine_process(server):
        # Otherwise vLLM puts the CPU worker into a third process: 4 s more to start, and two more hops per
        # step.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine_port = 0
    if nodes is not None:
        os.environ.setdefault("VLLM_HOST_IP", nodes.address)  # vLLM would take that of the default route
        engine_port = nodes.gather()
    args = engine_arguments(run, model_path, engine_port)
    num_replicas = server.data_parallel_size
    try:
        if server.quantization is not None and args.create_model_config().is_moe:
            raise ConfigError(
                f'server.quantization = "{server.quantization}" is not supported with model = {run.model!r}: vLLM '
                "builds the kernels of quantized experts again at each weight sync, while CUDA graphs keep the "
                'constants of the first ones; unset it, and set server.kv_cache_dtype = "fp8" to save memory'
            )
        if num_replicas > 1 and args.create_model_config().is_moe:
            raise ConfigError(
                f"server.data_parallel_size = {num_replicas} is not supported with model = {run.model!r}: the replicas "
                "of a mixture-of-experts model compute each step together, which is untested with weight syncs; "
                "start several servers and list them in `endpoints`"
            )
        # Bind only the engine process. This process only forwards messages and may run anywhere, for example
        # on the core of a waiting learner.
        with (
            signals_blocked(),
            bound_to_cores(server.cpu_cores),
            replicas_as_ours(num_replicas, divide_cores=server.cpu_cores is not None),
            nullcontext() if nodes is None else nodes.watched(kill_engine_core),
        ):
            llm = VersionedLLM.from_engine_args(args)
    except (ValueError, RuntimeError, OSError) as error:
        if nodes is not None and (reason := nodes.lost()) is not None:
            raise EngineDead(reason) from error
        raise ConfigError(
            f"vLLM cannot serve model {run.model}: {_reason(error)} Check these keys of [server]: max_model_len, "
            "max_concurrent_sequences, reserved_sequences, kv_cache_memory_mib, block_size, tensor_parallel_size, "
            "data_parallel_size, gpu_memory_utilization, vllm."
        ) from error
    _freeze_startup_state()
    return llm


def kill_engine_core() -> None:
    """Kill the processes of the engine on this node."""
    for child in multiprocessing.active_children():
        child.kill()


def _freeze_startup_state() -> None:
    """Exclude existing objects and environment variables from repeated work.

    The garbage collector skips frozen objects. vLLM caches variables that it would look up with each token.
    Both take a twelfth of this process's compute time in the demo.
    """
    gc.unfreeze()  # Objects of an earlier engine may be garbage now.
    gc.collect()
    gc.freeze()
    enable_envs_cache()


def _check_receive_overlap(server: ServerConfig) -> None:
    if not server.overlap_weight_loading or server.num_workers == 1:
        return
    if server.tensor_parallel_size == 1:
        key, size, reason = "data_parallel_size", server.data_parallel_size, "it is tested with one worker only"
    else:
        key, size = "tensor_parallel_size", server.tensor_parallel_size
        reason = (
            "workers that wait for each other leave too little time for the receiving thread"
            if current_platform.is_cpu()
            else "each worker would keep the whole model in addition to its shard, and a weight sync during generation "
            "would run the NCCL kernels of two groups against each other"
        )
    raise ConfigError(
        f"server.overlap_weight_loading = true is not supported with server.{key} = {size}: {reason}; "
        "set server.overlap_weight_loading = false"
    )


def _reason(error: Exception) -> str:
    """Extract the sentence from pydantic's error text."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if "validation error for" not in line and "errors.pydantic.dev" not in line)
    return text.removeprefix("Value error, ").split(" [type=")[0]
