"""Evaluations while a run trains: begun after a step, asked in a thread, told in the metrics of the step after; of all sets each time.

    after_step ─▶ (every_steps) ─▶ a thread's event loop: evaluate.py ─▶ evaluations.jsonl ─▶ take_metrics, a step later or more
                                     UnderWay: each answer on disk ─▶ resume, which asks for each prompt once
                                     pin: holds, until all is answered ─▶ the next step begins

Between the main loop and the OpenAI side of a server. Invariant: one at a time, and none of them stops the run: what goes wrong with one
costs that one, with a line that says why. The file of answers holds whole answers to one set of questions, asked after one step.
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
from learner.evaluation.openai_client import Answered
from learner.evaluation.results import Evaluation, in_words, metrics_of, versions_in_words
from learner.rewards.workers import RewardWorkers
from learner.run_inputs import RunInputs
from learner.servers.loop_thread import LoopThread
from learner.storage.files import Lines, whole_lines, writing
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)
ALONE_STEPS = 20
"""So many of the newest steps that no evaluation went on beside are what the others are compared with."""
IN_EVERY_STEP = ("/step", "/reward", "/reward/low", "/reward/high")
"""The ends of what is told of the newest in the steps after it too, for who reads only some of them."""
FILE = "evaluation.partial.jsonl"


class Evaluations:
    """Those of one run, on rank 0; none unless `learner.evaluation.every_steps` says so."""

    def __init__(self, run_inputs: RunInputs, run_dir: Path, run_id: str) -> None:
        """Read what will be asked. Raises ConfigError or DataError. `run_id`: whose weights answer."""
        self._run_id = run_id
        self._config, self._num_steps = run_inputs.run.learner.evaluation, run_inputs.run.learner.steps
        self._sets = sets_of(run_inputs) if self._config.every_steps else []
        self._digest, self._judging_set = digest_of(self._sets), run_inputs.run.learner.checkpoint.judging_set
        self._path = run_dir / results.FILE
        self._kept = UnderWay(run_dir)
        self._cleanup = ExitStack()
        self._thread: LoopThread | None = None
        self._asked: Asked | None = None
        self._alone_s: deque[float] = deque(maxlen=ALONE_STEPS)
        self._beside_s: list[float] = []
        self._score_of: dict[int, float | None] = {}
        self._newest: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._newest_step, self._ended_step = 0, -1

    def start(self, workers: RewardWorkers) -> None:
        """They rate the answers, beside those of the training. Raises ConfigError."""
        self._workers = workers
        if self._sets:
            self._thread = LoopThread("evaluation")
            self._cleanup.callback(self._thread.stop)
            open_players(self._sets, workers, self._thread, self._cleanup)

    def close(self) -> None:
        """The one under way is left for a resume."""
        if self._asked is not None:
            self._asked.result.cancel()
        self._cleanup.close()
        self._kept.close()

    def begin_run(self) -> None:
        """That before the first step."""
        if self._sets and self._config.at_start:
            self._begin(0)

    def resume(self, version: int) -> None:
        """Go on with what the learner before this one had not finished."""
        self._newest_step = version
        results.take_back(self._path, version)
        if not self._sets:
            return
        noted = [one for one in results.earlier(self._path) if one.step is not None]
        for one in noted:
            self._judge(one)
            self._tell(one)
        of_step: dict[int | None, set[str | None]] = {}
        for one in noted:
            of_step.setdefault(one.step, set()).add(one.set_name)
        wanted = {questions.set_name for questions in self._sets}
        ended = {step for step, names in of_step.items() if step is not None and names >= wanted}
        self._ended_step = max(ended, default=-1)
        left = self._kept.left()
        if left is None:
            return
        begun, answers = left
        # Of a later step: those weights are gone, and the step will come again.
        if begun.asked == self._digest and begun.step <= version and begun.step not in ended:
            total = sum(len(questions.prompts) for questions in self._sets)
            log.info(
                "going on with the evaluation after step %d: %d of %d answers are there",
                begun.step,
                len(answers),
                total,
            )
            self._ask(begun.step, answers, {one.set_name: one for one in noted if one.step == begun.step})
        else:
            self._kept.forget()

    @property
    def holds(self) -> bool:
        """With `pin`, whether the next step has to wait: a server that comes back meanwhile must get the weights that answer."""
        return self._config.pin and self._asked is not None and not self._asked.result.done()

    def after_step(self, step: int, seconds: float) -> None:
        """Begin one if it is its turn. The one after the last step is `is_over`'s."""
        (self._alone_s if self._asked is None else self._beside_s).append(seconds)
        self._newest_step = step
        self._take()
        if not self._sets or step % self._config.every_steps or step == self._num_steps:
            return
        if self._asked is None:
            self._begin(step)
        else:
            log.warning("no evaluation after step %d: that after step %d is still under way; raise learner.evaluation.every_steps (%d)",
                        step, self._asked.step, self._config.every_steps)  # fmt: skip
            self._metrics["evaluation/left_out"] = 1.0

    def scores(self) -> dict[int, float | None]:
        """By step, the mean reward; None: not known yet. From any thread."""
        return dict(self._score_of)

    def take_metrics(self) -> dict[str, float]:
        """Of the one that has ended since they were taken last."""
        metrics, self._metrics = self._newest | self._metrics, {}
        return metrics

    def is_over(self) -> bool:
        """After the last step: whether nothing is left to wait for. Begins the one of that step when no other is under way.

        Every question has its deadline (learner.evaluation.timeout_s), so it is over in the end.
        """
        self._take()
        is_last_owed = self._newest_step >= self._num_steps and self._ended_step != self._newest_step
        if self._sets and self._asked is None and is_last_owed:
            self._begin(self._newest_step)
        return self._asked is None

    def _begin(self, step: int) -> None:
        try:
            self._kept.begin(Begun(step, self._digest))
        except SlipstreamError as error:
            self._give_up(step, error)
        else:
            self._ask(step, {}, {})

    def _ask(self, step: int, known: Mapping[int, Answered], noted: Mapping[str | None, Evaluation]) -> None:
        assert self._thread is not None
        self._beside_s.clear()
        self._score_of.setdefault(step, None)
        work = ask_and_rate_all(self._sets, self._workers, known, self._kept.add, of_run=self._run_id)
        self._asked = Asked(step, self._thread.submit(work), noted)

    def _take(self) -> None:
        """What has ended, if it has."""
        if self._asked is None or not self._asked.result.done():
            return
        asked, self._asked = self._asked, None
        self._ended_step = asked.step
        try:
            made = self._note(asked)
            self._kept.forget()
        except SlipstreamError as error:
            self._give_up(asked.step, error)
            return
        for one in made:
            self._judge(one)
            self._metrics |= self._tell(one)
        beside = ""
        if self._alone_s and self._beside_s:
            slowdown = statistics.median(self._beside_s) / statistics.median(self._alone_s)
            self._metrics["evaluation/training_slowdown"] = slowdown
            beside = f"; a step took {slowdown:.2f} times as long beside it"
        log.info("%s%s", "; ".join(map(in_words, made)), beside)
        for one in made:
            if self._config.pin and one.versions is not None and one.versions[0] != one.versions[1]:
                log.warning("learner.evaluation.pin: %s answered all the same; does another learner push to the server at %s?",
                            versions_in_words(one.versions, ""), one.url)  # fmt: skip

    def _note(self, asked: "Asked") -> list[Evaluation]:
        """Raises SlipstreamError."""
        made = [msgspec.structs.replace(one, step=asked.step) for one in asked.result.result()]
        return [asked.noted.get(one.set_name) or results.note(self._path, one) for one in made]

    def _judge(self, made: Evaluation) -> None:
        """In one go: who asks for the scores meanwhile removes a checkpoint that is neither judged nor awaited."""
        if made.step is None or made.set_name != self._judging_set:
            return
        if made.reward is not None:
            self._score_of[made.step] = made.reward.mean
        else:
            self._score_of.pop(made.step, None)

    def _tell(self, made: Evaluation) -> dict[str, float]:
        metrics, start = metrics_of(made), "/".join(filter(None, ("evaluation", made.set_name)))
        self._newest |= {name: metrics[name] for end in IN_EVERY_STEP if (name := start + end) in metrics}
        return metrics

    def _give_up(self, step: int, error: SlipstreamError) -> None:
        self._score_of.pop(step, None)
        log.warning("no evaluation after step %d: %s", step, error)
        self._metrics["evaluation/failed"] = 1.0


