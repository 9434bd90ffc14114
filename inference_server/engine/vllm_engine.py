"""vLLM behind the server's `Engine` interface: completions with a version per token, and weight syncs.

One `VersionedLLM` serves groups and the OpenAI API. A failure of vLLM's process raises EngineDead, a failure
of one request raises EngineFailed.
"""

import asyncio
import logging
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from inference_server.config import ServerRun
from inference_server.engine.data_parallel import COORDINATOR, replica_of_turn, salt_at
from inference_server.engine.guests import SCORES
from inference_server.engine.interface import (
    EngineDead,
    EngineFailed,
    EngineLimits,
    PushOrder,
    Sampled,
    WorkerInfo,
    WorkerReport,
)
from inference_server.engine.node_link import ServerNodes
from inference_server.engine.output import Completions
from inference_server.engine.processes import EngineProcesses
from inference_server.engine.supervisor import in_time
from inference_server.engine.versioned_llm import UNTOUCHED, kill_engine_core, start_llm
from protocol.messages import RoutingShape, Sampling
from protocol.model_files import end_token_ids, fingerprint

log = logging.getLogger(__name__)
T = TypeVar("T")
TOKENS_PER_CHUNK = 32
"""Number of tokens per chunk of a completion. Each chunk shows that its group makes progress, and costs the
event loop about 30 µs."""
FIRST_STAGING_POLL_S = 0.01
STAGING_POLL_S = 0.01 if current_platform.is_cpu() else 0.25
"""Maximum seconds between polls of a staged sync, which double from the first one. Each poll is answered between
two decoding steps, and an adapter arrives within a few."""
DEATH_NOTICE_S = 5.0
"""Maximum seconds for vLLM to notify its waiting requests of the death of its process."""


