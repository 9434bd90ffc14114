"""The completions of one group as they come out of vLLM, piece by piece.

vLLM keeps 189 bytes for each token of a request, as Python's numbers in lists. Here it is 8 from the moment that it comes, and
vLLM's go with each completion that ends: a long one does not keep those of its siblings.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from vllm.outputs import CompletionOutput

from inference_server.engine.interface import EngineFailed
from protocol.messages import Completion


class Completions:
    """Of one request. Each is given out once, when it has ended."""

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._token_ids: dict[int, list[np.ndarray]] = defaultdict(list)
        self._logprobs: dict[int, list[np.ndarray]] = defaultdict(list)
        self._ends: Counter[str] = Counter()

    def take(self, pieces: Sequence[CompletionOutput]) -> dict[int, Completion]:
        """Return what has ended with these pieces, by its index; what vLLM has aborted is left out."""
        return {piece.index: completion for piece in pieces if (completion := self._take(piece)) is not None}

    def _take(self, piece: CompletionOutput) -> Completion | None:
        index = piece.index
        self._token_ids[index].append(np.asarray(piece.token_ids, dtype=np.int32))
        # One that was aborted before its first token has none.
        logprobs = piece.logprobs.logprobs if piece.logprobs is not None else []
        self._logprobs[index].append(np.asarray(logprobs, dtype=np.float32))
        if piece.finish_reason is None:
            return None
        self._ends[piece.finish_reason] += 1
        token_ids, logprobs = (np.concatenate(pieces.pop(index)) for pieces in (self._token_ids, self._logprobs))
        if piece.finish_reason not in ("stop", "length"):
            return None
        return Completion(
            token_ids=token_ids,
            behaviour_logprobs=logprobs,
            versions=[(int(span.version), span.end - span.start) for span in piece.weight_versions],
            finish_reason=piece.finish_reason,
        )

    def check(self) -> None:
        """Raises EngineFailed unless vLLM has ended all of them by itself."""
        num_finished = self._ends["stop"] + self._ends["length"]
        if num_finished < self._num_completions:
            raise EngineFailed(
                f"vLLM finished {num_finished} of {self._num_completions} completions (finish_reason: {dict(self._ends)})"
            )
