"""The part that lives inside each vLLM worker: receives a push and loads it into the running model.

    server ── RPC receive_push(order) ──▶ worker: join the epoch ▸ start ▸ (bucket ▸ load)* ▸ finish ──▶ WorkerReport

One RPC does a whole push, because between start and finish the model's tensors are on the meta device and any forward
pass would kill the engine. Importing this module registers the weight transfer engine: vLLM imports it as
`worker_extension_cls` in every worker before the model is loaded.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from inference_server.engine import PushOrder, WorkerReport
from protocol.collective import Collective, join_collective
from protocol.errors import PushFailed
from protocol.messages import Manifest
from protocol.weights import Received, receive_weights

log = logging.getLogger(__name__)

TRANSFER_ENGINE = "slipstream"
SERVER_PID = "SLIPSTREAM_SERVER_PID"
"""In the environment of every process the server starts."""

# vLLM warns of every module that a push leaves alone: rotary tables and the tied head are so each time.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class JoinEpoch(WeightTransferInitInfo):
    """Which collective to join, as vLLM hands it to the transfer engine."""

    order: PushOrder
    rank: int


@dataclass
class ReceivePush(WeightTransferUpdateInfo):
    """Which push to receive."""

    order: PushOrder


class SlipstreamTransfer(WeightTransferEngine[JoinEpoch, ReceivePush]):
    """Receives flat buckets over a collective and loads them layer by layer through vLLM's own reload."""

    init_info_cls = JoinEpoch
    update_info_cls = ReceivePush

    _epoch: str | None = None
    _collective: Collective | None = None
    _manifest: Manifest | None = None
    received: Received | None = None
    loading = False
    """True from the first tensor loaded until a whole push has arrived: the weights are neither old nor new."""

    def init_transfer_engine(self, init_info: JoinEpoch) -> None:
        """Join the order's epoch unless we are in it. Raises PushFailed."""
        order = init_info.order
        if order.epoch == self._epoch:
            return
        if order.rendezvous is None or order.manifest is None:
            raise PushFailed(
                f"epoch {order.epoch} is not known here (the last one was {self._epoch}) and came without a rendezvous; "
                "the learner must begin a new epoch"
            )
        self.shutdown()
        self._collective = join_collective(order.epoch, order.rendezvous, init_info.rank, self.device)
        self._epoch, self._manifest = order.epoch, order.manifest

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReceivePush) -> None:
        assert self._collective is not None and self._manifest is not None
        self.received = receive_weights(self._collective, self._manifest, self._load)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_heads()

    def leave(self, epoch: str | None = None) -> None:
        """Leave the given epoch, or whichever is current."""
        if self._collective is not None and epoch in (None, self._epoch):
            collective, self._epoch, self._collective, self._manifest = self._collective, None, None, None
            collective.close()

    def shutdown(self) -> None:
        self.leave()

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.loading = True
        self.model.load_weights(iter((name, tensor.to(self.device)) for name, tensor in tensors))

    def _repack_tied_heads(self) -> None:
        """Give the CPU's prepacked copy of a tied head the new embedding; vLLM's reload sees only the embedding."""
        embeddings = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        for head in (module for module in embeddings if isinstance(module, ParallelLMHead)):
            if any(other.weight is head.weight for other in embeddings if other is not head):
                head.quant_method.process_weights_after_loading(head)


def _end_with_server(server_pid: int) -> None:
    """Kill this process and its engine when the server is gone: vLLM's own processes outlive a SIGKILL of it for ever."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(server_pid)], [], [])
    engine_pid = os.getppid()  # of a worker with a process of its own; else the server, or who inherited us from it
    if engine_pid not in (1, server_pid) and "EngineCore" in Path(f"/proc/{engine_pid}/cmdline").read_text():
        os.kill(engine_pid, signal.SIGKILL)
    os._exit(1)


if SERVER_PID in os.environ:
    threading.Thread(target=_end_with_server, args=(int(os.environ[SERVER_PID]),), daemon=True).start()

if TRANSFER_ENGINE not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER_ENGINE, SlipstreamTransfer)


class PushWorker:
    """Methods added to vLLM's worker class; `self` is the worker."""

    weight_transfer_engine: Any
    vllm_config: Any
    rank: int

    def receive_push(self, order: bytes) -> bytes:
        """Receive and load one push; returns an encoded WorkerReport, also of a failure."""
        push = msgspec.msgpack.decode(order, type=PushOrder)
        transfer: SlipstreamTransfer = self.weight_transfer_engine
        state, join_s, started, error = "joining", 0.0, time.monotonic(), ""
        torn_before, transfer.loading, transfer.received = transfer.loading, False, None
        try:
            parallel = self.vllm_config.parallel_config
            rank = 1 + parallel.data_parallel_index * parallel.world_size + self.rank
            transfer.init_transfer_engine(JoinEpoch(order=push, rank=rank))
            state, join_s = "receiving", time.monotonic() - started
            self._update_model(transfer, push)
            state, transfer.loading = "done", False
        # Whatever goes wrong must be returned: an exception out of one worker's RPC leaves the replies of the others
        # in vLLM's queues, where the next RPC would find them.
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            state = "loading" if transfer.loading else state
            transfer.loading = transfer.loading or torn_before
            error += self._clean_up(transfer, join_failed=state == "joining")
        done = transfer.received if state == "done" else None
        report = WorkerReport(
            rank=self.rank, ok=state == "done", state=state, weights_intact=not transfer.loading,
            checksum=done.checksum if done else "", join_s=join_s, receive_s=done.receive_s if done else 0.0,
            load_s=time.monotonic() - started - join_s - done.receive_s if done else 0.0, error=error,
        )  # fmt: skip
        return msgspec.msgpack.encode(report)

    def leave_epoch(self, epoch: str) -> None:
        """Close the collective of an epoch, if it is the current one."""
        try:
            self.weight_transfer_engine.leave(epoch)
        # As in receive_push: it is forgotten whether it could be closed or not, and an exception must not leave the RPC.
        except Exception as failure:
            log.warning("the collective of epoch %s could not be closed: %s", epoch, failure)

    def _update_model(self, transfer: SlipstreamTransfer, push: PushOrder) -> None:
        with set_current_vllm_config(self.vllm_config):
            transfer.start_weight_update()
            transfer.receive_weights(ReceivePush(order=push))
            transfer.finish_weight_update()
            self.model_runner.reset_lora_state()  # type: ignore[attr-defined]

    def _clean_up(self, transfer: SlipstreamTransfer, *, join_failed: bool) -> str:
        """Leave the broken epoch and put untouched layers back from the meta device, so that a full push can follow."""
        try:
            transfer.leave()
            if not join_failed:
                with set_current_vllm_config(self.vllm_config):
                    transfer.finish_weight_update()
        # Same boundary as in receive_push: the report must go out.
        except Exception as failure:
            transfer.loading = True
            return f"; and while cleaning up {type(failure).__name__}: {failure}"
        return ""
