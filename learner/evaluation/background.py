"""Evaluations during training: started after a step, run in a thread, reported with a later step.

    after_step ─▶ (every_steps) ─▶ evaluate.py (thread) ─▶ evaluations.jsonl ─▶ pop_metrics at a later step
                                   PartialResults: each answer on disk ─▶ a resume requests only the others
                                   pin_policy: holds until all is answered ─▶ the next step starts

Each evaluation covers all sets.
Invariant: one evaluation runs at a time. A failed evaluation never stops the run, and a log line gives the
reason. The file of answers has complete answers to one set of questions, evaluated after one step.
"""

import logging
import statistics
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.evaluation import results
from learner.evaluation.episodes import open_players
from learner.evaluation.eval_sets import digest_of, sets_of
from learner.evaluation.evaluate import ask_and_rate_all
from learner.evaluation.openai_client import PromptAnswers
from learner.evaluation.results import Evaluation, describe_versions, metrics_of, summarize
from learner.rewards.workers import RewardWorkers
from learner.run_inputs import RunInputs
from learner.servers.loop_thread import LoopThread
from learner.storage.files import JsonLinesFile, whole_lines, writing
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)
ALONE_STEPS = 20
"""Number of recent steps without a running evaluation, the baseline of the slowdown."""
IN_EVERY_STEP = ("/step", "/reward", "/reward/low", "/reward/high")
"""Suffixes of the newest evaluation's metrics that later steps repeat, for readers of only some steps."""
FILE = "evaluation.partial.jsonl"


