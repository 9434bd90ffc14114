"""`learner doctor` with real sockets: it reports each fault in one line with a remedy, and changes nothing."""

import asyncio
import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from learner.config import LearnerRun, WeightSyncConfig
from learner.doctor import doctor, reach
from learner.doctor.doctor import check_transport, examine
from protocol.channel.keys import make_keys, server_keys
from protocol.config import load_config
from protocol.doctor import Finding, disk_finding, package_version
from protocol.errors import ProtocolError
from protocol.messages import (
    PROTOCOL_VERSION,
    LearnerMessage,
    Pulse,
    Refused,
    ServerInfo,
    ServerMessage,
    TrialResult,
)
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ScriptedEngine, ServerThread
from tests.fingerprint import MODEL
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.in_process import run_here
from tests.learner.openai_server import openai_server
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent.parent
RECIPE = str(ROOT / "deploy/recipes/reverse.toml")
TINY = fingerprint(resolve_model("tiny:digits"))
NOBODY = "tcp://127.0.0.1:1"
PULSE = Pulse(
    server_id="s", policy_version=None, groups_running=0, groups_unacked=0, tokens_generated=0, idle_s=0.0
)  # fmt: skip
EVERYTHING = {
    "names", "port", "keys", "versions", "tenancy", "model", "dtype", "clock", "transport", "bandwidth", "speed",
    "memory",
    "disk",
}  # fmt: skip


def run_at(endpoint: str, tmp_path: Path, *flags: str) -> LearnerRun:
    arguments = [RECIPE, "--run-dir", str(tmp_path / "run"), "--endpoint", endpoint, *flags]
    return load_config(LearnerRun, arguments, "test")


def problems(run: LearnerRun) -> list[Finding]:
    return [finding for finding in examine(run) if finding.verdict == "problem"]


def the_problem(run: LearnerRun) -> str:
    (found,) = problems(run)
    line = str(found)
    assert "\n" not in line and found.remedy
    return line


@pytest.fixture(autouse=True)
def small_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TRIAL_BYTES", 5 << 20)


class FixedReplies:
    """A channel to a server that sends these messages for any request, and then nothing."""

    endpoint = NOBODY

    def __init__(self, *messages: ServerMessage | Exception) -> None:
        self._messages = list(messages)

    async def send(self, message: LearnerMessage, timeout_s: float) -> None:
        pass

    async def receive(self) -> ServerMessage:
        if not self._messages:
            await asyncio.Event().wait()
        message = self._messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message


def info(**changes: object) -> ServerInfo:
    """Return the info of a healthy server, with changes."""
    server_info = ServerInfo(
        probe_id="p", protocol_version=PROTOCOL_VERSION, package_version=package_version(), clock_s=time.time(),
        run=None, model=TINY, dtype="float32", transports=["tcp"], devices=["cpu"],
    )  # fmt: skip
    return msgspec.structs.replace(server_info, **changes)


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_healthy_server_has_no_problems(tmp_path: Path, has_keys: bool) -> None:
    make_keys(tmp_path / "keys")
    keys, flags = (server_keys(str(tmp_path / "keys")), ("--keys", f"{tmp_path}/keys")) if has_keys else (None, ())
    with ServerThread(ScriptedEngine(), model=TINY, keys=keys) as server:
        found = {finding.subject: finding for finding in examine(run_at(server.endpoint, tmp_path, *flags))}
    assert {name: finding.verdict for name, finding in found.items()} == dict.fromkeys(EVERYTHING, "ok")
    assert "with tcp to 1 worker" in found["transport"].text and "MiB/s" in found["bandwidth"].text


def test_the_doctor_does_not_disturb_a_running_run(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine(), model=TINY) as server:

        async def examine_beside_a_learner() -> None:
            learner = ScriptedLearner(server.endpoint, model=TINY)
            welcome = await learner.join()
            found = await asyncio.to_thread(lambda: list(examine(run_at(server.endpoint, tmp_path))))
            assert [finding for finding in found if finding.verdict == "problem"] == []
            (tenancy,) = [finding.text for finding in found if finding.subject == "tenancy"]
            assert tenancy.startswith("the server serves run run-a; another run waits until it ends")
            assert (await learner.join()).server_id == welcome.server_id
            learner.close()

        asyncio.run(examine_beside_a_learner())
        assert server.running.server.status()["run"] == "run-a"


