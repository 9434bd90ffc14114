"""Which checkpoints stay, and from which of them a run can go on."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from learner.config import CheckpointConfig, LearnerRun
from learner.rollouts.ledger import LedgerError
from learner.storage.checkpoint import STATE_FILE, CheckpointState, best_models, complete_checkpoints
from learner.storage.retention import prune
from learner.train import train
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.checkpoints import whole_tensors
from tests.learner.ledgers import steps_kept
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of, seeded
from tests.learner.storage.test_exact_resume import assert_ends_alike


def checkpoints(directory: Path, rewards: dict[int, float | None]) -> None:
    """Checkpoints of these steps, as far as retention looks at them."""
    for step, reward in rewards.items():
        path = directory / f"step-{step:06d}"
        path.mkdir()
        state = CheckpointState(step=step, version=step, reference=None, kl_coef=0.0, reward_mean=reward)
        (path / STATE_FILE).write_bytes(msgspec.json.encode(state))
        (path / "trained").mkdir()
        (path / "trained/index.json").write_bytes(b"{}")
        (path / "model").mkdir()
        (path / "model/config.json").write_bytes(b"{}")


def steps_in(directory: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(directory)]


def test_the_best_may_be_those_of_the_evaluations(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: 0.9, 20: 0.1, 30: 0.2, 40: 0.2, 50: 0.1})
    scores: dict[int, float | None] = {10: 0.1, 20: 0.8, 40: None, 50: None}
    assert prune(tmp_path, 1, 1, scores) == 50
    assert steps_in(tmp_path) == [40, 50], "that of 40 is not known yet"
    (kept,) = best_models(tmp_path).values()
    assert (kept.step, kept.score, kept.judged_by) == (20, 0.8, "evaluation")
    prune(tmp_path, 1, 1, scores | {40: 0.9})
    assert steps_in(tmp_path) == [50] and [best.step for best in best_models(tmp_path).values()] == [40]


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "whole", "models"),
    [
        (2, 0, [40, 50], []),
        (1, 1, [50], [30]),  # of 20 and 30, which are equally good, the newer
        (2, 2, [40, 50], [20, 30]),
        (1, 9, [50], [20, 30, 40]),  # nothing says that 10 was good
        (9, 0, [10, 20, 30, 40, 50], []),
        (0, 0, [10, 20, 30, 40, 50], []),
    ],
)
def test_the_newest_stay_whole_and_of_the_best_the_model(
    tmp_path: Path, keep_last: int, keep_best: int, whole: list[int], models: list[int]
) -> None:
    checkpoints(tmp_path, {10: None, 20: 0.9, 30: 0.9, 40: 0.2, 50: 0.1})
    for _ in range(2):
        assert prune(tmp_path, keep_last, keep_best) == whole[0]
        assert steps_in(tmp_path) == whole
        assert sorted(best.step for best in best_models(tmp_path).values()) == models
        assert len(list(tmp_path.iterdir())) == len(whole) + len(models)
        for path, best in best_models(tmp_path).items():
            assert sorted(file.name for file in path.rglob("*")) == ["best.json", "config.json", "model"]
            assert best.judged_by == "training reward"


def test_a_better_one_takes_the_place_of_the_best_and_a_kill_in_between_is_made_good(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: 0.5, 20: 0.1})
    prune(tmp_path, 1, 1)
    (tmp_path / "step-000010/trained").mkdir()
    checkpoints(tmp_path, {30: 0.4})
    prune(tmp_path, 1, 1)
    assert not (tmp_path / "step-000010/trained").exists() and steps_in(tmp_path) == [30]
    checkpoints(tmp_path, {40: 0.7, 50: 0.1})
    prune(tmp_path, 1, 1)
    assert [best.score for best in best_models(tmp_path).values()] == [0.7] and steps_in(tmp_path) == [50]


def test_without_a_model_there_is_nothing_to_keep_of_the_best(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: 0.9, 20: 0.1})
    shutil.rmtree(tmp_path / "step-000010/model")
    prune(tmp_path, 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]
    idle = CheckpointConfig(export_model=False, keep_best=3).idle_keys()
    assert idle == {"keep_best": "export_model = true"}


def test_a_checkpoint_after_a_million_steps_is_newer_than_those_before(tmp_path: Path) -> None:
    checkpoints(tmp_path, {999_998: 0.1, 999_999: 0.1, 1_000_000: 0.1, 1_000_001: 0.1})
    assert prune(tmp_path, 2, 0) == 1_000_000
    assert steps_in(tmp_path) == [1_000_000, 1_000_001]


def a_run(
    path: Path, endpoint: str, *, steps: int = 7, learner: dict[str, Any] | None = None, **checkpoint: int
) -> LearnerRun:
    settings = seeded() | {"steps": steps, "checkpoint": {"every_steps": 2} | checkpoint} | (learner or {})
    return make_run(path, endpoint, **settings)


def checkpoints_of(run: LearnerRun) -> Path:
    return Path(run.run_dir) / "checkpoints"


def test_a_checkpoint_is_as_good_as_the_steps_that_led_to_it(tmp_path: Path) -> None:
    with tiny_server() as server:
        for steps in (5, 7):
            run = a_run(tmp_path, server.endpoint, keep_last=0, steps=steps)
            train(run, resume=steps == 7)
    rewards = [line["reward/mean"] for line in metrics_of(run)]
    for path, led_to_it in zip(
        complete_checkpoints(checkpoints_of(run)),
        (rewards[:2], rewards[2:4], rewards[4:5], rewards[5:6], rewards[6:]),
        strict=True,
    ):
        state = json.loads((path / STATE_FILE).read_text())
        assert state["reward_mean"] == pytest.approx(sum(led_to_it) / len(led_to_it))


@pytest.mark.slow
def test_a_run_goes_on_from_any_of_the_newest_but_not_from_an_older_one(tmp_path: Path) -> None:
    with tiny_server() as server:
        whole = a_run(tmp_path / "whole", server.endpoint, keep_last=2, keep_best=9)
        train(whole, resume=False)
        assert steps_in(checkpoints_of(whole)) == [6, 7]
        assert sorted(best.step for best in best_models(checkpoints_of(whole)).values()) == [2, 4]
        assert 7 in steps_kept(whole) and 1 not in steps_kept(whole)
        # It began with other keys, goes back from its end to step 4 and ends once more.
        run = a_run(tmp_path / "back", server.endpoint, keep_last=3)
        train(run, resume=False)
        for step in (6, 7):
            shutil.rmtree(checkpoints_of(run) / f"step-00000{step}")
        train(a_run(tmp_path / "back", server.endpoint, keep_last=2, keep_best=0), resume=True)
        assert_ends_alike(run, whole)
        for step in (6, 7):
            shutil.rmtree(checkpoints_of(whole) / f"step-00000{step}")
        with pytest.raises(
            LedgerError, match=r"cannot go back to step 0: .*newest checkpoint, or start a new run whose model"
        ):
            train(whole, resume=True)


@pytest.mark.parametrize(
    "file",
    ["trained/index.json",
     *(pytest.param(file, marks=pytest.mark.slow) for file in ("trained/__0_0.distcp", "reference/__0_0.distcp"))],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_without_it_the_run_goes_on_from_the_one_before(
    tmp_path: Path, file: str
) -> None:
    kl = {"reference": {"kind": "every", "every_steps": 2}, "kl": {"coef": 0.1}}
    with tiny_server() as server:
        run = a_run(tmp_path, server.endpoint, steps=3, learner=kl)
        train(run, resume=False)
        newest = checkpoints_of(run) / "step-000003"
        shutil.copytree(run.run_dir, tmp_path / "whole" / "run")
        (newest / file).write_bytes((newest / file).read_bytes()[:1000])
        longer = a_run(tmp_path, server.endpoint, steps=3, learner=kl)
        with pytest.raises(ConfigError, match=r"step-000003 cannot be read \(.*\); remove it"):
            train(longer, resume=True)
        shutil.rmtree(newest)
        train(longer, resume=True)
    assert_ends_alike(run, a_run(tmp_path / "whole", server.endpoint, steps=3, learner=kl))


@pytest.mark.parametrize("key", ["keep_last", "keep_best"])
def test_a_negative_number_of_checkpoints_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} = -1 must not be negative"):
        a_run(tmp_path, "tcp://127.0.0.1:1", **{key: -1})


def test_a_fixed_reference_is_one_file_in_all_checkpoints_and_outlives_the_first(tmp_path: Path) -> None:
    kl = {"reference": {"kind": "fixed"}, "kl": {"coef": 0.1}}
    with tiny_server() as server:
        run = a_run(tmp_path, server.endpoint, steps=5, learner=kl, keep_last=2, keep_best=0)
        train(run, resume=False)
        four, five = (path / "reference" / "__0_0.distcp" for path in complete_checkpoints(checkpoints_of(run)))
        assert four.stat().st_ino == five.stat().st_ino and four.stat().st_nlink == 2, "that of step 2 is gone"
        train(a_run(tmp_path, server.endpoint, steps=6, learner=kl, keep_last=1, keep_best=0), resume=True)
    (six,) = (path / "reference" / "__0_0.distcp" for path in complete_checkpoints(checkpoints_of(run)))
    assert six.stat().st_nlink == 1
    began_with = load_file(resolve_model("tiny:digits") / "model.safetensors")
    kept = whole_tensors(six.parent)
    assert kept.keys() == {f"0/{name}" for name in began_with}
    assert all(torch.equal(kept[f"0/{name}"], tensor) for name, tensor in began_with.items())


def test_where_files_cannot_be_linked_a_fixed_reference_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("links are not supported")

    monkeypatch.setattr("os.link", refuse)
    kl = {"reference": {"kind": "fixed"}, "kl": {"coef": 0.1}}
    with tiny_server() as server:
        run = a_run(tmp_path, server.endpoint, steps=3, learner=kl)
        train(run, resume=False)
    two, three = (path / "reference" / "__0_0.distcp" for path in complete_checkpoints(checkpoints_of(run)))
    assert two.stat().st_ino != three.stat().st_ino and two.read_bytes() == three.read_bytes()
