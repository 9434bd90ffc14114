"""Prefixes from which an episode's agent can continue: the ends of recorded turns.

    messages or text of a request ─▶ the longest prefix it extends ─▶ its tokens plus new ones ─▶ session.py

A prefix holds the messages or text up to the end of a turn, and their exact tokens.
Invariant: sampled tokens are never rendered again. A request that extends no prefix is rendered as a whole and
starts a branch. The same applies if its template renders the earlier turns differently.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from learner.environments.conversation import continued
from learner.gateway.messages import starts_with
from learner.prompts.chat_template import ChatTemplate, Message

Form = tuple[Any, Any]
"""Rendering options of a conversation besides its messages: tools and template arguments."""


class RecordedChat(msgspec.Struct, frozen=True, eq=False):
    """A conversation that ends with a turn."""

    messages: list[Message]
    form: Form
    token_ids: np.ndarray
    stops: tuple[str, ...]
    """Texts at which the turn may have ended. The turn contains none of them."""


class RecordedText(msgspec.Struct, frozen=True, eq=False):
    """A text that ends with a turn."""

    text: str
    """Text including the stop text that ended the turn, which the agent did not receive.

    A request without that stop text starts a branch.
    """
    token_ids: np.ndarray


class PrefixIndex:
    """Recorded prefixes of one episode. `of_chat` and `of_text` are usable from any thread."""

    def __init__(self) -> None:
        self._chats: list[RecordedChat] = []
        self._texts: list[RecordedText] = []

    @property
    def last_messages(self) -> list[Message]:
        """Messages of the conversation that had the last turn, or none."""
        return self._chats[-1].messages if self._chats else []

    def of_chat(self, template: ChatTemplate, messages: Sequence[Message]) -> tuple[list[Message], np.ndarray]:
        """Return the conversation as recorded, with its new messages, and its tokens.

        Raises:
            DataError: The template cannot render the messages.
        """
        form = form_of(template)
        by_length = sorted(self._chats, key=lambda one: len(one.messages))
        fitting = (one for one in reversed(by_length) if one.form == form and starts_with(messages, one.messages))
        if (prefix := next(fitting, None)) is None:
            return list(messages), np.array(template.token_ids(messages), np.int32)
        new = messages[len(prefix.messages) :]
        recorded = prefix.token_ids.tolist()
        prompt = continued(template, prefix.messages, new, recorded, prefix.stops)
        token_ids = prompt.token_ids if prompt.begins_branch else [*recorded, *prompt.token_ids]
        return [*prefix.messages, *new], np.array(token_ids, np.int32)

    def of_text(self, template: ChatTemplate, text: str, *, adds_special_tokens: bool = True) -> np.ndarray:
        """Return the tokens of a text. Only the part after a known beginning is encoded."""
        extended = [one for one in self._texts if text.startswith(one.text)]
        if extended:
            prefix = max(reversed(extended), key=lambda one: len(one.text))
            new = _tokens_after(template, prefix, text)
            if new is not None:
                return np.concatenate([prefix.token_ids, np.array(new, np.int32)])
        token_ids = template.tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        return np.array(template.with_one_begin(token_ids), np.int32)

    def add_chat(
        self, template: ChatTemplate, messages: list[Message], token_ids: np.ndarray, stops: tuple[str, ...]
    ) -> None:
        """Add a conversation that ends with a turn, and all of its tokens."""
        self._chats.append(RecordedChat(messages, form_of(template), token_ids, stops))

    def add_text(self, text: str, token_ids: np.ndarray) -> None:
        self._texts.append(RecordedText(text, token_ids))


def _tokens_after(template: ChatTemplate, prefix: RecordedText, text: str) -> list[int] | None:
    """Return the tokens of the text after a prefix, or None if the text leaves the turn open or ends it in another way.

    An agent that renders the chat template itself writes the end token, which the recorded turn already has.
    """
    rest, end = text[len(prefix.text) :], int(prefix.token_ids[-1])
    new = list(template.tokenizer.encode(rest, add_special_tokens=False)) if rest else []
    if not template.is_end(end) or (new and not template.is_end(new[0])):
        return new
    return new[1:] if new[:1] == [end] else None


def form_of(template: ChatTemplate) -> Form:
    return template.tools, template.arguments
