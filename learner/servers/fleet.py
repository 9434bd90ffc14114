"""The inference servers of a run: their links, the choice of one for a request, and waiting for them.

    consumes: welcomes, losses and groups of the links   produces: the server to use, groups, state changes
    waits for: a welcome of any server                   unblocked by: any server at one of the endpoints,
                                                         which may change (membership.py)

Rollouts, weight syncs and the parity probe reach servers only through the members of one fleet. A server that
does not fit the run is excluded, with an error in the log. If it is the last one, the error ends the run, as
a background failure if it happened in the loop.
Invariant: only a ready server is chosen: it is connected and has the version that was published last.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial

from learner.config import LearnerRun
from learner.sandbox.open_files import reserve_open_files
from learner.servers.link import ServerLink
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import EndpointSource, Load, Member, MemberState, least_loaded
from protocol.channel.keys import learner_keys
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused, ServerLost, SlipstreamError
from protocol.messages import Group, GroupFailed, Hello, Refused, RoutingShape, Welcome

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 10.0
CHECK_INTERVAL_S = 0.05
OnGroup = Callable[[Member, Group | GroupFailed], None]
OnMember = Callable[[Member], None]
REREAD_EVERY_S = 5.0
"""Interval between two reads of `endpoints_from`, in seconds."""
CLOSE_AFTER_S = 10.0
"""Delay before a removed server's link is closed, so that sends can end, in seconds."""
FILES_PER_LINK = 10
"""Open files of a link: those of its ZeroMQ context, and its connection."""


def _ignore(*message: object) -> None:
    """Ignore a message: the default callback."""


