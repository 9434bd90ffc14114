"""The servers of an evaluation: the run's server, and a scripted OpenAI server."""

from collections.abc import Iterator

import pytest

from protocol.model_files import resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.openai_server import OpenAIServer, openai_server


@pytest.fixture
def openai() -> Iterator[OpenAIServer]:
    with openai_server() as openai:
        yield openai


@pytest.fixture
def server(openai: OpenAIServer) -> Iterator[ServerThread]:
    """Return the run's server, with `openai` as its HTTP API, which answers correctly."""
    with tiny_server(ModelEngine(resolve_model("tiny:digits"))) as server:
        openai.of(server)
        openai.answer = lambda prompt, count: [prompt[-2:0:-1]] * count
        yield server
