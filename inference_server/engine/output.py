"""Tokens on their way from the engine's process to a finished group.

    scheduler ── an output per token ──▶ Pieces: held ── an output per piece ──▶ vLLM's front end ──▶ Completions: the group

vLLM's front end hands tokens on by `stream_interval`, but receives each one: on a CPU that costs 12 µs of the engine's core per token
and 30 µs of the front end's, a tenth of a small model's token. vLLM also keeps 189 bytes per token, as Python numbers in lists;
`Completions` keeps 8, and frees vLLM's with each completion that ends.

Invariant: the front end receives what it would have received, in the same order and with the same versions, only later. The first
token of a request, everything that comes with its end, and outputs with more than tokens and logprobs are never held.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import wraps
from operator import attrgetter, is_
from typing import Any

import msgspec
import numpy as np
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import LogprobsLists

from inference_server.engine.interface import EngineFailed
from protocol.messages import Completion


class Piece(msgspec.Struct):
    """What is held of a request that has had its first token."""

    client: int
    """Of vLLM's front ends, the one that it came from."""
    size: int
    """So many tokens are told together."""
    token_ids: list[int] = []
    logprobs: list[LogprobsLists] = []

    def hold(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def let_go(self, output: EngineCoreOutput) -> None:
        """Put what is held before what an output has."""
        self.hold(output)
        output.new_token_ids = self.token_ids
        if self.logprobs:
            output.new_logprobs = _joined(self.logprobs)
        self.token_ids, self.logprobs = [], []


class Pieces:
    """Of all requests of one engine."""

    def __init__(self, requests: Mapping[str, Any]) -> None:
        """`requests` are the engine's own, by their ids, without those that have just ended."""
        self._requests = requests
        self._held: dict[str, Piece] = {}

    def take(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Of the outputs of a step, return those that the front end is to get now."""
        due = [output for output in outputs if self._is_due(output)]
        if len(self._held) > len(self._requests):  # some have ended
            self._held = {name: piece for name, piece in self._held.items() if name in self._requests}
        return due

    def _is_due(self, output: EngineCoreOutput) -> bool:
        piece = self._held.get(output.request_id)
        if piece is None:
            if (request := self._requests.get(output.request_id)) is not None:
                self._held[output.request_id] = Piece(request.client_index, _size_of_pieces(request.sampling_params))
            return True
        if len(piece.token_ids) + len(output.new_token_ids) < piece.size and _has_tokens_alone(output):
            piece.hold(output)
            return False
        piece.let_go(output)
        return True

    def take_all(self) -> dict[int, EngineCoreOutputs]:
        """Return all that is held, by the front end that is to get it."""
        outputs: dict[int, EngineCoreOutputs] = defaultdict(lambda: EngineCoreOutputs(outputs=[]))
        for name, piece in self._held.items():
            if piece.token_ids and name in self._requests:
                output = EngineCoreOutput(name, [])
                piece.let_go(output)
                outputs[piece.client].outputs.append(output)
        return outputs


def _size_of_pieces(params: SamplingParams | None) -> int:
    """One token where the front end looks for the text that ends a completion: the engine would go on until it sees it."""
    return 1 if params is None or params.stop else params.stream_interval or 1


def _has_tokens_alone(output: EngineCoreOutput) -> bool:
    """Whether every other field has its default, also those that a later vLLM adds: what is held loses them."""
    return all(map(is_, _others_of(output), _DEFAULTS))


_HELD = {"request_id", "new_token_ids", "new_logprobs"}
_OTHERS = {field.name: field.default for field in msgspec.structs.fields(EngineCoreOutput) if field.name not in _HELD}
_others_of, _DEFAULTS = attrgetter(*_OTHERS), tuple(_OTHERS.values())
"""None and 0, of which there is one each, so that no tensor is compared with them."""


def _joined(parts: list[LogprobsLists]) -> LogprobsLists:
    if len(parts) == 1:
        return parts[0]
    token_ids, logprobs, ranks, _ = zip(*parts, strict=True)
    return LogprobsLists(np.concatenate(token_ids), np.concatenate(logprobs), np.concatenate(ranks))


def send_in_pieces() -> None:
    """Change vLLM's engine, in this process."""
    attach_weight_version, set_weight_version = EngineCore._attach_weight_version, EngineCore.set_weight_version

    def pieces_of(engine: Any) -> Pieces:
        if not hasattr(engine, "pieces"):
            engine.pieces = Pieces(engine.scheduler.requests)
        return engine.pieces

    @wraps(attach_weight_version)
    def attach_and_hold(engine: Any, outputs: dict[int, EngineCoreOutputs]) -> None:
        attach_weight_version(engine, outputs)
        for of_client in outputs.values():
            of_client.outputs = pieces_of(engine).take(of_client.outputs)

    @wraps(set_weight_version)
    def let_go_and_set(engine: Any, version: str) -> None:
        outputs = pieces_of(engine).take_all()
        attach_weight_version(engine, outputs)
        for of_client in outputs.items():
            engine.output_queue.put_nowait(of_client)
        set_weight_version(engine, version)

    EngineCore._attach_weight_version, EngineCore.set_weight_version = attach_and_hold, let_go_and_set


class Completions:
    """Of one request. Each is given out once, when it has ended."""

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._token_ids: dict[int, list[np.ndarray]] = defaultdict(list)
        self._logprobs: dict[int, list[np.ndarray]] = defaultdict(list)
        self._ends: Counter[str] = Counter()

    def take(self, parts: Sequence[CompletionOutput]) -> dict[int, Completion]:
        """Return what has ended with these parts, by its index; what vLLM has aborted is left out."""
        return {part.index: completion for part in parts if (completion := self._take(part)) is not None}

    def _take(self, part: CompletionOutput) -> Completion | None:
        index = part.index
        self._token_ids[index].append(np.asarray(part.token_ids, dtype=np.int32))
        # One that was aborted before its first token has none.
        logprobs = part.logprobs.logprobs if part.logprobs is not None else []
        self._logprobs[index].append(np.asarray(logprobs, dtype=np.float32))
        if part.finish_reason is None:
            return None
        self._ends[part.finish_reason] += 1
        token_ids, logprobs = (np.concatenate(parts.pop(index)) for parts in (self._token_ids, self._logprobs))
        if part.finish_reason not in ("stop", "length"):
            return None
        return Completion(
            token_ids=token_ids,
            behaviour_logprobs=logprobs,
            versions=[(int(span.version), span.end - span.start) for span in part.weight_versions],
            finish_reason=part.finish_reason,
        )

    def check(self) -> None:
        """Raises EngineFailed unless vLLM has ended all of them by itself."""
        num_finished = self._ends["stop"] + self._ends["length"]
        if num_finished < self._num_completions:
            raise EngineFailed(
                f"vLLM finished {num_finished} of {self._num_completions} completions (finish_reason: {dict(self._ends)})"
            )
