"""Random output of a policy, in every tool-call format, is either a message with calls or unreadable."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.environments.answer import UnreadableAnswer
from learner.environments.conversation import ChatConversation
from learner.environments.host import StepResult
from protocol.errors import DataError
from tests.learner.environments.chat_tokenizer import CHARACTERS
from tests.learner.environments.template_families import ADD, FAMILIES, QUESTION, TOOLS, Family, chat_of, encoded

READERS = [name for name, family in FAMILIES.items() if family.renderer is not None] + ["qwen3"]
"""One family per format. The format of Hermes needs no name."""
NUM_TURNS, DEEP = 200, 3000
NASTY = [
    "null", "1e999", "-", "NaN", "9" * 5000, '"\\ud800"', "\\ud83d", "\x00", "[" * DEEP, '{"a":' * DEEP,
    "{" * 9 + "}" * 9, "true", '""', "add",
    '{"name": "add", "arguments": ', '{"name": 7}', '{"name": "add", "arguments": "{\\"number\\": 2}"}', "}", '"', "\n",
    "\n\n",
]  # fmt: skip


def turns_of(family: Family) -> st.SearchStrategy[str]:
    """Generate turns from pieces of real turns, special tokens, JSON, and strings that break parsers."""
    call = family.write_turn(calls=[ADD], reasoning="Two" if family.think else None)
    half = len(call) // 2
    marks = f"{family.marks} {family.tags} {family.ends}".split()
    own = [*marks, call, call[:half], call[half:], family.write_turn("It is 7")]
    values = st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    )
    pieces = st.sampled_from(own) | st.sampled_from(NASTY) | values.map(json.dumps) | st.text(CHARACTERS, max_size=9)
    called = st.integers().map(lambda number: family.write_turn(calls=[("add", {"number": number})]))
    return st.lists(pieces, max_size=8).map("".join) | called


@pytest.mark.parametrize("name", READERS)
def test_any_output_of_a_policy_is_either_parsed_or_unreadable(name: str) -> None:
    family, template = FAMILIES[name], chat_of(name, TOOLS)
    before, num_read = template.prompt_ids(QUESTION), 0

    @settings(max_examples=NUM_TURNS, database=None, suppress_health_check=list(HealthCheck))
    @given(turns_of(family), st.sampled_from(["", *family.ends.split()]))
    def say(turn: str, end: str) -> None:
        nonlocal num_read
        token_ids = encoded(template, turn + end)
        if not token_ids:
            return
        talk = ChatConversation(template, QUESTION)
        with contextlib.suppress(UnreadableAnswer):
            calls = talk.commands_of(before, token_ids)
            msgspec.msgpack.encode([talk.messages, [(call.name, call.arguments) for call in calls]])
            num_read += bool(calls)
            with contextlib.suppress(DataError):  # a template that rejects such a call: the episode ends
                talk.add_results([StepResult("2")] * len(calls))

    say()
    assert num_read > NUM_TURNS / 50, "too few turns were read as calls"
