"""Clocks of the server that a test need not wait for."""

import pytest


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the engine, and at groups without tokens."""
    monkeypatch.setattr("inference_server.engine.supervisor.CHECK_INTERVAL_S", 0.02)


@pytest.fixture
def pulse_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.server.PULSE_INTERVAL_S", 0.03)
