"""Checkpoint writer, which runs concurrently with training.

    main thread, every rank    wait for the previous one ─▶ copy what training changes to host memory
    background, every rank     write the shards of policy, optimizer and reference (policy/shards.py)
    background, rank 0         export ─▶ state.json ─▶ fsync ─▶ rename ─▶ retention (retention.py)

Invariant: at most one checkpoint is pending. A kill at any moment leaves the old checkpoints, with or without
the new one.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import broadcast

from learner.policy.published import Export, copy_for_export
from learner.policy.reference import Reference
from learner.policy.server_reference import ServerReference
from learner.policy.sharding import is_sharded
from learner.policy.shards import begin_writing, trained, written
from learner.storage.checkpoint import (
    ASIDE,
    CURRICULUM_FILE,
    REFERENCE,
    STATE_FILE,
    TRAINED,
    CheckpointState,
    RunProgress,
    checkpoint_of,
    remove_checkpoint,
)
from learner.storage.files import DiskError, writing
from learner.training.policy_trainer import PolicyTrainer
from protocol.durable import sync
from protocol.errors import DeadlineExceeded, SlipstreamError

log = logging.getLogger(__name__)

WAIT_SLICE_S = 1.0


class PendingCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a checkpoint on rank 0, which training does not modify."""

    path: Path
    """Final path of the checkpoint."""
    state: CheckpointState
    progress: RunProgress
    export: Export | None
    shards: list[Future[Any]]

    def write(self) -> float:
        """Write the checkpoint durably, rename it into place, and return its bytes.

        Raises:
            DiskError: The checkpoint could not be written.
        """
        aside = self.path.with_suffix(ASIDE)
        try:
            with writing(aside):
                for saving in self.shards:
                    written(saving)
                if self.export is not None:
                    self.export.write(aside)
                if self.progress.pass_rates is not None:
                    (aside / CURRICULUM_FILE).write_bytes(msgspec.json.encode(self.progress.pass_rates))
                (aside / STATE_FILE).write_bytes(msgspec.json.encode(self.state))
                num_bytes = make_durable(aside)
                remove_checkpoint(self.path)
                aside.rename(self.path)
                sync(self.path.parent)
        except DiskError:
            wait(self.shards)
            shutil.rmtree(aside, ignore_errors=True)  # free its space for other writes
            raise
        return num_bytes


