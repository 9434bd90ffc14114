"""The server that computes the reference's logprobs: its connection, its model and its scores.

    main thread    keep_ready: welcome ─▶ check it ─▶ frozen: ready       otherwise: weight sync of the copy ─▶ ready
    loop           score: wait until ready ─▶ Score ─▶ Scores             lost meanwhile: again

It is a fleet of one server, apart from the servers of the policy. The server may be killed and started again at
any moment: nothing but its scores is lost, and those are requested again.
Invariant: every score returned is that of `version`: the run's copy of this version, or the server's own model.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np

from learner.config import LearnerRun
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.parity import longest_scored
from learner.servers.sync_source import Weights
from learner.servers.weight_sync import WeightSync
from protocol.errors import ConfigError, DeadlineExceeded, ParityError, ServerLost
from protocol.messages import Hello, Welcome, new_learner_id

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.05
NUM_AT_ONCE = 64
"""Sequences that the server scores at once. More would not fill its steps better, and their time in its queue would
count against learner.reference.timeout_s."""


class ReferenceServer:
    """Connection to the reference's server. `score` is for the loop, all else for the main thread."""

    def __init__(self, run: LearnerRun, hello: Hello, loop: LoopThread, copy: Weights | None) -> None:
        """Open the connection; `start` begins the handshake.

        `copy`: the copy of the policy that weight syncs send. None: the server is frozen.
        """
        config = self._config = run.learner.reference
        assert config.endpoint is not None
        self.endpoint, self._connect_timeout_s = config.endpoint, run.learner.connect_timeout_s
        own = msgspec.structs.replace(
            run, endpoint=self.endpoint, endpoints=(), endpoints_from=None,
            learner=msgspec.structs.replace(run.learner, reference=msgspec.structs.replace(config, endpoint=None)),
        )  # fmt: skip
        # With a name of its own, it cannot take a server from the policy that has another address here.
        hello = msgspec.structs.replace(hello, learner=new_learner_id(), only_scores=copy is None)
        self.fleet = Fleet(own, hello, loop)
        sync_config = msgspec.structs.replace(run.learner.weight_sync, compression="none", lora="merged")
        self._sync = WeightSync(self.fleet, copy, sync_config) if copy is not None else None
        self.version: int | None = None
        """Policy version of the copy that the server must have. None: it is frozen."""
        self._ready_id = ""
        """Id of the checked server that has the reference's weights."""
        self._seen_at = time.monotonic()
        self._num_replicas, self._next_replica = 1, 0
        self._places = asyncio.Semaphore(NUM_AT_ONCE)
        self.num_scored_tokens = 0

    def start(self) -> None:
        self.fleet.start(lambda member, group: None)

    def close(self, *, is_over: bool) -> None:
        """Abort a weight sync in progress, and free the server if the run is over."""
        if self._sync is not None:
            self._sync.close()
        self.fleet.is_over = is_over
        self.fleet.leave()

    def keep_ready(self, check: Callable[[str, Welcome], None], waits_since: float) -> bool:
        """Check the server, and send it the copy, whenever it is new or has lost its weights.

        `check(endpoint, welcome)` raises ConfigError if the server does not fit the run. `waits_since` is when the
        caller began to wait, by the monotonic clock. Returns whether the server is ready.

        Raises:
            ConfigError: The server does not fit the run.
            DeadlineExceeded: No server was connected, or another learner had it, for `learner.connect_timeout_s`.
            PushError: The copy cannot be sent.
        """
        self.fleet.loop.raise_failure()
        welcome = self._member.welcome
        if welcome is None:
            if time.monotonic() - max(self._seen_at, waits_since) > self._connect_timeout_s:
                if self._member.link.busy is not None:
                    raise DeadlineExceeded(f"learner.reference.endpoint: {self.fleet.no_server()}")
                raise DeadlineExceeded(
                    f"no server of the reference answers at {self.endpoint} (learner.reference.endpoint) after "
                    f"{self._connect_timeout_s:g} s; start it with `slipstream serve`, or raise "
                    "learner.connect_timeout_s"
                )
            return False
        self._seen_at = time.monotonic()
        if welcome.server_id != self._ready_id:
            check(self.endpoint, welcome)
            if self._sync is None:
                self._require_own_model(welcome)
                self._set_ready(welcome)
            else:
                self._send()
        return welcome.server_id == self._ready_id

    def expect(self, version: int) -> None:
        """Return only scores of the copy of `version` from now on. The next `keep_ready` sends it."""
        self._ready_id = ""  # before the version: no score of the earlier copy may pass for one of this version
        self.version = version

    def _send(self) -> None:
        assert self._sync is not None and self.version is not None
        self._sync.send(self.version, [self._member])
        if self._sync.holders(self.version) and (welcome := self._member.welcome) is not None:
            self._set_ready(welcome)
            log.info("the reference's server at %s has the policy of version %d", self.endpoint, self.version)

    def _set_ready(self, welcome: Welcome) -> None:
        self._num_replicas = welcome.num_replicas
        self._ready_id = welcome.server_id  # last: from now on, the loop sends scores to its replicas

    def _require_own_model(self, welcome: Welcome) -> None:
        if not welcome.is_untouched:
            raise ConfigError(
                f'learner.reference.endpoint = "{self.endpoint}": weight syncs of another run have replaced the '
                "server's own model; start it again"
            )

    @property
    def _member(self) -> Member:
        return self.fleet.members[0]

    # --- called in the loop --------------------------------------------------------------------------------

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the reference's logprobs of a sequence's tokens after its first.

        Waits for the server as long as necessary: `keep_ready` limits this.

        Raises:
            DeadlineExceeded: The server is connected but did not answer within `learner.reference.timeout_s`.
            ParityError: It scored with other weights, or a logprob is NaN.
            SlipstreamError: The server cannot score the sequence.
        """
        async with self._places:
            while True:
                member = self._member
                welcome, version = member.welcome, self.version
                if welcome is None or welcome.server_id != self._ready_id:
                    await asyncio.sleep(POLL_INTERVAL_S)
                    continue
                self._next_replica = (self._next_replica + 1) % self._num_replicas
                try:
                    scores = await member.link.score(token_ids, self._config.timeout_s, self._next_replica)
                except ServerLost as error:
                    log.info("requesting the reference's logprobs again: %s", error)
                    continue
                except DeadlineExceeded as error:
                    raise DeadlineExceeded(
                        f"{error}, as the reference (learner.reference.timeout_s); its engine may hang: see its log, "
                        "then continue with --resume"
                    ) from error
                if version == self.version:  # otherwise it was refreshed meanwhile
                    break
        if scores.policy_version != version:
            raise ParityError(
                f"the reference's server at {self.endpoint} scored with version {scores.policy_version}; expected "
                f"version {version}; restart that server, then the learner with --resume"
            )
        if len(scores.logprobs) != len(token_ids) - 1 or np.isnan(scores.logprobs).any():
            raise ParityError(
                f"the reference's server at {self.endpoint} returned {len(scores.logprobs)} logprobs of "
                f"{len(token_ids)} tokens, {int(np.isnan(scores.logprobs).sum())} of them NaN; check its model and "
                "server.dtype"
            )
        self.num_scored_tokens += len(token_ids)
        return scores.logprobs


def check_context(endpoint: str, welcome: Welcome, longest: int, *, remedy: str) -> None:
    """Check that the server can score sequences of `longest` tokens. `remedy` makes them shorter.

    Raises:
        ConfigError: Its context is too short.
    """
    if longest > longest_scored(welcome.max_model_len):
        raise ConfigError(
            f'learner.reference.endpoint = "{endpoint}": the server has max_model_len = {welcome.max_model_len}, and '
            f"scoring the run's longest sequence of {longest} tokens needs one more than that; set "
            f"server.max_model_len = {longest + 1} there, or {remedy}"
        )
