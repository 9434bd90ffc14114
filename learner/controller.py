"""Rank 0's part of a run: rollouts, servers and records. train.py drives it.

    connect ─▶ (next_batch ─▶ sync_weights ─▶ record) for every step ─▶ finish

Every rank has a PolicyTrainer (training/policy_trainer.py). Only rank 0 has a Controller; the other ranks
follow it through RankZero.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from learner.algorithm.plug_in import has_ratio
from learner.evaluation.background import Evaluations
from learner.gateway.players import open_agents, open_player
from learner.policy.published import PublishedPolicy
from learner.policy.server_reference import ServerReference
from learner.reference_controller import ReferenceController
from learner.report.dashboard import start_dashboard
from learner.report.records import Timeline
from learner.report.run_log import RunLog
from learner.rewards.scoring import Scorer
from learner.rewards.workers import RewardWorkers
from learner.rollouts.bottleneck import ServerIdleness
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.rollouts.rollout_group import RolloutGroup, texts_of
from learner.rollouts.rollouts import Rollouts
from learner.run_inputs import RunInputs
from learner.server_fit import check_fits
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.parity import (
    NUM_SEQUENCES,
    FreshServerScores,
    ParityProbe,
    check_identity,
    score_fresh_server,
)
from learner.servers.quantization import has_quantized, log_correction
from learner.servers.sync_check import ExpectedAnswers, SyncCheck
from learner.servers.weight_sync import WeightSync
from learner.storage.checkpoint import read_pass_rates, read_state
from learner.storage.run_dir import RunDir, check_data, record_data
from learner.training.metrics import Devices, StepTimer, memory_metrics, staleness, throughput
from protocol.endpoint import exposure
from protocol.errors import ConfigError, DataError, DeadlineExceeded, ParityError, ScoringFailed, ServerLost
from protocol.messages import PROTOCOL_VERSION, Hello, new_learner_id
from protocol.model_files import fingerprint
from protocol.signals import Interrupt

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
WAIT_SLICE_S = 0.5
POLL_INTERVAL_S = 0.05
"""Polling interval while waiting for an evaluation."""
WAITING_NOTE_S = 15.0
CHECKED_TOKENS = {"min_tokens": 64, "max_tokens": 256}
"""Tokens of each step that both sides score around its weight sync: one completion with its prompt, or
several short ones."""


class Controller(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Parts of rank 0, and the operations of the main loop that need several of them."""

    run_inputs: RunInputs
    fleet: Fleet
    idleness: ServerIdleness
    reference: ReferenceController | None
    buffer: RolloutBuffer
    rewards: RewardWorkers
    rollouts: Rollouts
    weight_sync: WeightSync
    parity: ParityProbe
    sync_check: SyncCheck
    evaluations: Evaluations
    ledger: Ledger
    log: RunLog
    run_dir: RunDir
    devices: Devices

    @classmethod
    @contextmanager
    def open(
        cls,
        run_inputs: RunInputs,
        run_dir: RunDir,
        published: PublishedPolicy,
        reference: ServerReference | None,
        checkpoint: Path | None,
    ) -> Iterator["Controller"]:
        """Restore the records at the checkpoint; start the reward workers and rollouts.

        On exit, everything is closed in reverse order.
        """
        run, config = run_inputs.run, run_inputs.run.learner
        version = read_state(checkpoint).version if checkpoint else 0
        if run_dir.has_started:
            check_data(run_dir.data_digests, run_inputs.prompts)
        # Read the prompts before threads start, because this may fork.
        num_prompts = min(NUM_SEQUENCES, len(run_inputs.prompts))
        prompts = [run_inputs.prompts.prompt_at(position).token_ids for position in range(num_prompts)]
        evaluations = Evaluations(run_inputs, run_dir.path, run_dir.run_id)
        with ExitStack() as cleanup:
            timeline = Timeline(run_dir.timeline)
            cleanup.callback(timeline.close)
            resumed = "; ".join([f"the learner resumed after step {version}", *run_dir.changes])
            timeline.record(resumed if run_dir.has_started else "the run started")
            ledger = Ledger(run_dir.ledger)
            cleanup.callback(ledger.close)
            ledger.rewind(version)
            workers = RewardWorkers(config.reward)
            cleanup.callback(workers.close)
            player = open_player(run, run_inputs.prompts, cleanup, asks_attributes=bool(workers.with_environments))
            after_loop = cleanup.enter_context(ExitStack())  # closed when the loop has stopped
            fleet = _open_fleet(run_inputs, run_dir, cleanup)
            fleet.on_wait, fleet.on_change = published.still_waiting, timeline.record
            buffer = RolloutBuffer(run, run_inputs.prompts, ledger, read_pass_rates(checkpoint) if checkpoint else None)
            scorer = Scorer(config, run_inputs.tokenizer, workers)
            on_server = None
            if reference is not None:
                on_server = ReferenceController.open(run_inputs, reference, published, fleet, after_loop)
                cleanup.callback(on_server.close)
            rollouts = Rollouts(run, fleet, buffer, scorer, ledger, on_server.scores if on_server else None)
            cleanup.callback(rollouts.close)
            rollouts.start(version, open_agents(run, run_inputs.prompts, fleet.loop, cleanup) or player)
            dashboard = start_dashboard(fleet.loop, run_dir.path, config.report, cleanup, config.steps)
            run_log = RunLog(run_dir, config.report, config.steps, dashboard)
            cleanup.callback(run_log.close)
            weight_sync = WeightSync(
                fleet, published, config.weight_sync,
                lambda member: check_fits(run_inputs, member, is_quantized=fleet.is_quantized),
            )  # fmt: skip
            cleanup.callback(weight_sync.close)
            cleanup.callback(evaluations.close)
            evaluations.start(workers)
            parity = ParityProbe(run, fleet, published.logprobs, prompts)
            yield cls(
                run_inputs=run_inputs,
                fleet=fleet,
                idleness=ServerIdleness(fleet.idle_time),
                reference=on_server,
                buffer=buffer,
                rewards=workers,
                rollouts=rollouts,
                weight_sync=weight_sync,
                parity=parity,
                sync_check=SyncCheck(parity, config.parity, weight_sync.sample.changed_frac),
                evaluations=evaluations,
                ledger=ledger,
                log=run_log,
                run_dir=run_dir,
                devices=Devices(published.device, published.num_ranks),
            )

    @property
    def is_quantized(self) -> bool:
        """Whether a server quantized when the run connected."""
        return bool(self.fleet.is_quantized)

    def connect(self, version: int) -> None:
        """Wait for a server, send it the weights, check parity, and open admission."""
        if not self.fleet.is_connected:
            log.info("waiting for %s", self.fleet.describe())
        mismatch, holders = None, list[Member]()
        while mismatch is None or not holders:
            mismatch = self._sync(self.fleet.wait(), version)
            holders = self.weight_sync.holders(version)
        self.fleet.is_quantized = has_quantized(holders)
        if self.reference is not None:
            self.reference.connect(version)
        record_data(self.run_dir.data_digests, self.run_inputs.prompts)
        if self.run_dir.has_started:
            self.evaluations.resume(version)
        else:
            self.evaluations.begin_run()
        self.run_dir.begin(version)
        self.fleet.is_over = False
        run = self.run_inputs.run
        log_correction(run, is_quantized=self.is_quantized, has_ratio=has_ratio(run.learner.loss.objective))
        log.info("parity: mean |Δ logprob| = %.1e between server and learner", mismatch)
        self.publish(version)
        self.log.start_clock()
        self.idleness.restart()

    def attach_interrupt(self, interrupt: Interrupt) -> None:
        """Let an interrupt end the waits for a lost server, so that the step's checkpoint is written at once."""
        self.fleet.is_interrupted = lambda: interrupt.requested
        if self.reference is not None:
            self.reference.scores.server.fleet.is_interrupted = self.fleet.is_interrupted

    def publish(self, version: int, expected: ExpectedAnswers | None = None) -> None:
        """Start the checks of `version`, and admit the rollouts that staleness permits.

        Both go to the servers that have `version`.
        """
        holders = self.weight_sync.holders(version)
        # Request the checks before the groups. Behind a step's groups, their answers would be late for the
        # next step.
        self.sync_check.ask(holders, expected)
        self.sync_check.ask_before(holders)  # with overlap, the next step may have started
        # Also to a server that is lost just now: it may return with this version, and would get no other sync.
        self.rollouts.publish(version, *self.weight_sync.received(version).values())

    def next_batch(self, version: int, interrupt: Interrupt) -> list[RolloutGroup] | None:
        """Return the groups of the next step, or None when interrupted.

        Servers that join or return get the weights meanwhile.

        Raises:
            ParityError: Tokens of this version were sampled with other weights. They are not trained on.
        """
        started = last_connected = last_note = time.monotonic()
        self.idleness.begin_wait()
        while not interrupt.requested:
            if self.fleet.is_connected:
                last_connected = time.monotonic()
                self._sync_joiners(version)
            elif time.monotonic() - last_connected > self.run_inputs.run.learner.connect_timeout_s:
                raise self.fleet.no_server()
            if self.reference is not None:
                self.reference.keep_ready(started)
            self.fleet.on_wait()
            if is_held := self.evaluations.holds:
                time.sleep(POLL_INTERVAL_S)
            elif (groups := self.rollouts.next_batch(version, WAIT_SLICE_S)) is not None:
                self.idleness.end_wait()
                self._check_before_training(groups, version)
                return groups
            if time.monotonic() - last_note > WAITING_NOTE_S:
                last_note = time.monotonic()
                log.info(
                    "waiting for %s",
                    "the evaluation (learner.evaluation.pin_policy)" if is_held else self.rollouts.waits_for,
                )
        return None

    def _check_before_training(self, groups: list[RolloutGroup], version: int) -> None:
        """Check the weights that sampled the newest tokens, and begin the check of the next sync.

        Raises:
            ParityError: Tokens of this version were sampled with other weights. They are not trained on.
        """
        if any(group.newest_version >= version for group in groups):
            self.weight_sync.wait()  # with overlap, its tokens may be here before its check was requested
            self.sync_check.check()
        self.sync_check.begin(version, texts_of(groups, **CHECKED_TOKENS))
        if not self.weight_sync.is_syncing:  # otherwise `publish` requests it, at the latest `sync_weights`
            self.sync_check.ask_before(self.weight_sync.holders(version))

    def sync_weights(self, step: int, groups: list[RolloutGroup]) -> dict[str, float]:
        """Record the groups as consumed by `step`, and sync its weights.

        Returns the metrics of the last completed sync: this one, or with overlap the previous one. There are none
        if the run is interrupted while no server is connected.
        """
        self.ledger.consume([(group.group_id, staleness(group, step - 1)) for group in groups], step)
        config = self.run_inputs.run.learner
        self.weight_sync.wait()
        self.sync_check.ask_before(self.weight_sync.holders(step - 1))
        self.sync_check.check()
        while not self.weight_sync.holders():  # every server has restarted since: any of them joins, with all checks
            if not (members := self.fleet.wait()):
                return {}  # interrupted: a resume sends the weights
            self._sync(members, step)
        if joiners := self.weight_sync.joiners():
            # With overlap, a sync may always be pending in next_batch, so joining servers also get the
            # weights here.
            self._sync(joiners, step)
        when_done = partial(self.publish, step, self.sync_check.expect(step))
        report = self.weight_sync.pop_report()
        if config.weight_sync.overlap_with_training:
            self.weight_sync.begin(step, when_done)
        else:
            report = self.weight_sync.send(step) or self.weight_sync.report_of(step)
            when_done()
        return report.metrics() if report is not None else {}

    def record(
        self, step: int, groups: list[RolloutGroup], metrics: dict[str, float], mismatches: dict[str, float],
        timer: StepTimer,
    ) -> None:  # fmt: skip
        """Log the step, and stop the run if server and learner no longer agree.

        `mismatches` has the mean |Δ logprob| of each server.
        """
        metrics |= self.parity.pop_metrics()
        times = timer.pop_metrics()
        metrics |= times
        metrics["perf/completion_tokens_per_s"] = metrics["rollout/tokens"] / times["time/step"]
        metrics["perf/learner_idle_frac"] = times["time/wait_for_batch"] / times["time/step"]
        metrics |= throughput(groups, metrics.pop("perf/train_tflop", None), times["time/step"], self.devices)
        metrics |= memory_metrics(self.devices.device)
        metrics |= self.fleet.metrics()
        idle = self.idleness.pop_metrics(times["time/step"], times["time/wait_for_batch"])
        if self.fleet.is_connected:  # a lost server has sent no heartbeat
            metrics |= idle
        metrics |= self.evaluations.pop_metrics()
        metrics |= self.rollouts.pop_metrics() | self.run_inputs.prompts.metrics | self.rewards.latencies.pop_metrics()
        if self.reference is not None and metrics["reference/refreshed"]:
            self.reference.refresh(step)
        self.log.step(step, metrics)
        self.evaluations.after_step(step, times["time/step"])
        self.log.sample(step, groups[0], self.run_inputs.tokenizer, lambda: self._columns_of(groups[0]))
        is_learned_from = self.run_inputs.run.learner.reward.is_learned_from
        if is_learned_from and all(reward is None for group in groups for reward in group.rewards_G):
            log.warning(
                "no completion of step %d could be scored: every reward function returned None or timed out", step
            )
        self.parity.check_fresh(mismatches)

    def _columns_of(self, group: RolloutGroup) -> Mapping[str, Any]:
        return self.run_inputs.prompts.prompt_at(self.ledger.position_of(group.slot)).columns

    def finish(self, version: int, interrupt: Interrupt) -> None:
        """Wait for the last weight sync, its check and the last evaluation.

        An interrupted run leaves the evaluation to a resume.
        """
        self.weight_sync.wait()
        self.sync_check.check()
        if not interrupt.requested and not self.evaluations.is_over():
            log.info("waiting for the evaluation after the last step (an interrupt leaves it to --resume)")
        while not interrupt.requested and not self.evaluations.is_over():
            self._sync_joiners(version)
            self.fleet.on_wait()
            time.sleep(POLL_INTERVAL_S)
        self.log.amend(version, self.evaluations.pop_metrics())
        self.fleet.is_over = not interrupt.requested

    def _sync_joiners(self, version: int) -> None:
        if not self.weight_sync.is_syncing and (joiners := self.weight_sync.joiners()):
            self._sync(joiners, version)
            self.publish(version)

    def _sync(self, members: list[Member], version: int) -> float | None:
        """Send the current weights to servers without any of this run, and check parity.

        Both sides score the fixed sequences. Returns the largest mean |Δ logprob|, or None if no server
        stayed to the end. An error of the last server is raised.
        """
        run, mismatches = self.run_inputs.run, []
        fresh_scores: dict[Member, FreshServerScores | None] = {}
        for member in members:
            with self._at_the_cost_of(member):
                check_fits(self.run_inputs, member, is_quantized=self.fleet.is_quantized)
                fresh_scores[member] = score_fresh_server(run, self.parity, member, version)
        if fresh_scores:
            self.weight_sync.send(version, list(fresh_scores))
        for member, before in fresh_scores.items():
            if member in self.weight_sync.holders(version):
                with self._at_the_cost_of(member):
                    mismatch = self.parity.measure(member, version)
                    if before is not None:
                        check_identity(run, self.parity, member, before, version)
                    if self.fleet.is_several:
                        log.info("parity of the server at %s: mean |Δ logprob| = %.1e", member.endpoint, mismatch)
                    mismatches.append(mismatch)
            elif member in self.weight_sync.received(version):  # lost just now: it must not return unchecked
                self.weight_sync.failed(member)
        return max(mismatches, default=None)

    @contextmanager
    def _at_the_cost_of(self, member: Member) -> Iterator[None]:
        """Drop the server on an error, or raise the error if it is the last server."""
        try:
            yield
        except (ConfigError, DataError, ParityError, ScoringFailed) as error:
            self.fleet.exclude(member, error)
        except (ServerLost, DeadlineExceeded) as error:
            if isinstance(error, DeadlineExceeded) and not self.fleet.is_several:
                raise
            log.warning("parity could not be measured: %s", error)
            self.weight_sync.failed(member)


def _open_fleet(run_inputs: RunInputs, run_dir: RunDir, cleanup: ExitStack) -> Fleet:
    run, model = run_inputs.run, fingerprint(run_inputs.model_path)
    hello = Hello(run=run_dir.run_id, protocol_version=PROTOCOL_VERSION, model=model, learner=new_learner_id())
    fleet = Fleet(run, hello, LoopThread("learner"))
    fleet.experts = run_inputs.experts
    fleet.is_over = not run_dir.has_started  # until then, no server holds anything to resume
    for note in filter(None, (exposure(one.endpoint, has_keys=run.keys is not None) for one in fleet.members)):
        log.warning(note)
    cleanup.callback(fleet.close)
    cleanup.callback(fleet.loop.stop)
    cleanup.callback(fleet.leave)
    return fleet


class RankZero:
    """Caller of rank 0's Controller; the other ranks follow (policy/published.py).

    A call returns None on the other ranks.
    """

    def __init__(self, controller: Controller | None, published: PublishedPolicy) -> None:
        self._controller, self._published = controller, published

    def __call__(self, act: Callable[Concatenate[Controller, P], T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        with self._published.led():
            return act(self._controller, *args, **kwargs) if self._controller is not None else None
