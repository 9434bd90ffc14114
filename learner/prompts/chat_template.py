"""A conversation as the model sees it: messages through the tokenizer's chat template, as tokens. Under encoding.py and the episodes.

Invariant: whoever renders the same messages gets the same tokens, whether they are a prompt or what an episode has come to.
"""

import json
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


class Turns(msgspec.Struct, frozen=True):
    """How turns end and are read; of the model and the config, beside the template."""

    renderer: str | None = None
    """learner.environment.renderer."""
    more_ends: frozenset[int] = frozenset()
    """Tokens that end a turn, beside the tokenizer's own (`end_token_ids` of the model)."""
    goes_on: bool = True
    """Whether an answer that a prompt begins is gone on with; agents, as clients of vLLM, open a new turn."""


class ChatTemplate(msgspec.Struct, frozen=True, eq=False):
    """Goes into other processes as it is."""

    tokenizer: "PreTrainedTokenizerBase"
    arguments: dict[str, Any]
    """learner.data.chat_template_kwargs."""
    tools: list[dict[str, Any]]
    """JSON schemas of what the policy can call."""
    turns: Turns = Turns()

    @property
    def renderer(self) -> str | None:
        return self.turns.renderer

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self.turns.more_ends | {self.tokenizer.eos_token_id}

    def is_end(self, token_id: int) -> bool:
        """Whether a turn that has this token last was ended by it, not by a text or by its length."""
        return token_id in self.ends or token_id in self.tokenizer.all_special_ids

    def without_end(self, token_ids: list[int]) -> list[int]:
        """Return a turn without the token that ended it."""
        return token_ids[:-1] if token_ids and self.is_end(token_ids[-1]) else token_ids

    def spoken(self, token_ids: list[int]) -> str:
        """Return the text of a turn."""
        (text,) = texts_of(self.tokenizer, [self.without_end(token_ids)])
        return text

    def harmless(self, text: str) -> str:
        """Return a text of somebody else's in which no token that the template means something by is left: a space without width parts it."""
        marks = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        marks |= set(self.tokenizer.convert_ids_to_tokens(sorted(self.turns.more_ends)))
        for mark in marks:
            text = text.replace(mark, f"{mark[0]}\u200b{mark[1:]}")
        return text

    def turn_end(self) -> int | None:
        """Return the token that the template lets a turn of the assistant end with; of some it is the mark of who speaks next."""
        said, other, asked = (
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
            for text in ("A", "B", "A")
        )
        turn, another = self.token_ids(said[:2], opens_turn=False), self.token_ids(other[:2], opens_turn=False)
        next_ids = self.token_ids(asked)
        start = num_shared(turn, another)
        ends = [token_id for token_id in [*turn[start:], *next_ids[len(turn) : len(turn) + 1]] if token_id in self.ends]
        return ends[0] if ends else self.tokenizer.eos_token_id

    @property
    def has_texts(self) -> bool:
        """False: a text may mean less than its messages, so only their tokens will do."""
        return hasattr(self.tokenizer, "backend_tokenizer")

    def text(self, messages: Sequence[Message], *, opens_turn: bool = True) -> str:
        """With what opens the policy's next turn, or without. Raises DataError."""
        text: str = self._apply(messages, opens_turn, tokenize=False)
        return text

    def token_ids(self, messages: Sequence[Message], *, opens_turn: bool = True) -> list[int]:
        """Likewise. Templates bring their own special tokens; the tokenizer adds none."""
        if not self.has_texts:
            return list(self._apply(messages, opens_turn, tokenize=True))
        return list(self.tokenizer.encode(self.text(messages, opens_turn=opens_turn), add_special_tokens=False))

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """With what opens the policy's turn, unless they end with an answer that is begun: that goes on. Raises DataError."""
        begun = self.begun(messages)
        if begun is None:
            return self.text(messages)
        text: str = self._apply(messages, False, tokenize=False, goes_on=True)
        return text if text.endswith(begun) else text + begun[len(begun.rstrip()) :]  # some templates trim what is said

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Likewise."""
        if not self.has_texts:
            goes_on = self.begun(messages) is not None
            return list(self._apply(messages, not goes_on, tokenize=True, goes_on=goes_on))
        return list(self.tokenizer.encode(self.prompt_text(messages), add_special_tokens=False))

    def shows(self, messages: Sequence[Message], place: int) -> bool:
        """Whether what this message says has a part in the text. Raises DataError."""
        render: Callable[[list[Message]], Any] = self.text if self.has_texts else self.token_ids
        before, after = messages[:place], messages[place + 1 :]
        one, other = (render([*before, messages[place] | {"content": said}, *after]) for said in "AB")
        return bool(one != other)

    def begun(self, messages: Sequence[Message]) -> str | None:
        """Return the text of a last message by the assistant, with which a prompt puts the beginning of an answer into the policy's mouth."""
        last = messages[-1]
        if not self.turns.goes_on or last.get("role") != "assistant" or last.get("tool_calls"):
            return None
        text = _as_text(last.get("content"))
        return text if isinstance(text, str) and text.strip() else None

    def _apply(self, messages: Sequence[Message], opens_turn: bool, *, tokenize: bool, goes_on: bool = False) -> Any:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"the prompt is a conversation (or learner.data.system_prompt is set), but the tokenizer of "
                f"{self.tokenizer.name_or_path!r} has no chat template; use an instruct model, add a chat_template to its "
                "tokenizer, or give plain prompts without a system prompt"
            )
        more = ({"tools": self.tools} if self.tools else {}) | self.arguments
        try:
            return self.tokenizer.apply_chat_template(
                [_without_nulls(message) for message in messages], tokenize=tokenize, return_dict=False, add_generation_prompt=opens_turn,
                continue_final_message=goes_on, **more,
            )  # fmt: skip
        except Exception as error:  # of the template's code, or of what it makes of a message that the policy wrote
            raise DataError(f"the conversation does not go through the chat template: {error}") from error


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))


def storable(value: T) -> T:
    """Return it if the ledger and other processes can take it: JSON may be deeper, its numbers longer, and its texts half characters.

    Raises ValueError, OverflowError or RecursionError.
    """
    msgspec.msgpack.encode(value)
    return value


def _without_nulls(message: Message) -> Message:
    """As a person would have written it. Files of columns, such as parquet, give every message each key that one of them has, and many data
    sets hold the arguments of calls as JSON's text, which a template would encode once more."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _as_text(message.get("content") or "")
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call_without_nulls(call) for call in calls]
    return plain


def _as_text(content: Any) -> Any:
    """Parts that are all texts as one text: templates of models that read nothing else print a list as Python does."""
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
