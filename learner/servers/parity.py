"""Parity: server and learner must give the same logprobs to the same tokens under the same weights.

    connect                    measure: all fixed sequences on both sides, before the first group is asked for
                               (and before a run's first push: identity.py)
    push ─▶ expect ─▶ ask      one of them, scored by the server while the learner goes on
    next batch ─▶ check        before any token of the new version is trained on, at the latest before the next push

A wrong model, a stale LM head, a lost tensor or another dtype shows here at once instead of as a run that silently does not
learn. Every server is compared by itself, and none is waited for long while others are there. Invariant: an answer is compared only with logprobs of the version that it is for.
"""

import logging
import random
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait

import msgspec
import torch

from learner.config import LearnerRun
from learner.servers.fleet import Fleet
from learner.servers.member import Member
from protocol.errors import DeadlineExceeded, ParityError, SlipstreamError
from protocol.messages import Scores, Welcome

log = logging.getLogger(__name__)

NUM_SEQUENCES = 4
MAX_PROMPT_TOKENS = 256
NUM_RANDOM_TOKENS = 8
ASK_TIMEOUT_S = 5.0
"""The server scores before it generates; one too busy to do so within this is asked again after the next push."""
CALL_SLACK_S = 10.0


class Expected(msgspec.Struct, frozen=True, eq=False):
    """What the learner gives to one sequence under one version. T: its tokens after the first."""

    version: int
    token_ids: list[int]
    logprobs_T: torch.Tensor


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
        self._bound, self._dtype = run.learner.parity.bound(run.dtype), run.dtype
        self._asked: list[tuple[Member, Expected, Future[Scores]]] = []
        self._measured: float | None = None

    def measure(self, member: Member, version: int) -> float:
        """Return the mean |Δ logprob| over all tokens. Raises ParityError above the bound, ServerLost, DeadlineExceeded."""
        own = self._of_all(member, self._logprobs)
        return self._compare(member, (own - self.server_logprobs(member, version)).abs())

    def server_logprobs(self, member: Member, version: int | None) -> torch.Tensor:
        """The server's of all fixed sequences; None: of the model's own weights. Raises like `measure`."""
        has_others = any(other is not member and self._fleet.is_ready(other) for other in self._fleet.members)
        timeout_s, key = (self._patience_s, "patience_s") if has_others else (self._timeout_s, "timeout_s")

        def score(token_ids: list[int]) -> torch.Tensor:
            scoring = member.link.score(token_ids, timeout_s)
            try:
                return _of_version(member, self._loop.call(scoring, timeout_s + CALL_SLACK_S), version)
            except DeadlineExceeded as error:
                raise DeadlineExceeded(f"{error} (learner.push.{key})") from error

        return self._of_all(member, score)

    def expect(self, version: int) -> Expected | None:
        """Return what to `ask` for when the servers have `version`, which the learner has now; None if it is not its turn."""
        if self._every_steps == 0 or version % self._every_steps:
            return None
        index = version // self._every_steps % len(self._sequences)
        welcomes = [member.link.welcome for member in self._fleet.members]
        token_ids = self._sequences[index][-min(_longest(welcome) for welcome in welcomes if welcome is not None) :]
        return Expected(version, token_ids, self._logprobs(token_ids))

    def ask(self, members: Collection[Member], expected: Expected | None) -> None:
        """Have servers score what is expected, without waiting for it. May be called from another thread."""
        if expected is not None:
            self._asked = [
                (member, expected, self._loop.submit(member.link.score(expected.token_ids, ASK_TIMEOUT_S)))
                for member in members
            ]

    def check(self) -> None:
        """Wait for the answers to what was asked, and compare. Raises ParityError above the bound."""
        asked, self._asked = self._asked, []
        answers = [answer for _, _, answer in asked]
        if wait(answers, ASK_TIMEOUT_S + CALL_SLACK_S, "FIRST_COMPLETED").done:
            wait(answers, self._patience_s)
        for member, expected, answer in asked:
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
                log.warning("parity of version %d could not be checked: %s", expected.version, error)
            else:
                theirs_T = _of_version(member, theirs, expected.version)
                self._compare(member, (expected.logprobs_T - theirs_T).abs())

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call."""
        measured, self._measured = self._measured, None
        return {} if measured is None else {"parity/abs_logprob": measured}

    def _of_all(self, member: Member, logprobs: Callable[[list[int]], torch.Tensor]) -> torch.Tensor:
        assert member.link.welcome is not None
        longest = _longest(member.link.welcome)
        return torch.cat([logprobs(sequence[-longest:]) for sequence in self._sequences])

    def _compare(self, member: Member, difference_T: torch.Tensor) -> float:
        mismatch = difference_T.mean().item()
        self._measured = max(self._measured or 0.0, mismatch)
        check_mismatch(mismatch, self._bound, self._dtype, "fixed sequences", member.endpoint)
        return mismatch


def check_fresh(run: LearnerRun, mean_abs_logprob: Mapping[str, float]) -> None:
    """Raise ParityError when, on tokens of the current version, that of a server is above the bound."""
    for endpoint, mismatch in mean_abs_logprob.items():
        check_mismatch(mismatch, run.learner.parity.bound(run.dtype), run.dtype, "fresh tokens", endpoint)


def check_mismatch(mean_abs_logprob: float, bound: float, dtype: str, tokens: str, endpoint: str) -> None:
    """Raise ParityError when the mean |Δ logprob| is above the bound (or NaN)."""
    if not mean_abs_logprob <= bound:
        raise ParityError(
            f"server and learner disagree: mean |Δ logprob| of {tokens} is {mean_abs_logprob:.2g}, the bound is {bound:.2g} "
            f"for {dtype} (learner.parity.max_mean_abs_logprob). The server, at {endpoint}, may run another model, dtype or "
            "temperature, or a push did not load every tensor."
        )


def _longest(welcome: Welcome) -> int:
    """Tokens of a sequence that the server scores: vLLM does so on the way to one more."""
    return welcome.max_model_len - 1


def _of_version(member: Member, scores: Scores, version: int | None) -> torch.Tensor:
    if scores.policy_version != version:
        raise ParityError(
            f"the server at {member.endpoint} scored with version {scores.policy_version}, pushed was {version}"
        )
    return torch.from_numpy(scores.logprobs.copy())
