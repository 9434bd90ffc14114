"""Verify that a weight sync took effect: the logprobs of texts must change on both sides.

    main thread    begin(n - 1), ask_before ─▶ train ─▶ expect(n) ─▶ sync of version n ─▶ ask ─▶ check
    servers                      score under n - 1                                        score under n

`check` runs before training on tokens of n. Comparing levels would miss a lost sync: in bfloat16 two healthy
sides differ by 0.1 nats (135M parameters). A step at learning rate 1e-6 changes the policy by a thousandth of
that. But a step changes the last bits of nearly every logprob on both sides, if enough weights change. An
engine with old weights repeats its numbers exactly, unless its batches change: on a GPU the check then proves
nothing.
Invariant: an answer is compared only with logprobs of its own version. All checks together take at most
`max_time_share` of the training time.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait

import msgspec
import torch

from learner.config import ParityConfig
from learner.servers.membership import Member
from learner.servers.parity import ParityProbe, longest_scored, of_version, replicas
from protocol.errors import ParityError, ServerLost, SlipstreamError
from protocol.messages import Scores

log = logging.getLogger(__name__)

MIN_CHANGED_WEIGHTS = 1e-4
"""Minimum share of weights that a step must change, in the server's dtype.

If fewer change, bfloat16 rounding can swallow the change on one side and move every token on the other. This
occurs at 4e-6 of 135M parameters, but not at 4e-5.
"""
MIN_CHANGED_WEIGHTS_QUANTIZED = 1e-2
"""The same for a quantized server, where most changes of a weight stay within one quantized value."""
MAX_LOGPROB = -1e-3
"""Logprob above which a token is left out: float32 hardly resolves the change of a nearly certain token."""
LEAST_CHANGE = 1e-5
"""Minimum change of a logprob at the learner, in nats."""
MIN_CHANGED, MIN_CHANGED_FRAC = 12, 0.9
"""Minimum number and share of tokens that must change at the learner before the servers are checked."""
WAIT_SLACK_S, WAIT_SLICE_S = 10.0, 0.5
MAX_UNANSWERED = 5
"""Number of consecutive unanswered checks before a warning."""

ReplicaId = tuple[Member, int]
"""Server and index of one of its replicas."""
Answers = dict[ReplicaId, list[Future[Scores]]]


class BeforeSync(msgspec.Struct, frozen=True, eq=False):
    """Texts of a step, and the logprobs of both sides before its weight sync.

    Suffix: T, the tokens after the first of each sequence.
    """

    version: int
    sequences: list[list[int]]
    logprobs_T: torch.Tensor
    answers: Answers
    """Answers of the servers, including pending ones."""


class ExpectedAnswers(msgspec.Struct, frozen=True, eq=False):
    """Learner's logprobs under a version, for comparison with the servers'."""

    version: int
    logprobs_T: torch.Tensor
    before: BeforeSync


class SyncCheck:
    """Check of all servers with the weights.

    Used in the main thread, except `ask` and `ask_before`.
    """

    def __init__(
        self, probe: ParityProbe, config: ParityConfig, changed_frac: Callable[[int, torch.dtype], float]
    ) -> None:
        """Create the check.

        `changed_frac` returns the share of weights that a version changed in a dtype.
        """
        self._probe, self._config, self._changed_frac = probe, config, changed_frac
        self._before: BeforeSync | None = None
        self._lock = threading.Lock()
        """Held while `ask_before` sends its requests."""
        self._pending_answers: Answers = {}
        self._expected: ExpectedAnswers | None = None
        self._num_unanswered = 0
        """Number of consecutive unanswered checks."""
        self._spent_s = self._next_at = 0.0
        """Main-thread seconds of the current check, and the earliest start of the next one."""

    def begin(self, version: int, sequences: list[list[int]]) -> None:
        """Score texts at the learner before the step trains, if a check is due.

        `version`: the version of the weights before the step.
        """
        self._before = None
        started_at = time.monotonic()
        every_steps = self._config.every_steps
        if every_steps > 0 and (version + 1) % every_steps == 0 and started_at >= self._next_at:
            longest = longest_scored(self._probe.fleet.max_model_len)
            sequences = [sequence[-longest:] for sequence in sequences]
            self._before = BeforeSync(version, sequences, self._probe.logprobs(sequences), {})
            self._spent_s = time.monotonic() - started_at

    def ask_before(self, members: Collection[Member]) -> None:
        """Request scores from the servers that still have the version of `begin`.

        May be called from any thread. Requests are sent once and not waited for. The servers have the whole
        step to answer: on a CPU, the step's prompts may be ahead in the engine's queue.
        """
        with self._lock:
            before = self._before
            if before is not None and not before.answers:
                before.answers.update(self._ask(before.sequences, members, self._probe.timeout_s))

    def expect(self, version: int) -> ExpectedAnswers | None:
        """Return what to `ask` once the servers have `version`; None if no check is due.

        `version` is the learner's current one. Waits up to `patience_s` for the answers to `ask_before`,
        which the servers must give before they get other weights.
        """
        before, self._before = self._before, None
        if before is None or before.version != version - 1:
            return None
        started_at = time.monotonic()
        self._wait(before.answers, self._probe.patience_s)
        for late in (answer for each in before.answers.values() for answer in each):
            late.cancel()
        logprobs_T = self._probe.logprobs(before.sequences)
        self._spent_s += time.monotonic() - started_at
        return ExpectedAnswers(version, logprobs_T, before)

    def ask(self, members: Collection[Member], expected: ExpectedAnswers | None) -> None:
        """Request the expected scores without waiting for them, from any thread.

        Servers score before they generate. A server that is too busy to score within `patience_s` is checked
        after the next sync. None requests nothing, and keeps a pending check: a server has joined meanwhile.
        """
        if expected is not None:
            self._expected = expected
            self._pending_answers = self._ask(expected.before.sequences, members, self._probe.patience_s)

    def check(self) -> None:
        """Wait for the answers to `ask`, and compare them. Raises ParityError."""
        pending, expected = self._pending_answers, self._expected
        self._pending_answers, self._expected = {}, None
        if expected is None:
            return
        started_at = time.monotonic()
        self._wait(pending, self._probe.patience_s + WAIT_SLACK_S)
        is_answered = bool(pending)
        for replica_id, answers in pending.items():
            before_T = _answer_before(expected.before, replica_id)
            scores = _results(answers, replica_id, expected.version, self._probe.patience_key)
            if scores is not None:
                theirs_T = of_version(replica_id[0], scores, expected.version)
                self._probe.check_level(*replica_id, (expected.logprobs_T - theirs_T).abs(), "texts of the step")
                if before_T is not None:
                    self._check_change(replica_id, expected, before_T, theirs_T)
            is_answered &= scores is not None and before_T is not None
        self._count(is_answered)
        ended_at = time.monotonic()
        self._next_at = ended_at + (self._spent_s + ended_at - started_at) * (1 / self._config.max_time_share - 1)

    def _count(self, is_answered: bool) -> None:
        """Warn once if the checks stay unanswered."""
        self._probe.record({"parity/checked": float(is_answered)})
        self._num_unanswered = 0 if is_answered else self._num_unanswered + 1
        if self._num_unanswered == MAX_UNANSWERED:
            log.warning(
                "%d weight syncs in a row could not be checked: a server did not score the texts of the step both "
                "before and after them. Raise its limit (%s), or set learner.parity.every_steps = 0 to disable the "
                "check",
                MAX_UNANSWERED, self._probe.patience_key,
            )  # fmt: skip

    def _check_change(
        self, replica_id: ReplicaId, expected: ExpectedAnswers, before_T: torch.Tensor, theirs_T: torch.Tensor
    ) -> None:
        member, replica = replica_id
        ours_T = expected.logprobs_T - expected.before.logprobs_T
        is_sensitive_T = expected.before.logprobs_T < MAX_LOGPROB
        is_changed_T = is_sensitive_T & (ours_T.abs() > LEAST_CHANGE)
        num_changed = int(is_changed_T.sum())
        if num_changed < max(MIN_CHANGED, MIN_CHANGED_FRAC * int(is_sensitive_T.sum())):
            return
        welcome = member.link.welcome
        assert welcome is not None
        least = MIN_CHANGED_WEIGHTS_QUANTIZED if welcome.quantization else MIN_CHANGED_WEIGHTS
        if self._changed_frac(expected.version, getattr(torch, welcome.dtype)) < least:
            return
        change_T = theirs_T - before_T
        unchanged_frac = float((change_T[is_changed_T] == 0).float().mean())
        self._probe.record(
            {
                "parity/learner_change": float(ours_T.abs().mean()),
                "parity/server_change": float(change_T.abs().mean()),
                "parity/unchanged_frac": unchanged_frac,
            }
        )
        if unchanged_frac == 1:
            where = f"replica {replica} of the server" if len(replicas(member)) > 1 else "the server"
            raise ParityError(
                f"the weights of version {expected.version} did not reach the engine of {where} at {member.endpoint}: "
                f"{num_changed} logprobs changed on the learner (by {float(ours_T.abs().mean()):.1e} on average), none "
                "on the server. Restart that server and continue with --resume; if this repeats, vLLM does not load "
                "this model correctly"
            )

    def _wait(self, answers: Answers, timeout_s: float) -> None:
        """Wait until all answers are there or have failed, or until the timeout."""
        pending = {future for each in answers.values() for future in each}
        deadline = time.monotonic() + timeout_s
        while pending and (left_s := deadline - time.monotonic()) > 0:
            self._probe.fleet.on_wait()
            pending = wait(pending, min(left_s, WAIT_SLICE_S)).not_done

    def _ask(self, sequences: list[list[int]], members: Collection[Member], timeout_s: float) -> Answers:
        submit = self._probe.fleet.loop.submit
        return {
            (member, replica): [submit(member.link.score(ids, timeout_s, replica)) for ids in sequences]
            for member in members
            for replica in replicas(member)
        }


def _answer_before(before: BeforeSync, replica_id: ReplicaId) -> torch.Tensor | None:
    """Return the logprobs that a server gave before the sync.

    None if no request was sent, or if the answer was too late or had another version.
    """
    answers = before.answers.get(replica_id, [])
    if not answers or not all(one.done() and not one.cancelled() and one.exception() is None for one in answers):
        return None
    scores = [one.result() for one in answers]
    is_of_version = all(one.policy_version == before.version for one in scores)
    return of_version(replica_id[0], scores, before.version) if is_of_version else None


def _results(answers: list[Future[Scores]], replica_id: ReplicaId, version: int, key: str) -> list[Scores] | None:
    """Return the answers of a server; None, with a warning, if one is missing. `key` limits the wait."""
    member, _ = replica_id
    try:
        return [answer.result(0) for answer in answers]
    except (TimeoutError, SlipstreamError) as error:
        if not member.is_draining:  # otherwise it shut down as announced
            limit = "" if isinstance(error, ServerLost) else f" ({key})"
            log.warning("parity of version %d could not be checked: %s%s", version, error, limit)
    return None
