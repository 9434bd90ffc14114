"""A dead rank ends the other ranks soon, with one line that names it; foreign connections end none."""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import learner.rank_watch as rank_watch
from learner.training.distributed import ranks_of
from protocol.config import to_toml
from protocol.errors import ConfigError, SlipstreamError
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import Place, Work, places_of
from tests.learner.runs import make_run, metrics_of
from tests.learner.training.fixed_groups import make_run as a_run
from tests.peer import PROCESSES
from tests.waiting import until

pytestmark = pytest.mark.system

NUM_RANKS = 3
ALL_WITHIN_S = 30.0
FORK_LIFE_S = 20.0
LATE_S = 1.0
WITHIN_S = 20.0
"""Time for rank 0 to turn a stranger away: less than it waits for the next line (MEET_S)."""


def error_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("victim", [0, NUM_RANKS - 1], ids=["rank 0", "another"])
def test_a_rank_that_dies_in_training_ends_the_others_with_one_line(tmp_path: Path, victim: int) -> None:
    config, log = tmp_path / "run.toml", tmp_path / "run.log"
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=1000)
        config.write_text(to_toml(run))
        metrics = Path(run.run_dir) / "metrics.jsonl"
        ranks = [start_learner(("train", str(config)), log, log, place.enter) for place in places_of(NUM_RANKS)]
        try:
            until(lambda: metrics.exists() and len(metrics_of(run)) >= 3)
            os.kill(ranks[victim].pid, signal.SIGKILL)
            ranks[victim].join(10)
            codes = [end_of(rank, log, ALL_WITHIN_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    expected = [1] * NUM_RANKS
    expected[victim] = -signal.SIGKILL
    assert codes == expected
    text = log.read_text()
    (line,) = error_lines(text)
    assert f"rank {victim} of this learner (process {ranks[victim].pid} on {socket.gethostname()}) has died" in line
    assert "--resume" in line and "Traceback" not in text and "gloo" not in text, text


def run_ranks(log: Path, work: Work, *args: object) -> tuple[list[int | None], str]:
    """Run `work` on two ranks that end like a command. Return their exit codes and output."""
    ranks = [PROCESSES.Process(target=be_rank, args=(place, log, work, args)) for place in places_of(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        rank.kill()
    return [rank.exitcode for rank in ranks], log.read_text()


def be_rank(place: Place, log: Path, work: Work, args: tuple[object, ...]) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    place.enter()
    try:
        work(*args)
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside_one_that_hears_nothing(*, is_watched: bool, has_fork: bool) -> None:
    rank_watch.END_S = 1.0
    if os.environ["RANK"] == "1" and not is_watched:
        rank_watch._start = die
    with ranks_of(a_run()) as accelerator:
        if accelerator.process_index == 1:
            if has_fork and os.fork() == 0:
                time.sleep(FORK_LIFE_S)
                os._exit(0)
            die()
        time.sleep(FORK_LIFE_S / 2)


@pytest.mark.parametrize(
    ("is_watched", "has_fork"),
    [(True, False), (False, False), (True, True)],
    ids=["", "and whose death comes before the watch begins", "and whose fork lives on"],
)
def test_a_rank_whose_collective_does_not_notice_a_death_is_killed(
    tmp_path: Path, is_watched: bool, has_fork: bool
) -> None:
    """The forks are those of `datasets`, which tokenizes in several processes."""
    work = partial(die_beside_one_that_hears_nothing, is_watched=is_watched, has_fork=has_fork)
    codes, log = run_ranks(tmp_path / "log", work)
    assert codes == [1, -signal.SIGKILL]
    (line,) = error_lines(log)
    assert "rank 1 of this learner" in line


def refuse_before_the_other_has_met_this_rank(*, rank: int) -> None:
    if os.environ["RANK"] != str(rank):
        name = "_begin" if rank == 0 else "_listen_to"
        meet = getattr(rank_watch.RankWatch, name)
        setattr(rank_watch.RankWatch, name, lambda *args: (time.sleep(LATE_S), meet(*args)))
    try:
        with ranks_of(a_run()) as accelerator:
            if accelerator.process_index == rank:
                raise ConfigError("refused")
            accelerator.wait_for_everyone()
    finally:
        if os.environ["RANK"] == str(rank):
            time.sleep(2 * LATE_S)  # its other threads go on until it exits


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_refuses_at_once_is_not_reported_as_dead(tmp_path: Path, rank: int) -> None:
    codes, log = run_ranks(tmp_path / "log", partial(refuse_before_the_other_has_met_this_rank, rank=rank))
    assert codes == [2, 2], log
    assert "error: refused" in log and "has died" not in log


def fail_alone() -> None:
    with ranks_of(a_run()) as accelerator:
        if accelerator.process_index == 1:
            raise ZeroDivisionError("a bug")
        accelerator.wait_for_everyone()


def test_an_error_of_one_rank_is_reported_only_by_that_rank(tmp_path: Path) -> None:
    codes, log = run_ranks(tmp_path / "log", fail_alone)
    assert codes == [1, 1]
    assert log.count("Traceback") == 1 and "ZeroDivisionError: a bug" in log
    (line,) = error_lines(log)
    assert "rank 1 of this learner" in line


def be_visited_by_strangers() -> None:
    strangers: list[socket.socket] = []
    listen, guess = rank_watch._listen, rank_watch.Greeting(token="0" * 32, rank=1, process="a guess")

    def listening(host: str) -> socket.socket:
        listener = listen(host)
        for line in (b"", b"GET / HTTP/1.1\r\n\r\n", rank_watch.msgspec.json.encode(guess) + b"\n", b"x" * 5000):
            strangers.append(socket.create_connection(("127.0.0.1", listener.getsockname()[1]), WITHIN_S))
            strangers[-1].sendall(line)
        strangers[0].shutdown(socket.SHUT_WR)
        return listener

    rank_watch._listen = listening
    with ranks_of(a_run()) as accelerator:
        for stranger in strangers:
            with suppress(ConnectionError):  # rank 0 closes it without reading the rest
                assert stranger.recv(4096) == b"", "the greeting has the token"
        accelerator.wait_for_everyone()


def test_foreign_connections_end_no_rank(tmp_path: Path) -> None:
    codes, log = run_ranks(tmp_path / "log", be_visited_by_strangers)
    assert codes == [0, 0] and error_lines(log) == [], log
