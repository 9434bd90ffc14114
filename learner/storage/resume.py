"""Choice of the checkpoint to resume from, equal on every rank.

    rank 0: the newest ─▶ broadcast ─▶ every rank waits until its file system shows the files ─▶ all compare

A shared file system may show a file later on another node. Invariant: no rank reads a checkpoint before all
ranks see the same one.
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
"""Deadline for files to appear. An NFS client may cache for 60 s that a file does not exist."""
POLL_INTERVAL_S = 0.5


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
    seen = _await(checkpoint, chosen, min(VISIBLE_WITHIN_S, collective_timeout_s / 2))
    require_agreement(
        accelerator, seen, f"Put run_dir on a file system that all ranks share, or copy {checkpoint} to every node"
    )
    return checkpoint


def _await(checkpoint: Path, chosen: CheckpointView, timeout_s: float) -> CheckpointView:
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