class Evaluations:
    """Evaluations of one run, on rank 0. Disabled without `every_steps`."""

    def __init__(self, run_inputs: RunInputs, run_dir: Path, run_id: str) -> None:
        """Read the prompts of all sets.

        `run_id`: run whose weights must answer.

        Raises:
            ConfigError: The config of a set is invalid.
            DataError: The prompts of a set cannot be read.
        """
        self._run_id = run_id
        self._config, self._num_steps = run_inputs.run.learner.evaluation, run_inputs.run.learner.steps
        self._sets = sets_of(run_inputs) if self._config.every_steps else []
        self._digest, self._judging_set = digest_of(self._sets), run_inputs.run.learner.checkpoint.judging_set
        self._path = run_dir / results.FILE
        self._kept = PartialResults(run_dir)
        self._cleanup = ExitStack()
        self._thread: LoopThread | None = None
        self._running: RunningEvaluation | None = None
        self._alone_s: deque[float] = deque(maxlen=ALONE_STEPS)
        self._concurrent_s: list[float] = []
        self._score_of: dict[int, float | None] = {}
        self._newest: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._newest_step, self._ended_step = 0, -1

    def start(self, workers: RewardWorkers) -> None:
        """Start the thread and the players. Raises ConfigError.

        `workers` rate the answers, concurrently with those of the training.
        """
        self._workers = workers
        if self._sets:
            self._thread = LoopThread("evaluation")
            self._cleanup.callback(self._thread.stop)
            open_players(self._sets, workers, self._thread, self._cleanup)

    def close(self) -> None:
        """Stop, and leave a running evaluation for a resume."""
        if self._running is not None:
            self._running.result.cancel()
        self._cleanup.close()
        self._kept.close()

    def begin_run(self) -> None:
        """Start the evaluation before the first step, if configured."""
        if self._sets and self._config.at_start:
            self._begin(0)

    def resume(self, version: int) -> None:
        """Continue the evaluations of the previous process, except those of other questions."""
        self._newest_step = version
        results.remove_later(self._path, version)
        if not self._sets:
            return
        digests = {eval_set.set_name: eval_set.digest for eval_set in self._sets}
        recorded = [
            one for one in results.earlier(self._path)
            # A resume may change the questions. Scores of others cannot be compared with the next ones.
            if one.step is not None and one.questions_digest == digests.get(one.set_name)
        ]  # fmt: skip
        for one in recorded:
            self._judge(one)
            self._update_newest(one)
        of_step: dict[int | None, set[str | None]] = {}
        for one in recorded:
            of_step.setdefault(one.step, set()).add(one.set_name)
        ended = {step for step, names in of_step.items() if step is not None and names >= digests.keys()}
        self._ended_step = max(ended, default=-1)
        left = self._kept.left()
        if left is None:
            return
        header, answers = left
        # Weights of a later step are gone, and the step will run again.
        if header.questions_digest == self._digest and header.step <= version and header.step not in ended:
            total = sum(len(eval_set.prompts) for eval_set in self._sets)
            log.info(
                "resuming the evaluation after step %d (%d of %d answers received)",
                header.step,
                len(answers),
                total,
            )
            self._ask(header.step, answers, {one.set_name: one for one in recorded if one.step == header.step})
        else:
            self._kept.forget()

    @property
    def holds(self) -> bool:
        """True if `pin_policy` makes the next step wait.

        A server that reconnects meanwhile must get the weights that are evaluated.
        """
        return self._config.pin_policy and self._running is not None and not self._running.result.done()

    def after_step(self, step: int, seconds: float) -> None:
        """Start an evaluation if one is due. `is_over` starts that of the last step."""
        (self._alone_s if self._running is None else self._concurrent_s).append(seconds)
        self._newest_step = step
        self._take()
        if not self._sets or step % self._config.every_steps or step == self._num_steps:
            return
        if self._running is None:
            self._begin(step)
        else:
            log.warning(
                "skipping the evaluation after step %d (that of step %d still running); raise "
                "learner.evaluation.every_steps (%d)",
                step, self._running.step, self._config.every_steps,
            )  # fmt: skip
            self._metrics["evaluation/left_out"] = 1.0

    def scores(self) -> dict[int, float | None]:
        """Return the mean reward by step; None where it is not known yet. Thread-safe."""
        return dict(self._score_of)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of an evaluation that has ended since the last call.

        The metrics of IN_EVERY_STEP are always included, for the newest evaluation.
        """
        metrics, self._metrics = self._newest | self._metrics, {}
        return metrics

    def is_over(self) -> bool:
        """Return whether nothing is left to wait for after the last step.

        Starts the evaluation of the last step when no other one is running. It ends, because every question
        has a deadline (learner.evaluation.timeout_s).
        """
        self._take()
        is_last_due = self._newest_step >= self._num_steps and self._ended_step != self._newest_step
        if self._sets and self._running is None and is_last_due:
            self._begin(self._newest_step)
        return self._running is None

    def _begin(self, step: int) -> None:
        try:
            self._kept.begin(PartialHeader(step, self._digest))
        except SlipstreamError as error:
            self._give_up(step, error)
        else:
            self._ask(step, {}, {})

    def _ask(self, step: int, known: Mapping[int, PromptAnswers], recorded: Mapping[str | None, Evaluation]) -> None:
        assert self._thread is not None
        self._concurrent_s.clear()
        self._score_of.setdefault(step, None)
        work = ask_and_rate_all(self._sets, self._workers, known, self._kept.add, of_run=self._run_id)
        self._running = RunningEvaluation(step, self._thread.submit(work), recorded)

    def _take(self) -> None:
        """Collect the running evaluation if it has ended."""
        if self._running is None or not self._running.result.done():
            return
        running, self._running = self._running, None
        self._ended_step = running.step
        try:
            made = self._record(running)
            self._kept.forget()
        except Exception as error:  # whatever a server answers or an agent does, training continues
            self._give_up(running.step, error)
            return
        for one in made:
            self._judge(one)
            self._metrics |= self._update_newest(one)
        slowdown_text = ""
        if self._alone_s and self._concurrent_s:
            slowdown = statistics.median(self._concurrent_s) / statistics.median(self._alone_s)
            self._metrics["evaluation/training_slowdown"] = slowdown
            slowdown_text = f"; a step took {slowdown:.2f} times as long while it ran"
        log.info("%s%s", "; ".join(map(summarize, made)), slowdown_text)
        for one in made:
            if self._config.pin_policy and one.versions is not None and one.versions[0] != one.versions[1]:
                log.warning(
                    "learner.evaluation.pin_policy = true, but %s answered; check that no other learner syncs weights "
                    "to the server at %s",
                    describe_versions(one.versions, ""), one.url,
                )  # fmt: skip

    def _record(self, running: "RunningEvaluation") -> list[Evaluation]:
        """Record the results. Raises an exception if the evaluation failed."""
        made = [msgspec.structs.replace(one, step=running.step) for one in running.result.result()]
        return [running.recorded.get(one.set_name) or results.record_evaluation(self._path, one) for one in made]

    def _judge(self, made: Evaluation) -> None:
        """Set or remove the score of a step in one operation.

        The checkpoint writer reads `scores` concurrently, and removes a checkpoint that is neither scored nor
        awaited.
        """
        if made.step is None or made.set_name != self._judging_set:
            return
        if made.reward is not None:
            self._score_of[made.step] = made.reward.mean
        else:
            self._score_of.pop(made.step, None)

    def _update_newest(self, made: Evaluation) -> dict[str, float]:
        metrics, start = metrics_of(made), "/".join(filter(None, ("evaluation", made.set_name)))
        names = [start + end for end in IN_EVERY_STEP]
        others = {name: value for name, value in self._newest.items() if name not in names}
        self._newest = others | {name: metrics[name] for name in names if name in metrics}
        return metrics

    def _give_up(self, step: int, error: Exception) -> None:
        self._score_of.pop(step, None)
        is_known = isinstance(error, SlipstreamError)
        log.warning(
            "the evaluation after step %d failed: %s", step, error if is_known else repr(error),
            exc_info=None if is_known else error,
        )  # fmt: skip
        self._metrics["evaluation/failed"] = 1.0


class RunningEvaluation(msgspec.Struct, frozen=True):
    """The running evaluation."""

    step: int
    result: Future[list[Evaluation]]
    recorded: Mapping[str | None, Evaluation]
    """Results by set that an earlier process recorded before it was killed."""


def is_due(run: LearnerRun, step: int) -> bool:
    """Return whether the evaluation after `step`, the last one, is incomplete."""
    config, run_dir = run.learner.evaluation, Path(run.run_dir)
    if not config.every_steps:
        return False
    recorded = {one.set_name for one in results.earlier(run_dir / results.FILE) if one.step == step}
    return not recorded.issuperset(config.set_names()) or PartialResults(run_dir).left() is not None


class PartialHeader(msgspec.Struct, frozen=True):
    """First line of the file."""

    step: int
    questions_digest: str = msgspec.field(name="asked")
    """Digest of the questions."""


class PartialLine(msgspec.Struct, frozen=True):
    """Later line of the file: the answer to one prompt."""

    index: int = msgspec.field(name="place")
    answered: PromptAnswers


class PartialResults:
    """File with the answers of the running evaluation."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._lines: JsonLinesFile | None = None

    def begin(self, header: PartialHeader) -> None:
        """Start a new file. Raises DiskError."""
        self.forget()
        self._append(header)

    def add(self, index: int, answered: PromptAnswers) -> None:
        """Append an answer. Raises DiskError."""
        self._append(PartialLine(index, answered))

    def left(self) -> tuple[PartialHeader, dict[int, PromptAnswers]] | None:
        """Return the first line and the answers by prompt index that are in the file.

        None if there is no file or it cannot be read.
        """
        if not self._path.is_file():
            return None
        try:
            first, *lines = self._path.read_bytes()[: whole_lines(self._path)].splitlines()
            header = msgspec.json.decode(first, type=PartialHeader)
            found = [msgspec.json.decode(line, type=PartialLine) for line in lines]
        except (ValueError, msgspec.DecodeError):  # from another version of Slipstream, or no complete line
            return None
        return header, {line.index: line.answered for line in found}

    def forget(self) -> None:
        """Delete the file. Raises DiskError."""
        self.close()
        with writing(self._path):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _append(self, record: msgspec.Struct) -> None:
        if self._lines is None:
            self._lines = JsonLinesFile(self._path)
        line: dict[str, Any] = msgspec.to_builtins(record)
        self._lines.append(line)
