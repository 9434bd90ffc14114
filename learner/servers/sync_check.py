"""Whether a weight sync arrived: texts of the step, scored on both sides before it and after it, must have changed on both.

    main thread    begin(n - 1, texts), ask_before ─▶ train ─▶ expect(n) ─▶ the sync of version n ─▶ ask ─▶ check: before tokens of n are trained on
    servers                    scores under n - 1                                                scores under n

Rounding hides a lost sync from a comparison of levels: in bfloat16 two healthy sides differ by 0.1 nats on a model of 135M parameters,
and one step at a learning rate of 1e-6 changes the policy by a thousandth of that. But it changes the last bits of nearly every logprob,
on both sides, as long as enough weights change. An engine that goes on with the old ones gives the very numbers that it gave before,
unless its batches change meanwhile: a GPU's numbers then do not repeat, and nothing is known.

Invariant: an answer is compared only with logprobs of the version that it is for, and the checks take at most `max_time_share` of the
training's time.
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
"""Share of the weights that a step must change, as the server holds them. Where a few change, rounding in bfloat16 can swallow all of
it on one side and move every token on the other: measured at 4e-6 of 135M parameters, not any more at 4e-5."""
MAX_LOGPROB = -1e-3
"""A token that is nearly certain is left out: float32 has hardly a digit for its change."""
LEAST_CHANGE = 1e-5
"""Nats by which a logprob must change at the learner to count."""
MIN_CHANGED, MIN_CHANGED_FRAC = 12, 0.9
"""So many tokens, and this share of them, must change at the learner before their change is looked for at the server."""
WAIT_SLACK_S, WAIT_SLICE_S = 10.0, 0.5
MAX_UNANSWERED = 5
"""Checks in a row that a server's silence prevents, until the log says so."""

Place = tuple[Member, int]
"""A server and one of its replicas."""
Answers = dict[Place, list[Future[Scores]]]


class Before(msgspec.Struct, frozen=True, eq=False):
    """Texts of a step, and what both sides give to them before its sync. T: the tokens after the first of each sequence."""

    version: int
    sequences: list[list[int]]
    logprobs_T: torch.Tensor
    answers: Answers
    """The servers', as far as they come."""


class Expected(msgspec.Struct, frozen=True, eq=False):
    """What the servers must have once they have a version."""

    version: int
    logprobs_T: torch.Tensor
    before: Before


