"""What the server needs from an engine: the seam between the protocol and vLLM.

`vllm_engine.py` implements it on vLLM, `tests/fakes.py` as a script. Nothing here imports vllm.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

from protocol.errors import SlipstreamError
from protocol.messages import Completion, Manifest, Rendezvous, Sampling


class EngineDead(SlipstreamError):
    """The engine has stopped for good; only another one helps."""


class EngineFailed(SlipstreamError):
    """The engine could not do one request; others are not affected."""


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker computes, and how weights can reach it."""

    device: str
    """As protocol.transports.transport.own_device_name gives it."""
    transports: list[str]
    pid: int


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was built for.

    Example: EngineLimits(max_model_len=64, vocab_size=32, dtype="float32", num_workers=1, max_concurrent_sequences=256)
    """

    max_model_len: int
    vocab_size: int
    dtype: str
    num_workers: int
    """Of all replicas."""
    max_concurrent_sequences: int
    """Of all replicas."""
    num_replicas: int = 1
    """Copies of the model that generate each for itself."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """That a group has got on: tokens were sampled, and with them these of its completions have ended."""

    entered_version: int
    """The policy version when the group entered the engine."""
    salt: str
    """What its keys and values are kept under."""
    num_cached_tokens: int = 0
    """Of its prompt, those whose keys and values were there already."""
    completions: dict[int, Completion]
    """By index within the group."""


WorkerState = Literal["receiving", "received", "loading", "done"]


class PushOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker is told of one push; `rendezvous` and `manifest` come with the first push of an epoch."""

    epoch: str
    version: int
    rendezvous: Rendezvous | None = None
    manifest: Manifest | None = None


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How one push went on one worker. Workers return failures: an exception would desynchronise vLLM's executor."""

    rank: int
    ok: bool
    state: WorkerState
    """How far it came."""
    weights_intact: bool
    """False once new tensors have been loaded, until a whole push has succeeded."""
    checksum: str = ""
    """Of the bytes that came, each bucket of them checked."""
    join_s: float = 0.0
    receive_s: float = 0.0
    load_s: float = 0.0
    error: str = ""
    retryable: bool = True
    """False if the same push would fail again."""


class Engine(Protocol):
    """Generates, scores and takes new weights. All methods but `restart` raise EngineDead once the engine has stopped."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def num_steps(self) -> Sequence[int | None]:
        """Of each replica: changes whenever it gets on with anyone's request, by tokens or by a piece of a long prompt.

        None: it is known to have no request.
        """
        ...

    async def places(self) -> Sequence[WorkerPlace]:
        """Ask every worker where it is."""
        ...

    def generate(self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str) -> AsyncIterator[Sampled]:
        """Sample the completions of one group; tell of its first tokens, of further ones now and then, and of every end.

        `salt`: of an earlier group, whose keys and values may be used; empty: only those of the policy there is now.

        Cancelling whoever waits for it frees their places. Raises EngineFailed, in the end, unless all completions have come.
        """
        ...

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        """Return a replica's logprobs of `token_ids[1:]` and the version of the policy that gave them, None before the first push.

        Raises EngineFailed.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling, keep the sequences in flight; what is asked for from now on waits for `resume`."""
        ...

    async def resume(self) -> None: ...

    async def stage_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        """Let every worker receive a push into memory while generation goes on; end when all have, or one has failed."""
        ...

    async def load_push(self, order: PushOrder) -> Sequence[WorkerReport]:
        """Let every worker load a push, which it receives first unless it was staged; blocks generation."""
        ...

    async def leave_epoch(self, epoch: str) -> None:
        """Close the collective of an epoch on every worker, if it is the current one."""
        ...

    async def set_version(self, version: int) -> None:
        """Label the tokens sampled from now on."""
        ...

    def check_alive(self) -> None:
        """Raise EngineDead if the engine has stopped."""
        ...

    async def restart(self) -> None:
        """Take the place of an engine that has died: not paused, with the model's own weights.

        Raises EngineDead, ConfigError when it cannot be started.
        """
        ...

    def close(self) -> None: ...