def test_each_of_several_servers_is_examined_and_trials_run_last(tmp_path: Path) -> None:
    closed = f"tcp://127.0.0.1:{free_port()}"
    with ServerThread(ScriptedEngine(), model=TINY) as one, ServerThread(ScriptedEngine(), model=TINY) as other:
        (tmp_path / "servers.txt").write_text(f"{one.endpoint}\n{closed}\n{other.endpoint}\n")
        run = msgspec.structs.replace(run_at(one.endpoint, tmp_path), endpoints_from=f"file:{tmp_path}/servers.txt")
        found = list(examine(run))
    (bad,) = [finding for finding in found if finding.verdict == "problem"]
    assert bad.subject == "port" and bad.text.startswith(f"{closed}: nothing listens at")
    for server in (one, other):
        assert [finding.verdict for finding in found if finding.text.startswith(server.endpoint)] == 10 * ["ok"]
    assert [finding.subject for finding in found][-3:] == ["disk", "bandwidth", "bandwidth"]
    unread = msgspec.structs.replace(run, endpoints_from="file:/nowhere/servers.txt")
    assert "servers    endpoints_from: the file /nowhere/servers.txt cannot be read" in the_problem(unread)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        (NOBODY, "port       nothing listens at 127.0.0.1:1; start `slipstream serve run.toml` there"),
        ("tcp://nowhere.invalid:5757", "names      nowhere.invalid does not resolve"),
        ("tcp://[::]:5757", "is a listen address, not the address of a server; set `endpoint` to the server's name"),
    ],
)
def test_a_wrong_address_is_reported(tmp_path: Path, endpoint: str, expected: str) -> None:
    assert expected in the_problem(run_at(endpoint, tmp_path, "--insecure"))


def test_a_silent_address_and_a_foreign_server_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(reach, "HANDSHAKE_TIMEOUT_S", 0.5)
    with ExitStack() as sockets:
        mute = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        run = run_at(f"tcp://127.0.0.1:{mute.getsockname()[1]}", tmp_path)
        assert "does not respond like an inference server; correct `endpoint`" in the_problem(run)
        for _ in range(3):  # its queue is full from now on, so messages are dropped as by a firewall
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(mute.getsockname())
        assert "did not answer within 0.3 s; correct the address in `endpoint`, or allow TCP port" in the_problem(run)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([], "server     the server did not answer within 0.1 s: it is loading its model"),
        ([PULSE, Refused(reason="Invalid\nvalue 'Probe'")],
            "versions   .* does not know the request, Invalid value 'Probe'"),
        ([TrialResult(trial_id="t")], "versions   .* does not know the request, TrialResult"),
        ([ProtocolError("no message")], "versions   .* its answer cannot be decoded, no message"),
    ],
    ids=["nothing yet", "of a version without doctors", "something else", "nonsense"],
)  # fmt: skip
def test_a_server_without_information_is_reported(replies: list[Any], expected: str) -> None:
    with pytest.raises(reach.NotReached, match=expected):
        asyncio.run(reach.answer(FixedReplies(*replies), ServerInfo, 0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        ("learner.key", "does not know this learner's key; copy its public key"),
        ("server.pub", "`server.pub` belongs to another server, or that server has no keys; copy server.pub again"),
    ],
)
def test_a_wrong_key_is_reported(tmp_path: Path, replaced: str, expected: str) -> None:
    make_keys(tmp_path / "server")
    make_keys(tmp_path / "other")
    for name in {"learner.key", "server.pub"} - {replaced}:
        (tmp_path / "other" / name).write_bytes((tmp_path / "server" / name).read_bytes())
    with ServerThread(ScriptedEngine(), model=TINY, keys=server_keys(str(tmp_path / "server"))) as server:
        line = the_problem(run_at(server.endpoint, tmp_path, "--keys", str(tmp_path / "other")))
    assert line.startswith("problem  keys ") and expected in line