class SyncCheck:
    """Of all servers that have the weights. Used by the main thread, but for `ask`."""

    def __init__(
        self, probe: ParityProbe, config: ParityConfig, changed_frac: Callable[[int, torch.dtype], float]
    ) -> None:
        """`changed_frac`: the share of the weights that a version changed in a dtype."""
        self._probe, self._config, self._changed_frac = probe, config, changed_frac
        self._before: Before | None = None
        self._lock = threading.Lock()
        """Held while the servers are asked for what is before a sync."""
        self._asked: Answers = {}
        self._expected: Expected | None = None
        self._num_unanswered = 0
        """Checks in a row."""
        self._spent_s = self._next_at = 0.0
        """Of the main thread, for the check under way; and when the next may begin."""

    def begin(self, version: int, sequences: list[list[int]]) -> None:
        """Score texts of the step at the learner, before it trains the weights of `version`."""
        self._before = None
        started_at = time.monotonic()
        every_steps = self._config.every_steps
        if every_steps > 0 and (version + 1) % every_steps == 0 and started_at >= self._next_at:
            longest = longest_scored(self._probe.fleet.max_model_len)
            sequences = [sequence[-longest:] for sequence in sequences]
            self._before = Before(version, sequences, self._probe.logprobs(sequences), {})
            self._spent_s = time.monotonic() - started_at

    def ask_before(self, members: Collection[Member]) -> None:
        """Have the servers that still have that version score them, once, without waiting for it. From any thread.

        They have the whole step for it: on a CPU the prompts of the step's groups may be before it in the engine's queue.
        """
        with self._lock:
            before = self._before
            if before is not None and not before.answers:
                before.answers.update(self._ask(before.sequences, members, self._probe.timeout_s))

    def expect(self, version: int) -> Expected | None:
        """Return what to `ask` for when the servers have `version`, which the learner has now; None if it is not its turn.

        Waits up to `patience_s` for the servers' answers to `ask_before`, which they must give before they get other weights.
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
        return Expected(version, logprobs_T, before)

    def ask(self, members: Collection[Member], expected: Expected | None) -> None:
        """Have servers score what is expected, without waiting for it. May be called from another thread.

        They score before they generate; one too busy to do so within `patience_s` is asked again after the next sync.
        """
        self._expected = expected
        self._asked = {} if expected is None else self._ask(expected.before.sequences, members, self._probe.patience_s)

    def check(self) -> None:
        """Wait for the answers to what was asked, and compare. Raises ParityError."""
        asked, expected = self._asked, self._expected
        self._asked, self._expected = {}, None
        if expected is None:
            return
        started_at = time.monotonic()
        self._wait(asked, self._probe.patience_s + WAIT_SLACK_S)
        is_answered = bool(asked)
        for place, answers in asked.items():
            before_T = _answer_before(expected.before, place)
            scores = _results(answers, place, expected.version)
            if scores is not None:
                theirs_T = of_version(place[0], scores, expected.version)
                self._probe.check_level(*place, (expected.logprobs_T - theirs_T).abs(), "texts of the step")
                if before_T is not None:
                    self._check_change(place, expected, before_T, theirs_T)
            is_answered &= scores is not None and before_T is not None
        self._count(is_answered)
        ended_at = time.monotonic()
        self._next_at = ended_at + (self._spent_s + ended_at - started_at) * (1 / self._config.max_time_share - 1)

    def _count(self, is_answered: bool) -> None:
        """Say once that the check is never made."""
        self._probe.note({"parity/checked": float(is_answered)})
        self._num_unanswered = 0 if is_answered else self._num_unanswered + 1
        if self._num_unanswered == MAX_UNANSWERED:
            log.warning(
                "%d weight syncs in a row could not be checked: a server did not score the texts of the step both before and after "
                "them. Raise learner.push.patience_s, or set learner.parity.every_steps = 0 to do without",
                MAX_UNANSWERED,
            )  # fmt: skip

    def _check_change(self, place: Place, expected: Expected, before_T: torch.Tensor, theirs_T: torch.Tensor) -> None:
        member, replica = place
        ours_T = expected.logprobs_T - expected.before.logprobs_T
        is_telling_T = expected.before.logprobs_T < MAX_LOGPROB
        is_changed_T = is_telling_T & (ours_T.abs() > LEAST_CHANGE)
        num_changed = int(is_changed_T.sum())
        if num_changed < max(MIN_CHANGED, MIN_CHANGED_FRAC * int(is_telling_T.sum())):
            return
        assert member.link.welcome is not None
        if self._changed_frac(expected.version, getattr(torch, member.link.welcome.dtype)) < MIN_CHANGED_WEIGHTS:
            return
        change_T = theirs_T - before_T
        unchanged_frac = float((change_T[is_changed_T] == 0).float().mean())
        self._probe.note(
            {
                "parity/learner_change": float(ours_T.abs().mean()),
                "parity/server_change": float(change_T.abs().mean()),
                "parity/unchanged_frac": unchanged_frac,
            }
        )
        if unchanged_frac == 1:
            where = f"replica {replica} of the server" if len(replicas(member)) > 1 else "the server"
            raise ParityError(
                f"the weights of version {expected.version} did not arrive in the engine of {where} at {member.endpoint}: of "
                f"{num_changed} tokens whose logprobs they changed at the learner (by {float(ours_T.abs().mean()):.1e} on average), it "
                "gives 100% exactly the logprobs of before, although it reports the new version. Restart that server, and continue "
                "with --resume. If it happens again, vLLM does not load this model's weights as it must"
            )

    def _wait(self, answers: Answers, timeout_s: float) -> None:
        """Until all are there or have failed."""
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


def _answer_before(before: Before, place: Place) -> torch.Tensor | None:
    """What a server gave before the sync; None: it was not asked, not in time, or not under the version before."""
    answers = before.answers.get(place, [])
    if not answers or not all(one.done() and not one.cancelled() and one.exception() is None for one in answers):
        return None
    scores = [one.result() for one in answers]
    is_of_version = all(one.policy_version == before.version for one in scores)
    return of_version(place[0], scores, before.version) if is_of_version else None


def _results(answers: list[Future[Scores]], place: Place, version: int) -> list[Scores] | None:
    """Return the answers of a server; None, with a log line, if one of them did not come."""
    member, _ = place
    try:
        return [answer.result(0) for answer in answers]
    except (TimeoutError, SlipstreamError) as error:
        if not member.is_draining:  # else it has ended as announced
            key = "" if isinstance(error, ServerLost) else " (learner.push.patience_s)"
            log.warning("parity of version %d could not be checked: %s%s", version, error, key)
    return None
