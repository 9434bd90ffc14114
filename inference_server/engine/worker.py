"""Extension of every vLLM worker: receives a weight sync and loads it into the running model.

    server ── RPC [stage_push ▸ staged*] load_push ──▶ worker: (bucket ▸ load)* ──▶ WorkerReport

One RPC makes all changes to the model. While it runs, tensors are on the meta device, and any forward pass
would kill the engine. vLLM imports this module as `worker_extension_cls` in every worker before it loads the
model.
"""

import logging
import os
import time
from collections.abc import Collection
from functools import cached_property, partial
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from inference_server.engine import adapter_loader
from inference_server.engine.interface import PushOrder, WorkerInfo, WorkerReport, WorkerState
from inference_server.engine.memory import keep_trimmed
from inference_server.engine.output import send_in_chunks
from inference_server.engine.processes import NODE_WORKERS, SERVER_PID, end_with_server
from inference_server.engine.weight_loader import NextWeights, Reload, copies, put_back
from inference_server.engine.weight_receiver import Receiver
from protocol.errors import PushIncomplete, PushInterrupted
from protocol.messages import Manifest
from protocol.transports.transport import offered_transports, own_device_name
from protocol.weights.shared_baseline import worker_baseline

log = logging.getLogger(__name__)

# vLLM warns of every module that a sync leaves alone. Rotary tables and a tied head always are.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class PushWorker:
    """Methods added to vLLM's worker class. `self` is the worker.

    Each RPC of a sync returns an encoded WorkerReport, also for a failure. An exception in the RPC of one
    worker would leave the replies of the others in vLLM's queues, where the next RPC would find them.
    """

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int

    is_loading = False
    """True from the first loaded tensor until a whole sync has arrived: the weights are neither old nor
    new."""

    @cached_property
    def receiver(self) -> Receiver:
        owner_pid, num_on_node = int(os.environ[SERVER_PID]), int(os.environ[NODE_WORKERS])
        return Receiver(self.worker_number, self.device, partial(worker_baseline, owner_pid, num_on_node))

    @property
    def worker_number(self) -> int:
        """Number of this worker among all replicas. vLLM counts ranks per replica."""
        parallel = self.vllm_config.parallel_config
        return parallel.data_parallel_index * parallel.world_size + self.rank

    def info(self) -> bytes:
        """Return this worker's device, transports and process id, encoded."""
        is_on_server_node = self.vllm_config.parallel_config.node_rank == 0
        info = WorkerInfo(
            device=own_device_name(self.device), transports=list(offered_transports()),
            pid=os.getpid() if is_on_server_node else None,
        )  # fmt: skip
        return msgspec.msgpack.encode(info)

    def clear_adapter(self) -> None:
        """Let the engine start with an adapter of zeros."""
        adapter_loader.clear(self.model_runner.lora_manager)

    def stage_push(self, order: bytes) -> bytes:
        """Start to receive a sync while generation continues."""
        try:
            decoded = msgspec.msgpack.decode(order, type=PushOrder)
            self.receiver.stage(decoded, self._successor(decoded))
        except Exception as failure:
            return self._report("receiving", failure)
        return self._report("receiving")

    def staged(self) -> bytes:
        """Report the progress of a staged sync."""
        if self.receiver.is_staging or self.receiver.failure is not None:
            return self._report("receiving", self.receiver.failure)
        return self._report("received")

    def load_push(self, order: bytes) -> bytes:
        """Load a sync: what was staged, or else the buckets as they arrive."""
        was_torn, self.is_loading = self.is_loading, False
        try:
            with set_current_vllm_config(self.vllm_config):
                load_s = self._load(msgspec.msgpack.decode(order, type=PushOrder))
            self.is_loading = False
        except Exception as failure:
            state: WorkerState = "loading" if self.is_loading else "receiving"
            error = self._put_back(failure) if self.is_loading else failure
            self.is_loading = self.is_loading or was_torn
            self.receiver.leave()
            return self._report(state, error)
        return self._report("done", load_s=load_s)

    def leave_session(self, session: str) -> None:
        """Close the collective of a session, if the session is current."""
        try:
            self.receiver.leave(session)
        # The receiver drops the session even if it cannot close it.
        except Exception as failure:
            log.warning("could not close the collective of session %s: %s", session, failure)

    def _successor(self, order: PushOrder) -> NextWeights | None:
        """Return memory for full weights that arrive during generation, or None to keep the buckets."""
        carried, model = self.receiver.carried_by(order), self.model_runner.get_model()
        if self.device.type != "cpu" or carried is None or carried.is_adapter_alone:
            return None
        with adapter_loader.without_adapters(model):
            if not NextWeights.can_be_made(model):
                return None
            return NextWeights(model, self.vllm_config.model_config, carried.adapter_names)

    def _load(self, order: PushOrder) -> float:
        """Load a sync and return the seconds that took, without waits for buckets."""
        carried = self.receiver.carried_by(order)
        load_s, adapter = 0.0, dict[str, torch.Tensor]()
        if successor := self.receiver.successor(order):
            self.is_loading = True
            successor.swap_in()
            load_s, adapter = successor.load_s, successor.adapter
        elif carried is not None and carried.is_adapter_alone:
            for arrived in self.receiver.buckets(order):
                adapter |= copies(arrived, carried.adapter_names)
        else:
            names = frozenset[str]() if carried is None else carried.adapter_names
            with adapter_loader.without_adapters(self.model_runner.get_model()):
                load_s = self._reload(order, names, adapter)
        started = time.monotonic()
        self._apply(carried, adapter)
        return load_s + time.monotonic() - started

    def _apply(self, carried: Manifest | None, adapter: dict[str, torch.Tensor]) -> None:
        """Use the adapter of a sync, or none after a sync without one."""
        if carried is None or not carried.is_adapter_alone:
            self.model_runner.reset_lora_state()
            if self.vllm_config.lora_config is not None:
                self.clear_adapter()
        if carried is not None and carried.adapter is not None:
            prepared = adapter_loader.prepare(self.model_runner.lora_manager, adapter, carried.adapter.rank)
            self.is_loading = True
            adapter_loader.replace(self.model_runner.lora_manager, prepared)

    def _reload(self, order: PushOrder, adapter_names: Collection[str], adapter: dict[str, torch.Tensor]) -> float:
        """Load full weights, and put the tensors of the adapter into `adapter`."""
        load_s, reload = 0.0, Reload(self.model_runner.get_model(), self.vllm_config.model_config, self.device)
        for arrived in self.receiver.buckets(order):
            started = time.monotonic()
            self.is_loading = True
            reload.load(one for one in arrived.bucket.views(arrived.buffer) if one[0] not in adapter_names)
            adapter |= copies(arrived, adapter_names)
            del arrived  # Otherwise its memory is not free for the next bucket.
            load_s += time.monotonic() - started
        started = time.monotonic()
        reload.finish()
        return load_s + time.monotonic() - started

    def _put_back(self, failure: Exception) -> Exception:
        """Move untouched layers back from the meta device, and return the error to report.

        A whole sync can follow after that.
        """
        try:
            model = self.model_runner.get_model()
            with set_current_vllm_config(self.vllm_config), adapter_loader.without_adapters(model):
                put_back(model, self.vllm_config.model_config)
        except Exception as another:
            return RuntimeError(f"{failure}; the cleanup failed too: {type(another).__name__}: {another}")
        return failure

    def _report(self, state: WorkerState, error: Exception | None = None, load_s: float = 0.0) -> bytes:
        report = WorkerReport(
            rank=self.worker_number, ok=error is None, state=state, weights_intact=not self.is_loading,
            checksum=self.receiver.checksum, join_s=self.receiver.join_s, receive_s=self.receiver.receive_s,
            load_s=load_s, error="" if error is None else f"{type(error).__name__}: {error}",
            retryable=not isinstance(error, PushIncomplete), interrupted=isinstance(error, PushInterrupted),
        )  # fmt: skip
        return msgspec.msgpack.encode(report)


if SERVER_PID in os.environ:
    end_with_server()
    adapter_loader.adapt_linear_layers_only()
    send_in_chunks()  # With one worker, this process also runs the engine.
    if current_platform.is_cpu():
        # Imports a model runner that only a CPU has.
        from inference_server.engine.cpu_experts import return_experts
        from inference_server.engine.cpu_seeds import keep_seeds_of_chunked_prompts

        keep_trimmed()
        keep_seeds_of_chunked_prompts()
        return_experts()