def test_missing_keys_on_one_side_are_reported(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with ServerThread(ScriptedEngine(), model=TINY) as server:
        line = the_problem(run_at(server.endpoint, tmp_path, "--keys", str(tmp_path / "keys")))
        assert re.search("has no keys.* set the same `keys` on both sides", line)
        line = the_problem(run_at(server.endpoint, tmp_path, "--keys", str(tmp_path / "nowhere")))
        assert "nowhere' cannot be read" in line and "slipstream keys" in line


def test_a_trial_that_fails_at_the_server_is_reported_in_one_line(tmp_path: Path) -> None:
    result = TrialResult(trial_id="t", error="cannot reach the learner's\nrendezvous\x1b[31m")
    channel: Any = FixedReplies(result)
    found = asyncio.run(doctor.check_bandwidth(run_at(NOBODY, tmp_path), channel))
    assert found.text == "weights cannot be sent: cannot reach the learner's rendezvous [31m"
    assert found.remedy.endswith("(learner.weight_sync.ports, learner.weight_sync.advertise) in the firewalls")


def test_differences_between_server_and_learner_are_problems(tmp_path: Path) -> None:
    run = run_at(NOBODY, tmp_path)
    for found, expected in (
        (doctor.check_dtype(run, "float16"), "float16 at the server, float32 here; set server.dtype"),
        (doctor.check_versions(info(package_version="0.0.7")), "slipstream-rl 0.0.7 (protocol"),
        (doctor.check_versions(info(protocol_version=99)), "(protocol 99) at the server"),
        (doctor.check_model(MODEL, "tiny:digits"), f"vocab_size {MODEL.vocab_size} at the server, {TINY.vocab_size}"),
        (doctor.check_clock(600.0, 0.1), "600.0 s ahead of this machine's; synchronize both with NTP"),
        (doctor.check_clock(-600.0, 0.1), "600.0 s behind this machine's"),
    ):
        assert found.verdict == "problem" and expected in str(found)
    larger = msgspec.structs.replace(TINY, architecture="Larger", size="9 layers of width 9", vocab_size=32)
    assert doctor.check_model(larger, "tiny:digits").verdict == "problem"
    teacher = doctor.check_model(larger, "tiny:digits", only_scores=True)
    assert (teacher.verdict, teacher.text) == ("ok", "a Larger of 9 layers of width 9 with the same tokenizer")
    other = msgspec.structs.replace(larger, tokenizer_hash="0123")
    assert "tokenizer_hash 0123 at the server" in doctor.check_model(other, "tiny:digits", only_scores=True).text
    smaller = msgspec.structs.replace(larger, vocab_size=TINY.vocab_size - 1)
    found = doctor.check_model(smaller, "tiny:digits", only_scores=True)
    assert found.verdict == "problem" and f"at least {TINY.vocab_size} needed" in found.text
    assert doctor.check_clock(8.0, 4.0).verdict == "ok", "half of an answer of 8 s is uncertainty"
    found = doctor.check_dtype(run, "bfloat16")
    assert found.verdict == "ok" and "of up to 0.3" in found.text


@pytest.mark.parametrize(
    ("devices", "flag", "verdict", "expected"),
    [
        (["a/2"], "auto", "problem", "pip install it, or accept"),
        (["a/1"], "auto", "problem", "without expandable_segments"),
        (["a/2"], "tcp", "ok", "with tcp"),
        (["cpu"], "auto", "ok", "with tcp"),
        (["cpu"], "nccl", "problem", "weights cannot be sent over nccl"),
    ],
)
def test_gpus_with_a_cpu_transport_are_a_problem_with_the_fitting_transport_as_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], flag: str, verdict: str, expected: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr("learner.doctor.doctor.offered_transports", lambda: ["tcp"])
    monkeypatch.setattr("learner.doctor.doctor.own_device_name", lambda device: "a/1")
    monkeypatch.setattr("protocol.transports.nccl.why_not_installed", lambda: "cupy is missing; pip install it")
    server_info = info(transports=["tcp", "ipc", "nccl"], devices=devices)
    found = check_transport(run_at(NOBODY, tmp_path, "--learner.weight-sync.transport", flag), server_info)
    assert found.verdict == verdict and expected in str(found)
    assert ("over the CPUs: ipc is not possible because" in found.text) == (flag == "auto" and verdict == "problem")


def test_different_nccl_versions_are_a_problem_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.doctor.doctor.offered_transports", lambda: ["tcp", "nccl 2.30.7"])
    monkeypatch.setattr("learner.doctor.doctor.own_device_name", lambda device: "a/1")
    found = check_transport(run_at(NOBODY, tmp_path), info(transports=["tcp", "nccl 2.29.7"], devices=["a/2"]))
    assert found.verdict == "problem" and "weights are sent with tcp, over the CPUs" in found.text
    assert "the learner has nccl 2.30.7 and the server has nccl 2.29.7" in found.text


def test_a_link_that_is_too_slow_for_a_bucket_is_reported() -> None:
    push, mib = WeightSyncConfig(bucket_mib=256, timeout_s=60), 1 << 20
    slow = str(doctor.fast_enough(4 * mib, None, push))
    assert (
        "too slow to send a bucket before a weight sync times out; lower learner.weight_sync.bucket_mib (256)" in slow
    )
    assert doctor.fast_enough(5 * mib, None, push).verdict == "ok"
    assert doctor.fast_enough(4 * mib, 100 * mib, push).verdict == "ok"  # all weights fit into one bucket


