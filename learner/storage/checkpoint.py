"""Checkpoints: policy, optimizer, RNG, reference and versions; which there are, how they are read and how they go.

    step-000050/  state.json, which is written last    curriculum.json: the prompts' pass rates, where there is one
                  trained/: what is trained, in its own dtype, and the optimizer's moments    reference/: its snapshots
                  random_states_<rank>.pkl: the generators of each rank
                  model/, adapter/: the policy for others to load (policy/published.py); of one that stays because it is
                  among the best they are all that is left, and best.json says by what

Written by writer.py, beside training. A checkpoint of step n stands for the ledger's rows up to step n: a resume rewinds the
ledger to it. The ledger is the checkpoint's other half: it holds every group that was asked for, with its place in the data, its
completions while they may be needed and its rewards, and so the data's position, the slots passed over and the attempts. Which
checkpoints stay is decided in retention.py.
"""

import logging
import shutil
from pathlib import Path

import msgspec
import torch
from accelerate.checkpointing import load_accelerator_state

from learner.policy.hf_weights import held
from learner.policy.reference import ReferenceState
from learner.policy.shards import read_trained
from learner.prompts.curriculum import PassRates
from learner.storage.files import replace_file
from learner.training.policy_trainer import PolicyTrainer
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
CURRICULUM_FILE = "curriculum.json"
BEST_FILE = "best.json"
TRAINED, REFERENCE = "trained", "reference"
OF_A_BEST = {BEST_FILE, "model", "adapter"}
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
    model_digest: str | None = None
    """Digest of the model that the run started from (policy/model_digest.py); None: an earlier version did not keep it."""


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the way to it, beside what is trained."""

    reward_mean: float | None = None
    pass_rates: PassRates | None = None


def checkpoint_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


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


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a checkpoint of which only the model stays."""

    step: int
    score: float
    judged_by: str


def best_models(directory: Path) -> dict[Path, Best]:
    """Those of which only the model is left."""
    kept = [path.parent for path in directory.glob(f"step-*/{BEST_FILE}") if path.parent.suffix != ASIDE]
    return {
        path: msgspec.json.decode((path / BEST_FILE).read_bytes(), type=Best)
        for path in kept
        if not (path / STATE_FILE).exists()
    }


def keep_model_alone(checkpoint: Path, best: Best) -> None:
    """Take away all that a resume needs; from then on it is no checkpoint. What a kill in the middle leaves, the next call takes."""
    replace_file(checkpoint / BEST_FILE, msgspec.json.encode(best))
    (checkpoint / STATE_FILE).unlink(missing_ok=True)
    for path in checkpoint.iterdir():
        if path.name in OF_A_BEST:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def load_checkpoint(trainer: PolicyTrainer, checkpoint: Path) -> CheckpointState:
    """Restore every part in place. Raises ConfigError if the checkpoint is of another reference or cannot be read."""
    accelerator = trainer.accelerator
    state = read_state(checkpoint)
    before = "none" if state.reference is None else state.reference.kind
    now = "none" if trainer.reference is None else trainer.reference.state.kind
    if before != now:
        raise ConfigError(
            f'{checkpoint} has a reference of kind "{before}", learner.reference.kind is "{now}"; set it to "{before}" to '
            "resume, or choose another run_dir"
        )
    require_same_model(trainer, checkpoint, state)
    if not (checkpoint / TRAINED).is_dir():
        raise ConfigError(
            f"{checkpoint} was written by an earlier version of Slipstream, in whole files; finish the run with that one, or begin a "
            f"new one with its model: --model {checkpoint / 'model'}"
        )
    policy = accelerator.unwrap_model(trainer.policy)
    try:
        with torch.no_grad():
            read_trained(policy, trainer.optimizer, checkpoint / TRAINED)
            if trainer.reference is not None and state.reference is not None:
                trainer.reference.load(checkpoint / REFERENCE, policy, state.reference)
        load_accelerator_state(str(checkpoint), [], [], [], [], accelerator.process_index)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{checkpoint} cannot be read ({error}); remove it, so that --resume goes on from the one before it"
        ) from error
    trainer.kl_coef = state.kl_coef
    log.info("resumed from %s", checkpoint)
    return state


def require_same_model(trainer: PolicyTrainer, checkpoint: Path, state: CheckpointState) -> None:
    """Refuse a checkpoint without the policy's frozen weights (with LoRA: its base) if these are of another model now.

    Raises:
        ConfigError: The digests of both models differ.
    """
    frozen = [name for name, tensor in held(trainer.published.model).items() if not tensor.requires_grad]
    if not frozen or state.model_digest == trainer.model_digest:
        return
    if state.model_digest is None:
        log.warning(
            "%s does not say which model its run started from; check that it was %s, whose weights are frozen",
            checkpoint, trainer.model_path,
        )  # fmt: skip
        return
    raise ConfigError(
        f"model: {trainer.model_path} has changed since the run started: its digest was {state.model_digest} and is "
        f"{trainer.model_digest}. {checkpoint} does not hold the {len(frozen)} tensors that are not trained ({frozen[0]}, …). Restore "
        "the files of that model, or start a new run in another run_dir"
    )


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
