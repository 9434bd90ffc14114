"""The self-test: a run without learning, in which only noise separates server and learner.

    sync ─▶ sample a batch ─▶ sync the same weights with groups in flight ─▶ … ─▶ score tokens ─▶ compare

The self-test uses the run's own parts, sampling, data, rewards, objective and bounds, but no optimizer step.
A difference between the logprobs of both sides is therefore noise or a fault.
The run directory is not touched.
"""

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from accelerate.utils import set_seed

from learner.algorithm.kl import clamped, masked
from learner.algorithm.objectives import PickedTokens
from learner.algorithm.plug_in import has_ratio, objective_of
from learner.config import (
    CheckpointConfig,
    EvaluationConfig,
    KlConfig,
    LearnerConfig,
    LearnerRun,
    ReferenceConfig,
    ReportConfig,
)
from learner.controller import Controller
from learner.doctor.noise import ComparedTokens, NoiseMeasurement, bounds, floor
from learner.forward.logprobs import token_logprobs
from learner.policy.server_reference import ServerReference
from learner.rollouts.rollout_group import RolloutGroup
from learner.run_inputs import RunInputs
from learner.servers.parity import coarser, comparison
from learner.servers.quantization import choose_correction
from learner.storage.run_dir import open_run_dir
from learner.training.batch import BatchRow, step_rows
from learner.training.distributed import make_accelerator, my_batches
from learner.training.metrics import num_nonfinite
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import advantages
from protocol.errors import ConfigError
from protocol.signals import Interrupt

log = logging.getLogger(__name__)
NUM_BATCHES = 4
SETTLE_S = 0.1
"""Time for new groups to start, so that they are in flight during the next sync."""


def self_test(run: LearnerRun) -> NoiseMeasurement:
    """Measure the noise against a running server.

    Raises:
        ParityError: The two sides disagree before the first batch.
    """
    with tempfile.TemporaryDirectory(prefix="slipstream-self-test-") as directory, ExitStack() as cleanup:
        run = without_learning(run, Path(directory) / "run")
        trainer, controller = cleanup.enter_context(connected(run, "slipstream self-test"))
        config = trainer.config
        batches = sample_across_syncs(controller)
        tokens = compare(trainer, batches, config.sampling.temperature)
        compared = [
            comparison(run, welcome) for one in controller.fleet.connected() if (welcome := one.welcome) is not None
        ]
        measured = NoiseMeasurement(
            dtype=coarser(run.dtype, *(one.theirs for one in compared)),
            objective=config.loss.objective,
            temperature=config.sampling.temperature,
            parity_bound=max((one.bound for one in compared), default=config.parity.bound(run.dtype)),
            num_not_finite=tokens.num_not_finite,
            fresh=floor(tokens, tokens.is_fresh_N),
            through_push=floor(tokens, ~tokens.is_fresh_N),
            bounds=bounds(tokens, config),
            is_quantized=controller.is_quantized,
            has_rewards=config.reward.is_learned_from,
        )
        if config.sampling.temperature != 1 and measured.disagreeing:
            untempered = compare(trainer, batches, 1.0)
            everything = floor(untempered, np.ones_like(untempered.is_fresh_N))
            measured = msgspec.structs.replace(measured, at_temperature_1=everything)
        return measured


@contextmanager
def connected(run: LearnerRun, command: str) -> Iterator[tuple[PolicyTrainer, Controller]]:
    """Start a run without a warm start, and free its servers however it ends.

    Raises:
        ConfigError: Several ranks run the command.
    """
    with ExitStack() as cleanup:
        accelerator = make_accelerator()
        if accelerator.num_processes > 1:
            raise ConfigError(
                f"{accelerator.num_processes} ranks run this command; expected one. Start it with `{command}`"
            )
        set_seed(run.seed)
        run_dir = open_run_dir(run, resume=False)
        cleanup.callback(run_dir.close)
        run_inputs = RunInputs(run)
        trainer = make_trainer(run_inputs, accelerator, is_new=False)
        on_server = trainer.reference if isinstance(trainer.reference, ServerReference) else None
        controller = cleanup.enter_context(Controller.open(run_inputs, run_dir, trainer.published, on_server, None))
        controller.connect(0)
        trainer.run = choose_correction(
            trainer.run, is_quantized=controller.is_quantized, has_ratio=has_ratio(run.learner.loss.objective)
        )
        controller.fleet.is_over = True
        yield trainer, controller


def in_directory(run: LearnerRun, directory: Path, **changes: Any) -> LearnerRun:
    """Return the run in another directory, without evaluations and trackers, and with changed keys.

    Other keys stay, such as the number of steps, on which schedules depend.
    """
    config = msgspec.structs.replace(
        run.learner.in_effect(),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(),
        report=ReportConfig(trackers=(), dashboard_port=0),
        **changes,
    )
    return msgspec.structs.replace(run, run_dir=str(directory), learner=config)