def test_too_little_memory_and_disk_are_reported_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: 1 << 20)
    memory, disk = doctor.check_resources(run_at(NOBODY, tmp_path))
    assert (memory.verdict, disk.verdict) == ("problem", "ok")
    assert "but only 0.0 GiB of host memory are free" in memory.text and "use a smaller model" in memory.remedy
    full = disk_finding(tmp_path / "not" / "yet", "run_dir", 1 << 60)
    assert full.verdict == "problem" and f"in {tmp_path}" in full.text


@pytest.mark.parametrize(("keep_last", "num_kept"), [(2, 3), (0, 7)])
def test_all_checkpoints_that_are_kept_need_space(tmp_path: Path, keep_last: int, num_kept: int) -> None:
    flags = ("--learner.steps", "61", "--learner.checkpoint.every-steps", "10")
    *_, disk = doctor.check_resources(
        run_at(NOBODY, tmp_path, *flags, "--learner.checkpoint.keep-last", str(keep_last))
    )
    assert disk.subject == "disk" and f"{num_kept} checkpoints" in disk.text


def test_memory_is_estimated_for_the_passes_on_this_device(tmp_path: Path) -> None:
    def needed(*flags: str) -> str:
        return next(doctor.check_resources(run_at(NOBODY, tmp_path, *flags))).text

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_tokens = load_config(LearnerRun, [RECIPE], "test").learner.tokens_per_pass(device)
    assert needed() == needed("--learner.micro-batch-tokens", str(num_tokens))
    assert needed() != needed("--learner.micro-batch-tokens", str(4 * num_tokens))


def test_the_gpus_of_the_learner_are_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_gib, devices = [1, 70, 40], list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free_gib[gpu] << 30, 80 << 30))
    monkeypatch.setattr("learner.doctor.doctor.own_device_name", lambda device: devices.append(device) or "a/1")
    monkeypatch.setattr("learner.doctor.doctor.offered_transports", lambda: ["tcp"])
    run = run_at(NOBODY, tmp_path)
    for learner_gpus, gib, first in (([1, 2], 40.0, 1), ([2, 5], 40.0, 2), ([5], 1.0, 0), ([], 1.0, 0)):
        placed = msgspec.structs.replace(run, deploy={"learner_gpus": learner_gpus, "server_gpus": [[0]]})
        room = doctor._room(placed)
        assert (room.device_gib, room.num_ranks) == (gib, max(1, len(learner_gpus)))
        check_transport(placed, info(devices=["cpu"]))
        assert devices.pop() == torch.device("cuda", first)


def test_an_invalid_placement_is_a_problem(tmp_path: Path) -> None:
    run = msgspec.structs.replace(run_at(NOBODY, tmp_path), deploy={"learner_gpus": 1})
    assert the_problem(run).endswith("deploy.learner_gpus = 1: Expected `array`, got `int`; use a list")


def test_an_unreadable_model_config_affects_only_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_config: object) -> None:
        raise RuntimeError("ambiguous")

    monkeypatch.setattr(doctor, "shape_of", fail)
    (finding,) = doctor.check_resources(run_at(NOBODY, tmp_path))
    assert "cannot estimate the needs of" in finding.text and "(ambiguous)" in finding.text


def test_the_command_exits_with_1_and_creates_no_run(tmp_path: Path) -> None:
    done = run_here("doctor", RECIPE, "--run-dir", str(tmp_path / "run"), "--endpoint", NOBODY)
    assert done.returncode == 1 and "1 problem found" in done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()][1] == ["problem", "port"]
    assert not (tmp_path / "run").exists()


def test_the_server_of_evaluations_is_examined_if_the_run_has_any(tmp_path: Path) -> None:
    def evaluation(*flags: str) -> list[Finding]:
        return [one for one in examine(run_at(NOBODY, tmp_path, *flags)) if one.subject == "evaluation"]

    assert evaluation() == []
    every = ("--learner.evaluation.every-steps", "2", "--learner.evaluation.url")
    with openai_server() as openai:
        (well,) = evaluation(*every, openai.url)
        assert (well.verdict, well.text) == ("ok", f"{openai.url} serves a model")
        openai.failures = [401]
        (refused,) = evaluation(*every, openai.url)
        assert refused.verdict == "problem" and "OPENAI_API_KEY" in str(refused)
    (absent,) = evaluation(*every, "http://127.0.0.1:1/v1")
    assert absent.verdict == "problem" and "start the server, correct learner.evaluation.url" in str(absent)
