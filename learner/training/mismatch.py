"""How far the learner's logprobs are from those of each server, on tokens of the current version: one that is wrong must not be lost
in the mean of many.

Between the logprobs of a micro-batch and the check of rank 0 (leader.py). Suffixes: B branches, T tokens of the longest, N
episodes of the step.
"""

import torch
from accelerate import Accelerator

from learner.rollouts.scored_group import ScoredGroup

OF_SERVER = "mismatch of "
"""Begins the names of these numbers, which are no metrics: an endpoint follows."""


class Mismatch:
    """Since the last `take`."""

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(places_B, sum and number of tokens by branch) of each micro-batch, where they were computed."""

    def see(self, places_B: torch.Tensor, fresh_BT: torch.Tensor, mismatch_BT: torch.Tensor) -> None:
        """|Δ logprob|, of which the fresh ones count."""
        sums_B = torch.where(fresh_BT, mismatch_BT, 0.0).sum(dim=1)
        self._seen.append((places_B, torch.stack([sums_B.double(), fresh_BT.sum(dim=1).double()], dim=1)))

    def take(self, accelerator: Accelerator, groups: list[ScoredGroup]) -> dict[str, float]:
        """The mean of each server, if they are several, of all ranks, each of which calls this."""
        seen, self._seen = self._seen, []
        servers = sorted({group.server for group in groups})
        if len(servers) == 1:
            return {}
        server_N = torch.tensor([servers.index(group.server) for group in groups for _ in group.rewards_G])
        sums = torch.zeros(len(servers), 2, dtype=torch.float64, device=accelerator.device)
        for places_B, sums_B in seen:
            sums.index_add_(0, server_N.to(accelerator.device)[places_B], sums_B)
        totals = accelerator.reduce(sums, "sum").tolist()
        return {
            OF_SERVER + server: total / num_tokens
            for server, (total, num_tokens) in zip(servers, totals, strict=True)
            if num_tokens
        }


def take_mismatches(metrics: dict[str, float], groups: list[ScoredGroup]) -> dict[str, float]:
    """Take those of all servers out of a step's metrics, by endpoint; that of a single one is a metric, and stays."""
    of_servers = {
        name.removeprefix(OF_SERVER): metrics.pop(name) for name in list(metrics) if name.startswith(OF_SERVER)
    }
    if not of_servers and "policy/mismatch_abs_logprob" in metrics:
        of_servers[groups[0].server] = metrics["policy/mismatch_abs_logprob"]
    return of_servers
