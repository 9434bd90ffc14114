"""Texts that end a completion. An OpenAI server takes four of them: of more it is told the first ones, and what it answers is cut here.

Between asking.py, playing.py and the server. Invariant: an answer ends where the run's own servers, which take any number, would have
ended it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_TOLD = 4


def end_of(text: str, stops: Sequence[str]) -> int | None:
    """Behind the stop that ends first; None: there is none."""
    return min((place + len(stop) for stop in stops if (place := text.find(stop)) >= 0), default=None)


def cut_choice(
    choice: dict[str, Any], stops: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool
) -> dict[str, Any]:
    """A choice of an answer, with its `token_ids` if it has any, as if all stops had been told."""
    end = end_of(choice["text"], stops)
    if end is None:
        return choice
    cut = {"text": choice["text"][:end], "finish_reason": "stop"}
    if token_ids := choice.get("token_ids"):

        def has_ended(count: int) -> bool:
            (text,) = tokenizer.batch_decode([token_ids[:count]], skip_special_tokens=skip_special_tokens)
            return end_of(text, stops) is not None

        cut["token_ids"] = token_ids[: bisect_left(range(len(token_ids) + 1), True, key=has_ended)]
    return choice | cut
