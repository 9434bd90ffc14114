"""A learner controlled by a test: the real channel and the real sending half of a push."""

import asyncio
import uuid
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, TypeVar

import numpy as np

from protocol.channel.keys import LearnerKeys
from protocol.channel.sockets import LearnerChannel
from protocol.messages import (
    PROTOCOL_VERSION,
    AdapterSpec,
    Farewell,
    Generate,
    Group,
    GroupFailed,
    Hello,
    Message,
    ModelFingerprint,
    Pulse,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Refused,
    Rendezvous,
    Sampling,
    Score,
    Scores,
    Welcome,
)
from tests.fingerprint import MODEL

TIMEOUT_S = 60.0
PUSH_TIMEOUT_S = 60.0
BUSY_INTERVAL_S, HELLO_INTERVAL_S = 0.02, 3.0
M = TypeVar("M")


class ScriptedLearner:
    """Keeps messages that the test does not wait for, so that the order of unrelated messages does not matter."""

    def __init__(
        self, endpoint: str, run: str = "run-a", model: ModelFingerprint = MODEL, keys: LearnerKeys | None = None
    ) -> None:
        self.channel = LearnerChannel(endpoint, keys)
        self.run, self.model = run, model
        self.learner = uuid.uuid4().hex[:8]
        """Id of this learner process. Another learner may use the same id."""
        self.unread: list[Any] = []
        self._rendezvous_host: Any = None
        self.collective: Any = None
        """Collective of the session. A test may replace it with a corrupting one."""
        self._manifest: Any = None
        self._baseline: Any = None
        self.session = ""
        self.num_bytes = 0
        """That left in the last push."""
        self.num_workers = 1
        self.push_timeout_s = PUSH_TIMEOUT_S

    async def send(self, message: Message) -> None:
        await self.channel.send(message, TIMEOUT_S)

    async def receive(self, kind: type[M] | tuple[type[M], ...], timeout_s: float = TIMEOUT_S) -> M:
        """Return the next message of a kind. Other messages are kept, and pulses dropped unless requested."""
        for index, message in enumerate(self.unread):
            if isinstance(message, kind):
                return self.unread.pop(index)
        async with asyncio.timeout(timeout_s):
            while True:
                message = await self.channel.receive()
                if isinstance(message, kind):
                    return message
                if not isinstance(message, Pulse):
                    self.unread.append(message)

    async def hello(self, protocol_version: int = PROTOCOL_VERSION) -> None:
        hello = Hello(run=self.run, protocol_version=protocol_version, model=self.model, learner=self.learner)
        await self.send(hello)

    async def greet(self) -> Welcome | Refused:
        await self.hello()
        return await self.receive((Welcome, Refused))

    async def join(self) -> Welcome:
        """Say Hello until welcomed. A server whose engine restarts does not answer."""
        while True:
            await self.hello()
            with suppress(TimeoutError):
                answer = await self.receive((Welcome, Refused), HELLO_INTERVAL_S)
                if isinstance(answer, Welcome):
                    return answer
                assert answer.is_busy, answer.reason
                await asyncio.sleep(BUSY_INTERVAL_S)

    async def leave(self) -> None:
        """Free the server."""
        await self.send(Farewell(is_over=True))

    async def generate(
        self, group_id: str, prompt: list[int], deadline_s: float = TIMEOUT_S, salt: str = "",
        experts_from: int | None = None, **sampling: Any
    ) -> None:  # fmt: skip
        wanted = {"num_completions": 2, "max_tokens": 5, **sampling}
        await self.send(
            Generate(
                group_id=group_id, prompt_token_ids=np.array(prompt, dtype=np.int32),
                sampling=Sampling(**wanted), deadline_s=deadline_s, salt=salt, experts_from=experts_from,
            )
        )  # fmt: skip

    async def group(self, group_id: str, prompt: list[int], **options: Any) -> Group:
        """Request a group and wait for it."""
        await self.generate(group_id, prompt, **options)
        answer: Group | GroupFailed = await self.receive((Group, GroupFailed))
        assert isinstance(answer, Group), answer.message
        return answer

    async def score(self, token_ids: list[int], deadline_s: float = TIMEOUT_S, replica: int = 0) -> Scores:
        tokens = np.array(token_ids, dtype=np.int32)
        await self.send(Score(request_id="s", token_ids=tokens, deadline_s=deadline_s, replica=replica))
        return await self.receive(Scores)

    # --- the sending half of a push ----------------------------------------------------------------------------------

    async def begin_push(
        self, version: int, tensors: list, bucket_bytes: int = 1 << 20, wire: Literal["dense", "delta"] = "dense",
        adapter: AdapterSpec | None = None,
    ) -> None:  # fmt: skip
        """Start the first push of a new session. Return when the server is ready and the ranks are connected."""
        import torch

        rendezvous = await self.start_push(version, tensors, bucket_bytes, wire, adapter)
        await self.receive(PushReady)
        self.close_collective()  # that of the session before
        self.collective = await asyncio.to_thread(
            self._rendezvous_host.host_collective, self.session, rendezvous, torch.device("cpu")
        )

    async def start_push(
        self, version: int, tensors: list, bucket_bytes: int = 1 << 20, wire: Literal["dense", "delta"] = "dense",
        adapter: AdapterSpec | None = None,
    ) -> Rendezvous:  # fmt: skip
        """Send the first message of a session; return where the workers join it."""
        from protocol.transports.group import RendezvousHost
        from protocol.weights.buckets import make_manifest
        from protocol.weights.delta import Baseline

        if self._rendezvous_host is None:
            self._rendezvous_host = RendezvousHost("127.0.0.1", self.push_timeout_s)
        self.session = uuid.uuid4().hex[:8]
        rendezvous = self._rendezvous_host.rendezvous(self.num_workers, "tcp")
        self._manifest = make_manifest(tensors, tensors[0][1].dtype, bucket_bytes, wire, adapter)
        self._baseline = Baseline()
        await self.send(
            PushBegin(session=self.session, version=version, rendezvous=rendezvous, manifest=self._manifest)
        )
        return rendezvous

    async def begin_push_again(self, version: int) -> None:
        """Start a push in the current session. Return when the server is ready."""
        self._manifest = self._manifest.of_later_syncs()
        await self.send(PushBegin(session=self.session, version=version))
        await self.receive(PushReady)

    async def transfer(self, tensors: Iterable[tuple[str, Any]]) -> Any:
        """Send the bytes of the started push. Return the sender. Raises PushError."""
        from protocol.weights.buckets import split_into_buckets
        from protocol.weights.delta import send_changes
        from protocol.weights.dense import send_weights

        buckets = split_into_buckets(self._manifest)
        if self._manifest.wire == "delta":
            return await asyncio.to_thread(send_changes, self.collective, buckets, tensors, self._baseline)
        return await asyncio.to_thread(send_weights, self.collective, buckets, tensors)

    async def transfer_expecting_failure(self, tensors: Iterable[tuple[str, Any]]) -> PushFailed:
        """Send the bytes of a push that must fail. Return the server's message."""
        from protocol.errors import PushError

        try:  # small tensors may all be sent before the receiver fails
            await self.transfer(tensors)
        except PushError as error:
            # As in the real learner: gloo forgets a broadcast that started when its connection broke.
            self._rendezvous_host.cancel(self.session, str(error))
        failed = await self.receive((PushDone, PushFailed))
        assert isinstance(failed, PushFailed)
        return failed

    async def push(
        self, version: int, tensors: list, bucket_bytes: int = 1 << 20, wire: Literal["dense", "delta"] = "dense",
        adapter: AdapterSpec | None = None,
    ) -> tuple[PushDone | PushFailed, str]:  # fmt: skip
        """Push in a new session. Return the server's message and the checksum of the sent bytes."""
        await self.begin_push(version, tensors, bucket_bytes, wire, adapter)
        sent = await self.transfer(tensors)
        self.num_bytes = sent.num_bytes
        return await self.receive((PushDone, PushFailed)), sent.checksum

    async def push_again(self, version: int, tensors: list) -> tuple[PushDone | PushFailed, str]:
        """Push in the current session."""
        await self.begin_push_again(version)
        sent = await self.transfer(tensors)
        self.num_bytes = sent.num_bytes
        return await self.receive((PushDone, PushFailed)), sent.checksum

    def close_collective(self) -> None:
        if self.collective is not None:
            self.collective.close()
            self.collective = None

    def close(self) -> None:
        self.close_collective()
        self.channel.close()
