"""Parity: server and learner must give the same logprobs to the same tokens under the same weights.

    connect                    measure: texts of the data on both sides, before the first group is asked for
                               (and before a run's first push: check_identity)
    every push                 sync_check.py: a group of the step, before and after it
    every step                 check_fresh: the tokens that the newest version has sampled

A wrong model, another temperature or a stale LM head shows here at once instead of as a run that silently does not learn. Every server
is compared by itself, with a bound that follows from its dtype and the run's, and none is waited for long while others are there: one in
bfloat16 in a run of float32 samples from a policy that is the learner's up to its rounding, with that policy's logprobs, so importance
ratios correct for the difference as they do for staleness.

A run's first push brings the weights that an untouched server has loaded by itself, so it must change nothing (`check_identity`): its
bound is far tighter than one between two programs, and a reload that packs, shuffles or forgets something shows there and nowhere else.
"""

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

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
"""Those with a known bound, the finer ones first."""
NOISE_FACTOR = 3.0
"""The noise is of one pair of scorings; that of another may be larger."""


class Comparison(msgspec.Struct, frozen=True):
    """The two sides whose logprobs are compared, and how far apart these may be."""

    ours: str
    """The dtype in which the learner computes."""
    theirs: str
    bound: float

    @property
    def in_words(self) -> str:
        return self.ours if self.ours == self.theirs else f"{self.ours} at the learner and {self.theirs} at the server"


def comparison(run: LearnerRun, welcome: Welcome) -> Comparison:
    return Comparison(run.dtype, welcome.dtype, run.learner.parity.bound(coarser(run.dtype, welcome.dtype)))


def coarser(*dtypes: str) -> str:
    return max(dtypes, key=DTYPES.index)


def is_finer(one: str, other: str) -> bool:
    return DTYPES.index(one) < DTYPES.index(other)


class ParityProbe:
    """Fixed sequences, texts of the data, scored on both sides."""

    def __init__(
        self,
        run: LearnerRun,
        fleet: Fleet,
        logprobs: Callable[[Sequence[Sequence[int]]], torch.Tensor],
        prompts: list[list[int]],
    ) -> None:
        """`logprobs` gives the learner's of several sequences, after the first token of each; `prompts`: what the texts are made of."""
        self.sequences = texts_of(prompts)
        self.logprobs, self.fleet = logprobs, fleet
        self.timeout_s, self.patience_s = run.learner.push.timeout_s, run.learner.push.patience_in_effect_s
        self._run = run
        self._comparisons: dict[str, Comparison] = {}
        """By endpoint, also of servers that have gone: their tokens may be in a batch yet."""
        self._metrics: dict[str, float] = {}

    def measure(self, member: Member, version: int) -> float:
        """Return the mean |Δ logprob| over all tokens. Raises ParityError above the bound, ServerLost, DeadlineExceeded."""
        assert member.link.welcome is not None
        self._comparisons[member.endpoint] = comparison(self._run, member.link.welcome)
        own_T = self.logprobs(self._sequences_for(member))
        differences_RT = (own_T - self.server_logprobs(member, version)).abs()
        mismatches = [self.check_level(member, *each, "fixed sequences") for each in enumerate(differences_RT)]
        if len(mismatches) > 1:
            told = ", ".join(f"{mismatch:.1e}" for mismatch in mismatches)
            log.info("parity of each replica of the server at %s: mean |Δ logprob| = %s", member.endpoint, told)
        return max(mismatches)

    def server_logprobs(self, member: Member, version: int | None) -> torch.Tensor:
        """The server's of all texts, a row for each replica; None: of the model's own weights. Raises like `measure`."""
        has_others = any(other is not member and self.fleet.is_ready(other) for other in self.fleet.members)
        timeout_s, key = (self.patience_s, "patience_s") if has_others else (self.timeout_s, "timeout_s")

        def score(replica: int, token_ids: list[int]) -> torch.Tensor:
            scoring = member.link.score(token_ids, timeout_s, replica)
            try:
                scores = self.fleet.loop.call(scoring, timeout_s + CALL_SLACK_S)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error} (learner.push.{key})") from error
            return of_version(member, [scores], version)

        sequences = self._sequences_for(member)
        return torch.stack([torch.cat([score(replica, ids) for ids in sequences]) for replica in replicas(member)])

    def check_level(self, member: Member, replica: int, difference_T: torch.Tensor, tokens: str) -> float:
        """Return the mean |Δ logprob|. Raises ParityError when it is above the server's bound."""
        mismatch = difference_T.mean().item()
        self.note({"parity/abs_logprob": mismatch})
        where = f" at its replica {replica}" if len(replicas(member)) > 1 else ""
        self._check(mismatch, f"{tokens}{where}", member.endpoint)
        return mismatch

    def check_fresh(self, mean_abs_logprob: Mapping[str, float]) -> None:
        """Raise ParityError when, on tokens of the current version, that of a server (by endpoint) is above its bound."""
        for endpoint, mismatch in mean_abs_logprob.items():
            self._check(mismatch, "fresh tokens", endpoint)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Keep the largest of each since the last `take_metrics`."""
        self._metrics |= {name: max(value, self._metrics.get(name, value)) for name, value in metrics.items()}

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _comparison(self, endpoint: str) -> Comparison:
        """Nobody knows after a restart who has sent a group that came before: it may have been any server."""
        known = self._comparisons
        return known[endpoint] if endpoint in known else max(known.values(), key=lambda compared: compared.bound)

    def _sequences_for(self, member: Member) -> list[list[int]]:
        assert member.link.welcome is not None
        longest = longest_scored(member.link.welcome.max_model_len)
        return [sequence[-longest:] for sequence in self.sequences]

    def _check(self, mean_abs_logprob: float, tokens: str, endpoint: str) -> None:
        """Raise ParityError when the mean |Δ logprob| is above the server's bound (or NaN)."""
        compared = self._comparison(endpoint)
        if not mean_abs_logprob <= compared.bound:
            raise ParityError(
                f"server and learner disagree: mean |Δ logprob| of {tokens} is {mean_abs_logprob:.2g}, the bound is "
                f"{compared.bound:.2g} for {compared.in_words} (learner.parity.max_mean_abs_logprob). The server, at {endpoint}, may "
                "run another model or temperature, or a push did not load every tensor."
            )


