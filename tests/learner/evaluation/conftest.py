"""The servers of an evaluation: the one that a run trains with, and its OpenAI side, which answers as it is told."""

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
    """Whose HTTP side `openai` is. It reverses every prompt but its last character, which is right."""
    with tiny_server(ModelEngine(resolve_model("tiny:digits"))) as server:
        openai.of(server)
        openai.answer = lambda prompt, count: [prompt[-2:0:-1]] * count
        yield server
