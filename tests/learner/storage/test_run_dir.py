"""The run directory: a resume needs the same config and the same prompts, also for runs of earlier versions."""

import json
import logging
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from learner.config import DataConfig, LearnerRun
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.storage.files import network_file_system
from learner.storage.run_dir import check_data, open_run_dir, record_data
from learner.train import train
from protocol.config import to_toml
from protocol.errors import ConfigError, DataError
from protocol.former_keys import renamed
from protocol.model_files import resolve_model
from tests.learner.config.settings import merged
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of

BEFORE_SECTIONS = Path(__file__).parent / "config_before_sections.toml"
"""Config of a version without [learner.checkpoint] and [learner.report]."""


def old_config() -> dict[str, Any]:
    return tomllib.loads(BEFORE_SECTIONS.read_text())


def now(run_dir: Path, changes: dict[str, Any] | None = None) -> LearnerRun:
    """Return the old config with the current keys."""
    table, _ = renamed(old_config())
    learner = merged(table["learner"], changes or {})
    return msgspec.convert(table | {"learner": learner, "run_dir": str(run_dir)}, LearnerRun)


def test_a_run_started_before_keys_moved_can_be_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.toml").write_bytes(BEFORE_SECTIONS.read_bytes())
    with caplog.at_level(logging.INFO):
        run_dir = open_run_dir(now(tmp_path), resume=True)
        run_dir.begin()
        run_dir.close()
        assert (tmp_path / "config.toml").read_text() == to_toml(now(tmp_path, {"loss.dual_clip": 3.0}))
        open_run_dir(now(tmp_path), resume=True).close()
    assert caplog.messages == [
        "resumed with learner.loss.dual_clip = 3.0, was inf", f"resumed with run_dir = {tmp_path}, was runs/old"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("then", "changed", "message"),
    [
        ({}, {"groups_per_step": 8}, r"another config: learner\.groups_per_step was 16, is 8\. Restore"),
        ({}, {"data.chat_template_kwargs": {"enable_thinking": False}},
         r"learner\.data\.chat_template_kwargs\.enable_thinking was None, is False\. Rest"),
        ({"loss.z_loss_coef": 0.1}, {}, r"another config: learner\.loss\.z_loss_coef was 0\.1, is no longer a key"),
        # A missing key that is newer than the file has its default.
        ({"loss.normalization": None}, {}, None),
        ({"loss.normalization": None}, {"loss.normalization": "sequence"}, r"normalization was 'token', is 'sequence'"),
        # Defaults that depend on other keys are written out.
        ({"kl.estimator": "k3"}, {"kl.estimator": None}, None),
        ({"kl.estimator": "k3"}, {"kl.estimator": "k2"}, r"learner\.kl\.estimator was 'k3', is 'k2'"),
        ({}, {"loss.dual_clip": math.inf}, None),
        ({"loss.clip_high": 4.0}, {"loss.clip_high": 4.0}, None),
        ({"loss.objective": "gspo"}, {"loss.objective": "gspo"}, None),
        ({"loss.objective": "gspo"}, {"loss.objective": "gspo", "loss.normalization": None},
         r"learner\.loss\.normalization was 'token', is 'sequence'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_resume_with_another_value_of_a_fixed_key_is_rejected(
    tmp_path: Path, then: dict[str, Any], changed: dict[str, Any], message: str | None
) -> None:
    old = old_config()
    (tmp_path / "config.toml").write_text(tomli_w.dumps(old | {"learner": merged(old["learner"], then)}))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        open_run_dir(now(tmp_path, changed), resume=True).close()


@pytest.mark.parametrize("text", [b"steps = ", b"\xff"])
def test_a_damaged_config_of_the_run_is_named(tmp_path: Path, text: bytes) -> None:
    first = open_run_dir(now(tmp_path), resume=False)
    first.begin()
    first.close()
    (first.path / "config.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read as TOML"):
        open_run_dir(now(tmp_path), resume=True)


def test_keys_that_errors_advise_to_change_can_change_at_a_resume_and_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_run_dir(now(tmp_path), resume=False)
    first.begin()
    first.close()
    with pytest.raises(ConfigError, match="already contains a run; continue it with --resume"):
        open_run_dir(now(tmp_path), resume=False)
    changes = {"cpu_cores": None, "gradient_checkpointing": True, "max_group_attempts": 9, "max_staleness": 1,
               "optimizer.learning_rate": 1e-3, "reward.max_failed_share": 0.5,
               "reward.max_memory_mib": 4096}  # fmt: skip
    with caplog.at_level(logging.INFO):
        open_run_dir(now(tmp_path, changes), resume=True).close()
    assert caplog.messages == [
        "resumed with learner.cpu_cores = None, was [1]",
        "resumed with learner.gradient_checkpointing = True, was False",
        "resumed with learner.max_group_attempts = 9, was 3",
        "resumed with learner.max_staleness = 1, was 2",
        "resumed with learner.optimizer.learning_rate = 0.001, was 0.002",
        "resumed with learner.reward.max_failed_share = 0.5, was 0.2",
        "resumed with learner.reward.max_memory_mib = 4096, was None",
    ]


@pytest.mark.parametrize("inside", ["checkpoints", "saved/here", "."])
def test_a_start_that_ended_before_its_first_group_does_not_block_the_next(tmp_path: Path, inside: str) -> None:
    run = now(tmp_path / "run", {"checkpoint.dir": str(tmp_path / "run" / inside)})
    open_run_dir(run, resume=False).close()
    (tmp_path / "run/data.digests.tmp").touch()  # after a kill
    open_run_dir(run, resume=False).close()
    (tmp_path / "run/letters").touch()
    with pytest.raises(ConfigError, match="is not empty and contains no run"):
        open_run_dir(run, resume=False)


MOUNTS = r"""/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
host:/export /mnt/lab\040share nfs4 rw,relatime,vers=4.2 0 0
/dev/vdb /mnt/lab\040share/local xfs rw 0 0
10.0.0.1@tcp:/scratch /scratch lustre rw 0 0
tmpfs /scratch2 tmpfs rw 0 0
me@host: /home/me/far fuse.sshfs rw 0 0
beegfs_nodev /scratch2 beegfs rw 0 0
"""


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def mount(mounts: str) -> None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/filesystems").write_text("\text4\n")
        (tmp_path / "proc/self/mounts").write_text(mounts)
        monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "proc"))

    return mount


