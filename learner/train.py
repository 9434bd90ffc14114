"""Main loop of the learner: wait → batch → loss → step → weight sync → refresh → log.

    main thread        consumes: groups in slot order          produces: weights, metrics, checkpoints
                       waits for: a batch, the weight sync     unblocked by: the rollouts, the server
    learner's loop     rollouts/rollouts.py: prompts out, scored groups in
    a thread           storage/writer.py: the pending checkpoint

Step n trains the weights of version n - 1 and publishes version n. Every wait has a deadline.
"""

import gc
import logging
from contextlib import ExitStack
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed

from learner.algorithm.plug_in import has_ratio
from learner.config import LearnerRun
from learner.controller import Controller, RankZero
from learner.evaluation.background import is_due
from learner.policy.server_reference import ServerReference
from learner.rank_agreement import any_rank, decide_on_rank_0
from learner.run_inputs import RunInputs
from learner.servers.quantization import choose_correction
from learner.storage.checkpoint import load_checkpoint, shared_checkpoint
from learner.storage.checkpoint_dir import require_shared
from learner.storage.retention import Checkpoints, LearnerRecords
from learner.storage.run_dir import open_run_dir
from learner.training.distributed import ranks_of, share_groups
from learner.training.metrics import StepTimer, group_metrics
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import train_on
from protocol.signals import Interrupt

log = logging.getLogger(__name__)


def train(run: LearnerRun, *, resume: bool) -> Path | None:
    """Train until `learner.steps` or an interrupt, and leave a checkpoint.

    Returns the run directory to report on. It is None before the first step, and on all ranks except rank 0.

    Raises:
        SlipstreamError: The run cannot start or continue.
    """
    with ranks_of(run) as accelerator:
        # The frame of _train, which holds the model, must be gone before the ranks part.
        return _train(run, accelerator, resume=resume)


def _train(run: LearnerRun, accelerator: Accelerator, *, resume: bool) -> Path | None:
    set_seed(run.seed)
    if accelerator.is_main_process and (note := run.idle_keys_note()):
        log.warning(note)
    with ExitStack() as cleanup:
        run_dir = open_run_dir(run, resume=resume) if accelerator.is_main_process else None
        if run_dir is not None:
            cleanup.callback(run_dir.close)
        run = run.in_effect()  # the run directory keeps the config as set
        config = run.learner
        directory = run.checkpoint_dir
        require_shared(accelerator, directory, config.collective_timeout_s)
        checkpoint = shared_checkpoint(accelerator, directory, config.collective_timeout_s, resume=resume)
        run_inputs = RunInputs(run)
        trainer = make_trainer(run_inputs, accelerator, is_new=checkpoint is None)
        version = load_checkpoint(trainer, checkpoint).version if checkpoint else 0
        trainer.set_kl_coef(version, None)
        if version >= config.steps and not decide_on_rank_0(accelerator, lambda: is_due(run, version), bool):
            log.warning(
                "nothing to do: the run is at step %d, learner.steps = %d; raise it to train further",
                version, config.steps,
            )  # fmt: skip
            return run_dir.path if run_dir else None
        published = trainer.published
        on_server = trainer.reference if isinstance(trainer.reference, ServerReference) else None
        controller = (
            cleanup.enter_context(Controller.open(run_inputs, run_dir, published, on_server, checkpoint))
            if run_dir
            else None
        )
        lead = RankZero(controller, published)
        records = (
            LearnerRecords(controller.ledger, controller.buffer, controller.evaluations.scores) if controller else None
        )
        checkpoints = cleanup.enter_context(Checkpoints(trainer, directory, records, version if checkpoint else None))
        lead(Controller.connect, version)
        is_quantized = decide_on_rank_0(accelerator, lambda: controller is not None and controller.is_quantized, bool)
        trainer.run = choose_correction(
            trainer.run, is_quantized=is_quantized, has_ratio=has_ratio(config.loss.objective)
        )
        if checkpoint is None and config.warm_start.steps > 0:
            checkpoints.save(version)
        interrupt = cleanup.enter_context(Interrupt())
        lead(Controller.attach_interrupt, interrupt)
        gc.freeze()  # spares the garbage collector from scanning torch's permanent objects again and again
        cleanup.callback(gc.unfreeze)

        version = _run_steps(trainer, lead, checkpoints, version, interrupt)
        checkpoints.save(version)
        lead(Controller.finish, version, interrupt)
        checkpoints.wait()
    return run_dir.path if run_dir and version else None


def _run_steps(
    trainer: PolicyTrainer, lead: RankZero, checkpoints: Checkpoints, version: int, interrupt: Interrupt
) -> int:
    """Train until `learner.steps` or an interrupt; return the version reached."""
    accelerator, timer = trainer.accelerator, StepTimer()
    for step in range(version + 1, trainer.config.steps + 1):
        interrupt.is_elsewhere = any_rank(accelerator, interrupt.requested)  # some signals reach only one node
        if interrupt.requested:
            break
        with timer("wait_for_batch"):
            groups = share_groups(accelerator, lead(Controller.next_batch, version, interrupt))
        if groups is None:
            break
        metrics = train_on(trainer, groups, version, timer)
        mismatches = trainer.mismatch.pop_by_server(accelerator, groups)
        with timer("weight_sync"):
            metrics |= lead(Controller.sync_weights, step, groups) or {}
        metrics |= group_metrics(groups, version)
        version = step
        metrics |= trainer.after_step(version, metrics) | checkpoints.pop_metrics()
        lead(Controller.record, step, groups, metrics, mismatches, timer)
        with timer("checkpoint"):
            checkpoints.after_step(step, metrics)
    return version
