"""The tokenizer of the tests of prompts."""

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

from tests.learner.prompts.data_files import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreTrainedTokenizerBase]:
    """In a home of its own, where the encoded rows of no other test are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        yield make_tokenizer()
