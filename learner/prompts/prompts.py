"""Prompts of a run: the rows of the data as an endless sequence, ready to be sent to the server.

    sources.py ──▶ encoding.py ──▶ Prompts ──▶ prompt_at(position)

All prompts are encoded and checked at the start, so a bad prompt stops the run before it costs anything.

Invariant: every data epoch holds each prompt exactly once, and the prompt at a position depends only on data
and seed. A resume therefore needs only a position, and digests that show whether the data has changed.
"""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from learner.config import DataConfig
from learner.prompts.chat_template import ChatTemplate, TurnFormat
from learner.prompts.encoding import encode_source, with_system_prompt
from learner.prompts.reasoning import CLOSES_REASONING, OPENS_REASONING, opening_of
from learner.prompts.sources import open_source
from protocol.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Example: Prompt(prompt_id=3, prompt="4821>", token_ids=[7, 11, 5, 4, 13], columns={"answer": "1284"}).
    """

    prompt_id: int
    """Row of the data."""
    prompt: str | list[dict[str, Any]]
    """Text, or the messages that the chat template rendered."""
    token_ids: list[int]
    columns: dict[str, Any]
    """All other columns of the row, for the reward functions."""
    prefill: str | None = None
    """Partial answer that the prompt ends with and the policy continues, if any."""
    opens_reasoning: bool = False
    """Whether the template ends the prompt with `<think>`, so that the completion starts as reasoning."""

    @property
    def turn_start(self) -> str:
        """The part of the policy's turn that the prompt ends with, or ""."""
        return self.prefill or (OPENS_REASONING if self.opens_reasoning else "")

    def completion_of(self, answer: str) -> str:
        """Return the completion that gives this answer, which first ends the reasoning that the prompt has opened.

        An answer that ends the reasoning itself is a whole completion already.
        """
        is_open = OPENS_REASONING in self.turn_start.rpartition(CLOSES_REASONING)[2]
        return f"{CLOSES_REASONING}\n\n{answer}" if is_open and CLOSES_REASONING not in answer else answer


