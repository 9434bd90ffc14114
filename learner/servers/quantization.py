"""Quantized servers and the off-policy correction: chosen when a run has its first servers.

    Welcome.quantization ─▶ choose_correction: "auto" becomes a truncated weight, or nothing
                         └▶ check_joiner, for later servers

A quantized server samples from a policy that differs from the learner's in every token, by more than rounding.
Invariant: one correction applies from a start of the learner to its end.
"""

import logging
from collections.abc import Iterable

import msgspec

from learner.config import LearnerRun
from learner.servers.membership import Member
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


def has_quantized(members: Iterable[Member]) -> bool:
    """Return whether one of the servers quantizes."""
    # The last welcome counts, as a link may be down for a moment.
    return any((welcome := member.link.welcome) is not None and welcome.quantization for member in members)


def choose_correction(run: LearnerRun, *, is_quantized: bool, has_ratio: bool) -> LearnerRun:
    """Return the run with the off-policy correction that its servers need.

    `has_ratio`: whether the ratio multiplies the objective's gradient, as algorithm/plug_in.py finds out.
    """
    if not is_quantized:
        return run
    config = run.learner
    correction = config.off_policy_correction.for_quantized_servers(
        config.loss, config.staleness_bound, has_ratio=has_ratio
    )
    return msgspec.structs.replace(run, learner=msgspec.structs.replace(config, off_policy_correction=correction))


def log_correction(run: LearnerRun, *, is_quantized: bool, has_ratio: bool) -> None:
    """Log what "auto" becomes with quantized servers, and the keys of a weight if it becomes none."""
    if run.learner.off_policy_correction.weight != "auto":
        return
    chosen = choose_correction(run, is_quantized=is_quantized, has_ratio=has_ratio)
    correction = chosen.learner.off_policy_correction
    if is_quantized:
        log.info(
            'a server quantizes: learner.off_policy_correction.weight = "auto" is "%s" in this run, with anchor = "%s" '
            'and proximal = "%s"',
            correction.weight_used, correction.anchor_used, correction.proximal,
        )  # fmt: skip
    if idle := msgspec.structs.replace(correction, weight=correction.weight_used).idle_keys():
        log.warning(
            'learner.off_policy_correction.weight = "auto" is "none" in this run, and these keys have no effect '
            "without a weight: %s; set weight, or remove them",
            ", ".join(idle),
        )  # fmt: skip


def check_joiner(run: LearnerRun, member: Member, *, is_quantized: bool | None) -> None:
    """Check that the correction of the run fits a server that joins it.

    `is_quantized`: whether the correction was chosen for quantized servers. None: it is not chosen yet.

    Raises:
        ConfigError: The server quantizes, and the correction was chosen for servers that do not.
    """
    if run.learner.off_policy_correction.weight == "auto" and is_quantized is False and has_quantized([member]):
        assert member.link.welcome is not None
        raise ConfigError(
            f"the server at {member.endpoint} quantizes ({member.link.welcome.quantization}), and this run began with "
            'servers that do not, so that learner.off_policy_correction.weight = "auto" is "none". Set weight = '
            '"truncate" and anchor = "proximal", or weight = "none" to leave the difference uncorrected, and continue '
            "with --resume"
        )
