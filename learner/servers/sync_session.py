"""Weight-sync sessions, from the learner's side: one collective with all workers of a set of servers.

The first sync of a session carries rendezvous and manifest. In later syncs all sides are already joined, and
a LoRA run sends only its adapter.
Invariants: after any failure the session is closed and never used again. Its record of what the servers have
is discarded with it. A server is in one open session at most.
"""

import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence

import msgspec
import torch

from learner.config import WeightSyncConfig
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.stragglers import RankState
from protocol.errors import ConfigError, DeadlineExceeded, PushError
from protocol.messages import Manifest, PushBegin, Rendezvous, Welcome
from protocol.transports.collective import Collective, load_transport
from protocol.transports.group import RendezvousHost, address_towards
from protocol.transports.rendezvous import RankReport
from protocol.transports.transport import choose_transport, offered_transports, own_device_name
from protocol.weights.buckets import NamedTensors, split_into_buckets
from protocol.weights.delta import Baseline, send_changes
from protocol.weights.dense import Progress, Sent, send_weights

log = logging.getLogger(__name__)

Failure = PushError | DeadlineExceeded | ConfigError
"""Why a server could not be synced."""


class SyncSession:
    """Session with a set of servers, joined at its first sync. `abort` is thread-safe."""

    def __init__(
        self,
        servers: Mapping[Member, Welcome],
        manifest: Manifest,
        rendezvous: Rendezvous,
        rendezvous_host: RendezvousHost,
        device: torch.device,
    ) -> None:
        """Create a session. The servers' workers get their ranks in the order of the servers."""
        self.name = uuid.uuid4().hex[:8]
        self.server_ids = {member: welcome.server_id for member, welcome in servers.items()}
        self.manifest, self.rendezvous = manifest, rendezvous
        self.carries = manifest
        """Tensors of the next sync."""
        self._version = 0
        """Version of the current sync."""
        self.ranks: dict[Member, range] = {}
        first = 1
        for member, welcome in servers.items():
            self.ranks[member] = range(first, first + welcome.num_workers)
            first += welcome.num_workers
        self.collective: Collective | None = None
        self._rendezvous_host, self._device = rendezvous_host, device
        self._buckets = split_into_buckets(manifest)
        self._baseline = Baseline() if manifest.wire == "delta" else None

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self.server_ids)

    @property
    def num_bytes(self) -> int:
        """Size of the next sync's weights on the wire."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def begin(self, member: Member, version: int) -> PushBegin:
        """Return the message that starts a sync at one server."""
        self._version = version
        if self.collective is not None:
            return PushBegin(session=self.name, version=version)
        ranks = self.ranks[member]
        rendezvous = msgspec.structs.replace(self.rendezvous, first_rank=ranks.start)
        return PushBegin(session=self.name, version=version, rendezvous=rendezvous, manifest=self.manifest)

    def join(self) -> None:
        """Block until every worker has joined. Raises PushError at the deadline."""
        self.collective = self._rendezvous_host.host_collective(self.name, self.rendezvous, self._device)

    def send(self, tensors: NamedTensors, progress: Progress) -> Sent:
        """Send what the sync carries, or only the changes since the session's last sync.

        Raises:
            PushError: The collective failed.
        """
        assert self.collective is not None
        if self._baseline is not None:
            return send_changes(self.collective, self._buckets, tensors, self._baseline, progress)
        sent = send_weights(self.collective, self._buckets, tensors, progress)
        if self.carries != (later := self.manifest.of_later_syncs()):
            self.carries, self._buckets = later, split_into_buckets(later)
        return sent

    def states(self, since: float) -> dict[int, RankState]:
        """Return what is known of all workers in a sync that started to join or send at `since`."""
        now = time.monotonic()
        states: dict[int, RankState] = {}
        for rank in (rank for ranks in self.ranks.values() for rank in ranks):
            report, came_at = self._report_of(rank, since)
            if report is None:
                states[rank] = RankState(now - since)
            elif report.stage == "received":
                states[rank] = RankState(0.0)
            else:
                states[rank] = RankState(now - came_at, report.loading_s, report.blocked_s)
        return states

    def is_held_up(self, member: Member, since: float, done: Collection[Member]) -> bool:
        """Return whether a server waits for bytes that another one has not handed on, `done` servers excepted.

        In a collective that is no chain: whether it waits for bytes at all.
        """
        parents = self.collective.parents if self.collective is not None else {}
        own, finished = self.ranks[member], {0} | {rank for one in done for rank in self.ranks[one]}

        def is_at(rank: int, stage: str) -> bool:
            report, _ = self._report_of(rank, since)
            return report is not None and report.stage == stage

        if not parents:
            return any(is_at(rank, "receiving") for rank in own)
        outside = [(rank, parents[rank]) for rank in own if parents[rank] not in own]
        return any(
            not is_at(rank, "received") and parent not in finished and not is_at(parent, "received")
            for rank, parent in outside
        )

    def _report_of(self, rank: int, since: float) -> tuple[RankReport | None, float]:
        """Return a worker's last report of the current sync, and its arrival time.

        The last report of the sync before may come late. Taken for one of this sync, it would hide a worker that
        hangs.
        """
        report, came_at = self._rendezvous_host.report_of(self.name, rank) or (None, 0.0)
        if report is None or came_at < since or (report.stage != "joining" and report.version != self._version):
            return None, 0.0
        return report, came_at

    def abort(self) -> None:
        """Abort the join or broadcast in progress, here and at every worker."""
        self._cancel()
        if self.collective is not None:
            self.collective.abort()

    def close(self) -> None:
        """Leave the collective, and release workers that still join or receive."""
        self._cancel()
        if self.collective is not None:
            self.collective.close()

    def _cancel(self) -> None:
        """Cancel the session, even after all ranks have joined.

        NCCL does not notify a worker on this host that the learner has left.
        """
        self._rendezvous_host.cancel(self.name, "the learner abandoned the session")


class Route(msgspec.Struct, frozen=True):
    """Way of the weights to a server: the transport, and the learner's address as the server sees it."""

    transport: str
    own_host: str


