"""The inference servers of a run: their links, kept up in the learner's event loop, which of them is asked next, and the waiting
for them.

    consumes: welcomes, losses and groups of the links      produces: the server to ask, its groups, what became of whom
    waits for: a welcome of any                             unblocked by: whatever server listens at one of the endpoints,
                                                            which may change (membership.py)

Rollouts, pushes and the parity probe talk to servers through the members of one fleet (membership.py has their states), and nothing
else knows how. A server that does not fit the run is left out with an error in the log; what is wrong with the last one ends the
run, as a failure of the loop's background if it came there. Invariant: only a ready server is chosen: one that is connected and
has the version that was published last.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial

from learner.config import LearnerRun
from learner.servers.link import ServerLink
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Load, Member, Membership, State, least_loaded
from protocol.channel.keys import learner_keys
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused, ServerLost, SlipstreamError
from protocol.messages import Group, GroupFailed, Hello, Refused, Welcome

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.05
OnGroup = Callable[[Member, Group | GroupFailed], None]
OnMember = Callable[[Member], None]
REREAD_EVERY_S = 5.0
"""Of `endpoints_from`."""
CLOSE_AFTER_S = 10.0
"""What was being said to a server that is gone has ended by then."""


def _ignore(*message: object) -> None:
    """Of a fleet that nobody asks for groups."""


class Fleet:
    """The servers of one run, reached from any thread."""

    def __init__(self, run: LearnerRun, hello: Hello, loop: LoopThread) -> None:
        self.hello, self.loop = hello, loop
        self.on_wait: Callable[[], object] = lambda: None
        """Called again and again by whoever waits for a server, or for what it gives."""
        self.on_change: Callable[[str], object] = lambda what: None
        """Called in the loop with a sentence whenever a server has changed its state."""
        self.version: int | None = None
        """The one that was published last."""
        self.is_over = False
        """Whether the run would not come back if it ended now, so that the servers are free for others at once."""
        self._run = run
        self._num_choices = 0
        self._links: list[ServerLink] = []
        """Of all members there ever were."""
        self._on_group: OnGroup = _ignore
        self._on_welcome: OnMember = _ignore
        self._on_lost: OnMember = _ignore
        self._num_owed: Mapping[str, int] = {}
        self._keys = learner_keys(run.keys) if run.keys is not None else None
        has_keys = self._keys is not None
        self._membership = (
            Membership(run.endpoints_from, has_keys=has_keys, insecure=run.insecure) if run.endpoints_from else None
        )
        endpoints = self._membership.endpoints if self._membership else run.servers
        self.members: tuple[Member, ...] = loop.call(self._open(endpoints), OPEN_TIMEOUT_S)

    def start(
        self, on_group: OnGroup, on_welcome: OnMember = _ignore, on_lost: OnMember = _ignore,
        num_owed: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Begin to greet the servers. All are called in the loop; `on_lost` when what a server owes may never come from it.

        `num_owed`: how many groups each endpoint owes, now and whenever it is looked at.
        """
        self._on_group, self._on_welcome, self._on_lost = on_group, on_welcome, on_lost
        self._num_owed = num_owed if num_owed is not None else {}
        for member in self.members:
            self.loop.spawn(self._keep(member))
        if self._membership is not None:
            self.loop.spawn(self._reread(self._membership))

    def leave(self) -> None:
        """Free the servers if the run is over. The last thing that is said to them."""
        if self.is_over:
            self.loop.call(self._leave_all(), OPEN_TIMEOUT_S)

    def close(self) -> None:
        """Close the sockets; the loop has stopped."""
        for link in self._links:
            link.close()

    # --- from any thread -----------------------------------------------------------------------------------------

    @property
    def is_several(self) -> bool:
        return len(self.members) > 1 or self._membership is not None

    def connected(self) -> list[Member]:
        """The members whose server is there now, ready or not."""
        return [member for member in self.members if member.state(self.version) in ("syncing", "ready")]

    @property
    def is_connected(self) -> bool:
        return bool(self.connected())

    def wait(self, closing: threading.Event | None = None) -> list[Member]:
        """Block until a server has welcomed this run. Raises DeadlineExceeded, HandshakeRefused, ServerLost when `closing`."""
        deadline = time.monotonic() + self._run.learner.connect_timeout_s
        while not (members := self.connected()):
            self.loop.raise_failure()
            self.on_wait()
            if closing is not None and closing.is_set():
                raise ServerLost(f"{self.in_words()} is no longer waited for: the learner ends")
            if time.monotonic() > deadline:
                raise self.no_server()
            time.sleep(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
        return members

    def no_server(self) -> DeadlineExceeded:
        """The error when none has answered, or been free, for `learner.connect_timeout_s`."""
        patience_s = self._run.learner.connect_timeout_s
        if busy := [f"{one.endpoint}: {one.link.busy.reason}" for one in self.members if one.link.busy is not None]:
            silent = sum(one.state(self.version) == "joining" and one.link.busy is None for one in self.members)
            others = f" {silent} of {len(self.members)} servers do not answer." if silent else ""
            return DeadlineExceeded(
                f"run {self.hello.run} waited {patience_s:.0f} s (learner.connect_timeout_s) for a server that another learner "
                f"has.{others} {'. '.join(busy)}. Raise learner.connect_timeout_s to wait longer"
            )
        handshakes_fail = any(member.link.handshakes_fail for member in self.members)
        keys = " and `keys` (what listens there ends every handshake)" if handshakes_fail else ""
        return DeadlineExceeded(
            f"no inference server answers at {self._places()} after {patience_s:.0f} s; start one "
            f"with `inference-server run.toml`, check `endpoint{'s' * self.is_several}`{keys}, or raise learner.connect_timeout_s"
        )

    def in_words(self) -> str:
        """Who is waited for."""
        return f"{'any of the inference servers' if self.is_several else 'the inference server'} at {self._places()}"

    def expel(self, member: Member, error: SlipstreamError) -> None:
        """Leave a server out for good that does not fit this run. Raises `error` if it is the last."""
        if all(other is member or other.is_gone for other in self.members):
            raise error
        log.error("the server at %s is left out from now on: %s", member.endpoint, error)
        member.is_gone = True
        self.loop.call_soon(self._leave, member)

    def drop(self, member: Member) -> None:
        """Its last push failed: it must be pushed to again before it is asked for groups."""
        self.loop.call_soon(self._dropped, member)

    def metrics(self) -> dict[str, float]:
        """How busy the servers are, what of theirs could not be used, and, of several, how many are in which state."""
        links = [member.link for member in self.members]
        metrics = {"rollout/messages_refused": float(sum(link.num_refused for link in links))}
        idle = [link.server_idle_frac for link in links if link.server_idle_frac is not None]
        if idle:
            metrics["perf/server_idle_frac"] = sum(idle) / len(idle)
        if self.is_several:
            states = Counter(member.state(self.version) for member in self.members)
            names: tuple[State, ...] = ("joining", "syncing", "ready", "draining", "gone")
            metrics |= {f"servers/{name}": float(states[name]) for name in names}
        return metrics

    # --- in the loop ---------------------------------------------------------------------------------------------

    def published(self, version: int, server_ids: Collection[str]) -> None:
        """These servers now generate with `version`; whoever has an older one is not asked until it has this one."""
        self.version = version
        for member in self.members:
            if member.welcome is not None and member.welcome.server_id in server_ids:
                member.served = (member.welcome.server_id, version)
            self._note(member)

    def is_ready(self, member: Member) -> bool:
        return member.state(self.version) == "ready"

    def choose(self, without: Collection[Member] = (), stays_at: str = "") -> Member | None:
        """Return the ready server to ask next; None if there is none. `stays_at`: the endpoint of one that has begun with this."""
        ready = [member for member in self.members if member not in without and self.is_ready(member)]
        loads = [Load(self._num_owed.get(member.endpoint, 0), member.chosen_at) for member in ready]
        endpoints = [member.endpoint for member in ready]
        index = least_loaded(loads, endpoints.index(stays_at) if stays_at in endpoints else None)
        if index is None:
            return None
        self._num_choices += 1
        ready[index].chosen_at = self._num_choices
        return ready[index]

    @property
    def max_concurrent_sequences(self) -> int:
        """Of all ready servers."""
        welcomes = [member.welcome for member in self.members if self.is_ready(member)]
        return sum(welcome.max_concurrent_sequences for welcome in welcomes if welcome is not None)

    @property
    def max_model_len(self) -> int:
        """That every server has which was ever there."""
        return min(link.welcome.max_model_len for link in self._links if link.welcome is not None)

    async def _open(self, endpoints: Collection[str]) -> tuple[Member, ...]:
        links = [ServerLink(one, self.hello, keys=self._keys, insecure=self._run.insecure) for one in endpoints]
        self._links += links
        return tuple(Member(link.endpoint, link) for link in links)

    async def _keep(self, member: Member) -> None:
        member.task, member.link.on_lost = asyncio.current_task(), partial(self._lost, member)
        member.link.on_draining = partial(self._drains, member)
        member.link.on_busy = partial(self._must_wait, member)
        try:
            await member.link.run(partial(self._on_group, member), partial(self._welcomed, member))
        except* HandshakeRefused as refused:
            error = refused.exceptions[0]
            assert isinstance(error, HandshakeRefused)
            self.expel(member, error)

    async def _reread(self, membership: Membership) -> None:
        """Take in the servers that have come into the list, and let those finish that have left it."""
        while True:
            await asyncio.sleep(REREAD_EVERY_S)
            endpoints = await asyncio.to_thread(membership.look)
            self.members = tuple(
                member for member in self.members if not member.is_gone or member.endpoint in endpoints
            )
            known = [member.endpoint for member in self.members]
            await self._take_in([endpoint for endpoint in endpoints if endpoint not in known])
            for member in self.members:
                was_draining = member.is_draining
                member.is_unlisted = member.endpoint not in endpoints
                self._note(member)
                if member.is_draining and not was_draining:
                    self.loop.spawn(self._drain(member))

    async def _take_in(self, endpoints: Collection[str], in_place_of: Member | None = None) -> None:
        new = await self._open(endpoints)
        self.members = (*(member for member in self.members if member is not in_place_of), *new)
        for member in new:
            self.loop.spawn(self._keep(member))

    def _drains(self, member: Member) -> None:
        """The server has said that it ends."""
        self._note(member)
        if not self.is_connected:
            log.info(
                "the server at %s is draining and ends; no other is there, so one is waited for, up to %g s "
                "(learner.connect_timeout_s)",
                member.endpoint, self._run.learner.connect_timeout_s,
            )  # fmt: skip
        if not member.is_unlisted:
            self.loop.spawn(self._drain(member))

    async def _drain(self, member: Member) -> None:
        """Wait until it owes nothing, is lost, or is wanted again. One that ends by itself does so once it is owed nothing either."""
        deadline = time.monotonic() + self._run.learner.drain_timeout_s
        while member.is_draining and member.link.connected:
            num_owed = self._num_owed.get(member.endpoint, 0)
            if not num_owed and not member.link.is_draining:
                break
            if time.monotonic() > deadline:
                if num_owed:
                    log.warning(
                        "the server at %s still owes %d groups after %g s (learner.drain_timeout_s); they are asked for elsewhere",
                        member.endpoint, num_owed, self._run.learner.drain_timeout_s,
                    )  # fmt: skip
                break
            await asyncio.sleep(LOOK_EVERY_S)
        if member.is_draining:
            member.is_gone = True
            self._leave(member)
            # What comes there next, also if it is listed again before the next look, is a server that joins, not the one that has gone.
            await self._take_in([] if member.is_unlisted else [member.endpoint], in_place_of=member)

    def _must_wait(self, member: Member, refused: Refused) -> None:
        told = f"the server at {member.endpoint} is not free: {refused.reason}"
        self.on_change(told)
        log.warning(
            "%s. This run waits for it; it ends after %g s without any server (learner.connect_timeout_s)",
            told, self._run.learner.connect_timeout_s,
        )  # fmt: skip

    def _welcomed(self, member: Member, welcome: Welcome) -> None:
        for other in self.members:
            if other is member or other.is_gone or other.welcome is None:
                continue
            if other.welcome.server_id == welcome.server_id:
                self.expel(member, ConfigError(f"it is the server at {other.endpoint} under another address"))
                return
        if member.served is not None and member.served[0] != welcome.server_id:
            self._dropped(member)
        self._note(member)
        self._on_welcome(member)

    def _lost(self, member: Member) -> None:
        self._note(member)
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
        """So that the server may serve another run."""
        is_shared = self._has_another_link(member)
        await member.link.greet_again()  # which nobody hears: it is not connected any more
        await asyncio.sleep(CLOSE_AFTER_S)
        if not is_shared:
            await member.link.leave()
        member.link.close()

    def _has_another_link(self, member: Member) -> bool:
        """Whether its server is here under another address too, which still needs it."""
        welcome = member.link.welcome
        return welcome is not None and any(
            other is not member and other.welcome is not None and other.welcome.server_id == welcome.server_id
            for other in self.members
        )

    async def _leave_all(self) -> None:
        await asyncio.gather(*(link.leave() for link in self._links))

    def _note(self, member: Member) -> None:
        state, before = member.state(self.version), member.noted_state
        member.noted_state = state
        if state == before:
            return
        told = f"the server at {member.endpoint}: {before} → {state}"
        self.on_change(told)
        if self.is_several:
            log.info("%s", told)

    def _places(self) -> str:
        return ", ".join(member.endpoint for member in self.members)
