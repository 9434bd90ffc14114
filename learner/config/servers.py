"""Config of weight sync, and of the checks that server and learner agree."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from learner.config.section import AtLeastOne, Positive, Section, any_of, require
from protocol.config_keys import MayChange
from protocol.transports.registry import TRANSPORTS

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]
PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class WeightSyncConfig(Section):
    """Weight sync to the servers."""

    timeout_s: MayChange[Positive[float]] = 60.0
    """Deadline of each phase of a weight sync: ready, each broadcast, done."""
    straggler_timeout_s: MayChange[Positive[float]] = 5.0
    """With several servers: how long training waits for the others once one server has the weights. A later
    server gets a sync of its own, which may be slow but must not stall for this long. Raise the value if a
    collective takes longer to form, or a model to load. At most half of timeout_s counts. A server also has
    this long to score the texts of a check (learner.parity.every_steps)."""
    transport: MayChange[TransportName] = "auto"
    """Transport of the weights. auto: ipc if learner and server share one GPU, nccl between GPUs (needs
    cupy), otherwise gloo; gloo: TCP between CPUs, on any port of both sides; tcp: TCP between CPUs over one
    port of the learner, to which the server's workers connect."""
    ports: MayChange[str | None] = None
    """Ports on which the learner may listen for weight syncs, one per server, with transport = "tcp": "29500"
    or "29500-29510". Unset: any free port."""
    advertise: MayChange[str | None] = None
    """Host or address at which the server's workers reach the learner, with transport = "tcp". Needed behind
    address translation. Unset: the learner's address on its connection to the server. The port is the one the
    learner listens on."""
    bucket_mib: MayChange[AtLeastOne[int]] = 256
    """Size of the flat buckets that carry the weights, in MiB. A larger tensor is a bucket of its own. The
    server holds two or three buckets."""
    overlap_with_training: MayChange[bool] = False
    """Whether to send a copy of the weights while the next step runs. Costs the memory of the copy."""
    compression: MayChange[Literal["none", "delta"]] = "none"
    """Compression of the weights. none: all weights; delta: only the values changed since the last sync,
    without loss. delta costs both sides a copy of the weights, and pays off on links between nodes."""
    max_attempts: MayChange[AtLeastOne[int]] = 3
    """Maximum number of attempts of a weight sync. A retry starts a new session. The run stops when all
    attempts have failed."""

    def check(self) -> None:
        require(
            self.ports is None or len(self.port_range()) > 0,
            f'ports = "{self.ports}" is not a port or a range of ports from 1 to 65535; use "29500" or "29500-29510"',
        )
        require(
            self.advertise is None
            or ("/" not in self.advertise and "[" not in self.advertise and self.advertise != ""),
            f'advertise = "{self.advertise}" is not a host name or an address alone; use "learner.example", '
            '"10.0.0.7" or "fd00::7"',
        )

    @property
    def straggler_timeout_in_effect_s(self) -> float:
        """Effective straggler_timeout_s, shorter than the deadlines of the peers that wait."""
        return min(self.straggler_timeout_s, self.timeout_s / 2)

    def unmet_needs(self) -> dict[str, str]:
        one_port = [name for name, entry in TRANSPORTS.items() if entry.uses_one_port]
        keys = () if self.transport in one_port else ("ports", "advertise")
        return dict.fromkeys(keys, any_of("transport", one_port))

    def port_range(self) -> Sequence[int]:
        """Return the ports to try in turn.

        If `ports` is unset, this is (0,), which means any port. If `ports` is malformed, there are none.
        """
        if self.ports is None:
            return (0,)
        if not (found := PORTS.fullmatch(self.ports)):
            return ()
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1) if first > 0 and last < 1 << 16 else ()


class ParityConfig(Section):
    """Check that server and learner compute the same logprobs with the same weights."""

    max_mean_abs_logprob: MayChange[Positive[float] | None] = None
    """Maximum mean |Δ logprob| of the same tokens. The run stops above it. Unset: 1e-3 in float32; 0.3 in
    bfloat16, where healthy models of 135M parameters differ by 0.09. For a server in another dtype
    (server.dtype), the bound of the coarser dtype applies, to this server alone."""
    max_identity_abs_logprob: MayChange[Positive[float] | None] = None
    """Maximum mean |Δ logprob| of a server before and after a run's first weight sync. This sync sends a new
    server the weights that it has already loaded. Unset: 1e-5 in float32, 1e-3 in bfloat16. Three times the
    server's own noise is added."""
    every_steps: MayChange[int] = 1
    """Number of weight syncs from one check to the next. In a check, both sides score texts of the step
    again. The logprobs must have changed on both sides before tokens of the new version are trained on. 0:
    only a check at the start."""
    max_time_share: MayChange[float] = 0.05
    """Maximum share of the training time for these checks. Some syncs go unchecked where short steps would
    exceed it. 1: all are checked."""

    def check(self) -> None:
        require(
            self.every_steps >= 0, f"every_steps = {self.every_steps} must not be negative; 0 checks only at the start"
        )
        require(
            0 < self.max_time_share <= 1,
            f"max_time_share = {self.max_time_share} must be above 0 and at most 1; every_steps = 0 checks only at "
            "the start",
        )

    def unmet_needs(self) -> dict[str, str]:
        return {} if self.every_steps else {"max_time_share": "every_steps"}

    def identity_bound(self, dtype: str) -> float:
        if self.max_identity_abs_logprob is not None:
            return self.max_identity_abs_logprob
        return 1e-5 if dtype == "float32" else 1e-3

    def bound(self, dtype: str) -> float:
        if self.max_mean_abs_logprob is not None:
            return self.max_mean_abs_logprob
        return 1e-3 if dtype == "float32" else 0.3
