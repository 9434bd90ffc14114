"""What rank 0 alone has and does: the rollouts, the way to the server, the books. train.py sets it in motion.

Every rank has a Trainee (training/trainee.py); rank 0 alone has a Leader.
"""

import logging
import time
from contextlib import ExitStack
from functools import partial

import msgspec
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig, LearnerRun
from learner.interrupt import Interrupt
from learner.policy.lockstep import Lockstep
from learner.policy.lora import merged_tensors
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.report.dashboard import Dashboard
from learner.report.run_log import RunLog
from learner.rewards.workers import RewardWorkers
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollouts import Rollouts
from learner.rollouts.scored_group import ScoredGroup
from learner.rollouts.scoring import Scorer
from learner.rollouts.waits import learner_s
from learner.servers.loop_thread import LoopThread
from learner.servers.parity import Expected, ParityProbe, check_mismatch
from learner.servers.push import Pusher, PushReport
from learner.storage.run_dir import RunDir
from learner.training.metrics import StepTimer
from learner.training.trainee import Trainee
from protocol.endpoint import exposure
from protocol.errors import ConfigError, DataError, ServerLost
from protocol.messages import PROTOCOL_VERSION, Hello, Welcome
from protocol.model_files import fingerprint, resolve_model

log = logging.getLogger(__name__)

WAIT_SLICE_S = 0.5
WAITING_NOTE_S = 15.0
DASHBOARD_TIMEOUT_S = 10.0


class Leader(msgspec.Struct, frozen=True, eq=False):
    """What only rank 0 has: the rollouts, the way to the server, the books."""

    rollouts: Rollouts
    pusher: Pusher
    parity: ParityProbe
    ledger: Ledger
    log: RunLog
    run_dir: RunDir
    prompts: Prompts
    tokenizer: PreTrainedTokenizerBase


def make_leader(
    run: LearnerRun,
    run_dir: RunDir,
    accelerator: Accelerator,
    trainee: Trainee,
    lockstep: Lockstep,
    version: int,
    cleanup: ExitStack,
) -> Leader:
    """Open the books, start the reward workers and the rollout thread; `cleanup` closes them in reverse."""
    config = run.learner
    model_path = resolve_model(run.model)
    tokenizer = load_tokenizer(model_path)
    prompts = Prompts(config.data, tokenizer, run.seed)
    ledger = Ledger(run_dir.ledger)
    cleanup.callback(ledger.close)
    ledger.rewind(version)
    workers = RewardWorkers(config.reward)
    cleanup.callback(workers.close)
    model_fingerprint = fingerprint(model_path)
    hello = Hello(run=run_dir.run_id, protocol_version=PROTOCOL_VERSION, model=model_fingerprint)
    if note := exposure(run.endpoint, has_keys=run.keys is not None):
        log.warning(note)
    scorer = Scorer(config, tokenizer, workers, ledger)
    rollouts = Rollouts(run, hello, prompts, ledger, scorer, version)
    cleanup.callback(rollouts.close)
    dashboard = start_dashboard(rollouts.thread, run_dir, config.dashboard_port, cleanup)
    run_log = RunLog(run_dir, config.trackers, config.steps, dashboard)
    cleanup.callback(run_log.close)
    policy = accelerator.unwrap_model(trainee.policy)
    tensors = partial(merged_tensors, policy) if config.lora.rank else lockstep.tensors
    pusher = Pusher(
        rollouts, tensors, getattr(torch, run.dtype), config.push, config.connect_timeout_s, accelerator.device,
        # The device of a rank may be too small for all the weights that several share.
        copy_device=torch.device("cpu") if accelerator.is_fsdp2 else None,
    )  # fmt: skip
    cleanup.callback(pusher.close)
    parity = ParityProbe(
        [prompts.prompt_at(position).token_ids for position in range(min(4, len(prompts)))],
        model_fingerprint.vocab_size, lockstep.logprobs, rollouts.link, rollouts.thread,
        config=config.parity, dtype=run.dtype, timeout_s=config.push.timeout_s,
    )  # fmt: skip
    return Leader(rollouts, pusher, parity, ledger, run_log, run_dir, prompts, tokenizer)


def start_dashboard(thread: LoopThread, run_dir: RunDir, port: int, cleanup: ExitStack) -> Dashboard | None:
    if port == 0:
        return None
    dashboard = thread.call(Dashboard.start(run_dir.path, port), DASHBOARD_TIMEOUT_S)
    cleanup.callback(lambda: thread.call(dashboard.close(), DASHBOARD_TIMEOUT_S))
    log.info("live dashboard: %s", dashboard.address)
    return dashboard


def check_fits(run: LearnerRun, prompts: Prompts, welcome: Welcome) -> None:
    """Raise ConfigError or DataError when the run asks for what the server does not have."""
    if welcome.dtype != run.dtype:
        raise ConfigError(
            f"the server computes in {welcome.dtype}, this run says dtype = {run.dtype!r}; start both with the same"
        )
    row, num_tokens = prompts.longest()
    max_tokens = run.learner.sampling.max_tokens
    if num_tokens + max_tokens > welcome.max_model_len:
        raise DataError(
            f"the prompt in row {row} has {num_tokens} tokens; with learner.sampling.max_tokens = {max_tokens} that is more "
            f"than the server's {welcome.max_model_len}. Raise server.max_model_len, lower max_tokens or filter the data"
        )


