"""Rank 0's part of a reference on a server: its weights there, and the scores of the groups.

    connect ─▶ (keep_ready while a batch is awaited ─▶ refresh after a step, when one is due) ─▶ close

It joins what the parts below know: the policy, its copy in a file, the server, and the groups.
"""

import logging
import time
from contextlib import ExitStack

import msgspec

from learner.policy.published import PublishedPolicy
from learner.policy.server_reference import ReferenceCopy, ServerReference
from learner.rollouts.reference_scores import ReferenceScores
from learner.run_inputs import RunInputs
from learner.servers.fleet import Fleet
from learner.servers.parity import longest_scored
from learner.servers.reference_server import ReferenceServer, check_context
from learner.storage.files import writing
from protocol.endpoint import exposure
from protocol.errors import ConfigError
from protocol.messages import Welcome

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.05


class ReferenceController(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Rank 0's part of a reference on a server: its weights there, and the scores of the groups."""

    run_inputs: RunInputs
    state: ServerReference
    scores: ReferenceScores
    copy: ReferenceCopy | None
    """Copy of the policy that the server gets. None: the server is frozen."""
    published: PublishedPolicy
    fleet: Fleet
    """The servers of the policy."""

    @classmethod
    def open(
        cls,
        run_inputs: RunInputs,
        state: ServerReference,
        published: PublishedPolicy,
        fleet: Fleet,
        after_loop: ExitStack,
    ) -> "ReferenceController":
        """Open the connection in the loop of `fleet`. `after_loop` closes its sockets."""
        run = run_inputs.run
        is_synced = run.learner.reference.is_synced
        copy = ReferenceCopy(state.file, published.wire_dtype, published.device) if is_synced else None
        server = ReferenceServer(run, fleet.hello, fleet.loop, copy)
        after_loop.callback(server.fleet.close)
        if note := exposure(server.endpoint, has_keys=run.keys is not None):
            log.warning(note)
        server.fleet.on_wait = published.still_waiting
        server.start()
        scores = ReferenceScores(server)
        return cls(run_inputs=run_inputs, state=state, scores=scores, copy=copy, published=published, fleet=fleet)

    def close(self) -> None:
        """Leave the server, and free it if the run is over. Call this before the loop stops."""
        self.scores.server.close(is_over=self.fleet.is_over)

    def connect(self, version: int) -> None:
        """Wait until the server has the reference. The policy of `version` may be the reference itself."""
        if self.copy is not None:
            if self.state.version == version:  # otherwise the checkpoint had the copy
                self._write()
            self.scores.server.expect(self.state.version)
        log.info("waiting for the reference's server at %s", self.scores.server.endpoint)
        started = time.monotonic()
        while not self.keep_ready(started):
            self.published.still_waiting()
            time.sleep(POLL_INTERVAL_S)

    def keep_ready(self, waits_since: float) -> bool:
        """Check the server, and refill it, when it is new. Raises as ReferenceServer.keep_ready."""
        return self.scores.server.keep_ready(self._check, waits_since)

    def refresh(self, version: int) -> None:
        """Make the current policy the reference. The next `keep_ready` sends it."""
        self._write()
        self.scores.refresh(version)

    def _write(self) -> None:
        assert self.copy is not None
        with writing(self.copy.file):
            self.copy.write(self.published.tensors())

    def _check(self, endpoint: str, welcome: Welcome) -> None:
        config = self.run_inputs.run.learner
        if config.environment.is_used:
            longest = config.environment.max_episode_tokens or self.fleet.max_model_len
            remedy = f"set learner.environment.max_episode_tokens = {longest_scored(welcome.max_model_len)}"
        else:
            longest = self.run_inputs.prompts.longest()[1] + config.sampling.max_tokens
            remedy = "lower learner.sampling.max_tokens"
        check_context(endpoint, welcome, longest, remedy=remedy)
        if welcome.quantization:
            _judge_quantization(endpoint, welcome.quantization, is_copy=self.copy is not None)
        if self.copy is None:
            self.state.require_same_model(endpoint, welcome.model_digest)
            is_own = welcome.model_digest == self.run_inputs.model_digest
            log.info(
                "the reference is the model of the server at %s, %s",
                endpoint, "the one that the run starts from" if is_own else "another one than the policy",
            )  # fmt: skip


def _judge_quantization(endpoint: str, quantization: str, *, is_copy: bool) -> None:
    """Refuse a copy of the policy that is quantized, and warn of a model that is.

    Raises:
        ConfigError: The KL to a quantized copy would contain its rounding.
    """
    described = f'learner.reference.endpoint = "{endpoint}": the server quantizes ({quantization})'
    if is_copy:
        raise ConfigError(
            f"{described}, so that the KL to its copy of the policy would contain the rounding. Start it with "
            "--server.quantization None --server.kv-cache-dtype None"
        )
    log.warning(
        "%s, and the KL contains the rounding; to avoid it, start the server without server.quantization and "
        "server.kv_cache_dtype",
        described,
    )