class Prompts:
    """All prompts of a run, as an endless sequence of positions."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        tools: Callable[[], list[dict[str, Any]]] = list,
        turns: TurnFormat = TurnFormat(),  # noqa: B008  (frozen)
        trained: DataConfig | None = None,
    ) -> None:
        """Load, encode and check all prompts.

        `tools` returns the JSON schemas for the chat template, and is called only if the prompts are
        conversations. `trained`: data that a run trains on, if these are the prompts of an evaluation.

        Raises:
            DataError: The data cannot be read, or a prompt is invalid or too long.
        """
        self._config, self._seed = config, seed
        self._source = open_source(config, seed, trained)
        first = self._source.row(0).get(config.prompt_column)  # encoding reports a missing column
        self.are_conversations = config.system_prompt is not None or not isinstance(first, str)
        self.template = ChatTemplate(
            tokenizer, config.chat_template_kwargs, tools() if self.are_conversations else [], turns
        )
        self._encoded = encode_source(self._source, config, self.template)
        too_long = self._find_too_long()
        self.num_too_long = len(too_long)
        """Number of prompts that were dropped or truncated."""
        self._rows = np.arange(len(self._source))
        if config.overlong_prompts == "drop":
            self._rows = np.delete(self._rows, too_long)
        if not len(self._rows):
            raise DataError(
                f"every prompt of {self._source.name} has more than learner.data.max_prompt_tokens = "
                f"{config.max_prompt_tokens} tokens; raise it"
            )
        logger.info("loaded %d prompts (longest: %d tokens)", len(self), self.longest()[1])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def name(self) -> str:
        """Name of the data, for messages."""
        return self._source.name

    @property
    def digests(self) -> np.ndarray:
        """Digest of each prompt as int64, over its token ids and all columns of its row."""
        return self._encoded.digests[self._rows]

    @property
    def metrics(self) -> dict[str, float]:
        """Number of prompts that the token limit dropped or truncated, unless these are errors."""
        done = {"drop": "dropped", "truncate": "truncated"}.get(self._config.overlong_prompts)
        return {f"data/{done}_prompts": float(self.num_too_long)} if done else {}

    def check_one_kind(self, used_by: str) -> None:
        """Raise DataError if some prompts are texts and others conversations, which `used_by` cannot play."""
        others = self._rows[self._encoded.are_texts[self._rows] == self.are_conversations]
        if len(others):
            kinds = ("conversations", "a text") if self.are_conversations else ("texts", "a conversation")
            raise DataError(
                f"the prompts of {self.name} are {kinds[0]}, but the prompt in row {others[0]} is {kinds[1]}; expected "
                f"prompts of one kind with {used_by}, because texts go to one method and conversations have tools. "
                "Make them alike"
            )

    def check_whole(self, used_by: str) -> None:
        """Raise DataError if prompts are truncated, which `used_by` renders again, whole, with each turn."""
        if self._config.overlong_prompts == "truncate" and self.num_too_long:
            raise DataError(
                f'learner.data.overlong_prompts = "truncate" with {used_by}: {self.num_too_long} of {len(self)} '
                f"prompts have more than learner.data.max_prompt_tokens = {self._config.max_prompt_tokens} tokens, but "
                "later turns would begin with the whole prompt. Raise max_prompt_tokens, or set overlong_prompts = "
                '"drop"'
            )

    def longest(self) -> tuple[int, int]:
        """Return the row of the longest prompt and its number of tokens."""
        index = int(self._encoded.num_tokens[self._rows].argmax())
        row = int(self._rows[index])
        return row, len(self._encoded.prompt_ids(row))

    def epoch_of(self, position: int) -> int:
        """Return the data epoch of a position."""
        return position // len(self)

    def row_at(self, position: int) -> int:
        """Return the row of the data at a position of the endless sequence."""
        epoch, index = divmod(position, len(self))
        return self.row(int(_order(len(self), self._seed, epoch)[index]) if self._config.shuffle else index)

    def row(self, index: int) -> int:
        """Return the row of the data at this index of the unshuffled prompts."""
        return int(self._rows[index])

    def prompt_at(self, position: int) -> Prompt:
        """Return the prompt at a position of the endless sequence."""
        row = self.row_at(position)
        columns = self._source.row(row)
        prompt = with_system_prompt(columns.pop(self._config.prompt_column), self._config)
        token_ids = self._encoded.prompt_ids(row)
        prefill = None if isinstance(prompt, str) else self.template.prefill(prompt)
        return Prompt(
            prompt_id=row, prompt=prompt, token_ids=token_ids, columns=columns, prefill=prefill,
            opens_reasoning=prefill is None and bool(opening_of(self.template.tokenizer, token_ids)),
        )  # fmt: skip

    def _find_too_long(self) -> np.ndarray:
        """Return the rows above the token limit. Raises DataError if they are refused."""
        config, num_tokens = self._config, self._encoded.num_tokens
        if config.max_prompt_tokens is None:
            return np.array([], np.int64)
        rows = np.flatnonzero(num_tokens > config.max_prompt_tokens)
        if not len(rows):
            return rows
        first = f"row {rows[0]} of {self._source.name} has {num_tokens[rows[0]]} tokens"
        if config.overlong_prompts == "error":
            raise DataError(
                f"the prompt in {first}, more than learner.data.max_prompt_tokens = {config.max_prompt_tokens}; "
                f"{len(rows)} of {len(num_tokens)} prompts are longer. Raise it, filter the data, or set "
                "learner.data.overlong_prompts to drop or truncate"
            )
        logger.warning(
            "%s %d of %d prompts with more than learner.data.max_prompt_tokens = %d tokens (the prompt in %s)",
            "dropped" if config.overlong_prompts == "drop" else "truncated the start of",
            len(rows),
            len(num_tokens),
            config.max_prompt_tokens,
            first,
        )
        return rows


@functools.lru_cache(maxsize=8)
def _order(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed % 2**32, epoch]).permutation(num_prompts)
