"""The benchmark of long resumes, with a short run: the extended directory can be resumed."""

from pathlib import Path

import pytest

from learner.report.summary import summarize
from tests.bench.long_resume import long_run, make_long, resume_s
from tests.learner.model_engine import tiny_server
from tests.learner.runs import metrics_of, rows_of

pytestmark = pytest.mark.system


@pytest.mark.slow
def test_an_extended_directory_is_resumed_at_its_end(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = long_run(tmp_path, server.endpoint, 50, 2)
        make_long(run, 50)
        assert rows_of(run, "count(*), max(slot), max(step)") == [(100, 99, 50)]
        assert resume_s(run) > 0
    assert [line["step"] for line in metrics_of(run)] == list(range(1, 52))
    assert rows_of(run, "slot", "step = 51") == [(100,), (101,)]
    assert metrics_of(run)[-1]["curriculum/skipped"] >= 0
    assert summarize(Path(run.run_dir)).groups_lost == 0
