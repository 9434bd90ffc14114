"""What two ranks make of checkpoints that they do not see alike, for `test_checkpoint.py`."""

import shutil
import threading
from pathlib import Path

import pytest
from accelerate import Accelerator

from learner.storage import checkpoint
from learner.storage.checkpoint import shared_checkpoint
from protocol.errors import RanksDisagree
from tests.learner.ranks import Place

FILES = ("state.json", "trained/index.json", "reference/index.json")
LATE_S = 0.5


def write(directory: Path, step: int, content: str = "") -> Path:
    """What tells one checkpoint from another."""
    path = checkpoint.checkpoint_of(directory, step)
    for file in FILES:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(f"{step} {content}")
    return path


def choose(accelerator: Accelerator, directory: Path) -> None:
    """Rank 0 sees steps 6 and 7, rank 1 something else in each case."""
    rank, timeout_s = accelerator.process_index, 4 * LATE_S
    assert shared_checkpoint(accelerator, directory / f"none-{rank}", timeout_s, resume=True) is None
    for case, words in {
        "older": [
            'files.state.json is "',
            '"No such file or directory" on rank 1',
            "step-000007",
            "a file system that all ranks share",
        ],
        "other": ["files.trained/index.json is "],
        "late": [],
        "newer": [],
    }.items():
        mine = directory / f"{case}-{rank}"
        write(mine, 6)
        if rank == 0 or case != "older":
            path = write(mine, 7)
        if rank == 1 and case == "other":
            (path / "trained/index.json").write_text("of another run")
        if rank == 1 and case == "newer":
            write(mine, 8)
        if rank == 1 and case == "late":
            path.rename(path.with_suffix(".hidden"))
            threading.Timer(LATE_S, path.with_suffix(".hidden").rename, [path]).start()
        if words:
            with pytest.raises(RanksDisagree) as caught:
                shared_checkpoint(accelerator, mine, timeout_s, resume=True)
            assert all(word in str(caught.value) for word in words), caught.value
        else:
            # Rank 0 alone says whether this is a resume.
            found = shared_checkpoint(accelerator, mine, 20 * timeout_s, resume=rank == 0)
            assert found == mine / "step-000007"
            assert shared_checkpoint(accelerator, mine, timeout_s, resume=rank == 1) is None
        shutil.rmtree(mine)


def enter_with_an_old_view(place: Place) -> None:
    """A rank whose file system does not list the newest checkpoint yet."""
    place.enter()
    if place.rank == 1:
        complete = checkpoint.complete_checkpoints
        checkpoint.complete_checkpoints = lambda directory: complete(directory)[:-1]  # type: ignore[assignment]
