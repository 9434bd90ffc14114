"""What a mean over tokens hides and one token can be: the extreme ratios of a step, and how much of an update's gradient one token is.

Between the loss of a micro-batch and the metrics, over micro-batches, updates and ranks.

Suffixes: U updates, N micro-batches or ranks (M, R).
"""

import math

import torch
from accelerate import Accelerator

MAX_NATS = 20.0
"""As in the loss: beyond it a ratio is no different."""
MIN_PULL = 1e-12
"""Of a row whose advantage is 0."""


class Extremes:
    """Since the last `take`."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []
        """Of each micro-batch, where it was computed, since to look at it now would wait for the GPU: -lowest and highest log-ratio,
        largest pull and its multiplier, sum of the pulls."""

    def see(self, log_ratio_BT: torch.Tensor, pull_BT: torch.Tensor, plain_pull_B: torch.Tensor) -> None:
        """Log-ratios to the behavior policy and |∂ loss / ∂ logprob|, both 0 outside the mask: a ratio of 1 is no extreme.

        `plain_pull_B`: of a row's tokens by weight and advantage alone.
        """
        low, high = log_ratio_BT.float().nan_to_num().aminmax()
        pull_BT = pull_BT.float().nan_to_num()
        heaviest = pull_BT.argmax()
        pull, plain_pull = pull_BT.flatten()[heaviest], plain_pull_B[heaviest // pull_BT.shape[1]].float()
        self._seen.append(torch.stack([-low, high, pull, pull / plain_pull.clamp(min=MIN_PULL), pull_BT.sum()]))

    def take(self, accelerator: Accelerator, num_updates: int) -> dict[str, float]:
        """Return the metrics of the updates since, each with as many micro-batches, of all ranks, each of which calls this.

        loss/max_token_share: the largest share that one token has of Σ |∂ loss / ∂ logprob| over the tokens of an update.
        loss/max_token_multiplier: how much more that token pulls than its row's weight and advantage make it.
        """
        nothing = [torch.zeros(5, device=accelerator.device)] * num_updates
        seen_UM5 = torch.stack(self._seen or nothing).view(num_updates, -1, 5)
        self._seen.clear()
        of_ranks_RU5 = accelerator.gather(_joined(seen_UM5).unsqueeze(0))
        all_U5 = _joined(of_ranks_RU5.transpose(0, 1))
        low, high = all_U5[:, :2].amax(dim=0).tolist()
        metrics = {"policy/ratio_min": math.exp(-min(low, MAX_NATS)), "policy/ratio_max": math.exp(min(high, MAX_NATS))}
        shares = [(pull / total, multiplier) for _, _, pull, multiplier, total in all_U5.tolist() if total > 0]
        return metrics | dict(
            zip(("loss/max_token_share", "loss/max_token_multiplier"), max(shares, default=()), strict=False)
        )


def _joined(seen_UN5: torch.Tensor) -> torch.Tensor:
    """Of each update, over its micro-batches or ranks."""
    heaviest_U11 = seen_UN5[..., 2:3].argmax(dim=1, keepdim=True)
    heaviest_U2 = seen_UN5[..., 2:4].gather(1, heaviest_U11.expand(-1, -1, 2)).squeeze(1)
    return torch.cat([seen_UN5[..., :2].amax(dim=1), heaviest_U2, seen_UN5[..., 4:].sum(dim=1)], dim=1)
