"""Engine interface between the protocol and vLLM.

`vllm_engine.py` implements it on vLLM, `tests/fakes.py` as a script. This module does not import vllm.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from protocol.errors import TRANSIENT_ERROR, SlipstreamError
from protocol.messages import Completion, Manifest, Rendezvous, RoutingShape, Sampling


class EngineDead(SlipstreamError):
    """The engine has stopped permanently. Only a new engine helps."""

    exit_code = TRANSIENT_ERROR


class EngineFailed(SlipstreamError):
    """The engine could not complete one request. Other requests are not affected."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Device, transports and process of one worker."""

    device: str
    """Device name, as returned by protocol.transports.transport.own_device_name."""
    transports: list[str]
    pid: int | None
    """Process id, or None on another node than the server's."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the engine was built for.

    Example: EngineLimits(max_model_len=64, vocab_size=32, dtype="float32", num_workers=1,
    max_concurrent_sequences=256).
    """

    max_model_len: int
    vocab_size: int
    dtype: str
    num_workers: int
    """Number of workers of all replicas."""
    max_concurrent_sequences: int
    """Maximum number of group sequences in one decoding step, over all replicas."""
    num_replicas: int = 1
    """Number of copies of the model, which generate independently."""
    max_lora_rank: int = 0
    """Maximum rank of an adapter that the engine can apply. 0: none."""
    quantization: str = ""
    """Description of what the engine quantizes. Empty if nothing."""
    experts: RoutingShape | None = None
    """Shape of the routed experts that the engine can return. None: it returns none."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a group: new tokens, and the completions that ended with them."""

    entered_version: int
    """Policy version when the group entered the engine."""
    salt: str
    """Salt of the group's KV cache."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    completions: dict[int, Completion]
    """Completions that have ended, by index within the group."""
    prompt_experts: np.ndarray | None = None
    """Routed experts of the prompt, if requested, once a completion has ended."""


WorkerState = Literal["receiving", "received", "loading", "done"]


class PushOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Instructions to every worker for one weight sync.

    The first sync of a session includes `rendezvous` and `manifest`.
    """

    session: str
    version: int
    rendezvous: Rendezvous | None = None
    manifest: Manifest | None = None


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one weight sync on one worker.

    Workers return failures, because an exception would desynchronize vLLM's executor.
    """

    rank: int
    ok: bool
    state: WorkerState
    """Last state that the sync reached."""
    weights_intact: bool
    """False once new tensors have been loaded, until a whole sync has succeeded."""
    checksum: str = ""
    """Checksum of the received bytes. Each bucket has been checked."""
    join_s: float = 0.0
    receive_s: float = 0.0
    load_s: float = 0.0
    error: str = ""
    retryable: bool = True
    """False if the same sync would fail again."""
    interrupted: bool = False
    """Whether the transfer broke off, perhaps at another rank of the session."""


class Engine(Protocol):
    """Engine that generates, scores and loads new weights.

    Methods other than `restart` and `close` raise EngineDead once the engine has stopped.
    """

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def num_steps(self) -> Sequence[int | None]:
        """Step counter of each replica.

        A counter changes whenever any request advances, by tokens or by a prefill chunk. None: the replica is
        known to have no request.
        """
        ...

    async def workers(self) -> Sequence[WorkerInfo]:
        """Return the device, transports and process of every worker."""
        ...

    def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        """Sample the completions of one group.

        Yields at the first tokens, at intervals after that, and at the end of each completion. Canceling the
        iteration frees the slots.

        Args:
            salt: Salt of an earlier group, to reuse its KV cache. Empty: use only the current policy's.
            experts_from: First prompt token whose routed experts are returned. None: return none.

        Raises:
            EngineFailed: Completions are missing at the end.
        """
        ...

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        """Return a replica's logprobs of `token_ids[1:]`, and the policy version.

        The version is None before the first sync.

        Raises:
            EngineFailed: The engine could not score the tokens.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling and keep the sequences in flight. New requests wait for `resume`."""
        ...

    async def resume(self) -> None: ...

    async def stage_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        """Receive a sync into memory on every worker while generation continues.

        Returns when all workers have received the sync, or one has failed.
        """
        ...

    async def load_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        """Load a sync on every worker, which receives it first unless it is staged.

        Blocks generation.
        """
        ...

    async def leave_session(self, session: str) -> None:
        """Close the collective of a session on every worker, if the session is current."""
        ...

    async def set_version(self, version: int) -> None:
        """Set the version label of tokens sampled from now on."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDead if the engine has stopped."""
        ...

    async def restart(self) -> None:
        """Replace a dead engine by a new one, not paused, with the model's own weights.

        Raises:
            EngineDead: The old engine does not exit, or the new one does not answer.
            ConfigError: The new engine cannot be started.
        """
        ...

    def close(self) -> None: ...