class SyncSessions:
    """Open sessions of the learner, and the choice of the servers that share one."""

    def __init__(self, loop: LoopThread, config: WeightSyncConfig, device: torch.device) -> None:
        self._loop, self._config, self._device = loop, config, device
        self._rendezvous_hosts: dict[str, RendezvousHost] = {}
        """Rendezvous by the learner's address."""
        self._routes: dict[tuple[str, str], Route] = {}
        """Routes by endpoint and server id."""
        self._open: list[SyncSession] = []

    def groups(self, members: Sequence[Member], manifest: Manifest) -> tuple[list[list[Member]], dict[Member, Failure]]:
        """Return which servers can share a session, and why others cannot be synced."""
        groups: list[tuple[Route, list[str], list[Member]]] = []
        unfit: dict[Member, Failure] = {}
        for member in members:
            try:
                welcome = _welcome(member)
                _check_adapter(member.endpoint, welcome, manifest)
                route = self._route(member.endpoint, welcome)
            except (PushError, ConfigError) as error:
                unfit[member] = error
                continue
            for shared, devices, group in groups:
                if shared == route and self._can_share(route, [*devices, *welcome.devices]):
                    devices += welcome.devices
                    group.append(member)
                    break
            else:
                groups.append((route, [*welcome.devices], [member]))
        return [group for _, _, group in groups], unfit

    def of(self, members: Sequence[Member], manifest: Manifest) -> SyncSession:
        """Return the open session of exactly these servers, or a new one in place of all that have one of them.

        Raises:
            PushError: A server is not connected.
            ConfigError: The weights cannot be sent as configured.
        """
        servers = {member: _welcome(member) for member in members}
        server_ids = {member: welcome.server_id for member, welcome in servers.items()}
        for session in self._open:
            if session.server_ids == server_ids:
                return session
        for session in [session for session in self._open if session.server_ids.keys() & server_ids.keys()]:
            self.close(session)
        route = self._route(members[0].endpoint, servers[members[0]])
        rendezvous_host = self._rendezvous_host(route.own_host)
        num_workers = sum(welcome.num_workers for welcome in servers.values())
        rendezvous = rendezvous_host.rendezvous(num_workers, route.transport)
        session = SyncSession(servers, manifest, rendezvous, rendezvous_host, self._device)
        self._open.append(session)
        return session

    def close(self, session: SyncSession) -> None:
        """Close a session, and notify its servers without waiting for them."""
        self._open.remove(session)
        session.close()
        for member in session.members:
            if member.link.connected:
                self._loop.submit(member.link.abort_push(session.name))

    def close_all(self) -> None:
        for session in tuple(self._open):
            self.close(session)
        for rendezvous_host in self._rendezvous_hosts.values():
            rendezvous_host.close()

    def _can_share(self, route: Route, devices: Sequence[str]) -> bool:
        """Return whether one collective can connect the learner and workers on these devices."""
        is_explicit = self._config.transport != "auto"
        obstacle = load_transport(route.transport).obstacle([own_device_name(self._device), *devices], is_explicit)
        return obstacle is None

    def _route(self, endpoint: str, welcome: Welcome) -> Route:
        key = (endpoint, welcome.server_id)
        if key not in self._routes:
            transport = choose_transport(
                self._config.transport,
                own_device_name(self._device),
                welcome.devices,
                learner_transports=offered_transports(),
                server_transports=welcome.transports,
            )
            self._routes[key] = Route(transport, address_towards(endpoint))
        return self._routes[key]

    def _rendezvous_host(self, own_host: str) -> RendezvousHost:
        if own_host not in self._rendezvous_hosts:
            advertise = self._config.advertise
            host = self._rendezvous_hosts[own_host] = RendezvousHost(
                own_host, self._config.timeout_s, ports=self._config.port_range(), advertise=advertise
            )
            if advertise not in (None, host.advertised):
                log.info(
                    "workers of servers at a loopback endpoint connect to %s, not learner.weight_sync.advertise (%s)",
                    host.advertised, advertise,
                )  # fmt: skip
        return self._rendezvous_hosts[own_host]


def _welcome(member: Member) -> Welcome:
    if member.welcome is None:
        raise PushError(f"no server is connected at {member.endpoint}")
    return member.welcome


def _check_adapter(endpoint: str, welcome: Welcome, manifest: Manifest) -> None:
    if manifest.adapter is not None and manifest.adapter.rank > welcome.max_lora_rank:
        raise ConfigError(
            f"this run syncs its adapter of rank {manifest.adapter.rank} separately, and the server at {endpoint} "
            f"supports a rank of up to {welcome.max_lora_rank}; set server.max_lora_rank = {manifest.adapter.rank} "
            'there, or restart the learner with learner.weight_sync.lora = "merged"'
        )
