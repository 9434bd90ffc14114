"""An ordinary pass of a policy, which one that goes packed has no more: the oracle of its logprobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def ordinary(policy: Any) -> Iterator[None]:
    """Let passes of the policy be those of transformers alone."""
    before = policy.config._attn_implementation
    policy.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        policy.set_attn_implementation(before)


def plain_logits(policy: Any, token_ids_BS: torch.Tensor) -> torch.Tensor:
    """logits_BSV."""
    with ordinary(policy):
        logits_BSV: torch.Tensor = policy(token_ids_BS).logits
    return logits_BSV
