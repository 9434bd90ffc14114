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
from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase, get_scheduler

from learner.batch import ScoredGroup
from learner.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from learner.config import LearnerConfig, LearnerRun
from learner.dashboard import Dashboard
from learner.data import Prompts
from learner.fit import check_fits
from learner.interrupt import Interrupt
from learner.ledger import Ledger
from learner.loop_thread import LoopThread
from learner.parity import ParityProbe, check_mismatch
from learner.policy import load_policy, load_tokenizer
from learner.push import Pusher, PushReport
from learner.ranks import share_groups
from learner.reference import Reference, make_reference
from learner.rewards import RewardWorkers
from learner.rollouts import Rollouts
from learner.run_dir import RunDir, open_run_dir
from learner.run_log import RunLog, StepTimer
from learner.scoring import Scorer
from learner.step import forward_backward, group_metrics, staleness
from protocol.messages import PROTOCOL_VERSION, Hello
from protocol.model_files import fingerprint, resolve_model

log = logging.getLogger(__name__)

WAIT_SLICE_S = 0.5
WAITING_NOTE_S = 15.0
DASHBOARD_TIMEOUT_S = 10.0


class Trainee(msgspec.Struct, frozen=True, eq=False):
    """What every rank trains: the policy as prepared by accelerate, its optimizer and its reference."""

    policy: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    reference: Reference | None


class Leader(msgspec.Struct, frozen=True, eq=False):
    """What only rank 0 has: the rollouts, the way to the server, the books."""

    rollouts: Rollouts
    pusher: Pusher
    parity: ParityProbe
    ledger: Ledger
    log: RunLog
    prompts: Prompts
    tokenizer: PreTrainedTokenizerBase


def train(run: LearnerRun, *, resume: bool) -> Path | None:
    """Train until `learner.steps`, or until interrupted; leave a checkpoint. Raises SlipstreamError.

    Returns the run directory to report on: None before the first step and on all ranks but the first.
    """
    config = run.learner
    accelerator = Accelerator(mixed_precision="bf16" if run.dtype == "bfloat16" else "no")
    set_seed(run.seed)
    with ExitStack() as cleanup:
        run_dir = open_run_dir(run, resume=resume) if accelerator.is_main_process else None
        if run_dir is not None:
            cleanup.callback(run_dir.close)
        trainee = make_trainee(run, accelerator)
        checkpoints = run_dir.checkpoints if run_dir else RunDir.checkpoints_of(run.run_dir)
        checkpoint = find_checkpoint(checkpoints) if resume else None
        version = load_checkpoint(accelerator, checkpoint, trainee.reference).version if checkpoint else 0
        leader = make_leader(run, run_dir, accelerator, trainee, version, cleanup) if run_dir else None
        ledger = leader.ledger if leader else None
        if leader is not None:
            connect(leader, accelerator.unwrap_model(trainee.policy), version, run, accelerator.device)
        interrupt = cleanup.enter_context(Interrupt())

        for step in range(version + 1, config.steps + 1):
            timer = StepTimer()
            with timer("wait_for_batch"):
                groups = wait_for_batch(leader, version, config, interrupt) if leader else None
                groups = share_groups(accelerator, groups)
            if groups is None:
                break
            with timer("forward_backward"):
                metrics = forward_backward(accelerator, trainee.policy, trainee.reference, groups, version, config)
            with timer("optimizer"):
                metrics |= optimizer_step(accelerator, trainee, config.optimizer.max_grad_norm)
            with timer("push"):
                policy = accelerator.unwrap_model(trainee.policy)
                if leader is not None:
                    leader.ledger.consume([(group.group_id, staleness(group, version)) for group in groups], step)
                    metrics |= push_metrics(leader.pusher.push(step))
                    leader.rollouts.publish(step)
            metrics |= group_metrics(groups, version)
            version = step
            if trainee.reference is not None:
                trainee.reference.after_step(policy, version)
                metrics["reference/version"] = float(trainee.reference.version)
            if leader is not None:
                record(leader, step, groups, metrics, timer, policy, accelerator.device, run)
            if step % config.checkpoint_every == 0 and step < config.steps:
                save_checkpoint(accelerator, checkpoints, version, trainee.reference, ledger)
        save_checkpoint(accelerator, checkpoints, version, trainee.reference, ledger)
    return run_dir.path if run_dir and version else None


def make_trainee(run: LearnerRun, accelerator: Accelerator) -> Trainee:
    """Load the policy and build what trains it."""
    config, settings = run.learner, run.learner.optimizer
    policy = load_policy(resolve_model(run.model), gradient_checkpointing=config.gradient_checkpointing)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
    )
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    # accelerate advances the scheduler once per rank at every step
    scale = accelerator.num_processes
    scheduler = get_scheduler(
        names[settings.schedule], optimizer, settings.warmup_steps * scale, num_training_steps=config.steps * scale
    )
    policy, optimizer, scheduler = accelerator.prepare(policy, optimizer, scheduler)
    reference = make_reference(config.reference, accelerator.unwrap_model(policy), config.sampling.temperature)
    return Trainee(policy, optimizer, scheduler, reference)


