"""A request: what the server is asked for one slot, and which of the completions it answers with can be used. Pure.

Invariant: a group that is let through has at least two completions, all with tokens: one alone has no baseline.
"""

import msgspec
import numpy as np

from learner.config import SamplingConfig
from learner.prompts.prompts import Prompt
from learner.rollouts.ledger_row import group_id_of
from protocol.errors import ProtocolError
from protocol.messages import Generate, Group, Sampling

MIN_SURVIVORS = 2


class Request(msgspec.Struct, kw_only=True, eq=False):
    """A group that a server owes us, or is to."""

    slot: int
    attempt: int
    prompt: Prompt
    sent_at: float | None = None
    """When it was last handed to a connection."""
    owed_by: str | None = None
    """The endpoint of the server that was asked last and may still answer."""
    answered_by: str = ""
    """Likewise, of the one whose group has come."""

    @property
    def group_id(self) -> str:
        return group_id_of(self.slot, self.attempt)


def message_of(request: Request, config: SamplingConfig, run_seed: int, deadline_s: float) -> Generate:
    """The request as the server gets it."""
    seed = (run_seed * 1_000_003 + request.slot * config.num_completions) % 2**31 if config.seeded else None
    return Generate(
        group_id=request.group_id,
        prompt_token_ids=np.array(request.prompt.token_ids, np.int32),
        sampling=Sampling(
            num_completions=config.num_completions,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=seed,
            stop=config.stop,
        ),
        deadline_s=deadline_s,
    )


def survivors(group: Group, config: SamplingConfig, vocab_size: int) -> Group | None:
    """Leave completions without tokens out; None if fewer than two are left.

    Raises ProtocolError for what was not asked for: too many completions, or too long ones, or ids that are no tokens.
    """
    if len(group.completions) > config.num_completions:
        raise ProtocolError(
            f"group {group.group_id} has {len(group.completions)} completions, asked for were {config.num_completions}"
        )
    for completion in group.completions:
        ids = completion.token_ids
        if len(ids) > config.max_tokens:
            raise ProtocolError(
                f"group {group.group_id} has a completion of {len(ids)} tokens, asked for were at most {config.max_tokens}"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ProtocolError(
                f"group {group.group_id} has token ids from {ids.min()} to {ids.max()}, the model 0 to {vocab_size - 1}"
            )
    usable = [completion for completion in group.completions if len(completion.token_ids)]
    return msgspec.structs.replace(group, completions=usable) if len(usable) >= MIN_SURVIVORS else None
