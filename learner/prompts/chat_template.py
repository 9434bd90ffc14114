"""Render conversations as tokens with the tokenizer's chat template, for encoding.py and for episodes.

Invariant: the same messages always give the same tokens, as a prompt or as the history of an episode.
"""

import datetime
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from learner.prompts.reasoning import texts_of
from protocol.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
T = TypeVar("T")
DATE = datetime.datetime(2024, 7, 26)
"""Day that templates with a clock show: the one that Llama's have without a clock. Today's would give other tokens in a
resume on another day, and split an episode that lasts beyond midnight."""


class TurnFormat(msgspec.Struct, frozen=True):
    """Rules of the model and the config for the end and the continuation of turns."""

    renderer: str | None = None
    """Value of learner.environment.tool_call_format."""
    more_ends: frozenset[int] = frozenset()
    """Tokens that end a turn besides the tokenizer's own (`end_token_ids` of the model)."""
    goes_on: bool = True
    """Whether the policy continues a partial answer. Agents, as clients of vLLM, open a new turn."""


class ChatTemplate(msgspec.Struct, frozen=True, eq=False):
    """Chat template with its arguments and tools, safe to send to other processes."""

    tokenizer: "PreTrainedTokenizerBase"
    arguments: dict[str, Any]
    """Value of learner.data.chat_template_kwargs."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the policy can call."""
    turns: TurnFormat = TurnFormat()

    @property
    def renderer(self) -> str | None:
        return self.turns.renderer

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self.turns.more_ends | {self.tokenizer.eos_token_id}

    def is_end(self, token_id: int) -> bool:
        """Return whether this token, as the last of a turn, ended the turn.

        Otherwise, a stop string or the length limit ended it.
        """
        return token_id in self.ends or token_id in self.tokenizer.all_special_ids

    def without_end(self, token_ids: list[int]) -> list[int]:
        """Return a turn without the token that ended it."""
        return token_ids[:-1] if token_ids and self.is_end(token_ids[-1]) else token_ids

    def with_one_begin(self, token_ids: list[int]) -> list[int]:
        """Remove a duplicate BOS token.

        A text that was rendered earlier already starts with the BOS token that the tokenizer adds.
        """
        begin = self.tokenizer.bos_token_id
        return token_ids[1:] if begin is not None and token_ids[:2] == [begin, begin] else token_ids

    def spoken(self, token_ids: list[int]) -> str:
        """Return the text of a turn."""
        (text,) = texts_of(self.tokenizer, [self.without_end(token_ids)])
        return text

    def harmless(self, text: str) -> str:
        """Break up special tokens in untrusted text with a zero-width space, which replaces those of one character.

        The result contains no token that has a meaning in the template.
        """
        marks = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        # None: an id that the model's config has and the tokenizer does not
        marks |= {
            mark for mark in self.tokenizer.convert_ids_to_tokens(sorted(self.turns.more_ends)) if mark is not None
        }
        for mark in sorted(filter(None, marks)):
            text = _without(mark, text)
        return text

    def turn_end(self) -> int | None:
        """Return the token with which this template ends an assistant turn.

        In some templates, it is the token that marks the next speaker.
        """
        first, second, followed = (
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
            for text in ("A", "B", "A")
        )
        turn, another = self.token_ids(first[:2], opens_turn=False), self.token_ids(second[:2], opens_turn=False)
        next_ids = self.token_ids(followed)
        start = num_shared(turn, another)
        ends = [token_id for token_id in [*turn[start:], *next_ids[len(turn) : len(turn) + 1]] if token_id in self.ends]
        return ends[0] if ends else self.tokenizer.eos_token_id

    @property
    def has_texts(self) -> bool:
        """True if text renders messages without loss; otherwise, only their tokens do."""
        return hasattr(self.tokenizer, "backend_tokenizer")

    def text(self, messages: Sequence[Message], *, opens_turn: bool = True) -> str:
        """Render messages as text. Raises DataError if the template fails."""
        text: str = self._apply(messages, opens_turn, tokenize=False)
        return text

    def token_ids(self, messages: Sequence[Message], *, opens_turn: bool = True) -> list[int]:
        """Render messages as token ids. Raises DataError if the template fails.

        The template provides its own special tokens; the tokenizer adds none.
        """
        if not self.has_texts:
            return list(self._apply(messages, opens_turn, tokenize=True))
        return list(self.tokenizer.encode(self.text(messages, opens_turn=opens_turn), add_special_tokens=False))

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """Render a prompt as text. Raises DataError if the template fails.

        The text opens the policy's turn, or ends with a partial answer for the policy to continue.
        """
        prefill = self.prefill(messages)
        if prefill is None:
            return self.text(messages)
        text: str = self._apply(messages, False, tokenize=False, goes_on=True)
        return text if text.endswith(prefill) else text + prefill[len(prefill.rstrip()) :]  # some templates trim

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render a prompt as token ids. Raises DataError if the template fails."""
        if not self.has_texts:
            goes_on = self.prefill(messages) is not None
            return list(self._apply(messages, not goes_on, tokenize=True, goes_on=goes_on))
        return list(self.tokenizer.encode(self.prompt_text(messages), add_special_tokens=False))

    def shows(self, messages: Sequence[Message], index: int) -> bool:
        """Return whether the template renders this message's content. Raises DataError."""
        render: Callable[[list[Message]], Any] = self.text if self.has_texts else self.token_ids
        before, after = messages[:index], messages[index + 1 :]
        one, other = (render([*before, messages[index] | {"content": text}, *after]) for text in "AB")
        return bool(one != other)

    def prefill(self, messages: Sequence[Message]) -> str | None:
        """Return the partial answer (prefill) that a prompt ends with, or None.

        The policy continues this text of the last message, which is the assistant's.
        """
        last = messages[-1]
        if not self.turns.goes_on or last.get("role") != "assistant" or last.get("tool_calls"):
            return None
        text = content_text(last.get("content"))
        return text if isinstance(text, str) and text.strip() else None

    def _apply(self, messages: Sequence[Message], opens_turn: bool, *, tokenize: bool, goes_on: bool = False) -> Any:
        if self.tokenizer.chat_template is None:
            raise DataError(
                "the prompt is a conversation (or learner.data.system_prompt is set), but the tokenizer of "
                f"{self.tokenizer.name_or_path!r} has no chat template; use an instruct model, add a chat_template to "
                "its tokenizer, or use plain prompts without a system prompt"
            )
        more = {"strftime_now": DATE.strftime} | ({"tools": self.tools} if self.tools else {}) | self.arguments
        try:
            return self.tokenizer.apply_chat_template(
                [_without_nulls(message) for message in messages], tokenize=tokenize, return_dict=False,
                add_generation_prompt=opens_turn,
                continue_final_message=goes_on, **more,
            )  # fmt: skip
        except Exception as error:  # template code can raise anything, also over the policy's messages
            raise DataError(f"the chat template cannot render the conversation: {error}") from error


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (here, there) in pairs if here != there), min(len(one), len(other)))


