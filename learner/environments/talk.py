"""How an episode's turns become orders to the environment, and what it says becomes tokens: as plain text, or as a conversation.

    turn ─▶ orders ─▶ (process.py) ─▶ said ─▶ Heard: tokens that follow the turn, or a whole prompt that begins a branch

Between the player and the chat template. Invariant: what was recorded is never rendered again. A conversation is continued by what its
template puts behind the turn. Where the template now renders earlier turns differently (white space does not count), such as without
their reasoning, a branch begins with the template's rendering of the conversation.
"""

from collections.abc import Sequence

import msgspec

from learner.environments.answer import Unreadable, calls_of, read_answer
from learner.environments.host import Call, Said, Turn
from learner.prompts.chat_template import ChatTemplate, Message, num_shared
from learner.prompts.reasoning import OPENS_REASONING


class Heard(msgspec.Struct, frozen=True):
    """What stands before the next turn."""

    token_ids: list[int]
    begins_branch: bool = False
    """They are all that stands before it."""


class PlainTalk:
    """Each turn goes to the environment as text, and what it says follows as text."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def begin(self, said: Said) -> Heard:
        return self.hear([said])

    @property
    def messages(self) -> list[Message]:
        return []

    def cut_off(self, token_ids: list[int]) -> None:
        """The environment hears nothing of a turn that was not ended."""

    def orders(self, prompt: list[int], token_ids: list[int]) -> Sequence[Turn]:
        """`prompt`: all that stands before the turn."""
        return [Turn(self._template.spoken(token_ids))]

    def hear(self, said: list[Said]) -> Heard:
        text = "".join(one.text for one in said)
        return Heard(self._template.tokenizer.encode(text, add_special_tokens=False) if text else [])


class ChatTalk:
    """One conversation: the policy calls tools, whose answers are messages, until it calls none."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        self._template, self._messages, self._num_before = template, list(messages), len(messages)
        self._calls: list[Call] = []
        self._call_ids: list[str] = []
        self._num_calls = 0
        self._recorded: list[int] = []
        """Up to the end of the last turn."""

    def begin(self, said: Said) -> Heard:
        """What reset has said stands at the end of the last message."""
        if not said.text:
            return Heard([])
        last = self._messages[-1]
        self._messages[-1] = last | {"content": _joined(last["content"], said.text)}
        return Heard(self._template.prompt_ids(self._messages), begins_branch=True)

    def orders(self, prompt: list[int], token_ids: list[int]) -> list[Call]:
        """What the turn calls; nothing: it is the last. `prompt`: all that stands before the turn. Raises Unreadable."""
        try:
            message = read_answer(self._template, prompt, token_ids)
            self._calls, self._recorded = calls_of(message), [*prompt, *token_ids]
            self._name_calls(message)
        except Unreadable:
            self.cut_off(token_ids)
            raise
        self._say(message)
        return self._calls

    def _say(self, message: Message) -> None:
        """Add a message. If the prompt began an answer, the first turn is the rest of it: both become one message."""
        if len(self._messages) == self._num_before and (begun := self._template.begun(self._messages)) is not None:
            del self._messages[-1]
            self._num_before -= 1
            begun = begun.rstrip().removesuffix(OPENS_REASONING) if message.get("reasoning_content") else begun
            message = message | {"content": _joined(begun, message.get("content") or "")}
        self._messages.append(message)

    def _name_calls(self, message: Message) -> None:
        """Some templates refuse a call without an id of nine letters and digits, and an answer that names none."""
        for call in message.get("tool_calls") or ():
            self._num_calls += 1
            call.setdefault("id", f"call{self._num_calls:05}")
        self._call_ids = [call["id"] for call in message.get("tool_calls") or ()]

    @property
    def messages(self) -> list[Message]:
        """What was said after the prompt."""
        return self._messages[self._num_before :]

    def cut_off(self, token_ids: list[int]) -> None:
        """Note the last turn, of which nothing is read."""
        self._say({"role": "assistant", "content": self._template.spoken(token_ids)})

    def hear(self, said: list[Said]) -> Heard:
        """`said`: to each call, in order; to the last ones nothing, if the environment was done before."""
        answers = [
            {"role": "tool", "name": call.name, "tool_call_id": call_id, "content": self._template.harmless(one.text)}
            for call, call_id, one in zip(self._calls, self._call_ids, said, strict=False)
        ]
        heard = continued(self._template, self._messages, answers, self._recorded)
        self._messages += answers
        return heard


def continued(
    template: ChatTemplate,
    said: Sequence[Message],
    new: Sequence[Message],
    recorded: list[int],
    stops: Sequence[str] = (),
) -> Heard:
    """What stands before the next turn. Raises DataError.

    `recorded`: all tokens up to the end of the last one, with which `said` ends. `stops`: texts of which the last turn may have ended at one
    that is left out of `said`.
    """
    rendered = template.token_ids([*said, *new])
    end = _reach(template, rendered, recorded, stops)
    return Heard(rendered, begins_branch=True) if end is None else Heard(rendered[end:])


def _reach(template: ChatTemplate, rendered: list[int], recorded: list[int], stops: Sequence[str]) -> int | None:
    """Return up to where the recorded tokens reach in those of the template; None: it shows them otherwise.

    A turn that ended with a token such as <|im_end|> has it; one that ended otherwise, at a text that stops it, gets it now.
    """
    if rendered[: len(recorded)] == recorded:
        return len(recorded)
    has_ended = template.is_end(recorded[-1])
    ends = {recorded[-1]} if has_ended else template.ends
    begin = num_shared(rendered, recorded)
    text = _text_of(template, recorded[begin : len(recorded) - has_ended])
    cut = [] if has_ended else [stop for stop in map(_without_spaces, stops) if stop]
    shown = ""
    for place in range(begin, len(rendered)):
        if rendered[place] not in ends:
            continue
        shown += _text_of(template, rendered[begin:place])
        begin = place
        if text == shown or text.startswith(tuple(shown + stop for stop in cut)):
            return place + has_ended
        if not text.startswith(shown):
            return None
    return None


def _text_of(template: ChatTemplate, token_ids: list[int]) -> str:
    """Without white space, for templates trim messages and space the JSON of calls in their own way."""
    (text,) = template.tokenizer.batch_decode([token_ids], skip_special_tokens=False)
    return _without_spaces(text)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _joined(content: object, text: str) -> object:
    """A message's content, a text or parts, with more text."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"
