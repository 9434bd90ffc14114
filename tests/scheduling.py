"""What becomes of the tests of a pytest worker that is killed: the running one has failed, all others of its files go on.

xdist itself gives the running one to the next worker, which it may kill as well, until no more workers may be started.
The rest of its files is then never run, and nothing says so.
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
        """Give a worker files until it has three tests: it does not run its last one before it knows the next."""
        num_files = -1
        while len(self.workqueue) != num_files:
            num_files = len(self.workqueue)
            super()._reschedule(node)


def make_scheduler(config: pytest.Config, log: Producer) -> LoadFilesOnce | None:
    """For conftest.py's `pytest_xdist_make_scheduler`; None leaves it to xdist."""
    return LoadFilesOnce(config, log) if config.getvalue("dist") == "loadfile" else None
