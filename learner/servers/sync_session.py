"""One weight-sync session with one server process, from the learner's side.

The first sync of a session carries rendezvous and manifest. In later syncs both sides are already joined, and
a LoRA run sends only its adapter.
Invariant: after any failure the session is closed and never used again. Its record of what the server has is
discarded with it.
"""

import uuid

import torch

from learner.config import WeightSyncConfig
from learner.servers.link import ServerLink
from protocol.errors import ConfigError, PushError
from protocol.messages import Manifest, Rendezvous, Welcome
from protocol.transports.collective import Collective
from protocol.transports.group import RendezvousHost, address_towards
from protocol.transports.transport import choose_transport, offered_transports, own_device_name
from protocol.weights.buckets import NamedTensors, split_into_buckets
from protocol.weights.delta import Baseline, send_changes
from protocol.weights.dense import Progress, Sent, send_weights


class SyncSession:
    """Weight-sync session, joined at its first sync. `abort` is thread-safe."""

    def __init__(
        self,
        server_id: str,
        manifest: Manifest,
        rendezvous: Rendezvous,
        rendezvous_host: RendezvousHost,
        device: torch.device,
    ) -> None:
        self.name = uuid.uuid4().hex[:8]
        self.server_id, self.manifest, self.rendezvous = server_id, manifest, rendezvous
        self.collective: Collective | None = None
        self._rendezvous_host, self._device = rendezvous_host, device
        self._next = manifest
        """Tensors of the next sync."""
        self._buckets = split_into_buckets(manifest)
        self._baseline = Baseline() if manifest.wire == "delta" else None

    @property
    def num_bytes(self) -> int:
        """Size of the next sync's weights on the wire."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def join(self) -> Collective:
        """Block until every worker has joined. Raises PushError at the deadline."""
        return self._rendezvous_host.host_collective(self.name, self.rendezvous, self._device)

    def send(self, tensors: NamedTensors, progress: Progress) -> Sent:
        """Send all weights, or only the adapter's or the changes since the session's last sync.

        `tensors` may have more than the adapter's.

        Raises:
            PushError: The collective failed.
        """
        assert self.collective is not None
        if self._baseline is not None:
            return send_changes(self.collective, self._buckets, tensors, self._baseline, progress)
        if self._next.is_adapter_alone:
            names = self._next.adapter_names
            tensors = ((name, tensor) for name, tensor in tensors if name in names)
        sent = send_weights(self.collective, self._buckets, tensors, progress)
        self._next = self.manifest.of_later_syncs()
        self._buckets = split_into_buckets(self._next)
        return sent

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


class SyncSessions:
    """Factory of sessions with one server, which share its rendezvous point."""

    def __init__(self, link: ServerLink, config: WeightSyncConfig, device: torch.device) -> None:
        self._link, self._config, self._device = link, config, device
        self._rendezvous_host: RendezvousHost | None = None

    def begin(self, manifest: Manifest) -> SyncSession:
        """Return a new session with the connected server.

        Raises:
            PushError: No server is connected.
            ConfigError: The weights cannot be sent as configured.
        """
        welcome = self._link.welcome
        if welcome is None:
            raise PushError(f"no server is connected at {self._link.endpoint}")
        if manifest.adapter is not None and manifest.adapter.rank > welcome.max_lora_rank:
            raise ConfigError(
                f"this run syncs its adapter of rank {manifest.adapter.rank} separately, and the server at "
                f"{self._link.endpoint} supports a rank of up to {welcome.max_lora_rank}; set server.max_lora_rank = "
                f'{manifest.adapter.rank} there, or restart the learner with learner.weight_sync.lora = "merged"'
            )
        if self._rendezvous_host is None:
            self._rendezvous_host = RendezvousHost(
                address_towards(self._link.endpoint),
                self._config.timeout_s,
                ports=self._config.port_range(),
                advertise=self._config.advertise,
            )
        return SyncSession(
            welcome.server_id,
            manifest,
            self._rendezvous_host.rendezvous(welcome.num_workers, self._transport(welcome)),
            self._rendezvous_host,
            self._device,
        )

    def _transport(self, welcome: Welcome) -> str:
        return choose_transport(
            self._config.transport,
            own_device_name(self._device),
            welcome.devices,
            learner_transports=offered_transports(),
            server_transports=welcome.transports,
        )

    def close(self) -> None:
        if self._rendezvous_host is not None:
            self._rendezvous_host.close()
