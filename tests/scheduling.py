"""What becomes of the tests of a pytest worker that is killed: the one that ran has failed, all others of its files go on.

xdist itself gives the one that ran to the next worker too, which it may kill as well, until no worker may be started any more; what is
left of the files is then never run, nor said to be missing.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class LoadFilesOnce(LoadFileScheduling):
    """xdist's `--dist loadfile`, in which no test is begun twice."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Put back what a worker had not begun; return the test that it was killed in."""
        units = self.assigned_work[node]
        left = ((unit, test) for unit in units.values() for test, has_ended in unit.items() if not has_ended)
        unit, killed_in = next(left, ({}, None))
        if killed_in is not None:
            unit[killed_in] = True
        # A worker that is given a file of which nothing is left would never ask for another.
        self.assigned_work[node] = {name: unit for name, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return killed_in

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker files until it has three tests to run: it keeps the last one back until it knows what comes after it."""
        num_files = -1
        while len(self.workqueue) != num_files:
            num_files = len(self.workqueue)
            super()._reschedule(node)


def make_scheduler(config: pytest.Config, log: Producer) -> LoadFilesOnce | None:
    """For conftest.py's `pytest_xdist_make_scheduler`; None leaves it to xdist."""
    return LoadFilesOnce(config, log) if config.getvalue("dist") == "loadfile" else None
