"""Lay out the tokens of several groups in one row, without padding and with common prefixes stored once.

    prompts ─▶ Run: their common prefix ─▶ prompts that end there, and child runs where the others diverge
    runs, completions ─▶ Pack ─▶ tree_attention.py: who sees what    logprobs.py: pass, one row a completion

Invariant: the runs on the path to a prompt's end contain exactly that prompt. Each token keeps the position
and the visible tokens of its own sequence. The row omits the last token of a completion, which predicts
nothing.

Suffixes: N packed tokens, M predicted tokens, B completions, T tokens of the longest completion, S tokens of
the longest sequence, R rows that predict.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

MIN_SHARED = 32
"""Minimum length of a shared run. Recomputing fewer tokens costs less than another block of keys."""


class TokenRun(msgspec.Struct, frozen=True, eq=False):
    """A node of the tree of prompts: tokens `start` to `end` of each prompt below it."""

    start: int
    end: int
    of: int
    """Index of one of these prompts."""
    ends: list[int]
    """Indices of the prompts that end with this run."""
    goes_on: list["TokenRun"]


class Segment(NamedTuple):
    """A run of tokens shared by the same sequences: part of a prompt, or a completion.

    Segments are in depth-first order. Everything that continues a segment follows it without a gap, up to
    `continued_until`.
    """

    start: int
    length: int
    position: int
    """Position of the first token in the sequence."""
    continued_until: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> np.ndarray:
        return np.arange(self.start, self.end)


class Pack(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of one forward pass, on the device that computes it."""

    token_ids_N: torch.Tensor
    positions_N: torch.Tensor
    predicting_M: torch.Tensor
    """Indices into the N tokens that predict, completion after completion."""
    targets_M: torch.Tensor
    is_token_BT: torch.Tensor
    """Mask of the M predicted tokens, with one row for each completion."""
    segments: tuple[Segment, ...]
    paths_B: tuple[tuple[Segment, ...], ...]
    """Segments of each completion's sequence, the prompt first."""
    plans: dict[object, object] = msgspec.field(default_factory=dict)
    """Cache of values that are computed once for all layers and passes."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_N)

    @property
    def read_R(self) -> torch.Tensor:
        """Rows that predict anything, each once and in order."""
        if "read" not in self.plans:
            self.plans["read"] = self.predicting_M.unique()
        return cast(torch.Tensor, self.plans["read"])

    def unpacked(self, values_M: torch.Tensor) -> torch.Tensor:
        """Return values_BT, one row for each completion, with 0 after its end."""
        return values_M.new_zeros(self.is_token_BT.shape).masked_scatter(self.is_token_BT, values_M)

    def sequences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (rows_BS, predicting_M), the pack as padded sequences.

        rows_BS holds the indices of each sequence's tokens in the pack, padded with index 0. predicting_M
        holds the indices into the flattened B · S tokens that predict.
        """
        rows_B = [np.concatenate([segment.rows for segment in path]) for path in self.paths_B]
        rows_BS = np.zeros((len(rows_B), max(map(len, rows_B))), np.int64)
        is_predicting_BS = np.zeros(rows_BS.shape, bool)
        for b, (rows, num_predicted) in enumerate(zip(rows_B, self.is_token_BT.sum(dim=1).tolist(), strict=True)):
            rows_BS[b, : len(rows)] = rows
            is_predicting_BS[b, len(rows) - num_predicted : len(rows)] = True
        device = self.token_ids_N.device
        return torch.from_numpy(rows_BS).to(device), torch.from_numpy(np.flatnonzero(is_predicting_BS)).to(device)


Group = tuple[np.ndarray, Sequence[np.ndarray]]
"""Token ids of a prompt, at least one, and of its completions."""


def pack(groups: Sequence[Group], device: torch.device) -> Pack:
    """Lay out groups without sharing tokens between their prompts."""
    return pack_trees([[group] for group in groups], device)