def connect(leader: Leader, version: int, run: LearnerRun) -> None:
    """Wait for the server, give it this run's weights, check that both sides agree, and open admission."""
    if not leader.rollouts.link.connected:
        log.info("waiting for the inference server at %s", run.endpoint)
    mismatch = None
    while mismatch is None:
        welcome = leader.rollouts.wait_for_server(run.learner.connect_timeout_s)
        check_fits(run, leader.prompts, welcome)
        leader.pusher.push(version)
        mismatch = measure_parity(leader, version)
    leader.run_dir.begin(run)
    log.info("parity: mean |Δ logprob| = %.1e between server and learner", mismatch)
    publish(leader, version)


def publish(leader: Leader, version: int, expected: Expected | None = None) -> None:
    """Let rollouts send what the staleness rule allows now that the server has `version`, and ask whether it has it right."""
    server_id = leader.pusher.server_id
    if server_id is not None:
        leader.rollouts.publish(version, server_id)
        leader.parity.ask(expected)


def measure_parity(leader: Leader, version: int) -> float | None:
    """Compare both sides on the fixed sequences; None if the server went away meanwhile. Raises ParityError."""
    try:
        return leader.parity.measure(version)
    except ServerLost as error:
        log.warning("parity could not be measured: %s", error)
        return None


def wait_for_batch(
    leader: Leader, version: int, config: LearnerConfig, interrupt: Interrupt
) -> list[ScoredGroup] | None:
    """Return the groups of the next step, or None when interrupted. A server that came back is given the weights.

    Raises ParityError before tokens of this version are trained on that come from other weights.
    """
    rollouts, pusher = leader.rollouts, leader.pusher
    last_connected = last_note = time.monotonic()
    while not interrupt.requested:
        if rollouts.link.connected:
            last_connected = time.monotonic()
            if not pusher.is_pushing and not pusher.server_has_weights:
                pusher.push(version)
                publish(leader, version, leader.parity.expect(version))
        elif time.monotonic() - last_connected > config.connect_timeout_s:
            raise rollouts.no_server(config.connect_timeout_s)
        groups = rollouts.take(config.groups_per_step, WAIT_SLICE_S, version)
        if groups is not None:
            if any(group.newest_version >= version for group in groups):
                leader.parity.check()
            return groups
        if time.monotonic() - last_note > WAITING_NOTE_S:
            last_note = time.monotonic()
            log.info("waiting for %s", rollouts.waits_for)
    return None


def push_step(leader: Leader, step: int, overlap: bool) -> dict[str, float]:
    """Push version `step`; return the metrics of the last push that is done: this one, or with overlap the one before."""
    report = leader.pusher.wait()
    leader.parity.check()
    when_done = partial(publish, leader, step, leader.parity.expect(step))
    if overlap:
        leader.pusher.begin(step, when_done)
    else:
        report = leader.pusher.push(step)
        when_done()
    return push_metrics(report) if report is not None else {}


def push_metrics(push: PushReport) -> dict[str, float]:
    return {
        "push/seconds": push.total_s,
        "push/transfer_seconds": push.transfer_s,
        "push/load_seconds": push.load_s,
        "push/stall_seconds": push.stall_s,
        "push/bytes": push.num_bytes,
    }


def record(
    leader: Leader,
    step: int,
    groups: list[ScoredGroup],
    metrics: dict[str, float],
    timer: StepTimer,
    run: LearnerRun,
) -> None:
    """Log the step everywhere, and stop the run when server and learner no longer agree."""
    metrics |= leader.parity.take_metrics()
    times = timer.metrics()
    metrics |= times
    metrics["perf/tokens_per_s"] = metrics["rollout/tokens"] / times["time/step"]
    metrics["perf/learner_idle_frac"] = times["time/wait_for_batch"] / times["time/step"]
    server_idle_frac = leader.rollouts.link.server_idle_frac
    if server_idle_frac is not None:
        metrics["perf/server_idle_frac"] = server_idle_frac
        metrics["wait/learner"] = learner_s(metrics, server_idle_frac)
    metrics["rollout/messages_refused"] = float(leader.rollouts.link.num_refused)
    metrics |= leader.rollouts.batch_metrics
    leader.log.step(step, metrics)
    leader.log.sample(step, *sample_of(groups[0], leader.tokenizer))
    if all(reward is None for group in groups for reward in group.rewards_G):
        log.warning("step %d: no completion could be scored: every reward function gave None (or was too slow)", step)
    if "policy/mismatch_abs_logprob" in metrics:
        bound = run.learner.parity.bound(run.dtype)
        check_mismatch(metrics["policy/mismatch_abs_logprob"], bound, run.dtype, "fresh tokens")


def sample_of(group: ScoredGroup, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str], list[float | None]]:
    """One group as text."""
    texts = tokenizer.batch_decode(
        [completion.token_ids.tolist() for completion in group.completions], skip_special_tokens=True
    )
    return str(tokenizer.decode(group.prompt_token_ids.tolist())), list(texts), group.rewards_G