def texts_of(prompts: list[list[int]]) -> list[list[int]]:
    """Join prompts into NUM_SEQUENCES texts of at least MIN_TEXT_TOKENS tokens each, cyclically; longer prompts keep their ends.

    Text of the data, not random tokens: on those, which no policy would sample, two healthy sides in bfloat16 differ the most.
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
    """Raise ConfigError for a dtype without a bound; say aloud what counts as agreement with one that is not the run's."""
    if welcome.dtype not in DTYPES:
        raise ConfigError(
            f"the server at {member.endpoint} computes in {welcome.dtype}, this run says dtype = {run.dtype!r}, and how far apart the "
            f"two may be is known of {' and '.join(DTYPES)} only; start the server with one of them as server.dtype, or without it"
        )
    if welcome.dtype != run.dtype:
        log.info(
            "the server at %s computes in %s, this run in %s: a mean |Δ logprob| of up to %.2g counts as agreement with it "
            "(learner.parity.max_mean_abs_logprob)",
            member.endpoint, welcome.dtype, run.dtype, comparison(run, welcome).bound,
        )  # fmt: skip


def replicas(member: Member) -> range:
    assert member.link.welcome is not None
    return range(member.link.welcome.num_replicas)


def longest_scored(max_model_len: int) -> int:
    """Tokens of a sequence that a server scores: vLLM does so on the way to one more."""
    return max_model_len - 1


def of_version(member: Member, scores: Sequence[Scores], version: int | None) -> torch.Tensor:
    """The logprobs of several sequences, one after the other. Raises ParityError for those of another version."""
    for one in scores:
        if one.policy_version != version:
            raise ParityError(
                f"the server at {member.endpoint} scored with version {one.policy_version}, pushed was {version}"
            )
    return torch.cat([torch.from_numpy(one.logprobs.copy()) for one in scores])


class Untouched(msgspec.Struct, frozen=True, eq=False):
    """What the server gave to the fixed sequences before anything was pushed. R: its replicas, T: their tokens after the first."""

    dtype: str
    """In which the server computes."""
    logprobs_RT: torch.Tensor
    noise: float
    """Mean |Δ logprob| between two scorings of the same weights: 0, unless it computes other requests beside."""


def score_untouched(run: LearnerRun, probe: ParityProbe, member: Member, version: int) -> Untouched | None:
    """Before the first push; None if the policy is not what the server has loaded. Raises ServerLost, DeadlineExceeded.

    Nor is it for a server in a finer dtype than weights travel in: the first push rounds what it has loaded from the model's files.
    """
    welcome = member.welcome
    if version > 0 or run.learner.warm_start.steps > 0 or welcome is None or not welcome.is_untouched:
        return None
    if is_finer(welcome.dtype, run.dtype):
        return None
    logprobs_RT = probe.server_logprobs(member, None)
    return Untouched(welcome.dtype, logprobs_RT, _distance(logprobs_RT, probe.server_logprobs(member, None)))


def check_identity(run: LearnerRun, probe: ParityProbe, member: Member, untouched: Untouched, version: int) -> None:
    """After the first push. Raises ParityError if it has changed the logprobs, ServerLost, DeadlineExceeded."""
    changed = _distance(untouched.logprobs_RT, probe.server_logprobs(member, version))
    bound = run.learner.parity.identity_bound(untouched.dtype) + NOISE_FACTOR * untouched.noise
    if not changed <= bound:
        raise ParityError(
            f"the first push brought the weights that the server at {member.endpoint} had loaded by itself, and yet its logprobs changed by {changed:.2g} "
            f"(mean |Δ logprob| of fixed sequences); the bound is {bound:.2g} for {untouched.dtype} with a noise of {untouched.noise:.2g} "
            "(learner.parity.max_identity_abs_logprob). Either vLLM does not load this model a second time as it did the first, or "
            "the files of the model differ on both sides"
        )


def _distance(one_RT: torch.Tensor, other_RT: torch.Tensor) -> float:
    """Of the replica where it is largest."""
    return (one_RT - other_RT).abs().mean(dim=1).max().item()