class Asked(msgspec.Struct, frozen=True):
    """The one under way."""

    step: int
    result: Future[list[Evaluation]]
    noted: Mapping[str | None, Evaluation]
    """By set, what a learner that was killed between two of them has noted already."""


def is_owed(run: LearnerRun, step: int) -> bool:
    """Whether the learner before this one ended, after this last step, without what it was to find of it."""
    config, run_dir = run.learner.evaluation, Path(run.run_dir)
    if not config.every_steps:
        return False
    noted = {one.set_name for one in results.earlier(run_dir / results.FILE) if one.step == step}
    return not noted.issuperset(config.set_names()) or UnderWay(run_dir).left() is not None


class Begun(msgspec.Struct, frozen=True):
    """The first line."""

    step: int
    asked: str
    """The digest of the questions."""


class Line(msgspec.Struct, frozen=True):
    """Any other."""

    place: int
    answered: Answered


class UnderWay:
    """Of the one evaluation of a run that is being asked."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._lines: Lines | None = None

    def begin(self, begun: Begun) -> None:
        """Raises DiskError."""
        self.forget()
        self._append(begun)

    def add(self, place: int, answered: Answered) -> None:
        """Raises DiskError."""
        self._append(Line(place, answered))

    def left(self) -> tuple[Begun, dict[int, Answered]] | None:
        """What an earlier learner left, and its answers by place; None where there is nothing, or nothing that can be read."""
        if not self._path.is_file():
            return None
        try:
            first, *lines = self._path.read_bytes()[: whole_lines(self._path)].splitlines()
            begun = msgspec.json.decode(first, type=Begun)
            found = [msgspec.json.decode(line, type=Line) for line in lines]
        except (ValueError, msgspec.DecodeError):  # written by another version of Slipstream, or without a whole line
            return None
        return begun, {line.place: line.answered for line in found}

    def forget(self) -> None:
        """Raises DiskError."""
        self.close()
        with writing(self._path):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _append(self, record: msgspec.Struct) -> None:
        if self._lines is None:
            self._lines = Lines(self._path)
        line: dict[str, Any] = msgspec.to_builtins(record)
        self._lines.append(line)
