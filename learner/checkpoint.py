"""Checkpoints: model, optimizer, scheduler, RNG, reference and versions, written so that a kill leaves the old or the new.

A checkpoint of step n stands for the ledger's rows up to step n: a resume rewinds the ledger to it. The data's position
is the ledger's next slot, so it needs no second home here.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec
from accelerate import Accelerator

from learner.ledger import Ledger
from learner.reference import Reference
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
NUM_KEPT = 2
"""The newest, and the one before it in case the newest turns out to be bad."""


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor."""

    step: int
    version: int
    reference_version: int | None


def save_checkpoint(
    accelerator: Accelerator, directory: Path, step: int, reference: Reference | None, ledger: Ledger | None
) -> None:
    """Write `directory/step-N` aside, make it durable, rename it into place. Called by every rank; rank 0 has the ledger."""
    final, aside = directory / f"step-{step:06d}", directory / f"step-{step:06d}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside))
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process or ledger is None:
        return
    if reference is not None:
        reference.save(aside)
    version = reference.version if reference is not None else None
    state = CheckpointState(step=step, version=step, reference_version=version)
    (aside / STATE_FILE).write_bytes(msgspec.json.encode(state))
    _make_durable(aside)
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    _sync(directory)
    ledger.forget_payloads(_prune(directory))


def find_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def load_checkpoint(accelerator: Accelerator, checkpoint: Path, reference: Reference | None) -> CheckpointState:
    """Restore every part in place. Raises ConfigError if the checkpoint lacks one."""
    state = msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=CheckpointState)
    if (reference is None) != (state.reference_version is None):
        raise ConfigError(
            f"{checkpoint} and learner.reference.kind do not fit: one has a reference, the other has none"
        )
    accelerator.load_state(str(checkpoint))
    if reference is not None and state.reference_version is not None:
        reference.load(checkpoint, state.reference_version)
    log.info("resumed from %s", checkpoint)
    return state


def _complete(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob(f"step-*/{STATE_FILE}") if path.parent.suffix != ".tmp")


def _prune(directory: Path) -> int:
    """Remove what is older than the kept ones; return the step of the oldest kept."""
    complete = _complete(directory)
    for old in complete[:-NUM_KEPT]:
        shutil.rmtree(old)
    return int(complete[-NUM_KEPT:][0].name.removeprefix("step-"))


def _make_durable(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