class Fleet:
    """Servers of one run, usable from any thread."""

    def __init__(self, run: LearnerRun, hello: Hello, loop: LoopThread) -> None:
        self.hello, self.loop = hello, loop
        self.on_wait: Callable[[], object] = lambda: None
        """Called repeatedly while a caller waits for a server or for its result."""
        self.is_interrupted: Callable[[], bool] = lambda: False
        """Whether the run ends after its step, so that a lost server is no longer waited for."""
        self.on_change: Callable[[str], object] = lambda what: None
        """Called in the loop with a sentence about each state change of a server."""
        self.version: int | None = None
        """Version that was published last."""
        self.has_version = asyncio.Event()
        """Set from the first published version on. Awaited in the loop."""
        self.experts: RoutingShape | None = None
        """Shape of the routed experts that each group must have. None: none are requested."""
        self.is_quantized: bool | None = None
        """Whether a server quantized when the run's correction was chosen. None: not chosen yet."""
        self.is_over = False
        """Whether the run would not resume if it ended now. Its servers are then free at once."""
        self._run = run
        self._num_choices = 0
        self._links: list[ServerLink] = []
        """Links of all members, including former ones."""
        self._on_group: OnGroup = _ignore
        self._on_welcome: OnMember = _ignore
        self._on_lost: OnMember = _ignore
        self._num_pending: Mapping[str, int] = {}
        self._keys = learner_keys(run.keys) if run.keys is not None else None
        has_keys = self._keys is not None
        self._source = (
            EndpointSource(run.endpoints_from, has_keys=has_keys, insecure=run.insecure) if run.endpoints_from else None
        )
        self._problem: str | None = None
        """Why servers could not be added."""
        endpoints = self._source.endpoints if self._source else run.servers
        self.members: tuple[Member, ...] = self._open(endpoints)

    def start(
        self, on_group: OnGroup, on_welcome: OnMember = _ignore, on_lost: OnMember = _ignore,
        num_pending: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Start the handshakes with all servers. All callbacks run in the loop.

        Args:
            on_lost: Called when a server may never answer its pending requests.
            num_pending: Number of groups pending at each endpoint, read again at each use.
        """
        self._on_group, self._on_welcome, self._on_lost = on_group, on_welcome, on_lost
        self._num_pending = num_pending if num_pending is not None else {}
        for member in self.members:
            self.loop.spawn(self._keep(member))
        if self._source is not None:
            self.loop.spawn(self._reread(self._source))

    def leave(self) -> None:
        """Free the servers if the run is over. Call this after all other messages."""
        if self.is_over:
            self.loop.end(self._leave_all(), LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """Close the sockets. Call this after the loop has stopped."""
        for link in self._links:
            link.close()

    # --- called from any thread ----------------------------------------------------------------------------

    @property
    def is_several(self) -> bool:
        return len(self.members) > 1 or self._source is not None

    def connected(self) -> list[Member]:
        """Return the members with a connected server that is not draining."""
        return [member for member in self.members if member.state(self.version) in ("syncing", "ready")]

    @property
    def is_connected(self) -> bool:
        return bool(self.connected())

    @property
    def is_generating(self) -> bool:
        """True if a server is connected, or a draining one still has pending groups."""
        return self.is_connected or any(
            member.link.connected and not member.is_gone and self._num_pending.get(member.endpoint, 0) > 0
            for member in self.members
        )

    def wait(self, closing: threading.Event | None = None) -> list[Member]:
        """Block until a server has welcomed this run. Return an empty list if the run is interrupted meanwhile.

        Raises:
            DeadlineExceeded: No server did so within `learner.connect_timeout_s`.
            HandshakeRefused: The last server does not fit this run.
            ServerLost: `closing` is set.
        """
        deadline = time.monotonic() + self._run.learner.connect_timeout_s
        while not (members := self.connected()):
            self.loop.raise_failure()
            self.on_wait()
            if closing is not None and closing.is_set():
                raise ServerLost(f"stopped waiting for {self.describe()}: the learner is shutting down")
            if self.is_interrupted():
                log.warning("stopped waiting for %s: the run was interrupted", self.describe())
                return []
            if time.monotonic() > deadline:
                raise self.no_server()
            time.sleep(min(CHECK_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        return members

    def no_server(self) -> DeadlineExceeded:
        """Return the error for a run without a server for `learner.connect_timeout_s`."""
        patience_s = self._run.learner.connect_timeout_s
        if busy := [f"{one.endpoint}: {one.link.busy.reason}" for one in self.members if one.link.busy is not None]:
            silent = sum(one.state(self.version) == "joining" and one.link.busy is None for one in self.members)
            others = f" {silent} of {len(self.members)} servers do not answer." if silent else ""
            return DeadlineExceeded(
                f"run {self.hello.run} waited {patience_s:.0f} s (learner.connect_timeout_s) for a server that "
                f"another learner uses.{others} {'. '.join(busy)}. Raise learner.connect_timeout_s to wait longer"
            )
        handshakes_fail = any(member.link.handshakes_fail for member in self.members)
        keys = " and `keys` (the peer there rejects every handshake)" if handshakes_fail else ""
        return DeadlineExceeded(
            f"no inference server answers at {self._endpoints()} after {patience_s:.0f} s; start one with "
            f"`slipstream serve run.toml`, check `endpoint{'s' * self.is_several}`{keys}, or raise "
            "learner.connect_timeout_s"
        )

    def describe(self) -> str:
        """Describe the servers that the run waits for."""
        return f"{'any of the inference servers' if self.is_several else 'the inference server'} at {self._endpoints()}"

    def exclude(self, member: Member, error: SlipstreamError) -> None:
        """Exclude a server that does not fit this run. Raises `error` if it is the last."""
        if all(other is member or other.is_gone for other in self.members):
            raise error
        log.error("excluded the server at %s: %s", member.endpoint, error)
        member.is_gone = True
        self.loop.call_soon(self._leave, member)

    def drop(self, member: Member) -> None:
        """Stop requests to a server whose weight sync failed, until its next one."""
        self.loop.call_soon(self._dropped, member)

    def idle_time(self) -> tuple[float, float]:
        """Return the servers' seconds without a group, and the seconds that their heartbeats cover, so far."""
        times = [link.idle_time for link in self._links]
        return sum(idle_s for idle_s, _ in times), sum(observed_s for _, observed_s in times)

    def metrics(self) -> dict[str, float]:
        """Return the refused messages and, for several servers, their states."""
        links = [member.link for member in self.members]
        metrics = {"rollout/messages_refused": float(sum(link.num_refused for link in links))}
        if self.is_several:
            states = Counter(member.state(self.version) for member in self.members)
            names: tuple[MemberState, ...] = ("joining", "syncing", "ready", "draining", "gone")
            metrics |= {f"servers/{name}": float(states[name]) for name in names}
        return metrics

    # --- called in the loop --------------------------------------------------------------------------------

    def published(self, version: int, server_ids: Collection[str]) -> None:
        """Record that these servers generate with `version`, even if a link is down for a moment.

        Servers with an older version get no requests until they have this one.
        """
        self.version = version
        self.has_version.set()
        for member in self.members:
            welcome = member.link.welcome
            if welcome is not None and welcome.server_id in server_ids:
                member.served = (welcome.server_id, version)
            self._report_state(member)

    def is_ready(self, member: Member) -> bool:
        return member.state(self.version) == "ready"

    def choose(self, without: Collection[Member] = (), stays_at: str = "") -> Member | None:
        """Return the ready server for the next request, or None.

        `stays_at`: endpoint of the server that sampled the previous turn of the episode.
        """
        ready = [member for member in self.members if member not in without and self.is_ready(member)]
        loads = [Load(self._num_pending.get(member.endpoint, 0), member.chosen_at) for member in ready]
        endpoints = [member.endpoint for member in ready]
        index = least_loaded(loads, endpoints.index(stays_at) if stays_at in endpoints else None)
        if index is None:
            return None
        self._num_choices += 1
        ready[index].chosen_at = self._num_choices
        return ready[index]

    @property
    def max_concurrent_sequences(self) -> int:
        """Number of sequences that all ready servers can generate at once."""
        welcomes = [member.welcome for member in self.members if self.is_ready(member)]
        return sum(welcome.max_concurrent_sequences for welcome in welcomes if welcome is not None)

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length that all servers support, including former ones."""
        return min(link.welcome.max_model_len for link in self._links if link.welcome is not None)

    def _open(self, endpoints: Collection[str], num_others: int = 0) -> tuple[Member, ...]:
        """Return new members. Not for the loop: it looks up each name, which may take DNS many seconds.

        Raises:
            ConfigError: This process may not open the files for all members. libzmq would abort it.
        """
        reserve_open_files(num_others + len(endpoints), FILES_PER_LINK, "servers (`endpoints`, `endpoints_from`)")
        members = list[Member]()
        for endpoint in endpoints:
            link = ServerLink(endpoint, self.hello, keys=self._keys, insecure=self._run.insecure)
            self._links.append(link)
            members.append(Member(endpoint, link))
        return tuple(members)

    async def _keep(self, member: Member) -> None:
        member.task, member.link.on_lost = asyncio.current_task(), partial(self._lost, member)
        member.link.on_draining = partial(self._note_draining, member)
        member.link.on_busy = partial(self._note_busy, member)
        try:
            await member.link.run(partial(self._on_group, member), partial(self._welcomed, member))
        except* HandshakeRefused as refused:
            error = refused.exceptions[0]
            assert isinstance(error, HandshakeRefused)
            self.exclude(member, error)

    async def _reread(self, source: EndpointSource) -> None:
        """Add servers that are new in the list, and drain those that left it."""
        while True:
            await asyncio.sleep(REREAD_EVERY_S)
            endpoints = await asyncio.to_thread(source.reread)
            self.members = tuple(
                member for member in self.members if not member.is_gone or member.endpoint in endpoints
            )
            known = [member.endpoint for member in self.members]
            await self._add([endpoint for endpoint in endpoints if endpoint not in known])
            for member in self.members:
                was_draining = member.is_draining
                member.is_unlisted = member.endpoint not in endpoints
                self._report_state(member)
                if member.is_draining and not was_draining:
                    self.loop.spawn(self._drain(member))

    async def _add(self, endpoints: Collection[str], in_place_of: Member | None = None) -> None:
        num_others = sum(member is not in_place_of for member in self.members)
        new: tuple[Member, ...] = ()
        try:
            new = await asyncio.to_thread(self._open, endpoints, num_others)
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("%s; not adding %s", error, ", ".join(endpoints))
        self.members = (*(member for member in self.members if member is not in_place_of), *new)
        for member in new:
            self.loop.spawn(self._keep(member))

    def _note_draining(self, member: Member) -> None:
        """Handle the notice of a server that it is draining."""
        self._report_state(member)
        if not self.is_connected:
            log.info(
                "the server at %s is shutting down and no other server is connected; waiting up to %g s for one "
                "(learner.connect_timeout_s)",
                member.endpoint, self._run.learner.connect_timeout_s,
            )  # fmt: skip
        if not member.is_unlisted:
            self.loop.spawn(self._drain(member))

    async def _drain(self, member: Member) -> None:
        """Wait until a draining server has nothing pending, is lost, or is listed again.

        A server that shuts down on its own is waited for until it disconnects. The wait ends after
        `learner.drain_timeout_s`, and the pending groups are then requested elsewhere.
        """
        deadline = time.monotonic() + self._run.learner.drain_timeout_s
        while member.is_draining and member.link.connected:
            num_pending = self._num_pending.get(member.endpoint, 0)
            if not num_pending and not member.link.is_draining:
                break
            if time.monotonic() > deadline:
                if num_pending:
                    log.warning(
                        "the server at %s still has %d pending groups after %g s (learner.drain_timeout_s); "
                        "requesting them from other servers",
                        member.endpoint, num_pending, self._run.learner.drain_timeout_s,
                    )  # fmt: skip
                break
            await asyncio.sleep(CHECK_INTERVAL_S)
        if member.is_draining:
            member.is_gone = True
            self._leave(member)
            # A server that appears at this endpoint later is a new member, even if it is listed again
            # before the next read.
            await self._add([] if member.is_unlisted else [member.endpoint], in_place_of=member)

    def _note_busy(self, member: Member, refused: Refused) -> None:
        message = f"the server at {member.endpoint} is not free: {refused.reason}"
        self.on_change(message)
        log.warning(
            "%s. Waiting for it; the run stops after %g s without any server (learner.connect_timeout_s)",
            message, self._run.learner.connect_timeout_s,
        )  # fmt: skip

    def _welcomed(self, member: Member, welcome: Welcome) -> None:
        for other in self.members:
            if other is member or other.is_gone or other.welcome is None:
                continue
            if other.welcome.server_id == welcome.server_id:
                self.exclude(member, ConfigError(f"it is the server at {other.endpoint} under another address"))
                return
        if member.served is not None and member.served[0] != welcome.server_id:
            self._dropped(member)
        self._report_state(member)
        self._on_welcome(member)

    def _lost(self, member: Member) -> None:
        self._report_state(member)
        self._on_lost(member)

    def _dropped(self, member: Member) -> None:
        member.served = None
        self._lost(member)

    def _leave(self, member: Member) -> None:
        self._lost(member)
        if member.task is not None:
            member.task.cancel()
        self.loop.spawn(self._close(member))

    async def _close(self, member: Member) -> None:
        """Close the link, and free the server for another run."""
        is_shared = self._has_another_link(member)
        # This only marks the link as disconnected: its task is canceled and sends no Hello.
        await member.link.greet_again()
        await asyncio.sleep(CLOSE_AFTER_S)
        if not is_shared:
            await member.link.leave()
        member.link.close()

    def _has_another_link(self, member: Member) -> bool:
        """Return whether another member is connected to the same server."""
        welcome = member.link.welcome
        return welcome is not None and any(
            other is not member and other.welcome is not None and other.welcome.server_id == welcome.server_id
            for other in self.members
        )

    async def _leave_all(self) -> None:
        await asyncio.gather(*(link.leave() for link in self._links))

    def _report_state(self, member: Member) -> None:
        state, before = member.state(self.version), member.noted_state
        member.noted_state = state
        if state == before:
            return
        message = f"the server at {member.endpoint}: {before} → {state}"
        self.on_change(message)
        if self.is_several:
            log.info("%s", message)

    def _endpoints(self) -> str:
        return ", ".join(member.endpoint for member in self.members)
