"""Config of the learner's use of its servers: sampling, weight sync, and the checks that both sides agree."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from learner.config.section import AtLeastOne, Positive, Section, Share, Timeout, any_of, require
from protocol.config_keys import MayChange
from protocol.endpoint import is_host
from protocol.messages import MAX_STOP_LENGTH, MAX_STOPS
from protocol.transports.registry import TRANSPORTS

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal["auto", *TRANSPORTS]
DEFAULT_BOUNDS = {"float32": 1e-3, "bfloat16": 0.3, "quantized": 1.0}
"""Bounds on the mean |Δ logprob|, by the coarser dtype of both sides. With wrong weights it is 3 and more."""
PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class SamplingConfig(Section):
    """Sampling of completions."""

    group_size: int = 8
    """Number of completions per prompt, the size of a group."""
    max_tokens: AtLeastOne[int] = 512
    """Maximum number of tokens of a completion. A completion that reaches it is truncated and counted."""
    temperature: float = 1.0
    """Sampling temperature. The learner applies it to its logits too."""
    top_p: Share[float] = 1.0
    """Total probability of the likeliest tokens to sample from. Below 1: only with allow_partial_support."""
    top_k: int = 0
    """Number of likeliest tokens to sample from. 0: all tokens; above 0: only with allow_partial_support."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, such as "</answer>". The completion keeps the tokens up to the one that
    completes such a text."""
    allow_partial_support: bool = False
    """Whether to train on completions sampled with top_p or top_k, although their logprobs are not those of
    the whole distribution. The parity check then leaves sampled tokens out."""
    seeded: bool = False
    """Whether to sample every completion with its own seed, which makes runs reproducible. Slower on GPUs."""

    def unmet_needs(self) -> dict[str, str]:
        return {} if self.is_partial else {"allow_partial_support": "top_p below 1 or top_k above 0"}

    def check(self) -> None:
        require(
            self.group_size >= 2,
            f"group_size = {self.group_size} must be at least 2, because a single completion has no baseline",
        )
        require(
            0.01 <= self.temperature <= 2,
            f"temperature = {self.temperature} must be between 0.01 (below it, vLLM samples greedily) and 2",
        )
        require(
            len(self.stop) <= MAX_STOPS and all(0 < len(text) <= MAX_STOP_LENGTH for text in self.stop),
            f"stop = {self.stop} must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
        )
        require(self.top_k >= 0, f"top_k = {self.top_k} must not be negative; 0 samples from all tokens")
        require(
            self.allow_partial_support or not self.is_partial,
            f"top_p = {self.top_p}, top_k = {self.top_k}: the server's logprobs would be those of the truncated "
            "distribution and the learner's those of the whole one, so every importance ratio would be too small "
            "(TRL measured a mean of 0.90 at top_p = 0.8). Set top_p = 1 and top_k = 0, or allow_partial_support = "
            "true to train anyway",
        )

    @property
    def is_partial(self) -> bool:
        """True if the server samples from a part of the policy's distribution, and returns logprobs of that part."""
        return self.top_p < 1 or self.top_k > 0


class WeightSyncConfig(Section):
    """Weight sync to the servers."""

    timeout_s: MayChange[Timeout] = 60.0
    """Deadline of each phase of a weight sync: ready, each broadcast, done."""
    straggler_timeout_s: MayChange[Timeout] = 5.0
    """With several servers: how long a weight sync waits for a server that keeps the others waiting. The others
    then go on without it, and it gets a sync of its own, which may be slow but must not stall for this long.
    Raise the value if a model takes longer to load. At most half of timeout_s counts. A server also has this
    long to score the texts of a check (learner.parity.every_steps)."""
    transport: MayChange[TransportName] = "auto"
    """Transport of the weights. auto: ipc if learner and server share one GPU, nccl between GPUs (needs
    cupy), otherwise tcp; tcp: TCP between CPUs, as a chain: the first worker connects to one port of the
    learner, and each further one to the worker before it, or to the learner if it cannot reach that one."""
    ports: MayChange[str | None] = None
    """Ports on which the learner may listen for weight syncs, with transport = "tcp": "29500" or "29500-29510".
    It needs one, one more for each further address by which servers reach it, and one for a reference on a
    server that is refreshed. Unset: any free port."""
    advertise: MayChange[str | None] = None
    """Host or address at which the server's workers reach the learner, with transport = "tcp". Needed behind
    address translation. Unset, and for servers at a loopback endpoint: the learner's address on its connection to
    the server. The port is the one the learner listens on."""
    bucket_mib: MayChange[AtLeastOne[int]] = 256
    """Size of the flat buckets that carry the weights, in MiB. A larger tensor is a bucket of its own. The
    server holds two or three buckets."""
    overlap_with_training: MayChange[bool] = False
    """Whether to send a copy of the weights while the next step runs. Costs the memory of the copy."""
    compression: MayChange[Literal["none", "delta"]] = "none"
    """Compression of the weights. none: all weights; delta: only the values changed since the last sync,
    without loss. delta costs both sides a copy of the weights, and pays off on links between nodes."""
    lora: MayChange[Literal["adapter", "merged"]] = "adapter"
    """What a weight sync of a LoRA run sends. adapter: the frozen weights once per session, then only the
    adapter, which the server applies during generation (server.max_lora_rank); merged: all weights, summed
    with the adapter, which costs a full transfer but nothing during generation. merged is also used if the
    server or the model does not support adapters."""
    max_attempts: MayChange[AtLeastOne[int]] = 3
    """Maximum number of attempts of a weight sync. A retry starts a new session. The run stops when all
    attempts have failed."""

    def check(self) -> None:
        require(
            self.ports is None or len(self.port_range()) > 0,
            f'ports = "{self.ports}" is not a port or a range of ports from 1 to 65535; use "29500" or "29500-29510"',
        )
        require(
            self.advertise is None or is_host(self.advertise),
            f'advertise = "{self.advertise}" is not a host name or an address alone; use "learner.example", '
            '"10.0.0.7" or "fd00::7"',
        )

    @property
    def straggler_timeout_in_effect_s(self) -> float:
        """Effective straggler_timeout_s, shorter than the deadlines of the peers that wait."""
        return min(self.straggler_timeout_s, self.timeout_s / 2)

    @property
    def straggler_timeout_key(self) -> str:
        """Key that sets the effective straggler_timeout_s, for error messages."""
        is_short = self.straggler_timeout_s <= self.timeout_s / 2
        return "learner.weight_sync.straggler_timeout_s" if is_short else "half of learner.weight_sync.timeout_s"

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
    (server.dtype), the bound of the coarser dtype applies, to this server alone. For a quantized server: 1.0
    when it joins, then three times its value at that moment, at least 0.3."""
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
        """Return the bound of a dtype, or of a "quantized" server as it joins."""
        if self.max_mean_abs_logprob is not None:
            return self.max_mean_abs_logprob
        return DEFAULT_BOUNDS[dtype]
