"""Checkpoints: their layout, and how they are found, read and removed.

    step-000050/  state.json: written last      curriculum.json: the prompts' pass rates, with a curriculum
                  trained/: trained weights in their own dtype, optimizer moments    reference/: its snapshots
                  random_states_<rank>.pkl: the RNG states of each rank
                  model/, adapter/: the policy in Hugging Face format (policy/published.py)
                  best.json: the score of one of the best, which keeps only this file, model/ and adapter/

writer.py writes checkpoints concurrently with training; retention.py decides which stay. The ledger is the
other half of a checkpoint, and a resume rewinds it to the checkpoint's step. It holds every requested group:
its position in the data, its rewards, and its completions while they may be needed. This determines the data
position, skipped slots and attempts.

A resume chooses the same checkpoint on every rank:

    rank 0: the newest ─▶ broadcast ─▶ every rank waits until its file system shows the files ─▶ all compare

A shared file system may show a file later on another node. Invariant: no rank reads a checkpoint before all
ranks see the same one.
"""

import hashlib
import logging
import shutil
import time
from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state
from transformers import PreTrainedModel

from learner.policy.hf_weights import held
from learner.policy.reference import ReferenceState
from learner.policy.shards import INDEX_FILE, read_trained
from learner.prompts.curriculum import PassRates
from learner.rank_agreement import decide_on_rank_0, require_agreement
from learner.storage.files import replace_file
from learner.training.entropy_control import EntropyControl
from learner.training.policy_trainer import PolicyTrainer
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"
CURRICULUM_FILE = "curriculum.json"
BEST_FILE = "best.json"
TRAINED, REFERENCE = "trained", "reference"
OF_A_BEST = {BEST_FILE, "model", "adapter"}
ASIDE = ".tmp"
"""Suffix of a checkpoint that is being written or removed."""
VISIBLE_WITHIN_S = 90.0
"""Deadline for files to appear. An NFS client may cache for 60 s that a file does not exist."""
POLL_INTERVAL_S = 0.5


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Non-tensor state of a checkpoint."""

    step: int
    version: int
    reference: ReferenceState | None
    kl_coef: float
    entropy: EntropyControl | None = None
    """State of the entropy bonus, or None from an earlier version."""
    reward_mean: float | None
    """Mean reward since the previous checkpoint, or None if there were no steps or no completion could be
    scored."""
    model_digest: str | None = None
    """Digest of the model that the run started from (run_inputs.py), or None from an earlier version."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Training statistics that a checkpoint stores alongside the trained weights."""

    reward_mean: float | None = None
    pass_rates: PassRates | None = None


def checkpoint_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return _checkpoints_with(STATE_FILE, directory)


def _checkpoints_with(file: str, directory: Path) -> list[Path]:
    """Return the checkpoints that contain the file, oldest first.

    A directory with another name, such as step-000050.tmp or step-000050.bak, is not a checkpoint of the run.
    """
    found = (path.parent for path in directory.glob(f"step-*/{file}"))
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=step_of)


def find_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    complete = complete_checkpoints(directory)
    return complete[-1] if complete else None


def remove_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint, then remove it.

    A kill during the removal therefore leaves nothing that looks like a checkpoint.
    """
    if checkpoint.exists():
        aside = checkpoint.with_suffix(f".old{ASIDE}")
        checkpoint.rename(aside)
        shutil.rmtree(aside)


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one of the best checkpoints, of which only the model is kept."""

    step: int
    score: float
    judged_by: str


def best_models(directory: Path) -> dict[Path, BestCheckpoint]:
    """Return the checkpoints that are reduced to their models."""
    return {
        path: msgspec.json.decode((path / BEST_FILE).read_bytes(), type=BestCheckpoint)
        for path in _checkpoints_with(BEST_FILE, directory)
        if not (path / STATE_FILE).exists()
    }


def keep_model_alone(checkpoint: Path, best: BestCheckpoint) -> None:
    """Remove everything that only a resume needs.

    The directory is then no longer a checkpoint. If a kill interrupts the removal, the next call completes
    it.
    """
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
    """Restore all parts of the checkpoint in place.

    Raises:
        ConfigError: The checkpoint has another reference kind or model, or cannot be read.
    """
    accelerator = trainer.accelerator
    state = read_state(checkpoint)
    before = "none" if state.reference is None else state.reference.kind
    now = "none" if trainer.reference is None else trainer.reference.state.kind
    if before != now:
        raise ConfigError(
            f'learner.reference.kind = "{now}" is not "{before}", the kind in {checkpoint}; set it to "{before}" to '
            "resume, or choose another run_dir"
        )
    was_on_server = state.reference is not None and state.reference.on_server
    endpoint = trainer.config.reference.endpoint
    if was_on_server != (endpoint is not None):
        raise ConfigError(
            f"learner.reference.endpoint = {endpoint!r}: the reference of {checkpoint} was "
            f"{'on a server' if was_on_server else 'in the learner'}; "
            f"{'set endpoint' if was_on_server else 'remove endpoint'} to resume, or choose another run_dir"
        )
    policy = accelerator.unwrap_model(trainer.policy)
    require_same_model(policy, trainer.model_path, trainer.model_digest, checkpoint)
    if not (checkpoint / TRAINED).is_dir():
        raise ConfigError(
            f"{checkpoint} was written in the unsharded format of an earlier version of Slipstream; finish the run "
            f"with that version, or start a new run from its model: --model {checkpoint / 'model'}"
        )
    try:
        with torch.no_grad():
            read_trained(policy, trainer.optimizer, checkpoint / TRAINED)
            if trainer.reference is not None and state.reference is not None:
                trainer.reference.load(checkpoint / REFERENCE, policy, state.reference)
        load_accelerator_state(str(checkpoint), [], [], [], [], accelerator.process_index)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{checkpoint} cannot be read ({error}) {_way_around(checkpoint)}") from error
    trainer.kl_coef = state.kl_coef
    trainer.entropy = state.entropy or trainer.entropy
    log.info("resumed from %s", checkpoint)
    return state