def test_a_network_file_system_is_detected_by_the_mount_of_the_path(mount: Callable[[str], None]) -> None:
    mount(MOUNTS)
    kinds = {
        "/runs/mine": None, "/mnt/lab share/runs": "nfs4", "/mnt/lab share/local/runs": None, "/scratch/me": "lustre",
        "/scratch2/x": "beegfs", "/home/me/far/run": "fuse.sshfs", "/home/me": None,
    }  # fmt: skip
    assert {path: network_file_system(Path(path)) for path in kinds} == kinds


def test_a_run_on_a_network_file_system_logs_a_warning_with_a_remedy(
    tmp_path: Path, mount: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    mount("host:/export / nfs4 rw 0 0\n")
    open_run_dir(now(tmp_path / "run"), resume=False).close()
    assert "is on a network file system (nfs4)" in caplog.text and "--run-dir" in caplog.text


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_that_outlives_its_learner_does_not_keep_the_lock(tmp_path: Path) -> None:
    learner = open_run_dir(now(tmp_path), resume=False)
    (has_forked, tell), (end, end_it) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(end_it)
        os.write(tell, b"1")
        os.read(end, 1)
        os._exit(0)
    try:
        os.read(has_forked, 1)
        with pytest.raises(ConfigError, match="another learner is writing"):
            open_run_dir(now(tmp_path), resume=False)
        learner.close()  # as its end closes all its files
        open_run_dir(now(tmp_path), resume=False).close()
    finally:
        for descriptor in (has_forked, tell, end, end_it):
            os.close(descriptor)
        os.waitpid(child, 0)


PROMPTS = ["1111>", "2222>", "3333>", "4444>", "5555>", "6666>"]


def write(path: Path, prompts: Sequence[str], answer: str = "9") -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt in prompts))
    return str(path)


def read(path: str, **keys: object) -> Prompts:
    return Prompts(DataConfig(path=path, **keys), load_tokenizer(resolve_model("tiny:digits")), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "answer", "keys", "problem"),
    [
        (PROMPTS, "9", {}, None),
        ([*PROMPTS, "7777>"], "9", {"num_prompts": 6}, None),
        ([*PROMPTS[:2], *PROMPTS[3:]], "9", {},
            r"row 2 is the first changed row .*Restore the data.*learner\.data\.revision"),
        (PROMPTS, "8", {}, "row 0 is the first changed row"),
        (PROMPTS, "9", {"max_prompt_tokens": 4, "overlong_prompts": "truncate"}, "row 0 is the first changed row"),
        (PROMPTS[:-1], "9", {}, "1 of its 6 prompts are missing at the end"),
        ([*PROMPTS, "7777>"], "9", {},
         r"1 new prompt after the original 6, .*Exclude them with learner\.data\.num_prompts = 6"),
    ],
    ids=["the same", "one left out", "one removed", "a column", "token ids", "the last removed", "one added"],
)  # fmt: skip
def test_changed_data_is_rejected_with_the_first_change(
    tmp_path: Path, now: list[str], answer: str, keys: dict[str, object], problem: str | None
) -> None:
    record = tmp_path / "data.digests"
    record_data(record, read(write(tmp_path / "a.jsonl", PROMPTS)))
    assert record.stat().st_size == 8 * len(PROMPTS)
    prompts = read(write(tmp_path / "moved.jsonl", now, answer), **keys)
    if problem is None:
        check_data(record, prompts)
        return
    with pytest.raises(DataError, match=f"{problem}.*start a new run with --run-dir"):
        check_data(record, prompts)


def test_a_run_resumes_only_on_its_data_and_with_keys_that_warnings_advise_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"path": write(tmp_path / "a.jsonl", PROMPTS)}
    with tiny_server() as server:
        first = make_run(tmp_path, server.endpoint, max_staleness=2, steps=5, data=data, checkpoint={"every_steps": 2})
        train(first, resume=False)
        shutil.rmtree(tmp_path / "run/checkpoints/step-000005")  # the groups sampled for step 5 are too old now
        mask, slower = {"weight": "mask"}, {"learning_rate": 1e-4}
        run = make_run(
            tmp_path, server.endpoint, max_staleness=0, steps=6, data=data, off_policy_correction=mask, optimizer=slower
        )
        write(tmp_path / "a.jsonl", [*PROMPTS[:2], *PROMPTS[3:]])
        with pytest.raises(DataError, match=r"a\.jsonl has changed since the run in .*run started: row 2 is the first"):
            train(run, resume=True)
        (tmp_path / "run/data.digests").unlink()  # as in a run of an earlier version
        with caplog.at_level(logging.WARNING):
            train(run, resume=True)
    assert "data.digests is missing" in caplog.text and (tmp_path / "run/data.digests").exists()
    *_, fifth, sixth = metrics_of(run)
    assert [(line["step"], line["optim/lr"], line["staleness/max"]) for line in (fifth, sixth)] == [
        (5, 1e-4, 0), (6, 1e-4, 0)
    ]  # fmt: skip
