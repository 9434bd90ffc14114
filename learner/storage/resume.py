"""Which checkpoint a resume goes on from: the same on every rank.

    rank 0: the newest ─▶ broadcast ─▶ every rank waits until its file system shows those files ─▶ all compare what they see

A shared file system may show a file later on another node. Invariant: no rank reads a checkpoint before all see the same one.
"""

import hashlib
import logging
import time
from pathlib import Path

import msgspec
from accelerate import Accelerator

from learner.policy.shards import INDEX_FILE
from learner.rank_agreement import decide_on_rank_0, require_agreement
from learner.storage.checkpoint import REFERENCE, STATE_FILE, TRAINED, find_checkpoint

log = logging.getLogger(__name__)

VISIBLE_WITHIN_S = 90.0
"""A client of NFS may believe for 60 s that a file does not exist."""
LOOK_EVERY_S = 0.5


class CheckpointView(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint as a rank sees it."""

    name: str | None
    """Name of its directory; None: there is no checkpoint, so the run starts anew."""
    files: dict[str, str] = {}
    """Digests of those that say what is in all others, or why they cannot be read."""


def shared_checkpoint(accelerator: Accelerator, directory: Path, rank_timeout_s: float, *, resume: bool) -> Path | None:
    """Return the newest complete checkpoint, on every rank the one that rank 0 finds; None without `resume` there.

    Raises:
        RanksDisagree: A rank does not see the files that rank 0 sees; says which.
    """

    def choose() -> CheckpointView:
        checkpoint = find_checkpoint(directory) if resume else None
        return CheckpointView(name=None) if checkpoint is None else _view_of(checkpoint)

    chosen = decide_on_rank_0(accelerator, choose, CheckpointView)
    if chosen.name is None:
        return None
    checkpoint = directory / chosen.name
    seen = _await(checkpoint, chosen, min(VISIBLE_WITHIN_S, rank_timeout_s / 2))  # rank 0 waits for the others
    require_agreement(
        accelerator, seen, f"Put run_dir on a file system that all ranks share, or copy {checkpoint} to every node"
    )
    return checkpoint


def _await(checkpoint: Path, chosen: CheckpointView, timeout_s: float) -> CheckpointView:
    """Look at the checkpoint until it is as rank 0 sees it, or the time is over; return how it is then."""
    end_s, has_logged = time.monotonic() + timeout_s, False
    while (seen := _view_of(checkpoint)) != chosen and time.monotonic() < end_s:
        if not has_logged:
            log.info("waiting up to %g s for the files of %s that rank 0 sees", timeout_s, checkpoint)
            has_logged = True
        time.sleep(LOOK_EVERY_S)
    return seen


def _view_of(checkpoint: Path) -> CheckpointView:
    files = (STATE_FILE, f"{TRAINED}/{INDEX_FILE}", f"{REFERENCE}/{INDEX_FILE}")
    return CheckpointView(name=checkpoint.name, files={file: _digest(checkpoint / file) for file in files})


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return error.strerror or type(error).__name__
