"""The learner's main loop: wait → batch → loss → step → push → refresh → log.

    main thread        consumes: groups in slot order        produces: weights, metrics, checkpoints
                       waits for: a batch, the push          unblocked by: the rollout thread, the server
    rollout thread     rollouts.py: prompts out, scored groups in

Step n trains the weights of version n - 1 and publishes version n. Everything before the loop builds the parts; everything
that may wait has a deadline.
"""

import logging
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from transformers import PreTrainedTokenizerBase

from learner.batch import ScoredGroup
from learner.checkpoint import find_checkpoint, load_checkpoint
from learner.config import LearnerConfig, LearnerRun
from learner.fit import check_fits
from learner.interrupt import Interrupt
from learner.lockstep import Lockstep
from learner.metrics import group_metrics, staleness
from learner.parity import Expected, check_mismatch
from learner.parts import Leader, make_leader
from learner.push import PushReport
from learner.ranks import share_groups
from learner.retention import Checkpoints
from learner.run_dir import RunDir, open_run_dir
from learner.run_log import StepTimer
from learner.step import train_on
from learner.trainee import make_trainee
from learner.waits import learner_s
from protocol.errors import ServerLost

log = logging.getLogger(__name__)

WAIT_SLICE_S = 0.5
WAITING_NOTE_S = 15.0


def train(run: LearnerRun, *, resume: bool) -> Path | None:
    """Train until `learner.steps`, or until interrupted; leave a checkpoint. Raises SlipstreamError.

    Returns the run directory to report on: None before the first step and on all ranks but the first.
    """
    config = run.learner
    accelerator = make_accelerator(run)
    set_seed(run.seed)
    with ExitStack() as cleanup:
        cleanup.callback(accelerator.end_training)  # gloo's threads, left to the interpreter's end, abort the process
        run_dir = open_run_dir(run, resume=resume) if accelerator.is_main_process else None
        if run_dir is not None:
            cleanup.callback(run_dir.close)
        directory = RunDir.checkpoints_of(run.run_dir)
        checkpoint = find_checkpoint(directory) if resume else None
        trainee = make_trainee(run, accelerator, is_new=checkpoint is None)
        version = load_checkpoint(accelerator, checkpoint, trainee).version if checkpoint else 0
        trainee.set_kl_coef(version, None, config)
        if version >= config.steps:
            log.warning("nothing to do: the run is at step %d, learner.steps = %d", version, config.steps)
            return run_dir.path if run_dir else None
        lockstep = Lockstep(accelerator, trainee.policy, getattr(torch, run.dtype))
        leader = make_leader(run, run_dir, accelerator, trainee, lockstep, version, cleanup) if run_dir else None
        checkpoints = Checkpoints(
            run, directory, accelerator, trainee, leader.ledger if leader else None, version if checkpoint else None
        )
        with lockstep.led():
            if leader is not None:
                connect(leader, version, run)
                leader.log.start_clock()
        if checkpoint is None and config.warm_start.steps > 0:
            checkpoints.save(version)
        interrupt = cleanup.enter_context(Interrupt())

        for step in range(version + 1, config.steps + 1):
            timer = StepTimer()
            with timer("wait_for_batch"):
                with lockstep.led():
                    groups = wait_for_batch(leader, version, config, interrupt) if leader else None
                groups = share_groups(accelerator, groups)
            if groups is None:
                break
            metrics = train_on(accelerator, trainee, groups, version, config, timer)
            with timer("push"), lockstep.led():
                if leader is not None:
                    leader.ledger.consume([(group.group_id, staleness(group, version)) for group in groups], step)
                    metrics |= push_step(leader, step, config.push.overlap)
            metrics |= group_metrics(groups, version)
            version = step
            metrics |= trainee.after_step(version, metrics, config)
            with lockstep.led():
                if leader is not None:
                    record(leader, step, groups, metrics, timer, run)
            checkpoints.after_step(step, metrics)
        checkpoints.save(version)
        if leader is not None:
            leader.pusher.wait()
            leader.parity.check()
    return run_dir.path if run_dir and version else None


def make_accelerator(run: LearnerRun) -> Accelerator:
    """The ranks. Those beside rank 0 wait for its batch in a collective, which must outlast whatever rank 0 may wait for."""
    config = run.learner
    num_rounds = 1 + config.max_replacements if config.active_sampling else 1
    longest_wait_s = config.connect_timeout_s + num_rounds * config.max_group_attempts * config.group_deadline_s
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=2 * longest_wait_s))
    accelerator = Accelerator(mixed_precision="bf16" if run.dtype == "bfloat16" else "no", kwargs_handlers=[patience])
    if accelerator.num_processes > 1:
        log.info("rank %d of %d on %s", accelerator.process_index, accelerator.num_processes, accelerator.device)
    return accelerator


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
