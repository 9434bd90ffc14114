"""Check that server and learner give the same logprobs to the same tokens under the same weights.

    connect                    measure: dataset texts on both sides, before the first group is requested
                               check_identity: before and after a run's first weight sync
    every weight sync          sync_check.py: a group of the step, before and after it
    every step                 check_fresh: the tokens that the newest version sampled

A wrong model, another temperature or a stale LM head shows here at once. Without these checks the run would
silently not learn. Each server is compared separately, with a bound that follows from its dtype and the
run's. No server is waited for long while others are ready.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Self, get_args

import msgspec
import torch

from learner.config import LearnerRun
from learner.servers.fleet import Fleet
from learner.servers.membership import Member
from protocol.errors import ConfigError, DeadlineExceeded, ParityError
from protocol.hardware import Dtype
from protocol.messages import Scores, Welcome

log = logging.getLogger(__name__)
NUM_SEQUENCES = 4
MAX_PROMPT_TOKENS = 256
MIN_TEXT_TOKENS = 48
CALL_SLACK_S = 10.0
DTYPES: tuple[str, ...] = get_args(Dtype)
"""Dtypes with a known bound, the finest first."""
BASELINE_FACTOR = 3.0
"""Multiple of a quantized server's first mismatch that it may reach later."""
NOISE_FACTOR = 3.0
"""Factor for the measured noise: another pair of scorings may differ more."""


class ParityComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Numerics of both sides, and the bound on the difference of their logprobs.

    A bfloat16 server in a float32 run samples from the learner's policy up to rounding, and returns the
    logprobs of that policy. Importance ratios therefore correct the difference, as they correct staleness.
    """

    ours: str
    """Dtype in which the learner computes."""
    theirs: str
    quantization: str
    """What the server quantizes. Empty: nothing."""
    bound: float

    @property
    def description(self) -> str:
        theirs = f"{self.theirs} ({self.quantization})" if self.quantization else self.theirs
        return self.ours if self.ours == theirs else f"{self.ours} on the learner and {theirs} on the server"

    def with_baseline(self, mismatch: float, floor: float) -> Self:
        """Return the comparison for a quantized server that has this mismatch with the learner's weights.

        How much quantization changes depends on the model, so a server is its own baseline. The bound is not below
        `floor`, because a policy that becomes more certain differs more.
        """
        return msgspec.structs.replace(self, bound=max(floor, min(self.bound, BASELINE_FACTOR * mismatch)))


def comparison(run: LearnerRun, welcome: Welcome) -> ParityComparison:
    dtype = "quantized" if welcome.quantization else coarser(run.dtype, welcome.dtype)
    bound = run.learner.parity.bound(dtype)
    return ParityComparison(ours=run.dtype, theirs=welcome.dtype, quantization=welcome.quantization, bound=bound)


def coarser(*dtypes: str) -> str:
    return max(dtypes, key=DTYPES.index)


def is_finer(one: str, other: str) -> bool:
    return DTYPES.index(one) < DTYPES.index(other)


class ParityProbe:
    """Fixed texts of the dataset, scored on both sides."""

    def __init__(
        self,
        run: LearnerRun,
        fleet: Fleet,
        logprobs: Callable[[Sequence[Sequence[int]]], torch.Tensor],
        prompts: list[list[int]],
    ) -> None:
        """Build the texts from `prompts`.

        `logprobs` returns the learner's logprobs of several sequences, after the first token of each.
        """
        self.sequences = texts_of(prompts)
        self.logprobs, self.fleet = logprobs, fleet
        config = run.learner.weight_sync
        self.timeout_s, self.patience_s = config.timeout_s, config.straggler_timeout_in_effect_s
        self.patience_key = config.straggler_timeout_key
        self._run = run
        self._comparisons: dict[str, ParityComparison] = {}
        """Comparison of each endpoint, also of former servers, whose tokens may still be in a batch."""
        self._metrics: dict[str, float] = {}

    def measure(self, member: Member, version: int) -> float:
        """Return the mean |Δ logprob| of the replica where it is largest.

        Raises:
            ParityError: The difference is above the bound.
            ServerLost: The server went away.
            DeadlineExceeded: The server did not score in time.
        """
        assert member.link.welcome is not None
        self._comparisons[member.endpoint] = comparison(self._run, member.link.welcome)
        own_T = self.logprobs(self._sequences_for(member))
        differences_RT = (own_T - self.server_logprobs(member, version)).abs()
        mismatches = [self.check_level(member, *each, "fixed sequences") for each in enumerate(differences_RT)]
        self._set_baseline(member, max(mismatches))
        if len(mismatches) > 1:
            values = ", ".join(f"{mismatch:.1e}" for mismatch in mismatches)
            log.info("parity of each replica of the server at %s: mean |Δ logprob| = %s", member.endpoint, values)
        return max(mismatches)

    def _set_baseline(self, member: Member, mismatch: float) -> None:
        """Judge a quantized server by its own mismatch from now on, unless the config sets a bound."""
        compared = self._comparisons[member.endpoint]
        if not compared.quantization:
            return
        self.record({"parity/quantized_abs_logprob": mismatch})
        if self._run.learner.parity.max_mean_abs_logprob is None:
            compared = self._comparisons[member.endpoint] = compared.with_baseline(
                mismatch, floor=self._run.learner.parity.bound("bfloat16")
            )
        log.info(
            "the server at %s quantizes (%s): its mean |Δ logprob| is %.2g with the learner's weights; allowing up to "
            "%.2g (learner.parity.max_mean_abs_logprob)",
            member.endpoint, compared.quantization, mismatch, compared.bound,
        )  # fmt: skip

    def server_logprobs(self, member: Member, version: int | None) -> torch.Tensor:
        """Return the server's logprobs of all texts, one row per replica.

        `version` None stands for the model's own weights. Raises the same errors as `measure`.
        """
        has_others = any(other is not member and self.fleet.is_ready(other) for other in self.fleet.members)
        timeout_s, key = self.timeout_s, "learner.weight_sync.timeout_s"
        if has_others:
            timeout_s, key = self.patience_s, self.patience_key

        def score(replica: int, token_ids: list[int]) -> torch.Tensor:
            scoring = member.link.score(token_ids, timeout_s, replica)
            try:
                scores = self.fleet.loop.call(scoring, timeout_s + CALL_SLACK_S)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error} ({key})") from error
            return of_version(member, [scores], version)

        sequences = self._sequences_for(member)
        return torch.stack([torch.cat([score(replica, ids) for ids in sequences]) for replica in replicas(member)])

    def check_level(self, member: Member, replica: int, difference_T: torch.Tensor, tokens: str) -> float:
        """Return the mean |Δ logprob|. Raises ParityError above the server's bound."""
        mismatch = difference_T.mean().item()
        self.record({"parity/abs_logprob": mismatch})
        where = f" at its replica {replica}" if len(replicas(member)) > 1 else ""
        self._check(mismatch, f"{tokens}{where}", member.endpoint)
        return mismatch

    def check_fresh(self, mean_abs_logprob: Mapping[str, float]) -> None:
        """Check the mean |Δ logprob| by endpoint, on tokens of the current version.

        Tokens sampled with top_p or top_k are not checked: their logprobs differ from the learner's by design.

        Raises:
            ParityError: A value is above the bound of its server.
        """
        if self._run.learner.sampling.is_partial:
            return
        for endpoint, mismatch in mean_abs_logprob.items():
            self._check(mismatch, "fresh tokens", endpoint)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Keep the maximum of each metric since the last `pop_metrics`."""
        self._metrics |= {name: max(value, self._metrics.get(name, value)) for name, value in metrics.items()}

    def pop_metrics(self) -> dict[str, float]:
        """Return and reset the metrics since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _comparison(self, endpoint: str) -> ParityComparison:
        """Return the comparison of a server; the one with the largest bound if unknown.

        After a restart the server of an earlier group is unknown.
        """
        known = self._comparisons
        return known[endpoint] if endpoint in known else max(known.values(), key=lambda compared: compared.bound)

    def _sequences_for(self, member: Member) -> list[list[int]]:
        assert member.link.welcome is not None
        longest = longest_scored(member.link.welcome.max_model_len)
        return [sequence[-longest:] for sequence in self.sequences]

    def _check(self, mean_abs_logprob: float, tokens: str, endpoint: str) -> None:
        """Raise ParityError if the mean |Δ logprob| is NaN or above the server's bound."""
        compared = self._comparison(endpoint)
        if not mean_abs_logprob <= compared.bound:
            raise ParityError(
                f"server and learner disagree: mean |Δ logprob| of {tokens} is {mean_abs_logprob:.2g}, the bound is "
                f"{compared.bound:.2g} for {compared.description} (learner.parity.max_mean_abs_logprob). Check that "
                f"the server at {endpoint} has the same model and temperature, and that its last weight sync loaded "
                "every tensor"
            )