def _way_around(checkpoint: Path) -> str:
    """Return how the run goes on without a damaged checkpoint."""
    earlier = [one for one in complete_checkpoints(checkpoint.parent) if step_of(one) < step_of(checkpoint)]
    if earlier:
        return f"but is the newest. Move it out of {checkpoint.parent}, then --resume continues from {earlier[-1].name}"
    return f"and is the oldest complete one. Start a new run from its model: --model {checkpoint / 'model'}"


def require_same_model(policy: PreTrainedModel, model_path: Path, model_digest: str, checkpoint: Path) -> None:
    """Refuse a checkpoint whose frozen weights belong to another model than the policy's.

    A checkpoint does not contain frozen weights, such as the base model under LoRA. The path and the digest are
    those of the model that the policy was loaded from.

    Raises:
        ConfigError: The digests of the two models differ.
    """
    frozen = [name for name, tensor in held(policy).items() if not tensor.requires_grad]
    recorded = read_state(checkpoint).model_digest
    if not frozen or recorded == model_digest:
        return
    if recorded is None:
        log.warning(
            "%s does not record the model that its run started from; check that it was %s, whose weights are frozen",
            checkpoint, model_path,
        )  # fmt: skip
        return
    raise ConfigError(
        f"model: {model_path} has changed since the run started: its digest was {recorded} and is "
        f"{model_digest}. {checkpoint} does not contain the {len(frozen)} frozen tensors ({frozen[0]}, …). "
        "Restore the files of that model, or start a new run in another run_dir"
    )


def read_state(checkpoint: Path) -> CheckpointState:
    """Return a checkpoint's state. Raises ConfigError if it is damaged."""
    path = checkpoint / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckpointState)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is damaged or from another version of Slipstream ({error}); choose another run_dir"
        ) from error


def read_pass_rates(checkpoint: Path) -> PassRates | None:
    """Return a checkpoint's pass rates, or None.

    They are missing without a curriculum, and in checkpoints of earlier versions.

    Raises:
        ConfigError: The file is damaged.
    """
    path = checkpoint / CURRICULUM_FILE
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=PassRates)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); remove it to count the pass rates again from the ledger"
        ) from error


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as one rank sees it."""

    name: str | None
    """Directory name of the checkpoint, or None if the run starts from scratch."""
    files: dict[str, str] = {}
    """Digests of the files that describe all others, or the reason why one cannot be read."""


def shared_checkpoint(
    accelerator: Accelerator, directory: Path, collective_timeout_s: float, *, resume: bool
) -> Path | None:
    """Return rank 0's newest complete checkpoint, or None if rank 0 does not resume.

    Raises:
        RanksDisagree: A rank does not see the files that rank 0 sees.
    """

    def choose() -> CheckpointView:
        checkpoint = find_checkpoint(directory) if resume else None
        return CheckpointView(name=None) if checkpoint is None else _view_of(checkpoint)

    chosen = decide_on_rank_0(accelerator, choose, CheckpointView)
    if chosen.name is None:
        return None
    checkpoint = directory / chosen.name
    # At most half the timeout of the collective in which rank 0 waits meanwhile.
    seen = _await_files(checkpoint, chosen, min(VISIBLE_WITHIN_S, collective_timeout_s / 2))
    require_agreement(
        accelerator, seen, f"Put {checkpoint} on a file system that all ranks share (learner.checkpoint.dir)"
    )
    return checkpoint


def _await_files(checkpoint: Path, chosen: CheckpointView, timeout_s: float) -> CheckpointView:
    """Poll until the checkpoint matches rank 0's view or time is up; return the view."""
    end_s, has_logged = time.monotonic() + timeout_s, False
    while (seen := _view_of(checkpoint)) != chosen and time.monotonic() < end_s:
        if not has_logged:
            log.info("waiting up to %g s for the files of %s, which rank 0 already sees", timeout_s, checkpoint)
            has_logged = True
        time.sleep(POLL_INTERVAL_S)
    return seen


def _view_of(checkpoint: Path) -> CheckpointView:
    files = (STATE_FILE, f"{TRAINED}/{INDEX_FILE}", f"{REFERENCE}/{INDEX_FILE}")
    return CheckpointView(name=checkpoint.name, files={file: _digest(checkpoint / file) for file in files})


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return error.strerror or type(error).__name__