def without_learning(run: LearnerRun, directory: Path) -> LearnerRun:
    """Return the run in another directory, with one step per batch.

    Keys that matter only if the weights change have their defaults.
    """
    # At least 1, so that a batch is in flight while another is taken. Above max_token_staleness, so that this
    # key stays in effect.
    # Without rewards, only the reference gives a run something to learn from.
    unused = {} if run.learner.kl.is_advantage else {"kl": KlConfig(), "reference": ReferenceConfig()}
    max_staleness = max(1, (run.learner.in_effect().off_policy_correction.max_token_staleness or 0) + 1)
    return in_directory(
        run,
        directory,
        steps=NUM_BATCHES,
        max_staleness=max_staleness,
        dynamic_sampling=False,
        **unused,
    )


def sample_across_syncs(controller: Controller) -> list[list[RolloutGroup]]:
    """Take NUM_BATCHES batches and sync the same weights between them as new versions."""
    batches: list[list[RolloutGroup]] = []
    interrupt = Interrupt()  # not entered: there is no step to finish, so Ctrl-C ends the test at once
    for version in range(NUM_BATCHES):
        if version:
            time.sleep(SETTLE_S)
            controller.weight_sync.send(version)
            controller.publish(version)
        groups = controller.next_batch(version, interrupt)
        assert groups is not None
        batches.append(groups)
        log.info("sampled batch %d of %d", version + 1, NUM_BATCHES)
    return batches


def rows_of(groups: list[RolloutGroup], config: LearnerConfig) -> list[BatchRow]:
    """Return every completion of the step, including those of groups without signal."""
    return [row for rows_G in step_rows(groups, advantages(groups, config), config) for row in rows_G]


@torch.no_grad()
def compare(trainer: PolicyTrainer, batches: list[list[RolloutGroup]], temperature: float) -> ComparedTokens:
    """Score every sampled token as the training step would."""
    accelerator, config = trainer.accelerator, trainer.config
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ComparedTokens.__struct_fields__ if name.endswith("_N")
    }
    num_completions = num_not_finite = 0
    for groups in batches:
        num_not_finite += sum(num_nonfinite(branch) for group in groups for branch in group.completions)
        rows = rows_of(groups, config)
        for batch in my_batches(accelerator, trainer.policy, rows, config, "the self-test"):
            logprobs_BT = token_logprobs(trainer.policy, batch.pack, temperature, routing=batch.routing)[0].float()
            finite_BT = torch.isfinite(logprobs_BT) & torch.isfinite(batch.behavior_logprobs_BT)
            mask_BT = batch.mask_BT & finite_BT
            num_not_finite += int((batch.mask_BT & ~finite_BT).sum())
            held_BT = held(logprobs_BT, batch.behavior_logprobs_BT, mask_BT, batch.advantages_BT, config)
            is_old_BT = batch.mask_BT & (batch.versions_BT != batch.entered_versions_B.unsqueeze(1))
            is_fresh_B1 = ~is_old_BT.any(dim=1, keepdim=True)
            completion_B1 = num_completions + torch.arange(len(mask_BT), device=accelerator.device).unsqueeze(1)
            num_completions += len(mask_BT)
            for name, values_BT in (
                ("logprobs_N", logprobs_BT.double()),
                ("behavior_logprobs_N", batch.behavior_logprobs_BT.double()),
                ("is_held_N", held_BT),
                ("is_fresh_N", is_fresh_B1.expand_as(mask_BT)),
                ("completion_N", completion_B1.expand_as(mask_BT)),
            ):
                columns[name].append(values_BT[mask_BT].cpu().numpy())
    return ComparedTokens(
        num_not_finite=num_not_finite, **{name: np.concatenate(parts_) for name, parts_ in columns.items()}
    )


def held(
    logprobs_BT: torch.Tensor,
    behavior_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    config: LearnerConfig,
) -> torch.Tensor:
    """Return which tokens the run's objective would hold back in their first update, besides those it picks."""
    correction = config.off_policy_correction
    is_own = correction.anchor_used == "proximal" and correction.proximal == "exact"
    anchor_BT = logprobs_BT if is_own else behavior_logprobs_BT
    log_ratio_BT = clamped(masked(logprobs_BT - anchor_BT, mask_BT))
    tokens = PickedTokens(log_ratio_BT, masked(logprobs_BT, mask_BT), advantages_BT, mask_BT, torch.zeros_like(mask_BT))
    return objective_of(config.loss.objective)(tokens, config.loss)[1] & mask_BT