def make_leader(
    run: LearnerRun, run_dir: RunDir, accelerator: Accelerator, trainee: Trainee, version: int, cleanup: ExitStack
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
    scorer = Scorer(prompts, tokenizer, workers, ledger, config)
    rollouts = Rollouts(run, hello, prompts, ledger, scorer, version)
    cleanup.callback(rollouts.close)
    dashboard = start_dashboard(rollouts.thread, run_dir, config.dashboard_port, cleanup)
    run_log = RunLog(run_dir, config.trackers, config.steps, dashboard)
    cleanup.callback(run_log.close)
    policy = accelerator.unwrap_model(trainee.policy)
    pusher = Pusher(rollouts, policy.named_parameters, getattr(torch, run.dtype), config.push, config.connect_timeout_s)
    cleanup.callback(pusher.close)
    parity = ParityProbe(
        [prompts.prompt_at(slot).token_ids for slot in range(min(4, len(prompts)))],
        model_fingerprint.vocab_size, rollouts.link, rollouts.thread,
        config=config.parity, dtype=run.dtype, timeout_s=config.push.timeout_s,
    )  # fmt: skip
    return Leader(rollouts, pusher, parity, ledger, run_log, prompts, tokenizer)


def start_dashboard(thread: LoopThread, run_dir: RunDir, port: int, cleanup: ExitStack) -> Dashboard | None:
    if port == 0:
        return None
    dashboard = thread.call(Dashboard.start(run_dir.path, port), DASHBOARD_TIMEOUT_S)
    cleanup.callback(lambda: thread.call(dashboard.close(), DASHBOARD_TIMEOUT_S))
    log.info("live dashboard: %s", dashboard.address)
    return dashboard


def connect(leader: Leader, policy: nn.Module, version: int, run: LearnerRun, device: torch.device) -> None:
    """Wait for the server, give it this run's weights, check that both sides agree, and open admission."""
    log.info("waiting for the inference server at %s", run.endpoint)
    welcome = leader.rollouts.wait_for_server(run.learner.connect_timeout_s)
    check_fits(run, leader.prompts, welcome)
    leader.pusher.push(version)
    mismatch = leader.parity.measure(policy, version, device)
    log.info("parity: mean |Δ logprob| = %.1e between server and learner", mismatch)
    leader.rollouts.publish(version)


def wait_for_batch(
    leader: Leader, version: int, config: LearnerConfig, interrupt: Interrupt
) -> list[ScoredGroup] | None:
    """Return the groups of the next step, or None when interrupted. A server that came back is given the weights."""
    rollouts, pusher = leader.rollouts, leader.pusher
    last_connected = last_note = time.monotonic()
    while not interrupt.requested:
        if rollouts.link.connected:
            last_connected = time.monotonic()
            if not pusher.server_has_weights:
                pusher.push(version)
                rollouts.publish(version)
        elif time.monotonic() - last_connected > config.connect_timeout_s:
            raise rollouts.no_server(config.connect_timeout_s)
        groups = rollouts.take(config.groups_per_step, WAIT_SLICE_S)
        if groups is not None:
            return groups
        if time.monotonic() - last_note > WAITING_NOTE_S:
            last_note = time.monotonic()
            log.info("waiting for %s", rollouts.waits_for)
    return None


def optimizer_step(accelerator: Accelerator, trainee: Trainee, max_grad_norm: float) -> dict[str, float]:
    learning_rate = float(trainee.scheduler.get_last_lr()[0])
    grad_norm = accelerator.clip_grad_norm_(trainee.policy.parameters(), max_grad_norm)
    trainee.optimizer.step()
    trainee.scheduler.step()
    trainee.optimizer.zero_grad()
    return {"optim/grad_norm": float(grad_norm or 0.0), "optim/lr": learning_rate}


def push_metrics(push: PushReport) -> dict[str, float]:
    return {
        "push/seconds": push.total_s,
        "push/transfer_seconds": push.transfer_s,
        "push/load_seconds": push.load_s,
        "push/stall_seconds": push.stall_s,
    }


def record(
    leader: Leader,
    step: int,
    groups: list[ScoredGroup],
    metrics: dict[str, float],
    timer: StepTimer,
    policy: nn.Module,
    device: torch.device,
    run: LearnerRun,
) -> None:
    """Log the step everywhere, and stop the run when server and learner no longer agree."""
    parity = run.learner.parity
    if parity.every_steps and step % parity.every_steps == 0:
        with timer("parity"):
            metrics["parity/abs_logprob"] = leader.parity.measure(policy, step, device)
    times = timer.metrics()
    metrics |= times
    metrics["perf/tokens_per_s"] = metrics["rollout/tokens"] / times["time/step"]
    metrics["perf/learner_idle_frac"] = times["time/wait_for_batch"] / times["time/step"]
    if leader.rollouts.link.server_idle_frac is not None:
        metrics["perf/server_idle_frac"] = leader.rollouts.link.server_idle_frac
    leader.log.step(step, metrics)
    leader.log.sample(step, *sample_of(groups[0], leader.tokenizer))
    if "policy/mismatch_abs_logprob" in metrics:
        check_mismatch(metrics["policy/mismatch_abs_logprob"], parity.bound(run.dtype), run.dtype, "fresh tokens")


def sample_of(group: ScoredGroup, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str], list[float | None]]:
    """One group as text."""
    texts = tokenizer.batch_decode(
        [completion.token_ids.tolist() for completion in group.completions], skip_special_tokens=True
    )
    return str(tokenizer.decode(group.prompt_token_ids.tolist())), list(texts), group.rewards_G
