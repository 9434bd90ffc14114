"""What a run's data was when it began: a digest for every prompt, so that a resume cannot ask for other ones.

In the ledger a group is the number of a prompt; with other data under the same numbers it would be trained as another's.
"""

import logging
from pathlib import Path

import numpy as np

from learner.prompts.prompts import Prompts
from learner.storage.disk import replace_file
from protocol.errors import DataError

log = logging.getLogger(__name__)


def record_data(path: Path, prompts: Prompts) -> None:
    """Keep the digests of a run that begins, eight bytes for each prompt. Raises DiskError."""
    replace_file(path, prompts.digests.astype("<i8").tobytes())


def check_data(path: Path, prompts: Prompts) -> None:
    """Raise DataError, with the first prompt that differs, where the data is not what the run began with."""
    if not path.exists():
        log.warning("%s is missing, so nobody can say whether the data is still the run's", path)
        return
    before, now = np.frombuffer(path.read_bytes(), "<i8"), prompts.digests
    if np.array_equal(before, now):
        return
    num_common = min(len(before), len(now))
    changed = np.flatnonzero(before[:num_common] != now[:num_common])
    if len(changed):
        what = (
            f"row {prompts.row(int(changed[0]))} is the first that changed (its prompt, its columns, or its token ids)"
        )
        remedy = "Restore the data, the chat template and the tokenizer (learner.data.revision pins a hub dataset)"
    elif len(now) > len(before):
        what = f"{len(now) - len(before)} prompts came after the {len(before)} it began with, which would change the order of all"
        remedy = f"Leave them out with learner.data.num_prompts = {prompts.row(len(before) - 1) + 1}"
    else:
        what = f"{len(before) - len(now)} of its {len(before)} prompts are missing, from the end"
        remedy = "Restore the data"
    raise DataError(
        f"{prompts.name} is not what the run in {path.parent} began with: {what}. {remedy}, or begin a new run with --run-dir"
    )