def pack_trees(trees: Sequence[Sequence[Group]], device: torch.device) -> Pack:
    """Lay out trees of groups. The prompts of a tree share their common prefixes."""
    laying = _Laying()
    for groups in trees:
        laying.add([(prompt, completion) for prompt, completions in groups for completion in completions])
    completions_B = [completion for groups in trees for _, completions in groups for completion in completions]
    predicting_B = [
        np.concatenate([[path[-2].end - 1], path[-1].rows])[: len(completion)]
        for path, completion in zip(laying.paths_B, completions_B, strict=True)
    ]
    lengths_B1 = np.array([len(completion) for completion in completions_B])[:, None]

    def on_device(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Pack(
        token_ids_N=on_device(laying.inputs),
        positions_N=on_device([segment.position + np.arange(segment.length) for segment in laying.segments]),
        predicting_M=on_device(predicting_B),
        targets_M=on_device(completions_B),
        is_token_BT=torch.from_numpy(np.arange(lengths_B1.max()) < lengths_B1).to(device),
        segments=tuple(laying.segments),
        paths_B=tuple(laying.paths_B),
    )


def runs_of(prompts: Sequence[np.ndarray]) -> list[TokenRun]:
    """Return the root runs of prompts, which are identified by index.

    No function here calls itself: an episode may have more nested branches than Python allows calls.
    """
    roots: list[TokenRun] = []
    pending = [(alike, 0, roots) for alike in _by_next(prompts, range(len(prompts)), 0)]
    pending.reverse()
    while pending:
        members, start, siblings = pending.pop()
        first = members[0]
        end = min(common_length(prompts[first], prompts[member]) for member in members)
        ends = [member for member in members if len(prompts[member]) == end]
        longer = [member for member in members if len(prompts[member]) > end]
        if end - start >= MIN_SHARED or not longer:
            siblings.append(run := TokenRun(start, end, first, ends, []))
            start, siblings = end, run.goes_on
        elif ends:
            siblings.append(TokenRun(start, end, ends[0], ends, []))
        pending += [(alike, start, siblings) for alike in reversed(_by_next(prompts, longer, end))]
    return roots


def _by_next(prompts: Sequence[np.ndarray], members: Sequence[int], position: int) -> list[list[int]]:
    """Return the prompts grouped by their token at `position`."""
    alike: dict[int, list[int]] = {}
    for member in members:
        alike.setdefault(int(prompts[member][position]), []).append(member)
    return list(alike.values())


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix."""
    if one is other:
        return len(one)
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


class _Laying:
    """Segments laid out so far, depth first."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.inputs: list[np.ndarray] = []
        """Token ids of each segment."""
        self.paths_B: list[tuple[Segment, ...]] = []

    def add(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Add a tree of (prompt, completion) pairs."""
        prompts, inputs = [prompt for prompt, _ in sequences], [ids[:-1] for _, ids in sequences]
        runs = _depth_first(runs_of(prompts))
        num_rows = [run.end - run.start + sum(len(inputs[i]) for i in run.ends) for run, _ in runs]
        for i in reversed(range(len(runs))):
            if (parent := runs[i][1]) is not None:
                num_rows[parent] += num_rows[i]
        start = self.segments[-1].end if self.segments else 0
        paths_of_runs: list[tuple[Segment, ...]] = []
        paths: dict[int, tuple[Segment, ...]] = {}
        for (run, parent), rows in zip(runs, num_rows, strict=True):
            segment = Segment(start, run.end - run.start, run.start, start + rows)
            path = (*(() if parent is None else paths_of_runs[parent]), segment)
            paths_of_runs.append(path)
            start = self._append(segment, prompts[run.of][run.start : run.end])
            for i in run.ends:
                leaf = Segment(start, len(inputs[i]), run.end, start + len(inputs[i]))
                paths[i] = (*path, leaf)
                start = self._append(leaf, inputs[i])
        self.paths_B += [paths[i] for i in range(len(sequences))]

    def _append(self, segment: Segment, ids: np.ndarray) -> int:
        """Append a segment; return the next free row."""
        self.segments.append(segment)
        self.inputs.append(ids)
        return segment.end


def _depth_first(roots: Sequence[TokenRun]) -> list[tuple[TokenRun, int | None]]:
    """Return each run before those that continue it, with the index of the run that it continues in this list."""
    runs: list[tuple[TokenRun, int | None]] = []
    pending: list[tuple[TokenRun, int | None]] = [(run, None) for run in reversed(roots)]
    while pending:
        runs.append(pending.pop())
        pending += [(longer, len(runs) - 1) for longer in reversed(runs[-1][0].goes_on)]
    return runs
