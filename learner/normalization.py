"""How much each token counts in the loss of an optimizer step. Pure; weighs rows as batches are built."""

from typing import Literal

Normalization = Literal["token", "sequence", "dr_grpo"]


def row_weight(
    normalization: Normalization, *, row_tokens: int, num_tokens: int, num_rows: int, max_tokens: int
) -> float:
    """The weight of each token of a row; counts are over the whole step, all ranks, before anything is masked.

    token:    1 / num_tokens, every token alike                          (DAPO, arXiv 2503.14476)
    sequence: 1 / (num_rows · row_tokens), every completion alike        (GRPO, arXiv 2402.03300)
    dr_grpo:  1 / (num_rows · max_tokens), a constant                    (Dr. GRPO, arXiv 2503.20783)
    """
    match normalization:
        case "token":
            return 1 / num_tokens
        case "sequence":
            return 1 / (num_rows * max(row_tokens, 1))
        case "dr_grpo":
            return 1 / (num_rows * max_tokens)
