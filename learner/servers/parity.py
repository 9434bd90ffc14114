"""Parity: server and learner must give the same logprobs to the same tokens under the same weights.

    connect                    measure: all fixed sequences on both sides, before the first group is asked for
                               (and before a run's first push: identity.py)
    push ─▶ expect ─▶ ask      one of them, scored by the server while the learner goes on
    next batch ─▶ check        before any token of the new version is trained on, at the latest before the next push

A wrong model, a stale LM head or a lost tensor shows here at once instead of as a run that silently does not learn. Every server
is compared by itself, with a bound that follows from its dtype and the run's, and none is waited for long while others are there: one in
bfloat16 in a run of float32 samples from a policy that is the learner's up to its rounding, with that policy's logprobs, so importance
ratios correct for the difference as they do for staleness. Invariant: an answer is compared only with logprobs of the version that it
is for.
"""

import logging
import random
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import get_args

import msgspec
import torch

from learner.config import LearnerRun
from learner.servers.fleet import Fleet
from learner.servers.member import Member
from protocol.errors import ConfigError, DeadlineExceeded, ParityError, SlipstreamError
from protocol.hardware import Dtype
from protocol.messages import Scores, Welcome

log = logging.getLogger(__name__)

NUM_SEQUENCES = 4
MAX_PROMPT_TOKENS = 256
NUM_RANDOM_TOKENS = 8
ASK_TIMEOUT_S = 5.0
"""The server scores before it generates; one too busy to do so within this is asked again after the next push."""
CALL_SLACK_S = 10.0
DTYPES: tuple[str, ...] = get_args(Dtype)
"""Those with a known bound, the finer ones first."""


