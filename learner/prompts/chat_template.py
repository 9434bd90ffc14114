"""A conversation as the model sees it: messages through the tokenizer's chat template, as tokens. Under encoding.py and the episodes.

Invariant: whoever renders the same messages gets the same tokens, whether they are a prompt or what an episode has come to.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
OPENS_REASONING, CLOSES_REASONING = "<think>", "</think>"


class ChatTemplate(msgspec.Struct, frozen=True, eq=False):
    """Goes into other processes as it is."""

    tokenizer: "PreTrainedTokenizerBase"
    arguments: dict[str, Any]
    """learner.data.chat_template_kwargs."""
    tools: list[dict[str, Any]]
    """JSON schemas of what the policy can call."""
    renderer: str | None = None
    """learner.environment.renderer."""

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

    def _apply(self, messages: Sequence[Message], opens_turn: bool, *, tokenize: bool) -> Any:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"the prompt is a conversation (or learner.data.system_prompt is set), but the tokenizer of "
                f"{self.tokenizer.name_or_path!r} has no chat template; use an instruct model, add a chat_template to its "
                "tokenizer, or give plain prompts without a system prompt"
            )
        more = ({"tools": self.tools} if self.tools else {}) | self.arguments
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=tokenize, return_dict=False, add_generation_prompt=opens_turn,
                **more,
            )  # fmt: skip
        except Exception as error:  # of the template's code, or of what it makes of a message that the policy wrote
            raise DataError(f"the conversation does not go through the chat template: {error}") from error
