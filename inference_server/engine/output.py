"""Tokens on their way from the engine process to a finished group.

    scheduler ── per token ──▶ OutputBuffer: held ── per chunk ──▶ vLLM's front end ──▶ Completions

vLLM's front end emits tokens by `stream_interval`, but receives each one. On a CPU, receiving a token costs
12 µs of the engine's core and 30 µs of the front end's: a tenth of the time per token of a small model. vLLM
also keeps 189 bytes per token, as Python numbers in lists. `Completions` keeps 8 bytes, and frees vLLM's
lists at the end of each completion.

Invariant: the front end receives the same tokens in the same order with the same versions, only later. Never
held: a request's first token, its end, and outputs with more than tokens, logprobs and routed experts.
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


class HeldOutput(msgspec.Struct):
    """Held output of a request that has had its first token."""

    client: int
    """Index of the vLLM front end that sent the request."""
    size: int
    """Number of tokens per chunk."""
    token_ids: list[int] = []
    logprobs: list[LogprobsLists] = []
    experts: list[np.ndarray] = []

    def hold(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.routed_experts is not None:
            self.experts.append(output.routed_experts)

    def release(self, output: EngineCoreOutput) -> None:
        """Prepend the held tokens, logprobs and routed experts to this output."""
        self.hold(output)
        output.new_token_ids = self.token_ids
        if self.logprobs:
            output.new_logprobs = _joined(self.logprobs)
        if self.experts:
            output.routed_experts = np.concatenate(self.experts)
        self.token_ids, self.logprobs, self.experts = [], [], []


class OutputBuffer:
    """Held output of all requests of one engine."""

    def __init__(self, requests: Mapping[str, Any]) -> None:
        """Hold nothing yet. `requests` is the engine's own table of unfinished requests."""
        self._requests = requests
        self._held: dict[str, HeldOutput] = {}

    def take(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Return the outputs of a step that the front end gets now, and hold the rest."""
        due = [output for output in outputs if self._is_due(output)]
        if len(self._held) > len(self._requests):  # Some requests have ended.
            self._held = {name: held for name, held in self._held.items() if name in self._requests}
        return due

    def _is_due(self, output: EngineCoreOutput) -> bool:
        held = self._held.get(output.request_id)
        if held is None:
            if (request := self._requests.get(output.request_id)) is not None:
                self._held[output.request_id] = HeldOutput(request.client_index, _chunk_size(request.sampling_params))
            return True
        if len(held.token_ids) + len(output.new_token_ids) < held.size and _has_tokens_alone(output):
            held.hold(output)
            return False
        held.release(output)
        return True

    def take_all(self) -> dict[int, EngineCoreOutputs]:
        """Return all held output, by front end."""
        outputs: dict[int, EngineCoreOutputs] = defaultdict(lambda: EngineCoreOutputs(outputs=[]))
        for name, held in self._held.items():
            if held.token_ids and name in self._requests:
                output = EngineCoreOutput(name, [])
                held.release(output)
                outputs[held.client].outputs.append(output)
        return outputs


def _chunk_size(params: SamplingParams | None) -> int:
    """Return the chunk size of a request, in tokens.

    It is 1 with stop strings: the engine generates until the front end finds one in the text.
    """
    return 1 if params is None or params.stop else params.stream_interval or 1


def _has_tokens_alone(output: EngineCoreOutput) -> bool:
    """Return True if the output may be held.

    Holding loses all fields except tokens, logprobs and routed experts, so the others must have their defaults.
    This includes fields of later vLLM versions.
    """
    return all(map(is_, _others_of(output), _DEFAULTS))


_HELD = {"request_id", "new_token_ids", "new_logprobs", "routed_experts"}
_OTHERS = {field.name: field.default for field in msgspec.structs.fields(EngineCoreOutput) if field.name not in _HELD}
_others_of, _DEFAULTS = attrgetter(*_OTHERS), tuple(_OTHERS.values())
"""Getter and defaults of all other fields. The defaults are the singletons None and 0, compared by identity,
so that no tensor is compared with them."""


def _joined(parts: list[LogprobsLists]) -> LogprobsLists:
    """Concatenate the rows of several steps.

    The rows of a step are as wide as the most logprobs that any of its requests wants. The narrowest step has
    all that this request wants.
    """
    if len(parts) == 1:
        return parts[0]
    token_ids, logprobs, ranks, _ = zip(*parts, strict=True)
    width = min(rows.shape[1] for rows in logprobs)
    return LogprobsLists(
        np.concatenate([rows[:, :width] for rows in token_ids]),
        np.concatenate([rows[:, :width] for rows in logprobs]),
        np.concatenate(ranks),
    )


def send_in_chunks() -> None:
    """Patch vLLM's engine in this process, so that it sends chunks."""
    attach_weight_version, set_weight_version = EngineCore._attach_weight_version, EngineCore.set_weight_version

    def buffer_of(engine: Any) -> OutputBuffer:
        if not hasattr(engine, "output_buffer"):
            engine.output_buffer = OutputBuffer(engine.scheduler.requests)
        return engine.output_buffer

    @wraps(attach_weight_version)
    def attach_and_hold(engine: Any, outputs: dict[int, EngineCoreOutputs]) -> None:
        attach_weight_version(engine, outputs)
        for of_client in outputs.values():
            of_client.outputs = buffer_of(engine).take(of_client.outputs)

    @wraps(set_weight_version)
    def release_and_set(engine: Any, version: str) -> None:
        outputs = buffer_of(engine).take_all()
        attach_weight_version(engine, outputs)
        for of_client in outputs.items():
            engine.output_queue.put_nowait(of_client)
        set_weight_version(engine, version)

    EngineCore._attach_weight_version, EngineCore.set_weight_version = attach_and_hold, release_and_set


class Completions:
    """Completions of one request. Each is returned once, when it has ended."""

    prompt_experts: np.ndarray | None = None
    """Routed experts of the prompt, as the first completion that ended has computed them."""

    def __init__(self, num_completions: int, num_prompt_experts: int | None = None) -> None:
        """Collect nothing yet. `num_prompt_experts` prompt tokens have routed experts; None: no token has."""
        self._num_completions, self._num_prompt_experts = num_completions, num_prompt_experts
        self._token_ids: dict[int, list[np.ndarray]] = defaultdict(list)
        self._logprobs: dict[int, list[np.ndarray]] = defaultdict(list)
        self._ends: Counter[str] = Counter()

    def add(self, parts: Sequence[CompletionOutput]) -> dict[int, Completion]:
        """Return the completions that end with these parts, by index.

        Completions that vLLM has aborted are left out.

        Raises:
            EngineFailed: Routed experts are missing.
        """
        return {part.index: completion for part in parts if (completion := self._add(part)) is not None}

    def _add(self, part: CompletionOutput) -> Completion | None:
        index = part.index
        self._token_ids[index].append(np.asarray(part.token_ids, dtype=np.int32))
        # A completion that was aborted before its first token has no logprobs.
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
            behavior_logprobs=logprobs,
            versions=[(int(span.version), span.end - span.start) for span in part.weight_versions],
            finish_reason=part.finish_reason,
            experts=self._experts_of(part.routed_experts, len(token_ids)),
        )

    def _experts_of(self, experts: np.ndarray | None, num_tokens: int) -> np.ndarray | None:
        """Return the routed experts of a completion's tokens, and keep those of its prompt if they are the first."""
        num_prompt = self._num_prompt_experts
        if num_prompt is None:
            return None
        expected, found = num_prompt + num_tokens - 1, 0 if experts is None else len(experts)
        if experts is None or found != expected:
            raise EngineFailed(f"vLLM returned the routed experts of {found} tokens, expected {expected}")
        if self.prompt_experts is None:
            self.prompt_experts = experts[:num_prompt].copy()
        return experts[num_prompt:].copy()  # a view would keep the prompt's rows of each completion

    def check(self) -> None:
        """Raise EngineFailed unless vLLM has finished all completions."""
        num_finished = self._ends["stop"] + self._ends["length"]
        if num_finished < self._num_completions:
            raise EngineFailed(
                f"vLLM finished {num_finished} of {self._num_completions} completions "
                f"(finish_reason: {dict(self._ends)})"
            )
