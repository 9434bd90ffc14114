"""The parts of a run and how they are put together; train.py sets them in motion.

Every rank has a Trainee (trainee.py); rank 0 alone has a Leader, and through it the server, the ledger and the log.
"""

import logging
from contextlib import ExitStack
from functools import partial

import msgspec
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from learner.config import LearnerRun
from learner.dashboard import Dashboard
from learner.data import Prompts
from learner.ledger import Ledger
from learner.lockstep import Lockstep
from learner.loop_thread import LoopThread
from learner.lora import merged_tensors
from learner.parity import ParityProbe
from learner.policy import load_tokenizer
from learner.push import Pusher
from learner.rewards import RewardWorkers
from learner.rollouts import Rollouts
from learner.run_dir import RunDir
from learner.run_log import RunLog
from learner.scoring import Scorer
from learner.trainee import Trainee
from protocol.endpoint import exposure
from protocol.messages import PROTOCOL_VERSION, Hello
from protocol.model_files import fingerprint, resolve_model

log = logging.getLogger(__name__)

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
