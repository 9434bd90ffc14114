"""Runs whose reference is on a server of its own: the real protocol, with transformers models instead of vLLM."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.policy.server_reference import FILE
from learner.train import train
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused
from protocol.model_digest import digest_model
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.runs import make_run, metrics_of, rows_of, seeded
from tests.ports import free_port

EVERY = {"kind": "every", "every_steps": 2}


def reference_server(
    path: Path | None = None, engine: ModelEngine | None = None, endpoint: str = "tcp://127.0.0.1:*", **options: Any
) -> ServerThread:
    """Return a server of the tiny model, or of the one at `path`."""
    path = path or resolve_model("tiny:digits")
    options = {"model": fingerprint(path), "model_digest": digest_model(path)} | options
    return ServerThread(engine or ModelEngine(path), endpoint=endpoint, **options)


def run_with(tmp_path: Path, server: ServerThread, endpoint: str | None, **learner: Any) -> LearnerRun:
    reference = learner.pop("reference", {"kind": "fixed"})
    if endpoint is not None:
        reference = reference | {"endpoint": endpoint}
    settings = {"kl": {"coef": 0.1}, "reference": reference} | seeded() | learner
    return make_run(tmp_path, server.endpoint, **settings)


def of_learning(run: LearnerRun) -> list[dict[str, float]]:
    """Return the metrics that the reference decides."""
    names = ("loss/policy", "optim/grad_norm", "reference/kl", "reference/version", "reward/mean")
    return [{name: line[name] for name in names} for line in metrics_of(run)]


def assert_alike(run: LearnerRun, other: LearnerRun) -> None:
    ours, theirs = of_learning(run), of_learning(other)
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, abs=2e-5)


@pytest.mark.parametrize(
    ("reference", "place"), [({"kind": "fixed"}, "loss"), (EVERY, "loss"), (EVERY, "reward"), (EVERY, "advantage")]
)
def test_a_run_learns_the_same_with_its_reference_on_a_server(
    tmp_path: Path, reference: dict[str, Any], place: str
) -> None:
    settings = {"reference": reference, "kl": {"coef": 0.1, "place": place}, "advantage": {"scale": "none"}}
    with tiny_server() as server, reference_server() as on_server:
        own = run_with(tmp_path / "own", server, None, **settings)
        run = run_with(tmp_path / "on_server", server, on_server.endpoint, **settings)
        train(own, resume=False)
        train(run, resume=False)
    assert_alike(run, own)
    assert [line["reference/version"] for line in metrics_of(run)] == (
        [0, 0, 0, 0] if reference["kind"] == "fixed" else [0, 2, 2, 4]
    )
    assert all(line["reference/scored_tokens"] > 0 and line["reference/score_seconds"] > 0 for line in metrics_of(run))


def test_a_killed_and_restarted_reference_loses_nothing_and_a_resume_has_the_same_version(tmp_path: Path) -> None:
    """The server dies twice: during a step, and while the learner is down."""
    with tiny_server() as server:
        own = run_with(tmp_path / "own", server, None, reference=EVERY, steps=8)
        train(own, resume=False)
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        dies = threading.Event()
        first = reference_server(engine=Dying(resolve_model("tiny:digits"), dies, 50), endpoint=endpoint)
        second = reference_server(endpoint=endpoint)

        def restart() -> None:
            with first:
                assert dies.wait(60)
            with second:
                stop.wait(60)

        stop = threading.Event()
        thread = threading.Thread(target=restart)
        thread.start()
        part = run_with(tmp_path / "part", server, endpoint, reference=EVERY, steps=5, checkpoint={"every_steps": 5})
        train(part, resume=False)
        stop.set()
        thread.join()
        # As if the learner had refreshed the reference once more, and had died before the next checkpoint.
        newer = Path(part.run_dir) / "checkpoints" / FILE
        with safe_open(newer, "pt") as stored:
            moved, metadata = {name: stored.get_tensor(name) + 0.1 for name in stored.keys()}, stored.metadata()  # noqa: SIM118
        save_file(moved, tmp_path / FILE, metadata)
        (tmp_path / FILE).replace(newer)
        with reference_server(endpoint=endpoint):
            whole = run_with(tmp_path / "part", server, endpoint, reference=EVERY, steps=8)
            train(whole, resume=True)
    assert_alike(whole, own)
    assert rows_of(whole, "count(*)", "state = 'consumed'") == [(24,)]


class Dying(ModelEngine):
    """Answers a number of scores, then signals that its server must end, and answers no more."""

    def __init__(self, path: Path, dies: threading.Event, after: int) -> None:
        super().__init__(path)
        self._dies, self._left = dies, after

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        self._left -= 1
        if self._left <= 0:
            self._dies.set()
            await asyncio.Event().wait()
        return await super().score(token_ids, replica)


def test_a_hung_reference_ends_the_run_after_a_deadline_that_names_its_key(tmp_path: Path) -> None:
    hanging = Dying(resolve_model("tiny:digits"), threading.Event(), after=20)
    with tiny_server() as server, reference_server(engine=hanging) as on_server:
        run = run_with(tmp_path, server, on_server.endpoint, reference={"kind": "fixed", "timeout_s": 1.0})
        with pytest.raises(
            DeadlineExceeded, match=rf"{on_server.endpoint} did not score .*within 1 s.*reference\.timeout"
        ):
            train(run, resume=False)
    nowhere = f"tcp://127.0.0.1:{free_port()}"
    with tiny_server() as server:
        run = run_with(tmp_path / "nowhere", server, nowhere, connect_timeout_s=2)
        with pytest.raises(DeadlineExceeded, match=rf"{nowhere} \(learner.reference.endpoint\) after 2 s"):
            train(run, resume=False)


def test_a_reference_that_does_not_fit_is_refused_with_both_sides_values(tmp_path: Path) -> None:
    path = resolve_model("tiny:digits")
    tokenizer = msgspec.structs.replace(fingerprint(path), tokenizer_hash="0123456789abcdef")
    short = msgspec.structs.replace(TINY_LIMITS, max_model_len=10)
    deep = msgspec.structs.replace(fingerprint(path), size="9 layers of width 64")
    of_others = ModelEngine(path)
    with tiny_server() as server:
        own = fingerprint(path).tokenizer_hash
        refusals: list[tuple[type[Exception], str, dict[str, Any], dict[str, Any]]] = [
            (HandshakeRefused, f"tokenizer {own}.*tokenizer 0123456789abcdef", {"model": tokenizer}, {}),
            (
                ConfigError,
                "max_model_len = 10, .*longest sequence of 10 tokens",
                {"engine": ModelEngine(path, short)},
                {},
            ),
            (HandshakeRefused, "9 layers of width 64", {"model": deep}, {"reference": EVERY}),
        ]
        for number, (error, expected, of_server, of_run) in enumerate(refusals):
            with reference_server(**of_server) as on_server, pytest.raises(error, match=expected):
                train(run_with(tmp_path / str(number), server, on_server.endpoint, **of_run), resume=False)
        with tiny_server(of_others) as used:  # another run has synced its weights to it
            train(make_run(tmp_path / "other", used.endpoint, steps=1), resume=False)
            with pytest.raises(ConfigError, match="another run have replaced the server's own model"):
                train(run_with(tmp_path / "used", server, used.endpoint), resume=False)


def test_a_resume_refuses_another_model_on_the_reference_server(tmp_path: Path) -> None:
    other = make_teacher(tmp_path / "teacher", seed=1)
    with tiny_server() as server:
        with reference_server() as on_server:
            train(run_with(tmp_path, server, on_server.endpoint, steps=1), resume=False)
        with (
            reference_server(other) as on_server,
            pytest.raises(ConfigError, match=r"digest .*, but the run's reference"),
        ):
            train(run_with(tmp_path, server, on_server.endpoint, steps=2), resume=True)
        with pytest.raises(ConfigError, match=r"endpoint = None: the reference of .* was on a server"):
            train(run_with(tmp_path, server, None, steps=2), resume=True)


def make_teacher(path: Path, seed: int, **changes: Any) -> Path:
    """Write a model with the tokenizer of the tiny one, other weights, and possibly another shape."""
    tiny = resolve_model("tiny:digits")
    shutil.copytree(tiny, path)
    config = AutoModelForCausalLM.from_pretrained(tiny).config
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@torch.no_grad()
def exact_kl(student: Path, teacher: Path) -> float:
    """Return the mean KL(student ‖ teacher) over the vocabulary, after prompts of the task."""
    ids = torch.tensor([[1 + (7 * row + 3 * column) % 10 for column in range(4)] + [11] for row in range(32)])
    own, other = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits[:, -1].log_softmax(-1)
        for path in (student, teacher)
    )
    return float((own.exp() * (own - other)).sum(-1).mean())


def test_a_student_without_rewards_approaches_a_larger_teacher(tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher", seed=3, n_layer=3, n_embd=96, n_head=3, initializer_range=0.3)
    with tiny_server() as server, reference_server(teacher) as on_server:
        run = run_with(
            tmp_path, server, on_server.endpoint, steps=12, groups_per_step=8, max_staleness=1, reward={},
            kl={"coef": 1.0, "place": "advantage"}, optimizer={"learning_rate": 1e-2},
            loss={"objective": "cispo"}, weight_sync={"timeout_s": 20, "overlap_with_training": True},
        )  # fmt: skip
        train(run, resume=False)
    student = Path(run.run_dir) / "checkpoints" / "step-000012" / "model"
    before, after = (exact_kl(path, teacher) for path in (resolve_model("tiny:digits"), student))
    kls = [line["reference/reverse_kl"] for line in metrics_of(run)]
    assert after < 0.75 * before and np.mean(kls[-4:]) < 0.75 * kls[0], (before, after, kls)
    assert "reward/mean" not in metrics_of(run)[0]
    assert rows_of(run, "count(*)", "state = 'consumed'") == [(96,)]
