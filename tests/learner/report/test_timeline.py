"""The timeline of a run: recorded events, and never a reason to stop the run."""

import json
from pathlib import Path

import pytest

from learner.report import records
from learner.report.records import Event, Timeline, read_events


def test_a_timeline_continues_after_a_kill_without_the_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text('{"time": 5.0, "what": "the run started"}\n{"time": 6.0, "wh')
    assert read_events(path) == [Event(5.0, "the run started")]
    timeline = Timeline(path)
    timeline.record("the learner resumed after step 3")
    timeline.close()
    assert [event.what for event in read_events(path)] == ["the run started", "the learner resumed after step 3"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_both_ends_of_a_long_timeline_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SHOWN_BYTES", 400)
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for i in range(100):
        timeline.record(f"event {i}")
    timeline.close()
    events = [event.what for event in read_events(tmp_path / "timeline.jsonl")]
    assert events[0] == "event 0" and events[-1] == "event 99" and len(events) < 20


def test_a_full_disk_is_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(Path("/dev/full"))
    timeline.record("a server came")
    timeline.close()
    assert "cannot record an event for the report: a server came" in caplog.text
