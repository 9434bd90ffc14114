"""What all tests of the learner share."""

import pytest

from learner.servers import sync_check


@pytest.fixture(autouse=True)
def every_sync_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps are so short that the checks would be left out most of the time."""
    monkeypatch.setattr(sync_check, "MAX_SHARE", 1.0)