class Expected(msgspec.Struct, frozen=True, eq=False):
    """What the learner gives to one sequence under one version. T: its tokens after the first."""

    version: int
    token_ids: list[int]
    logprobs_T: torch.Tensor


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
    """Fixed sequences (prompts with random tokens behind them) scored on both sides."""

    def __init__(
        self,
        run: LearnerRun,
        fleet: Fleet,
        logprobs: Callable[[list[int]], torch.Tensor],
        prompts: list[list[int]],
    ) -> None:
        """`logprobs` gives the learner's of a sequence, after its first token; of `prompts` the first NUM_SEQUENCES are used."""
        generator, vocab_size = random.Random(0), fleet.hello.model.vocab_size
        self._sequences = [
            prompt[-MAX_PROMPT_TOKENS:] + [generator.randrange(vocab_size) for _ in range(NUM_RANDOM_TOKENS)]
            for prompt in prompts[:NUM_SEQUENCES]
        ]
        self._logprobs = logprobs
        self._fleet, self._loop = fleet, fleet.loop
        self._timeout_s, self._patience_s = run.learner.push.timeout_s, run.learner.push.patience_in_effect_s
        self._every_steps = run.learner.parity.every_steps
        self._run = run
        self._comparisons: dict[str, Comparison] = {}
        """By endpoint, also of servers that have gone: their tokens may be in a batch yet."""
        self._asked: list[tuple[Member, int, Expected, Future[Scores]]] = []
        """With the replica that was asked."""
        self._measured: float | None = None

    def measure(self, member: Member, version: int) -> float:
        """Return the mean |Δ logprob| over all tokens. Raises ParityError above the bound, ServerLost, DeadlineExceeded."""
        assert member.link.welcome is not None
        self._comparisons[member.endpoint] = comparison(self._run, member.link.welcome)
        own_T = self._of_all(member, self._logprobs)
        differences_RT = (own_T - self.server_logprobs(member, version)).abs()
        mismatches = [self._compare(member, *each) for each in enumerate(differences_RT)]
        if len(mismatches) > 1:
            told = ", ".join(f"{mismatch:.1e}" for mismatch in mismatches)
            log.info("parity of each replica of the server at %s: mean |Δ logprob| = %s", member.endpoint, told)
        return max(mismatches)

    def server_logprobs(self, member: Member, version: int | None) -> torch.Tensor:
        """The server's of all fixed sequences, a row for each replica; None: of the model's own weights. Raises like `measure`."""
        has_others = any(other is not member and self._fleet.is_ready(other) for other in self._fleet.members)
        timeout_s, key = (self._patience_s, "patience_s") if has_others else (self._timeout_s, "timeout_s")

        def score(replica: int, token_ids: list[int]) -> torch.Tensor:
            scoring = member.link.score(token_ids, timeout_s, replica)
            try:
                return _of_version(member, self._loop.call(scoring, timeout_s + CALL_SLACK_S), version)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error} (learner.push.{key})") from error

        return torch.stack([self._of_all(member, partial(score, replica)) for replica in _replicas(member)])

    def expect(self, version: int) -> Expected | None:
        """Return what to `ask` for when the servers have `version`, which the learner has now; None if it is not its turn."""
        if self._every_steps == 0 or version % self._every_steps:
            return None
        index = version // self._every_steps % len(self._sequences)
        token_ids = self._sequences[index][-_longest(self._fleet.max_model_len) :]
        return Expected(version, token_ids, self._logprobs(token_ids))

    def ask(self, members: Collection[Member], expected: Expected | None) -> None:
        """Have servers score what is expected, without waiting for it. May be called from another thread."""
        if expected is not None:
            self._asked = [
                (
                    member,
                    replica,
                    expected,
                    self._loop.submit(member.link.score(expected.token_ids, ASK_TIMEOUT_S, replica)),
                )
                for member in members
                for replica in _replicas(member)
            ]

    def check(self) -> None:
        """Wait for the answers to what was asked, and compare. Raises ParityError above the bound."""
        asked, self._asked = self._asked, []
        answers = [answer for *_, answer in asked]
        if wait(answers, ASK_TIMEOUT_S + CALL_SLACK_S, "FIRST_COMPLETED").done:
            wait(answers, self._patience_s)
        for member, replica, expected, answer in asked:
            try:
                theirs = answer.result(0)
            except TimeoutError:
                answer.cancel()
                log.warning(
                    "parity of version %d could not be checked: the server at %s had not scored %g s after another "
                    "(learner.push.patience_s)",
                    expected.version, member.endpoint, self._patience_s,
                )  # fmt: skip
            except SlipstreamError as error:
                if member.is_draining:
                    continue  # it has ended as it said
                log.warning("parity of version %d could not be checked: %s", expected.version, error)
            else:
                theirs_T = _of_version(member, theirs, expected.version)
                self._compare(member, replica, (expected.logprobs_T - theirs_T).abs())

    def check_fresh(self, mean_abs_logprob: Mapping[str, float]) -> None:
        """Raise ParityError when, on tokens of the current version, that of a server (by endpoint) is above its bound."""
        for endpoint, mismatch in mean_abs_logprob.items():
            self._check(mismatch, "fresh tokens", endpoint)

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call."""
        measured, self._measured = self._measured, None
        return {} if measured is None else {"parity/abs_logprob": measured}

    def _comparison(self, endpoint: str) -> Comparison:
        """Nobody knows after a restart who has sent a group that came before: it may have been any server."""
        known = self._comparisons
        return known[endpoint] if endpoint in known else max(known.values(), key=lambda compared: compared.bound)

    def _of_all(self, member: Member, logprobs: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        assert member.link.welcome is not None
        longest = _longest(member.link.welcome.max_model_len)
        return torch.cat([logprobs(sequence[-longest:]) for sequence in self._sequences])

    def _compare(self, member: Member, replica: int, difference_T: torch.Tensor) -> float:
        mismatch = difference_T.mean().item()
        self._measured = max(self._measured or 0.0, mismatch)
        where = f" at its replica {replica}" if len(_replicas(member)) > 1 else ""
        self._check(mismatch, f"fixed sequences{where}", member.endpoint)
        return mismatch

    def _check(self, mean_abs_logprob: float, tokens: str, endpoint: str) -> None:
        """Raise ParityError when the mean |Δ logprob| is above the server's bound (or NaN)."""
        compared = self._comparison(endpoint)
        if not mean_abs_logprob <= compared.bound:
            raise ParityError(
                f"server and learner disagree: mean |Δ logprob| of {tokens} is {mean_abs_logprob:.2g}, the bound is "
                f"{compared.bound:.2g} for {compared.in_words} (learner.parity.max_mean_abs_logprob). The server, at {endpoint}, may "
                "run another model or temperature, or a push did not load every tensor."
            )


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


def _replicas(member: Member) -> range:
    assert member.link.welcome is not None
    return range(member.link.welcome.num_replicas)


def _longest(max_model_len: int) -> int:
    """Tokens of a sequence that a server scores: vLLM does so on the way to one more."""
    return max_model_len - 1


def _of_version(member: Member, scores: Scores, version: int | None) -> torch.Tensor:
    if scores.policy_version != version:
        raise ParityError(
            f"the server at {member.endpoint} scored with version {scores.policy_version}, pushed was {version}"
        )
    return torch.from_numpy(scores.logprobs.copy())
