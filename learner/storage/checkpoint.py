"""Checkpoints: model, optimizer, RNG, reference and versions, written so that a kill leaves the old or the new.

    step-000050/  state.json, which is written last    curriculum.json: the prompts' pass rates, where there is one
                  optimizer.bin, random_states_<rank>.pkl    reference-<i>.safetensors
                  model.safetensors, or with LoRA adapter.safetensors: what is trained, in float32
                  model/, adapter/: the policy for others to load (policy/export.py)

A checkpoint of step n stands for the ledger's rows up to step n: a resume rewinds the ledger to it. The ledger is the
checkpoint's other half: it holds every group that was asked for, with its place in the data, its completions while they
may be needed and its rewards, and so the data's position, the slots passed over and the attempts. Which checkpoints stay is
decided in retention.py.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from learner.policy.export import export_policy
from learner.policy.reference import ReferenceState
from learner.policy.sharded_checkpoint import load_sharded, save_sharded
from learner.prompts.curriculum import PassRates
from learner.storage.disk import DiskError, writing
from learner.training.trainee import Trainee
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
CURRICULUM_FILE = "curriculum.json"
ASIDE = ".tmp"
"""Ends the name of a checkpoint that is not there yet, or no longer."""


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor."""

    step: int
    version: int
    reference: ReferenceState | None
    kl_coef: float
    reward_mean: float | None
    """Over the steps since the checkpoint before; None: nothing could be scored, or there were no steps."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the way to it, beside what is trained."""

    reward_mean: float | None = None
    pass_rates: PassRates | None = None


def save_checkpoint(trainee: Trainee, directory: Path, step: int, course: Course) -> None:
    """Write `directory/step-N` aside, make it durable, rename it into place. Called by every rank. Raises DiskError."""
    accelerator = trainee.accelerator
    final = directory / f"step-{step:06d}"
    aside = final.with_suffix(ASIDE)
    with writing(directory):
        if accelerator.is_main_process:
            for left_over in directory.glob(f"step-*{ASIDE}"):
                shutil.rmtree(left_over)
            aside.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        _write(trainee, aside, step, course)
    except DiskError:
        shutil.rmtree(aside, ignore_errors=True)  # its space is needed for what else has to be written
        raise
    if accelerator.is_main_process:
        with writing(final):
            remove_checkpoint(final)
            aside.rename(final)
            _sync(directory)


def _write(trainee: Trainee, aside: Path, step: int, course: Course) -> None:
    accelerator, run, reference = trainee.accelerator, trainee.run, trainee.reference
    policy = accelerator.unwrap_model(trainee.policy)
    with writing(aside):
        if accelerator.is_fsdp2:
            save_sharded(accelerator, policy, trainee.optimizer, aside)
        else:
            accelerator.save_state(str(aside))
        if reference is not None:
            reference.save(aside, policy)
    if run.learner.checkpoint.export_model:
        with trainee.published.led(), writing(aside):
            if accelerator.is_main_process:
                export_policy(trainee.published, run, trainee.model_path, aside)
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return
    with writing(aside):
        state = CheckpointState(
            step=step,
            version=step,
            reference=None if reference is None else reference.state,
            kl_coef=trainee.kl_coef,
            reward_mean=course.reward_mean,
        )
        if course.pass_rates is not None:
            (aside / CURRICULUM_FILE).write_bytes(msgspec.json.encode(course.pass_rates))
        (aside / STATE_FILE).write_bytes(msgspec.json.encode(state))
        _make_durable(aside)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return those that a resume or a person may use, oldest first."""
    complete = [path.parent for path in directory.glob(f"step-*/{STATE_FILE}") if path.parent.suffix != ASIDE]
    return sorted(complete, key=lambda path: (len(path.name), path.name))  # from a million steps on names are longer


def find_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    complete = complete_checkpoints(directory)
    return complete[-1] if complete else None


def remove_checkpoint(checkpoint: Path) -> None:
    """Take its name away first, so that a kill in the middle leaves nothing that looks like a checkpoint."""
    if checkpoint.exists():
        aside = checkpoint.with_suffix(f".old{ASIDE}")
        checkpoint.rename(aside)
        shutil.rmtree(aside)


def load_checkpoint(trainee: Trainee, checkpoint: Path) -> CheckpointState:
    """Restore every part in place. Raises ConfigError if the checkpoint is of another reference or cannot be read."""
    accelerator = trainee.accelerator
    state = read_state(checkpoint)
    before = "none" if state.reference is None else state.reference.kind
    now = "none" if trainee.reference is None else trainee.reference.state.kind
    if before != now:
        raise ConfigError(
            f'{checkpoint} has a reference of kind "{before}", learner.reference.kind is "{now}"; set it to "{before}" to '
            "resume, or choose another run_dir"
        )
    try:
        if accelerator.is_fsdp2:
            load_sharded(accelerator, accelerator.unwrap_model(trainee.policy), trainee.optimizer, checkpoint)
        else:
            accelerator.load_state(str(checkpoint))
        if trainee.reference is not None and state.reference is not None:
            trainee.reference.load(checkpoint, trainee.policy, state.reference)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"{checkpoint} cannot be read ({error}); remove it, so that --resume goes on from the one before it"
        ) from error
    trainee.kl_coef = state.kl_coef
    log.info("resumed from %s", checkpoint)
    return state


def read_state(checkpoint: Path) -> CheckpointState:
    """Raises ConfigError."""
    path = checkpoint / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckpointState)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is damaged or of another version of Slipstream ({error}); choose another run_dir"
        ) from error


def read_pass_rates(checkpoint: Path) -> PassRates | None:
    """None: without a curriculum, or from before checkpoints had them. Raises ConfigError."""
    path = checkpoint / CURRICULUM_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=PassRates)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); remove it, and the pass rates are counted anew from the ledger"
        ) from error


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