def _without(mark: str, text: str) -> str:
    if len(mark) == 1:
        return text.replace(mark, "\u200b")
    # The lookahead also finds occurrences that overlap.
    return re.sub(f"{re.escape(mark[0])}(?={re.escape(mark[1:])})", lambda found: f"{found[0]}\u200b", text)


def storable(value: T) -> T:
    """Return a value unchanged if the ledger and other processes can store it.

    JSON may be nested too deeply, or contain integers that are too large or lone surrogates.

    Raises:
        ValueError, OverflowError, RecursionError: The value cannot be stored.
    """
    msgspec.msgpack.encode(value)
    return value


def _without_nulls(message: Message) -> Message:
    """Remove null keys from a message and parse the arguments of its tool calls.

    Columnar files such as parquet give every message each key that any message has. Many datasets store tool
    call arguments as JSON text, which a template would encode once more.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = content_text(message.get("content") or "")
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call_without_nulls(call) for call in calls]
    return plain


def content_text(content: Any) -> Any:
    """Join content that consists of text parts into one text.

    Templates of text-only models print a list in Python syntax.
    """
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def _call_without_nulls(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, OverflowError, RecursionError):
            arguments = storable(json.loads(arguments))
    if isinstance(arguments, dict):
        arguments = {name: value for name, value in arguments.items() if value is not None}
    rest = {key: value for key, value in call.items() if value is not None}
    return rest | {"function": function | {"arguments": {} if arguments is None else arguments}}
