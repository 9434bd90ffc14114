"""Scheduling of tests after a pytest worker is killed: its running test fails, and the rest of its files still run.

xdist itself gives the running test to the next worker, which it may kill too, until no more workers may start. The rest
of the files is then silently skipped.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class LoadFilesOnce(LoadFileScheduling):
    """xdist's `--dist loadfile`, in which no test starts twice."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Put back the tests that a dead worker had not started. Return the test that it died in."""
        units = self.assigned_work[node]
        left = ((unit, test) for unit in units.values() for test, has_ended in unit.items() if not has_ended)
        unit, killed_in = next(left, ({}, None))
        if killed_in is not None:
            unit[killed_in] = True
        # A worker that receives a file without remaining tests would never ask for another file.
        self.assigned_work[node] = {name: unit for name, unit in units.items() if not all(unit.values())}
        super().remove_node(node)
        return killed_in

    def _reschedule(self, node: WorkerController) -> None:
        """Assign files until a worker has three tests: it runs its last test only when it knows the next one."""
        num_files = -1
        while len(self.workqueue) != num_files:
            num_files = len(self.workqueue)
            super()._reschedule(node)


def make_scheduler(config: pytest.Config, log: Producer) -> LoadFilesOnce | None:
    """Return the scheduler for `pytest_xdist_make_scheduler`, or None for xdist's own."""
    return LoadFilesOnce(config, log) if config.getvalue("dist") == "loadfile" else None
