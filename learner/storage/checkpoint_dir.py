"""Directory of a run's checkpoints: it belongs to one run, and all ranks see it.

    rank 0 claims the directory for its run ─▶ rank 0 makes a probe in it ─▶ every other rank writes into the probe

Without the claim, two runs with the same learner.checkpoint.dir would prune each other's checkpoints. Without
the probe, ranks on several nodes would train until the first checkpoint and fail there, with nothing saved.
Invariant: after `require_shared`, what one rank writes into the directory reaches all.
"""

import secrets
import shutil
import socket
import time
from pathlib import Path

from accelerate import Accelerator

from learner.rank_agreement import decide_on_rank_0, first_problem
from learner.storage.checkpoint import POLL_INTERVAL_S, VISIBLE_WITHIN_S, find_checkpoint
from learner.storage.files import DiskError, replace_file
from protocol.errors import ConfigError

OWNER_FILE = "run_id"
"""File with the id of the run that the checkpoints belong to."""
PROBE = ".ranks-"
KEY = "learner.checkpoint.dir"


def claim(directory: Path, run_id: str, *, may_have_checkpoints: bool) -> None:
    """Create the directory and record the run it belongs to.

    `may_have_checkpoints` is True if the run resumes. It may then have moved its checkpoints here.

    Raises:
        ConfigError: The directory belongs to another run, or cannot be written.
    """
    owner = directory / OWNER_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        owned_by = owner.read_text("utf-8") if owner.exists() else None
        has_foreign = owned_by not in (None, run_id) or (not may_have_checkpoints and find_checkpoint(directory))
        if owned_by is None and not has_foreign:
            replace_file(owner, run_id.encode())
    except (OSError, DiskError) as error:
        raise ConfigError(f"{KEY}: {directory} cannot be written ({error}); choose another directory") from error
    if has_foreign:
        raise ConfigError(
            f"{KEY}: {directory} has checkpoints of {f'the run {owned_by}' if owned_by else 'another run'}; choose "
            "another directory"
        )


def require_shared(accelerator: Accelerator, directory: Path, collective_timeout_s: float) -> None:
    """Check that every rank sees what rank 0 writes into the directory, and can write there too.

    Raises:
        ConfigError: On every rank, if one of them does not see the directory of rank 0.
    """
    if accelerator.num_processes == 1:
        return
    probe = directory / decide_on_rank_0(accelerator, lambda: _make_probe(directory), str)
    # At most half the timeout of the collective in which the other ranks wait meanwhile.
    timeout_s = min(VISIBLE_WITHIN_S, collective_timeout_s / 2)
    try:
        mine = None if accelerator.is_main_process else _write_into(probe, accelerator.process_index, timeout_s)
        problem = first_problem(accelerator, mine)
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(probe, ignore_errors=True)
    if problem is not None:
        raise ConfigError(
            f"{KEY}: the ranks do not share {directory.absolute()}: {problem}. Set {KEY} to a directory on a file "
            "system that every node mounts; run_dir may stay on a local disk of rank 0"
        )


def _make_probe(directory: Path) -> str:
    name = f"{PROBE}{secrets.token_hex(8)}"
    try:
        (directory / name).mkdir()
    except OSError as error:
        raise ConfigError(f"{KEY}: {directory} cannot be written ({error}); choose another directory") from error
    return name


def _write_into(probe: Path, rank: int, timeout_s: float) -> str | None:
    """Write into rank 0's probe once it appears; return what went wrong, or None."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            (probe / str(rank)).touch()
        except FileNotFoundError:
            if time.monotonic() > give_up_at:
                return f"what rank 0 wrote there did not appear on {socket.gethostname()} within {timeout_s:g} s"
            time.sleep(POLL_INTERVAL_S)
        except OSError as error:
            return f"{socket.gethostname()} cannot write there ({error})"
        else:
            return None
