"""A run's first push brings the weights that an untouched server has loaded by itself, so it must change nothing.

    score ─▶ score again: the server's own noise ─▶ push ─▶ score ─▶ check

Bit-equal weights make this bound far tighter than one between two programs (parity.py), in bfloat16 above all: a reload that packs,
shuffles or forgets something differently from the first loading shows here and nowhere else.
"""

import msgspec
import torch

from learner.config import LearnerRun
from learner.servers.member import Member
from learner.servers.parity import ParityProbe, is_finer
from protocol.errors import ParityError

NOISE_FACTOR = 3.0
"""The noise is of one pair of scorings; that of another may be larger."""


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