def texts_of(prompts: list[list[int]]) -> list[list[int]]:
    """Join prompts cyclically into NUM_SEQUENCES texts, or fewer for fewer prompts.

    Each text has at least MIN_TEXT_TOKENS tokens, and a long one keeps only its end. Random tokens are
    unsuitable. No policy would sample them, and on them two healthy sides in bfloat16 differ the most.
    """
    texts: list[list[int]] = []
    following = itertools.cycle(prompts)
    for _ in range(min(NUM_SEQUENCES, len(prompts))):
        text: list[int] = []
        while len(text) < MIN_TEXT_TOKENS:
            text += next(following)
        texts.append(text[-MAX_PROMPT_TOKENS:])
    return texts


def check_dtype(run: LearnerRun, member: Member, welcome: Welcome) -> None:
    """Check that a server's dtype has a known bound; log the bound of another dtype.

    Raises:
        ConfigError: The dtype has no known bound.
    """
    if welcome.dtype not in DTYPES:
        raise ConfigError(
            f"the server at {member.endpoint} computes in {welcome.dtype} and this run in dtype = {run.dtype!r}; the "
            f"allowed difference is known only for {' and '.join(DTYPES)}. Set server.dtype to one of them, or remove "
            "it"
        )
    if welcome.dtype != run.dtype and not welcome.quantization:  # otherwise `measure` logs the bound
        log.info(
            "the server at %s computes in %s and this run in %s; allowing a mean |Δ logprob| of up to %.2g "
            "(learner.parity.max_mean_abs_logprob)",
            member.endpoint, welcome.dtype, run.dtype, comparison(run, welcome).bound,
        )  # fmt: skip


def replicas(member: Member) -> range:
    assert member.link.welcome is not None
    return range(member.link.welcome.num_replicas)


def longest_scored(max_model_len: int) -> int:
    """Return the maximum length of a sequence that a server scores.

    vLLM scores a sequence while it generates one more token.
    """
    return max_model_len - 1


def of_version(member: Member, scores: Sequence[Scores], version: int | None) -> torch.Tensor:
    """Return the logprobs of several sequences, concatenated.

    Raises:
        ParityError: The server scored with another version.
    """
    for one in scores:
        if one.policy_version != version:
            raise ParityError(
                f"the server at {member.endpoint} scored with version {one.policy_version}; expected version {version}"
            )
    return torch.cat([torch.from_numpy(one.logprobs.copy()) for one in scores])


class FreshServerScores(msgspec.Struct, frozen=True, eq=False):
    """Logprobs of the fixed texts on a fresh server, before any weight sync.

    Suffixes: R replicas, T tokens of all texts after the first of each.
    """

    dtype: str
    """Dtype in which the server computes."""
    logprobs_RT: torch.Tensor
    noise: float
    """Mean |Δ logprob| between two scorings of the same weights. 0 unless other requests run concurrently."""


def score_fresh_server(run: LearnerRun, probe: ParityProbe, member: Member, version: int) -> FreshServerScores | None:
    """Score the texts before the first sync; None if the server has other weights.

    A server in a finer dtype than the wire also gives None: the first sync rounds the weights of its model
    files.

    Raises:
        ServerLost: The server went away.
        DeadlineExceeded: The server did not score in time.
    """
    welcome = member.welcome
    if version > 0 or run.learner.warm_start.steps > 0 or welcome is None or not welcome.is_untouched:
        return None
    if is_finer(welcome.dtype, run.dtype):
        return None
    logprobs_RT = probe.server_logprobs(member, None)
    return FreshServerScores(welcome.dtype, logprobs_RT, _distance(logprobs_RT, probe.server_logprobs(member, None)))


def check_identity(
    run: LearnerRun, probe: ParityProbe, member: Member, fresh_scores: FreshServerScores, version: int
) -> None:
    """Check that the first sync changed nothing on a fresh server.

    The server has loaded the same weights on its own. The bound is therefore far tighter than one between two
    programs. A reload that packs, shuffles or forgets something shows only here.

    Raises:
        ParityError: The logprobs changed.
        ServerLost: The server went away.
        DeadlineExceeded: The server did not score in time.
    """
    changed = _distance(fresh_scores.logprobs_RT, probe.server_logprobs(member, version))
    bound = run.learner.parity.identity_bound(fresh_scores.dtype) + NOISE_FACTOR * fresh_scores.noise
    if not changed <= bound:
        raise ParityError(
            f"the server at {member.endpoint} already had these weights, but the first weight sync changed its "
            f"logprobs by {changed:.2g} on average, expected at most {bound:.2g} for {fresh_scores.dtype} "
            "(learner.parity.max_identity_abs_logprob). Compare the model files of both sides; if they are equal, "
            "vLLM reloads this model incorrectly"
        )


def _distance(one_RT: torch.Tensor, other_RT: torch.Tensor) -> float:
    """Return the mean |Δ logprob| of the replica where it is largest."""
    return (one_RT - other_RT).abs().mean(dim=1).max().item()
