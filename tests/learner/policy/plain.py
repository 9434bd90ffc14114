"""The plain transformers pass of a policy, which packing replaces: the oracle of its logprobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def ordinary(policy: Any) -> Iterator[None]:
    """Use the plain passes of transformers inside the block."""
    before = policy.config._attn_implementation
    policy.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        policy.set_attn_implementation(before)


def plain_logits(policy: Any, token_ids_BS: torch.Tensor) -> torch.Tensor:
    """Return logits_BSV."""
    with ordinary(policy):
        logits_BSV: torch.Tensor = policy(token_ids_BS).logits
    return logits_BSV
