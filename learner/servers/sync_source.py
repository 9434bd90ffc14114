"""Decide what the weight syncs of a run send, and read it from the policy.

    first sync of a session    all weights, merged with the adapter     or: frozen weights, then the adapter
    later syncs                the same                                     the adapter alone

The first sync of the run decides, for all servers and sessions.
"""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import torch

from learner.config import WeightSyncConfig
from learner.servers.membership import Member
from learner.servers.weight_copy import WeightSample
from protocol.messages import AdapterSpec, Manifest
from protocol.weights.buckets import NamedTensors, make_manifest

log = logging.getLogger(__name__)


class Weights(Protocol):
    """Policy, such as policy/published.py."""

    wire_dtype: torch.dtype
    device: torch.device
    copy_device: torch.device | None
    """Device of the copy that `WeightSync.begin` makes. None: the device of each tensor."""
    adapter: AdapterSpec | None
    """LoRA adapter of the policy. None: it has none."""
    why_merged: str | None
    """Reason why no server can apply the adapter separately, if there is one."""

    def tensors(self) -> NamedTensors:
        """Yield (checkpoint name, tensor) layer by layer, merged with the adapter."""
        ...

    def frozen_tensors(self) -> NamedTensors:
        """Yield the same without the adapter."""
        ...

    def adapter_tensors(self) -> NamedTensors:
        """Yield the adapter's tensors by their names in a manifest."""
        ...


class SyncSource:
    """Tensors of the syncs of one run."""

    def __init__(self, weights: Weights, config: WeightSyncConfig) -> None:
        self.weights, self._config = weights, config
        self.sample = WeightSample(weights.wire_dtype)
        self._manifest: Manifest | None = None

    @property
    def has_adapter(self) -> bool:
        """Whether a session carries the frozen weights once, and then the adapter alone."""
        return self._manifest is not None and self._manifest.adapter is not None

    def manifest(self, members: Sequence[Member]) -> Manifest:
        """Return the manifest of all sessions. The first call decides, for the servers that it names."""
        if self._manifest is None:
            adapter = self._adapter_for(members)
            tensors = self._all(self.weights.adapter_tensors()) if adapter else self.weights.tensors()
            self._manifest = make_manifest(
                tensors,
                self.weights.wire_dtype,
                self._config.bucket_mib << 20,
                "delta" if self._config.compression == "delta" and adapter is None else "dense",
                adapter,
            )
        return self._manifest

    def tensors(self, version: int, *, adapter_alone: bool) -> NamedTensors:
        """Yield the tensors of a sync, and keep a sample of those that training changes."""
        if not self.has_adapter:
            return self.sample.watch(version, self.weights.tensors())
        adapter = self.sample.watch(version, self.weights.adapter_tensors())
        return adapter if adapter_alone else self._all(adapter)

    def of_adapter(self, tensors: NamedTensors) -> NamedTensors:
        """Yield only the adapter's tensors."""
        assert self._manifest is not None
        names = self._manifest.adapter_names
        return ((name, tensor) for name, tensor in tensors if name in names)

    def _all(self, adapter: NamedTensors) -> NamedTensors:
        return chain(self.weights.frozen_tensors(), adapter)

    def _adapter_for(self, members: Sequence[Member]) -> AdapterSpec | None:
        """Return the adapter if all these servers can apply it. Otherwise, log the reason and return None."""
        adapter, reason = self.weights.adapter, self.weights.why_merged
        if adapter is None or self._config.lora == "merged":
            return None
        for member in members:
            welcome = member.link.welcome  # the last one, as a link may be down for a moment
            if reason is None and welcome is not None and welcome.max_lora_rank < adapter.rank:
                reason = (
                    f"the server at {member.endpoint} supports a rank of up to {welcome.max_lora_rank}; set "
                    f"server.max_lora_rank = {adapter.rank} there to send only the adapter"
                )
        if reason is not None:
            log.info("weight syncs send all weights, merged with the adapter: %s (learner.weight_sync.lora)", reason)
            return None
        log.info("weight syncs send the adapter (rank %d); each session starts with the frozen weights", adapter.rank)
        if self._config.compression == "delta":
            log.warning(
                'learner.weight_sync.compression = "delta" has no effect: weight syncs send the adapter alone. Remove '
                'it, or set learner.weight_sync.lora = "merged"'
            )
        return adapter