class CheckpointWriter:
    """Writer for one run's checkpoints.

    Every rank has a writer and calls the same methods at the same steps. The context waits for the pending
    checkpoint.
    """

    def __init__(self, trainer: PolicyTrainer, directory: Path) -> None:
        self._trainer, self._directory = trainer, directory
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[dict[str, float]] | None = None
        self._path, self._started_s = directory, 0.0
        """Path and start time of the newest checkpoint."""
        self._metrics: dict[str, float] = {}
        self._groups: list[dist.ProcessGroup | None] = [None, None]
        # Keeps background collectives apart from those of training. The group of a single rank exists for DCP, which
        # refuses a default group without a backend for CPUs.
        if dist.is_initialized():
            trainer.accelerator.wait_for_everyone()  # bounds the start of rank 0 by collective_timeout_s
            patience = timedelta(seconds=trainer.config.checkpoint.timeout_s)
            self._groups = [dist.new_group(backend="gloo", timeout=patience) for _ in self._groups]

    def begin(
        self, step: int, progress: RunProgress, earlier_step: int | None, when_complete: Callable[[], None]
    ) -> None:
        """Copy the state of `step` and start writing its checkpoint.

        `earlier_step` is the step of the previous checkpoint, with which this one shares what never changes.
        `when_complete` is called on rank 0 in the background.

        Raises:
            DiskError: The checkpoint, or the previous one, could not be written.
            DeadlineExceeded: The previous checkpoint took too long.
        """
        started_s = time.monotonic()
        self.wait()
        trainer, path = self._trainer, checkpoint_of(self._directory, step)
        aside, is_main = path.with_suffix(ASIDE), trainer.accelerator.is_main_process
        self._make_room(aside)
        try:
            with writing(aside):
                save_accelerator_state(str(aside), [], [], [], [], trainer.accelerator.process_index, step=0)
                keeps_reference = self._keeps_reference(aside, earlier_step)
        except DiskError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        trainer.accelerator.wait_for_everyone()
        export = self._export()
        shards = self._begin_shards(aside, with_reference=not keeps_reference)
        state = CheckpointState(
            step=step,
            version=step,
            reference=None if trainer.reference is None else trainer.reference.state,
            kl_coef=trainer.kl_coef,
            entropy=trainer.entropy,
            reward_mean=progress.reward_mean,
            model_digest=trainer.model_digest,
        )
        pending = PendingCheckpoint(path=path, state=state, progress=progress, export=export, shards=shards)
        self._path, self._started_s = path, started_s
        stall_s = time.monotonic() - started_s
        work = (_complete, pending, started_s, stall_s, when_complete) if is_main else (_accompany, shards)
        self._pending = self._thread.submit(*work)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of a checkpoint completed since the last call.

        An error that stopped the checkpoint is raised on every rank.
        """
        with self._trainer.published.led():
            if self._pending is not None and self._pending.done() and self._trainer.accelerator.is_main_process:
                self._await()
        taken, self._metrics = self._metrics, {}
        return taken

    def wait(self) -> None:
        """Wait until no checkpoint is pending.

        An error that stopped the checkpoint is raised on every rank.

        Raises:
            DeadlineExceeded: The checkpoint took longer than learner.checkpoint.timeout_s.
        """
        with self._trainer.published.led():
            if self._trainer.accelerator.is_main_process:
                self._await()
        self._await()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the pending checkpoint, unless the run ends with KeyboardInterrupt."""
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            try:
                self._await()
            except (SlipstreamError, OSError, RuntimeError) as its_error:
                log.warning("%s was not completed: %s", self._path, its_error)
        self._thread.shutdown(wait=False)

    def _await(self) -> None:
        if self._pending is None:
            return
        timeout_s = self._trainer.config.checkpoint.timeout_s
        while not wait([self._pending], WAIT_SLICE_S).done:
            self._trainer.published.still_waiting()
            if time.monotonic() - self._started_s > timeout_s:
                raise DeadlineExceeded(
                    f"{self._path} was not written within {timeout_s:g} s; write to a faster disk, save less often "
                    "(learner.checkpoint.every_steps), or raise learner.checkpoint.timeout_s"
                )
        finished, self._pending = self._pending, None
        self._metrics |= finished.result()

    def _make_room(self, aside: Path) -> None:
        with writing(self._directory):
            if self._trainer.accelerator.is_main_process:
                for left_over in self._directory.glob(f"step-*{ASIDE}"):
                    shutil.rmtree(left_over)
                aside.mkdir(parents=True)
        self._trainer.accelerator.wait_for_everyone()

    def _keeps_reference(self, aside: Path, earlier_step: int | None) -> bool:
        """Hard-link the previous checkpoint's reference if it never changes, or the copy of one on a server.

        Returns whether it is linked. Linked files exist as long as one checkpoint has them.
        """
        accelerator, reference, is_linked = self._trainer.accelerator, self._trainer.reference, False
        if isinstance(reference, ServerReference):
            reference.save(aside / REFERENCE)
            return True
        if reference is None or not reference.never_changes or earlier_step is None:
            return False
        if accelerator.is_main_process:
            try:
                _link_all(checkpoint_of(self._directory, earlier_step) / REFERENCE, aside / REFERENCE)
                is_linked = True
            except OSError as error:  # the file system has no links, or the previous checkpoint was removed
                log.info("writing the reference again, without hard links (%s)", error)
                shutil.rmtree(aside / REFERENCE, ignore_errors=True)
        return bool(broadcast(torch.tensor([is_linked], device=accelerator.device)))

    def _export(self) -> Export | None:
        trainer, export = self._trainer, None
        if trainer.config.checkpoint.export_model:
            with trainer.published.led():
                if trainer.accelerator.is_main_process:
                    export = copy_for_export(trainer.published, trainer.run, trainer.model_path)
        return export

    def _begin_shards(self, aside: Path, *, with_reference: bool) -> list[Future[Any]]:
        """Start writing this rank's shards; rank 0 alone writes an unsharded policy."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        policy = accelerator.unwrap_model(trainer.policy)
        if not (is_sharded(policy) or accelerator.is_main_process):
            return []
        parts = {TRAINED: trained(policy, trainer.optimizer)}
        if isinstance(trainer.reference, Reference) and with_reference:
            parts[REFERENCE] = trainer.reference.tensors(policy)
        return [
            begin_writing(tensors, aside / name, group, is_sharded=is_sharded(policy))
            for (name, tensors), group in zip(parts.items(), self._groups, strict=False)
        ]


def _complete(
    pending: PendingCheckpoint, started_s: float, stall_s: float, when_complete: Callable[[], None]
) -> dict[str, float]:
    num_bytes = pending.write()
    when_complete()
    return {
        "checkpoint/seconds": time.monotonic() - started_s,
        "checkpoint/stall_seconds": stall_s,
        "checkpoint/bytes": num_bytes,
    }


def _accompany(shards: list[Future[Any]]) -> dict[str, float]:
    for saving in shards:
        written(saving)
    return {}


def make_durable(directory: Path) -> float:
    """Sync the directory; return the bytes of files that no other checkpoint links."""
    num_bytes = 0.0
    for path in directory.rglob("*"):
        sync(path)
        status = path.stat()
        if path.is_file() and status.st_nlink == 1:
            num_bytes += status.st_size
    sync(directory)
    return num_bytes


def _link_all(directory: Path, into: Path) -> None:
    into.mkdir()
    for path in directory.iterdir():
        os.link(path, into / path.name)