class VllmEngine:
    """Engine on vLLM.

    `llm` serves the OpenAI application. After a restart, `on_restart` gives the application the new one.
    """

    on_restart: Callable[[AsyncLLM], Awaitable[None]] | None = None
    _nodes: ServerNodes | None = None
    """Link to the other nodes of the server, if it has several."""

    def __init__(self, run: ServerRun, model_path: Path) -> None:
        self._config, self._model_path = run, model_path
        if run.server.nnodes > 1:
            self._nodes = ServerNodes(run, fingerprint(model_path))
        self.llm = start_llm(run, model_path, self._nodes)
        self._processes = EngineProcesses(())
        self._clear_cache_on_push = run.server.kv_cache_on_weight_sync == "recompute"
        self._num_requests = 0
        self._version = -1
        """Current policy version. -1 before the first sync, until which the server admits no group."""
        config = self.llm.vllm_config
        self.limits = EngineLimits(
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            num_workers=run.server.num_workers,
            max_concurrent_sequences=run.server.capacity,
            num_replicas=run.server.data_parallel_size,
            max_lora_rank=0 if config.lora_config is None else config.lora_config.max_lora_rank,
            quantization=run.server.quantized_parts,
            experts=_routing_shape(config) if config.aux_output_config.enabled else None,
        )
        # The learner expects a turn to end at these ids. vLLM adds those of its own generation config and tokenizer.
        self._eos_token_ids = {token for token in end_token_ids(model_path) if token < self.limits.vocab_size}

    async def workers(self) -> list[WorkerInfo]:
        if self.llm.adapter is not None:
            await self._call_workers("clear_adapter")
        replies = await self._call_workers("info")
        workers = [msgspec.msgpack.decode(reply, type=WorkerInfo) for reply in replies]
        self._processes = EngineProcesses(worker.pid for worker in workers if worker.pid is not None)
        return workers

    @property
    def num_steps(self) -> list[int | None]:
        counts = [steps.count for _, steps in sorted(self.llm.steps.items())]
        if self.limits.num_replicas == 1:
            return [*counts]
        core = self.llm.engine_core
        return [
            count if core.engine_inflight[name] else None for name, count in zip(core.core_engines, counts, strict=True)
        ]

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        # Wait here, so that version and salt are those with which the request enters.
        await self.llm.admitting.wait()
        entered_version = self._version
        replica = self._replica_of_turn(salt) if sampling.num_completions == 1 else None
        if self._clear_cache_on_push or not salt:
            salt = self.llm.salt
        if replica is not None:
            salt = salt_at(salt, replica)
        params, num_prompt = params_of(sampling, self._eos_token_ids), len(prompt_token_ids)
        params.routed_experts_prompt_start = num_prompt if experts_from is None else experts_from
        completions = Completions(sampling.num_completions, None if experts_from is None else num_prompt - experts_from)
        async for output in self._run(prompt_token_ids, params, salt=salt, replica=replica):
            yield Sampled(
                entered_version=entered_version,
                salt=salt,
                num_cached_tokens=output.num_cached_tokens or 0,
                completions=completions.add(output.outputs),
                prompt_experts=completions.prompt_experts,
            )
        completions.check()

    def _replica_of_turn(self, salt: str) -> int | None:
        """Return the replica for a turn, or None if there is only one replica.

        vLLM chooses the replica of a group with several completions.
        """
        if self.limits.num_replicas == 1:
            return None
        core = self.llm.engine_core
        return replica_of_turn(salt, [core.engine_inflight[name] for name in core.core_engines])

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        params = SamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True,
            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, routed_experts_prompt_start=len(token_ids),
        )  # fmt: skip
        (output,) = [output async for output in self._run(token_ids, params, priority=SCORES, replica=replica)]
        logprobs = np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32)
        label = output.outputs[0].weight_versions[0].version
        return logprobs, None if label == UNTOUCHED else int(label)

    async def _run(
        self,
        token_ids: np.ndarray,
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str | None = None,
        replica: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Run one request. A lower priority value starts sooner.

        Args:
            salt: None: the salt of the current policy.
            replica: None: vLLM chooses the replica with the least load.
        """
        self._num_requests += 1
        prompt, request_id = tokens_input(token_ids.tolist(), cache_salt=salt), str(self._num_requests)
        try:
            async for output in self.llm.generate_first(
                prompt, params, request_id, priority=priority, data_parallel_rank=replica
            ):
                yield output
        except EngineDeadError as error:
            raise EngineDead(_DEAD) from error
        except (VLLMClientError, EngineGenerateError, ValueError) as error:
            raise EngineFailed(f"{type(error).__name__}: {error or error.__cause__}") from error

    async def pause(self) -> None:
        self.llm.admitting.clear()
        if self._clear_cache_on_push:
            await call_engine(self.llm.pause_generation(mode="keep", clear_cache=True))
        else:
            # pause_generation does this and sleeps 20 ms "for more intuitive ordering", a third of the stall.
            await call_engine(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await call_engine(self.llm.resume_generation())
        self.llm.admitting.set()

    async def stage_push(self, order: PushOrder) -> list[WorkerReport]:
        reports = await self._report("stage_push", msgspec.msgpack.encode(order))
        poll_s = FIRST_STAGING_POLL_S
        while all(report.ok for report in reports) and any(report.state == "receiving" for report in reports):
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, STAGING_POLL_S)
            reports = await self._report("staged")
        return reports

    async def load_push(self, order: PushOrder) -> list[WorkerReport]:
        return await self._report("load_push", msgspec.msgpack.encode(order))

    async def _report(self, method: str, *args: bytes) -> list[WorkerReport]:
        replies = await self._call_workers(method, *args)
        return [msgspec.msgpack.decode(reply, type=WorkerReport) for reply in replies]

    async def _call_workers(self, method: str, *args: bytes | str) -> list[bytes]:
        """Return the answers of all workers of all replicas.

        vLLM's own collective_rpc returns only the answers of the first replica.
        """
        replies = self.llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for of_replica in await call_engine(replies) for answer in of_replica]

    async def leave_session(self, session: str) -> None:
        await self._call_workers("leave_session", session)

    async def set_version(self, version: int) -> None:
        await call_engine(self.llm.update_weight_version(str(version)))
        self.llm.num_pushes += 1
        self._version = version

    def check_alive(self) -> None:
        if self.llm.errored:
            raise EngineDead(_DEAD)
        if self._processes.one_has_ended:
            raise EngineDead("a worker process of the vLLM engine has exited")
        if self._nodes is not None and (reason := self._nodes.lost()) is not None:
            raise EngineDead(reason)

    async def restart(self) -> None:
        self.llm.admitting.set()  # /v1 requests that wait for a weight sync fail with this engine
        starting = asyncio.create_task(asyncio.to_thread(self._start_anew))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A start cannot be canceled, but it fails as soon as its process is gone.
            while not starting.done():
                if self._nodes is not None:
                    self._nodes.end()
                kill_engine_core()
                await asyncio.wait([starting], timeout=0.1)
            raise
        if self.on_restart is not None:
            timeout_s = self._config.server.pause_timeout_s
            await in_time(
                self.on_restart(self.llm), timeout_s, "querying its supported tasks", "server.pause_timeout_s"
            )

    def _start_anew(self) -> None:
        if self._nodes is not None:
            self._nodes.release()
        kill_engine_core()
        self._processes.kill()
        give_up_at = time.monotonic() + DEATH_NOTICE_S
        while (handler := self.llm.output_handler) and not handler.done() and time.monotonic() < give_up_at:
            # The handler notifies waiting requests. A shutdown before that would leave them waiting forever.
            time.sleep(0.01)
        self._close_llm()
        self.llm = start_llm(self._config, self._model_path, self._nodes)
        self._version = -1

    def close(self) -> None:
        if self._nodes is not None:
            self._nodes.end()
        self._close_llm()

    def _close_llm(self) -> None:
        # The engine process has nothing to save, and a regular shutdown takes 3 s. SIGTERM is blocked in the
        # coordinator too, so vLLM would wait for it for 5 s.
        for child in multiprocessing.active_children():
            if child.name == COORDINATOR:
                child.kill()
        self.llm.shutdown(timeout=0.5)


def _routing_shape(config: VllmConfig) -> RoutingShape:
    model = config.model_config
    return RoutingShape(
        num_layers=model.get_total_num_hidden_layers(),
        num_experts=model.get_num_experts(),
        num_per_token=model.get_num_experts_per_tok(),
    )


def params_of(sampling: Sampling, eos_token_ids: set[int]) -> SamplingParams:
    """Convert the sampling of a group to vLLM's parameters."""
    return SamplingParams(
        # For the front end, one request with n completions costs half of n requests. The engine treats both
        # alike.
        n=sampling.num_completions,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(eos_token_ids | set(sampling.stop_token_ids)),
        logprobs=0,
        flat_logprobs=True,
        # vLLM searches for stop strings in the decoded text, including special tokens. Only the ids are used.
        stop=list(sampling.stop),
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=TOKENS_PER_CHUNK,
        skip_clone=True,
    )


async def call_engine(call: Awaitable[T]) -> T:
    """Await a call into vLLM's engine or its workers.

    Raises:
        EngineDead: The engine has died, or the call failed in it, so that its effect is unknown.
    """
    try:
        return await call
    except EngineDeadError as error:
        raise EngineDead(_DEAD) from error
    except Exception as error:
        if type(error) is not Exception:  # vLLM has no exception class for a failure on the other side.
            raise
        raise EngineDead(f"a call into the vLLM engine failed: {error}") from error


_DEAD = "the vLLM engine has died; its own error is in the log above"
