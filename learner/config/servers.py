"""The transfer of weights into the server, and the check that both sides agree."""

import re
from collections.abc import Sequence
from typing import Literal

from learner.config.section import Section, any_of, require
from protocol.config import MayChange

PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class PushConfig(Section):
    """The transfer of weights into the server."""

    timeout_s: MayChange[float] = 60.0
    """Deadline of every arrow of a push: ready, each broadcast, done."""
    patience_s: MayChange[float] = 5.0
    """Of several servers: how long training waits for the others once one has the weights. Whoever is later gets a push of its
    own, which may take its time but not stand still for so long: raise it where a collective takes longer to form, or a model to
    load. At most half of timeout_s counts. A server also has this long to score the texts of
    a check (learner.parity.every_steps)."""
    transport: MayChange[Literal["auto", "gloo", "tcp", "nccl", "ipc"]] = "auto"
    """auto: ipc where learner and server share one GPU, nccl between GPUs (needs cupy), else gloo (TCP between CPUs, on any port
    of both sides). tcp: between CPUs over one port of the learner, which the server's workers call."""
    ports: MayChange[str | None] = None
    """With transport = "tcp": the ports the learner may listen on for pushes, one for each server: "29500" or "29500-29510"."""
    advertise: MayChange[str | None] = None
    """With transport = "tcp": the host or address by which the server's workers call the learner, where it is not the one by
    which the learner calls the server: behind address translation. The port is the one that the learner listens on."""
    bucket_mib: MayChange[int] = 256
    """Size of the flat buckets the weights travel in; a tensor that is larger is a bucket alone. The server holds two or three."""
    overlap: MayChange[bool] = False
    """Push a copy of the weights while the next step is computed; costs the memory of the copy."""
    wire: MayChange[Literal["dense", "delta"]] = "dense"
    """delta: only what has changed since the last push, bit for bit; costs both sides a copy of the weights, pays off on links
    between nodes."""
    max_attempts: MayChange[int] = 3
    """A failed push is tried again in a new epoch; after so many failures the run stops."""

    def check(self) -> None:
        require(self.timeout_s > 0, f"timeout_s = {self.timeout_s} must be above 0")
        require(self.patience_s > 0, f"patience_s = {self.patience_s} must be above 0")
        require(
            self.ports is None or len(self.port_range()) > 0,
            f'ports = "{self.ports}" must be one port or a range from 1 to 65535: "29500" or "29500-29510"',
        )
        require(
            self.advertise is None
            or ("/" not in self.advertise and "[" not in self.advertise and self.advertise != ""),
            f'advertise = "{self.advertise}" must be a name or an address alone: "learner.example", "10.0.0.7" or "fd00::7"',
        )
        require(self.bucket_mib >= 1, f"bucket_mib = {self.bucket_mib} must be at least 1")
        require(self.max_attempts >= 1, f"max_attempts = {self.max_attempts} must be at least 1")

    @property
    def patience_in_effect_s(self) -> float:
        """Shorter than the deadlines of those that are kept waiting."""
        return min(self.patience_s, self.timeout_s / 2)

    def lacking(self) -> dict[str, str]:
        return {} if self.transport == "tcp" else dict.fromkeys(("ports", "advertise"), any_of("transport", ["tcp"]))

    def port_range(self) -> Sequence[int]:
        """Return the ports to try in turn; (0,), which is any, where none are named; nothing for what names none."""
        if self.ports is None:
            return (0,)
        if not (found := PORTS.fullmatch(self.ports)):
            return ()
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1) if first > 0 and last < 1 << 16 else ()


class ParityConfig(Section):
    """The check that server and learner give the same logprobs to the same tokens under the same weights."""

    max_mean_abs_logprob: MayChange[float | None] = None
    """Bound on the mean |Δ logprob| of the same tokens; the run stops above it. Unset: 1e-3 in float32, 0.3 in bfloat16, where healthy models
    of 135M parameters differ by 0.09; with a server in another dtype (server.dtype) that of the coarser one, for this server alone."""
    max_identity_abs_logprob: MayChange[float | None] = None
    """Bound on what a run's first push may change, for it brings a new server the weights that it has loaded itself: the mean |Δ
    logprob| of the server before and after. Unset: 1e-5 in float32, 1e-3 in bfloat16; the server's own noise is added."""
    every_steps: MayChange[int] = 1
    """After every how many weight syncs both sides score texts of the step once more: their logprobs must have changed on both, before
    tokens of the new version are trained on. 0: only a check at the start."""
    max_time_share: MayChange[float] = 0.05
    """Of the training's time, for these checks: where steps are so short that they would take more, some syncs go unchecked. 1: none does."""

    def check(self) -> None:
        require(
            self.every_steps >= 0, f"every_steps = {self.every_steps} must not be negative; 0 checks only at the start"
        )
        require(
            0 < self.max_time_share <= 1,
            f"max_time_share = {self.max_time_share} must be above 0 and at most 1; every_steps = 0 checks only at the start",
        )
        require(
            self.max_mean_abs_logprob is None or self.max_mean_abs_logprob > 0,
            f"max_mean_abs_logprob = {self.max_mean_abs_logprob} must be above 0",
        )
        require(
            self.max_identity_abs_logprob is None or self.max_identity_abs_logprob > 0,
            f"max_identity_abs_logprob = {self.max_identity_abs_logprob} must be above 0",
        )

    def lacking(self) -> dict[str, str]:
        return {} if self.every_steps else {"max_time_share": "every_steps"}

    def identity_bound(self, dtype: str) -> float:
        if self.max_identity_abs_logprob is not None:
            return self.max_identity_abs_logprob
        return 1e-5 if dtype == "float32" else 1e-3

    def bound(self, dtype: str) -> float:
        if self.max_mean_abs_logprob is not None:
            return self.max_mean_abs_logprob
        return 1e-3 if dtype == "float32" else 0.3
