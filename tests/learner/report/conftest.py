"""One browser for all tests of pages."""

from collections.abc import Iterator

import pytest

from tests.browser import CHROMIUM, Browser, running_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: apt-get install chromium")
    with running_browser() as browser:
        yield browser
