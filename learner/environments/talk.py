"""How an episode's turns become orders to the environment, and what it says becomes tokens: as plain text, or as a conversation.

    turn ─▶ orders ─▶ (process.py) ─▶ said ─▶ Heard: tokens that follow the turn, or a whole prompt that begins a branch

Between the player and the chat template. Invariant: what was recorded is never rendered again. A conversation is continued by what its
template puts behind the turn; where the template now shows what came before in another way, such as without its reasoning, a
branch begins with the conversation as the template has it.
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
        self._last_token = -1
        """Of the last turn."""

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
            self._calls, self._last_token = calls_of(message), token_ids[-1]
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
        heard = continued(self._template, self._messages, answers, self._last_token)
        self._messages += answers
        return heard


def continued(template: ChatTemplate, said: Sequence[Message], new: Sequence[Message], last_token: int) -> Heard:
    """What stands before the next turn, behind a recorded one that ended with `last_token`. Raises DataError."""
    before = template.token_ids(said, opens_turn=False)
    after = template.token_ids([*said, *new])
    begun = num_shared(before, template.token_ids(said[:-1], opens_turn=False)) if len(said) > 1 else 0
    end = _end_of_turn(template, before, begun, last_token)
    if after[:end] != before[:end]:
        return Heard(after, begins_branch=True)
    is_mark_of_next = end == len(before) and template.is_end(last_token) and after[end : end + 1] == [last_token]
    return Heard(after[end + is_mark_of_next :])


def _end_of_turn(template: ChatTemplate, token_ids: list[int], begun: int, last_token: int) -> int:
    """Up to where the recorded tokens reach in those that the template makes of them; the last turn begins at `begun` there.

    A turn that ended with a token such as <|im_end|> has it; one that ended otherwise, at a text that stops it, gets it now. Of some
    families a turn ends with the mark of who speaks next, which the template puts behind it.
    """
    has_ended = template.is_end(last_token)
    turn = range(len(token_ids) - 1, begun - 1, -1)
    for ends in ({last_token}, template.ends) if has_ended else (template.ends,):
        for place in turn:
            if token_ids[place] in ends:
                return place + has_ended
    return len(token_ids)


def _joined(content: object, text: str) -> object:
    """A message's content, a text or parts, with more text."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"
