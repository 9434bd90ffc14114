"""vLLM as the server runs it: requests wait while weights are loaded, and a policy's prefixes are its own.

Every request gets a prefix cache salt with the number of the push, so keys and values of an old policy are never shared
with a request of a new one. The one exception is asked for: the later turns of an episode say the salt of its first.
"""

import asyncio
import gc
import os
import uuid
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.data_parallel import replicas_as_ours
from inference_server.engine.guests import FIRST_OF_GUESTS
from inference_server.engine.vllm_args import engine_arguments, is_in_engine_process
from protocol.cores import bound_to_cores
from protocol.errors import ConfigError
from protocol.signals import held_from_children

UNTOUCHED = "default"
"""What vLLM calls the version of the weights that it has loaded itself."""
sampled_by: ContextVar[set[str] | None] = ContextVar("sampled_by", default=None)
"""Where an HTTP request wants to know it: the versions, as vLLM calls them, of the tokens that have answered it."""


class Steps(StatLoggerBase):
    """Counts the engine's steps: it sends its numbers after each, also after one that gave no request a token."""

    def __init__(self, *_: object) -> None:
        self.count = 0

    def record(self, *_: object, **__: object) -> None:
        self.count += 1

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class VersionedLLM(AsyncLLM):
    """AsyncLLM whose requests wait while a push is under way and never share a prefix with another policy version."""

    num_pushes = 0
    """In the salt instead of the version: two runs on one server both have a version 3."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.steps = steps = dict[int, Steps]()
        """By replica."""
        self._has_readers = options["log_stats"]
        self._name = uuid.uuid4().hex[:12]
        """In the salt too: an episode may go on at another server, whose pushes have the same numbers."""
        super().__init__(*args, **options | {"stat_loggers": [lambda _, replica: steps.setdefault(replica, Steps())]})
        self.admitting = asyncio.Event()
        self.admitting.set()

    @property
    def salt(self) -> str:
        """What is computed now may be shared under it."""
        return f"{self._name} push {self.num_pushes}"

    def _run_output_handler(self) -> None:
        """Without readers of vLLM's metrics keep no statistics of tokens, which take a quarter of the time that outputs take here:
        the logger that counts steps would have them kept."""
        self.log_stats = self.output_processor.log_stats = self._has_readers
        super()._run_output_handler()

    async def generate(
        self, prompt: Any, *args: Any, priority: int = 0, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """For the OpenAI application: whatever priority its clients ask for, they are guests (engine/guests.py), and
        whatever salt they choose, it is one of this push."""
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
        async for output in super().generate(prompt, *args, **kwargs):
            yield output

    def __del__(self) -> None:
        """Nothing: VllmEngine.close has shut down, and AsyncLLM's own fails in a half torn-down interpreter."""


def _note_versions(output: RequestOutput) -> None:
    """vLLM says them of a completion when it has ended."""
    versions = sampled_by.get()
    if versions is not None:
        versions.update(span.version for piece in output.outputs for span in piece.weight_versions or ())


def start_llm(run: ServerRun, model_path: Path) -> VersionedLLM:
    """Start vLLM as [server] says. Raises ConfigError where it cannot serve the model so."""
    server = run.server
    _refuse_overlap_of_several(server)
    disable_envs_cache()  # of an engine before this one
    if is_in_engine_process(server):
        # Without it vLLM puts the CPU worker into a third process: 4 s more to start and two hops more per step.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    args = engine_arguments(run, model_path)
    num_replicas = server.data_parallel_size
    try:
        if num_replicas > 1 and args.create_model_config().is_moe:
            raise ConfigError(
                f"server.data_parallel_size = {num_replicas} with model = {run.model!r}: the replicas of a model with experts compute "
                "each step together, which was never tried with pushes; start several servers and list them in `endpoints`"
            )
        # The engine's process alone: this one only passes on, and runs wherever there is room, such as on the core of a learner
        # that waits.
        with (
            held_from_children(),
            bound_to_cores(server.cpu_cores),
            replicas_as_ours(num_replicas, divide_cores=server.cpu_cores is not None),
        ):
            llm = VersionedLLM.from_engine_args(args)
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"vLLM cannot serve model {run.model}: {_reason(error)} Look at the keys of [server]: max_model_len, "
            "max_concurrent_sequences, reserved_sequences, kv_cache_memory_mib, block_size, tensor_parallel_size, data_parallel_size, gpu_memory_utilization, vllm."
        ) from error
    _settle()
    return llm


def _settle() -> None:
    """What is here by now stays as it is, so it is not looked at again: objects by the garbage collector, variables of the environment
    with each token, a twelfth of what this process computes during the demo."""
    gc.unfreeze()  # what an engine before this one has left
    gc.collect()
    gc.freeze()
    enable_envs_cache()


def _refuse_overlap_of_several(server: ServerConfig) -> None:
    if not server.receive_overlap or server.num_workers == 1:
        return
    if server.tensor_parallel_size == 1:
        key, size, reason = "data_parallel_size", server.data_parallel_size, "it was only ever tried with one worker"
    else:
        key, size = "tensor_parallel_size", server.tensor_parallel_size
        reason = (
            "workers that wait for each other leave the thread that receives too little time"
            if current_platform.is_cpu()
            else "each worker would keep the whole model beside its share, and a push beside generation would run NCCL's kernels of "
            "two groups against each other"
        )
    raise ConfigError(
        f"server.receive_overlap = true with server.{key} = {size}: {reason}; set receive_overlap = false"
    )


def _reason(error: Exception) -> str:
    """Take the sentence out of what pydantic wraps around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if "validation error for" not in line and "errors.pydantic.dev" not in line)
    return text.removeprefix("Value error, ").split(" [type=")[0]
