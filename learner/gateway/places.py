"""Where the agent of one episode may go on from: what was said up to each turn, and the exact tokens of it.

    messages or text of a request ─▶ the longest place that it extends ─▶ its tokens, and the new ones ─▶ session.py

Invariant: what was sampled is never rendered again. A request that extends no place, or whose template shows what was said in another way,
is rendered as it stands, and so begins a branch.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from learner.environments.talk import continued
from learner.gateway.messages import starts_with
from learner.prompts.chat_template import ChatTemplate, Message

Form = tuple[Any, Any]
"""What a conversation is rendered with beside its messages: tools, and arguments of the template."""


class SaidChat(msgspec.Struct, frozen=True, eq=False):
    """A conversation that ends with a turn."""

    messages: list[Message]
    form: Form
    token_ids: list[int]
    stops: tuple[str, ...]
    """Texts at which the turn may have ended; it holds none of them."""


class SaidText(msgspec.Struct, frozen=True, eq=False):
    """Likewise a text."""

    text: str
    """Includes the stop that ended the turn, which the agent was not told. A request without that stop begins a branch."""
    token_ids: list[int]


class Places:
    """Of one episode."""

    def __init__(self) -> None:
        self._chats: list[SaidChat] = []
        self._texts: list[SaidText] = []

    @property
    def last_messages(self) -> list[Message]:
        """Of the conversation that had a turn last; empty: there was none."""
        return self._chats[-1].messages if self._chats else []

    def of_chat(self, template: ChatTemplate, messages: Sequence[Message]) -> tuple[list[Message], list[int]]:
        """The conversation as it was recorded, with what is new, and its tokens. Raises DataError."""
        form = form_of(template)
        extended = [one for one in self._chats if one.form == form and starts_with(messages, one.messages)]
        if not extended:
            return list(messages), template.token_ids(messages)
        place = max(reversed(extended), key=lambda one: len(one.messages))
        new = messages[len(place.messages) :]
        heard = continued(template, place.messages, new, place.token_ids, place.stops)
        token_ids = heard.token_ids if heard.begins_branch else [*place.token_ids, *heard.token_ids]
        return [*place.messages, *new], token_ids

    def of_text(self, template: ChatTemplate, text: str) -> list[int]:
        """The tokens of a text; those of its end alone where the beginning is known."""
        extended = [one for one in self._texts if text.startswith(one.text)]
        if not extended:
            return list(template.tokenizer.encode(text, add_special_tokens=True))
        place = max(reversed(extended), key=lambda one: len(one.text))
        rest = text[len(place.text) :]
        return [*place.token_ids, *(template.tokenizer.encode(rest, add_special_tokens=False) if rest else ())]

    def add_chat(
        self, template: ChatTemplate, messages: list[Message], token_ids: list[int], stops: tuple[str, ...]
    ) -> None:
        """`messages` with the turn at their end, and all tokens up to there."""
        self._chats.append(SaidChat(messages, form_of(template), token_ids, stops))

    def add_text(self, text: str, token_ids: list[int]) -> None:
        self._texts.append(SaidText(text, token_ids))


def form_of(template: ChatTemplate) -> Form:
    return template.tools, template.arguments
