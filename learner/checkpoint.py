"""Checkpoints: model, optimizer, scheduler, RNG, reference and versions, written so that a kill leaves the old or the new.

A checkpoint of step n stands for the ledger's rows up to step n: a resume rewinds the ledger to it. The ledger is the
checkpoint's other half: it holds every group that was asked for, with its place in the data, its completions while they
may be needed and its rewards, and so the data's position, the slots passed over and the curriculum's pass rates.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec
from accelerate import Accelerator

from learner.ledger import Ledger
from learner.reference import ReferenceState
from learner.trainee import Trainee
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
NUM_KEPT = 2
"""The newest, and the one before it in case the newest turns out to be bad."""


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor."""

    step: int
    version: int
    reference: ReferenceState | None
    kl_coef: float


def save_checkpoint(
    accelerator: Accelerator, directory: Path, step: int, trainee: Trainee, ledger: Ledger | None
) -> None:
    """Write `directory/step-N` aside, make it durable, rename it into place. Called by every rank; rank 0 has the ledger."""
    final, aside = directory / f"step-{step:06d}", directory / f"step-{step:06d}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(aside))
    reference = trainee.reference
    if reference is not None:
        reference.save(aside, trainee.policy)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process or ledger is None:
        return
    reference_state = None if reference is None else reference.state
    state = CheckpointState(step=step, version=step, reference=reference_state, kl_coef=trainee.kl_coef)
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


def load_checkpoint(accelerator: Accelerator, checkpoint: Path, trainee: Trainee) -> CheckpointState:
    """Restore every part in place. Raises ConfigError if the checkpoint is of another reference or cannot be read."""
    try:
        state = msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=CheckpointState)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{checkpoint / STATE_FILE} is damaged or of another version of Slipstream ({error}); choose another run_dir"
        ) from error
    before = "none" if state.reference is None else state.reference.kind
    now = "none" if trainee.reference is None else trainee.reference.state.kind
    if before != now:
        raise ConfigError(
            f'{checkpoint} has a reference of kind "{before}", learner.reference.kind is "{now}"; set it to "{before}" to '
            "resume, or choose another run_dir"
        )
    accelerator.load_state(str(checkpoint))
    if trainee.reference is not None and state.reference is not None:
        trainee.reference.load(checkpoint, trainee.policy, state.reference)
    trainee.kl_coef = state.kl_coef
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
