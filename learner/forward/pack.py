"""The tokens of several groups in one row: each prompt once, its completions after it, no padding.

    prompts, completions ─▶ Pack ─▶ attention.py: who sees whom    logprobs.py: the pass, and back to one row a completion

Invariant: token n of the row has the position that it has in its sequence, and sees what it sees there. The last token of a
completion predicts nothing, so it is not in the row.

Suffixes: N packed tokens, M predicted tokens, B completions, T tokens of the longest completion, S tokens of the longest
sequence.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch


class Segment(NamedTuple):
    """A run of tokens that the same sequences have: a prompt, or what a completion has alone.

    Segments lie depth first: what continues one follows it without a gap, up to `continued_until`.
    """

    start: int
    length: int
    position: int
    """Of its first token in the sequence."""
    continued_until: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> np.ndarray:
        return np.arange(self.start, self.end)


class Pack(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one forward pass reads, on the device that computes it."""

    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    predicting_M: torch.Tensor
    """Which of the N tokens predicts; completion after completion."""
    targets_M: torch.Tensor
    is_token_BT: torch.Tensor
    """Where the M predicted tokens stand in a row for each completion."""
    segments: tuple[Segment, ...]
    paths_B: tuple[tuple[Segment, ...], ...]
    """The segments of each completion's sequence, the prompt first."""
    plans: dict[object, object] = msgspec.field(default_factory=dict)
    """Room for what attention.py works out once for all layers and passes."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    def unpacked(self, values_M: torch.Tensor) -> torch.Tensor:
        """values_BT: a row for each completion, 0 behind its end."""
        return values_M.new_zeros(self.is_token_BT.shape).masked_scatter(self.is_token_BT, values_M)

    def sequences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows_BS, predicting_M): which of the N tokens stand in each sequence, the first again behind its end, and which of the
        B · S predict.
        """
        rows_B = [np.concatenate([segment.rows for segment in path]) for path in self.paths_B]
        rows_BS = np.zeros((len(rows_B), max(map(len, rows_B))), np.int64)
        is_predicting_BS = np.zeros(rows_BS.shape, bool)
        for b, (rows, num_predicted) in enumerate(zip(rows_B, self.is_token_BT.sum(dim=1).tolist(), strict=True)):
            rows_BS[b, : len(rows)] = rows
            is_predicting_BS[b, len(rows) - num_predicted : len(rows)] = True
        device = self.token_ids_N.device
        return torch.from_numpy(rows_BS).to(device), torch.from_numpy(np.flatnonzero(is_predicting_BS)).to(device)


def pack(groups: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]], device: torch.device) -> Pack:
    """Lay out groups of (prompt, completions): token ids, a prompt of at least one."""
    segments: list[Segment] = []
    paths: list[tuple[Segment, ...]] = []
    for prompt, completions in groups:
        branches = list(_branches(_end(segments) + len(prompt), len(prompt), completions))
        root = Segment(_end(segments), len(prompt), 0, branches[-1].end)
        segments += [root, *branches]
        paths += [(root, branch) for branch in branches]
    completions_B = [completion for _, completions in groups for completion in completions]
    predicting_B = [
        np.concatenate([[root.end - 1], branch.rows])[: len(completion)]
        for (root, branch), completion in zip(paths, completions_B, strict=True)
    ]
    lengths_B1 = np.array([len(completion) for completion in completions_B])[:, None]
    inputs = [part for prompt, completions in groups for part in (prompt, *(ids[:-1] for ids in completions))]

    def on_device(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Pack(
        token_ids_N=on_device(inputs),
        positions_N=on_device([segment.position + np.arange(segment.length) for segment in segments]),
        predicting_M=on_device(predicting_B),
        targets_M=on_device(completions_B),
        is_token_BT=torch.from_numpy(np.arange(lengths_B1.max()) < lengths_B1).to(device),
        segments=tuple(segments),
        paths_B=tuple(paths),
    )


def _branches(start: int, position: int, completions: Sequence[np.ndarray]) -> Iterator[Segment]:
    for completion in completions:
        length = max(0, len(completion) - 1)
        yield Segment(start, length, position, start + length)
        start += length


def _end(segments: list[Segment]) -> int:
    return segments[-1].continued_until if segments else 0
