"""Convert turns into commands and responses into tokens, as text or as a chat.

    turn ─▶ commands ─▶ (process.py) ─▶ responses ─▶ NextPrompt: tokens after the turn, or a branch's prompt

This sits between the player and the chat template.
Invariant: recorded tokens are never rendered again. A conversation continues with what its template adds
after the turn. If the template now renders earlier turns differently, for example without their reasoning, a
branch starts with the rendered conversation. Differences in white space do not count.
"""

from collections.abc import Sequence

import msgspec

from learner.environments.answer import UnreadableAnswer, calls_of, read_answer
from learner.environments.host import Call, StepResult, Turn
from learner.prompts.chat_template import ChatTemplate, Message, num_shared
from learner.prompts.reasoning import OPENS_REASONING, opening_of


class NextPrompt(msgspec.Struct, frozen=True):
    """Tokens before the next turn."""

    token_ids: list[int]
    begins_branch: bool = False
    """Whether these are all the tokens before the turn, so that a new branch starts."""


class TextConversation:
    """Plain-text exchange: turns and responses are passed on as text."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def begin(self, result: StepResult) -> NextPrompt:
        return self.add_results([result])

    @property
    def messages(self) -> list[Message]:
        return []

    def cut_off(self, prompt: list[int], token_ids: list[int]) -> None:
        """Ignore a turn that was cut off. The environment does not see it."""

    def commands_of(self, prompt: list[int], token_ids: list[int]) -> Sequence[Turn]:
        """Return the turn as a command. `prompt`: all tokens before the turn."""
        return [Turn(self._template.spoken(token_ids))]

    def add_results(self, results: list[StepResult]) -> NextPrompt:
        text = "".join(one.text for one in results)
        return NextPrompt(self._template.tokenizer.encode(text, add_special_tokens=False) if text else [])


class ChatConversation:
    """A conversation: the policy calls tools until it calls none.

    The tools' answers are messages.
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[Message]) -> None:
        self._template, self._messages, self._num_before = template, list(messages), len(messages)
        self._calls: list[Call] = []
        self._call_ids: list[str] = []
        self._num_calls = 0
        self._recorded: list[int] = []
        """All tokens up to the end of the last turn."""

    def begin(self, result: StepResult) -> NextPrompt:
        """Append the response to reset to the last message."""
        if not result.text:
            return NextPrompt([])
        last = self._messages[-1]
        self._messages[-1] = last | {"content": _joined(last["content"], result.text)}
        return NextPrompt(self._template.prompt_ids(self._messages), begins_branch=True)

    def commands_of(self, prompt: list[int], token_ids: list[int]) -> list[Call]:
        """Return the tool calls of a turn, or none if it is the last turn.

        `prompt`: all tokens before the turn.

        Raises:
            UnreadableAnswer: The turn cannot be parsed.
        """
        try:
            message = read_answer(self._template, prompt, token_ids)
            self._calls, self._recorded = calls_of(message), [*prompt, *token_ids]
            self._name_calls(message)
        except UnreadableAnswer:
            self.cut_off(prompt, token_ids)
            raise
        self._say(message)
        return self._calls

    def _say(self, message: Message) -> None:
        """Add a message. The first turn is merged into an answer that the prompt began."""
        if len(self._messages) == self._num_before and (prefill := self._template.prefill(self._messages)) is not None:
            del self._messages[-1]
            self._num_before -= 1
            prefill = prefill.rstrip().removesuffix(OPENS_REASONING) if message.get("reasoning_content") else prefill
            message = message | {"content": _joined(prefill, message.get("content") or "")}
        self._messages.append(message)

    def _name_calls(self, message: Message) -> None:
        """Give each call an id of nine letters and digits, unless it has one.

        Some templates reject calls and tool answers without such an id.
        """
        for call in message.get("tool_calls") or ():
            self._num_calls += 1
            call.setdefault("id", f"call{self._num_calls:05}")
        self._call_ids = [call["id"] for call in message.get("tool_calls") or ()]

    @property
    def messages(self) -> list[Message]:
        """Messages after the prompt."""
        return self._messages[self._num_before :]

    def cut_off(self, prompt: list[int], token_ids: list[int]) -> None:
        """Record the last turn as text, without parsing it.

        The text includes a `<think>` with which the template ends the prompt, so that reasoning that never ends is
        no answer.
        """
        opens = self._template.prefill(self._messages) is None  # a prefill holds its own <think>
        opening = opening_of(self._template.tokenizer, prompt) if opens else ""
        self._say({"role": "assistant", "content": opening + self._template.spoken(token_ids)})

    def add_results(self, results: list[StepResult]) -> NextPrompt:
        """Return the tokens of the tools' answers, which are in the order of the calls.

        The last calls have no answer if the environment was done before.
        """
        answers = [
            {"role": "tool", "name": call.name, "tool_call_id": call_id, "content": self._template.harmless(one.text)}
            for call, call_id, one in zip(self._calls, self._call_ids, results, strict=False)
        ]
        prompt = continued(self._template, self._messages, answers, self._recorded)
        self._messages += answers
        return prompt


def continued(
    template: ChatTemplate,
    old: Sequence[Message],
    new: Sequence[Message],
    recorded: list[int],
    stops: Sequence[str] = (),
) -> NextPrompt:
    """Return the tokens before the next turn.

    `recorded`: all tokens up to the end of the last turn, with which the old messages end. `stops`: texts,
    one of which may have ended the last turn. The messages leave that text out.

    Raises:
        DataError: The template cannot render the messages.
    """
    rendered = template.token_ids([*old, *new])
    end = _reach(template, rendered, recorded, stops)
    return NextPrompt(rendered, begins_branch=True) if end is None else NextPrompt(rendered[end:])


def _reach(template: ChatTemplate, rendered: list[int], recorded: list[int], stops: Sequence[str]) -> int | None:
    """Return the end of the recorded tokens in the template's, or None if they differ.

    A turn that ended with a token such as <|im_end|> has that token. A turn that ended at a stop text gets it
    now.
    """
    if rendered[: len(recorded)] == recorded:
        return len(recorded)
    has_ended = template.is_end(recorded[-1])
    ends = {recorded[-1]} if has_ended else template.ends
    begin = num_shared(rendered, recorded)
    text = _text_of(template, recorded[begin : len(recorded) - has_ended])
    cut = [] if has_ended else [stop for stop in map(_without_spaces, stops) if stop]
    shown = ""
    for end in range(begin, len(rendered)):
        if rendered[end] not in ends:
            continue
        shown += _text_of(template, rendered[begin:end])
        begin = end
        if text == shown or text.startswith(tuple(shown + stop for stop in cut)):
            return end + has_ended
        if not text.startswith(shown):
            return None
    return None


def _text_of(template: ChatTemplate, token_ids: list[int]) -> str:
    """Return the text of tokens without white space.

    Templates trim messages and space the JSON of calls in their own ways.
    """
    (text,) = template.tokenizer.batch_decode([token_ids], skip_special_tokens=False)
    return _without_spaces(text)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _joined(content: object, text: str) -> object:
    """Append a text to a message's content, which is a text or a list of parts."""
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else f"{content}{text}"
