"""Fixtures that shorten the server's intervals."""

import pytest


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the engine, and groups without tokens, often."""
    monkeypatch.setattr("inference_server.engine.supervisor.CHECK_INTERVAL_S", 0.02)


@pytest.fixture
def pulse_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.server.PULSE_INTERVAL_S", 0.03)
