"""`learner doctor` at real sockets: of each fault it names that one, in one line, with what to do; and it changes nothing."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from learner.config import LearnerRun, WeightSyncConfig
from learner.doctor import doctor, reach
from learner.doctor.doctor import examine, transport
from protocol.channel.keys import make_keys, server_keys
from protocol.channel.sockets import ServerChannel
from protocol.config import load_config
from protocol.doctor import Finding, disk_finding, package_version
from protocol.messages import (
    PROTOCOL_VERSION,
    LearnerMessage,
    Probe,
    Refused,
    ServerInfo,
    ServerMessage,
    Trial,
    TrialResult,
)
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ScriptedEngine, ServerThread
from tests.fingerprint import MODEL
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.forked_learner import run_learner
from tests.learner.openai_server import openai_server
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent.parent
RECIPE = str(ROOT / "deploy/recipes/reverse.toml")
TINY = fingerprint(resolve_model("tiny:digits"))
TIMEOUT_S = 60.0


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


@contextmanager
def answering(answer: Callable[[LearnerMessage], ServerMessage | None]) -> Iterator[str]:
    """A server that says what a test wants it to, on the real channel; gives its endpoint."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    endpoint = ""

    async def serve() -> None:
        nonlocal endpoint
        with closing(ServerChannel("tcp://127.0.0.1:*")) as channel:
            endpoint = channel.endpoint
            started.set()
            while True:
                peer, message = await channel.receive()
                assert not isinstance(message, Exception)
                if (said := answer(message)) is not None:
                    await channel.send(peer, said)

    def live() -> None:
        serving = loop.create_task(serve())
        stop.append(serving.cancel)
        loop.run_until_complete(asyncio.gather(serving, return_exceptions=True))
        loop.close()

    stop: list[Callable[[], bool]] = []
    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert started.wait(TIMEOUT_S)
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop[0])
        thread.join(TIMEOUT_S)


def healthy(message: LearnerMessage, **changes: object) -> ServerMessage | None:
    """What a server says that is well and takes no trials, with changes to it."""
    match message:
        case Probe(probe_id=probe_id):
            server_info = ServerInfo(
                probe_id=probe_id, protocol_version=PROTOCOL_VERSION, package_version=package_version(), clock_s=time.time(),
                run=None, model=TINY, dtype="float32", transports=["gloo"], devices=["cpu"],
            )  # fmt: skip
            return msgspec.structs.replace(server_info, **changes)
        case Trial(trial_id=trial_id):
            return TrialResult(trial_id=trial_id, error="cannot reach the learner's\nrendezvous\x1b[31m")
    return None


def test_a_server_that_is_well_costs_no_complaint(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine(), model=TINY) as server:
        found = {finding.subject: finding for finding in examine(run_at(server.endpoint, tmp_path))}
    assert {name: finding.verdict for name, finding in found.items()} == dict.fromkeys(
        (
            "names",
            "port",
            "keys",
            "versions",
            "tenancy",
            "model",
            "dtype",
            "clock",
            "transport",
            "bandwidth",
            "speed",
            "memory",
            "disk",
        ),
        "ok",
    )
    assert "with gloo to 1 worker" in found["transport"].text and "MiB/s" in found["bandwidth"].text


def test_a_server_with_keys_that_is_well_costs_no_complaint(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with ServerThread(ScriptedEngine(), model=TINY, keys=server_keys(str(tmp_path / "keys"))) as server:
        assert problems(run_at(server.endpoint, tmp_path, "--keys", str(tmp_path / "keys"))) == []


def test_the_run_that_is_served_meanwhile_goes_on(tmp_path: Path) -> None:
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


def test_each_of_several_servers_is_looked_at_and_named(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine(), model=TINY) as server:
        closed = f"tcp://127.0.0.1:{free_port()}"
        (tmp_path / "servers.txt").write_text(f"{server.endpoint}\n{closed}\n")
        run = msgspec.structs.replace(run_at(server.endpoint, tmp_path), endpoints_from=f"file:{tmp_path}/servers.txt")
        found = list(examine(run))
    (bad,) = [finding for finding in found if finding.verdict == "problem"]
    assert bad.subject == "port" and bad.text.startswith(f"{closed}: nothing listens at")
    assert [finding.verdict for finding in found if finding.text.startswith(server.endpoint)] == 10 * ["ok"]
    unread = msgspec.structs.replace(run, endpoints_from="file:/nowhere/servers.txt")
    assert "servers    endpoints_from: the file /nowhere/servers.txt cannot be read" in the_problem(unread)


def test_trials_come_after_all_cheaper_checks_of_every_server(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine(), model=TINY) as one, ServerThread(ScriptedEngine(), model=TINY) as other:
        run = msgspec.structs.replace(run_at(one.endpoint, tmp_path), endpoints=(one.endpoint, other.endpoint))
        subjects = [finding.subject for finding in examine(run)]
    assert subjects[-3:] == ["disk", "bandwidth", "bandwidth"] and subjects.count("bandwidth") == 2


def test_a_closed_port(tmp_path: Path) -> None:
    port = free_port()
    line = the_problem(run_at(f"tcp://127.0.0.1:{port}", tmp_path))
    assert f"port       nothing listens at 127.0.0.1:{port}; start `slipstream serve run.toml` there" in line


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://nowhere.invalid:5757", "names      nowhere.invalid does not resolve"),
        ("tcp://*:5757", "names      tcp://*:5757 is a listen address"),
        ("tcp://[::]:5757", "is a listen address, not the address of a server; set `endpoint` to the server's name"),
    ],
)
def test_a_wrong_address(tmp_path: Path, endpoint: str, expected: str) -> None:
    assert expected in the_problem(run_at(endpoint, tmp_path, "--insecure"))


def test_an_address_that_nobody_answers_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:  # its queue is full from now on, and what comes is dropped as by a firewall
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        line = the_problem(run_at(f"tcp://127.0.0.1:{full.getsockname()[1]}", tmp_path))
        for one in waiting:
            one.close()
    assert "did not answer within 0.3 s; correct the address in `endpoint`, or allow TCP port" in line


def keys_with(tmp_path: Path, replaced: str) -> str:
    """Keys that are the server's but for one file, which is of another pair."""
    make_keys(tmp_path / "server")
    make_keys(tmp_path / "other")
    for name in {"learner.key", "server.pub"} - {replaced}:
        (tmp_path / "other" / name).write_bytes((tmp_path / "server" / name).read_bytes())
    return str(tmp_path / "other")


@pytest.mark.parametrize(
    ("replaced", "expected"),
    [
        ("learner.key", "does not know this learner's key; copy its public key"),
        ("server.pub", "`server.pub` belongs to another server; copy server.pub again"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, replaced: str, expected: str) -> None:
    wrong = keys_with(tmp_path, replaced)
    with ServerThread(ScriptedEngine(), model=TINY, keys=server_keys(str(tmp_path / "server"))) as server:
        line = the_problem(run_at(server.endpoint, tmp_path, "--keys", wrong))
    assert line.startswith("problem  keys ") and expected in line


def test_keys_on_one_side_only_and_keys_that_are_not_there(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with ServerThread(ScriptedEngine(), model=TINY) as server:
        line = the_problem(run_at(server.endpoint, tmp_path, "--keys", str(tmp_path / "keys")))
        assert "has no keys, but this learner has; set the same `keys` on both sides" in line
        line = the_problem(run_at(server.endpoint, tmp_path, "--keys", str(tmp_path / "nowhere")))
        assert "nowhere' cannot be read" in line and "cannot be read" in line and "slipstream keys" in line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"protocol_version": 99},
            f"(protocol 99) at the server, {package_version()} (protocol {PROTOCOL_VERSION}) here",
        ),
        ({"package_version": "0.0.7"}, "slipstream-rl 0.0.7 (protocol"),
    ],
)
def test_another_version(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    with answering(lambda message: healthy(message, **change)) as endpoint:
        versions, bandwidth = problems(run_at(endpoint, tmp_path))
    assert versions.subject == "versions" and expected in versions.text
    assert versions.remedy == "install the same version on both sides"
    assert str(bandwidth).endswith("in both directions") and "\n" not in str(bandwidth) and "\x1b" not in str(bandwidth)


def test_a_server_from_before_there_were_doctors(tmp_path: Path) -> None:
    with answering(lambda message: Refused(reason="malformed message: Invalid value 'Probe'")) as endpoint:
        line = the_problem(run_at(endpoint, tmp_path))
    assert "versions   the server's slipstream-rl is not this learner's" in line and "Invalid value 'Probe'" in line


@pytest.mark.parametrize(
    ("theirs", "is_problem", "expected"),
    [
        (
            "bfloat16",
            False,
            "bfloat16 at the server, float32 here: the parity check accepts a mean |Δ logprob| of up to 0.3",
        ),
        ("float16", True, "float16 at the server, float32 here"),
    ],
)
def test_another_dtype_is_reported_and_one_without_a_bound_is_a_problem(
    tmp_path: Path, theirs: str, is_problem: bool, expected: str
) -> None:
    with answering(lambda message: healthy(message, dtype=theirs)) as endpoint:
        found = {finding.subject: finding for finding in examine(run_at(endpoint, tmp_path))}
    assert found["dtype"].text == expected and (found["dtype"].verdict == "problem") == is_problem
    assert ("server.dtype" in found["dtype"].remedy) == is_problem


@pytest.mark.parametrize(("offset_s", "expected"), [(600.0, "600.0 s ahead of"), (-600.0, "600.0 s behind")])
def test_a_clock_that_is_ten_minutes_off(tmp_path: Path, offset_s: float, expected: str) -> None:
    with answering(lambda message: healthy(message, clock_s=time.time() + offset_s)) as endpoint:
        found = {finding.subject: finding for finding in problems(run_at(endpoint, tmp_path))}
    assert set(found) == {"clock", "bandwidth"}
    assert expected in found["clock"].text and "NTP" in found["clock"].remedy


def test_a_slow_answer_is_no_wrong_clock() -> None:
    assert doctor.clock(8.0, 4.0).verdict == "ok" and doctor.clock(8.0, 1.0).verdict == "problem"


def test_another_model(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine()) as server:
        line = the_problem(run_at(server.endpoint, tmp_path))
    assert f"vocab_size {MODEL.vocab_size} at the server, {TINY.vocab_size} here" in line


def test_a_transport_that_one_side_lacks(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine(), model=TINY) as server:
        line = the_problem(run_at(server.endpoint, tmp_path, "--learner.weight-sync.transport", "nccl"))
    assert "transport  weights cannot be sent over nccl" in line


def test_gpus_whose_weights_would_go_over_the_cpus_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.doctor.doctor.offered_transports", lambda: ["gloo", "tcp", "ipc"])
    monkeypatch.setattr("learner.doctor.doctor.own_device_name", lambda device: "a/1")
    monkeypatch.setattr(
        "protocol.transports.nccl.why_not_installed", lambda: "transport nccl needs cupy; pip install it"
    )
    theirs = msgspec.structs.replace(
        healthy(Probe(probe_id="p")), transports=["gloo", "tcp", "ipc", "nccl"], devices=["a/2"]
    )
    found = transport(run_at("tcp://127.0.0.1:1", tmp_path), theirs)
    assert found.verdict == "problem" and "with gloo, over the CPUs: ipc is not possible because it needs" in found.text
    assert (
        "nccl is not possible because the learner does not offer nccl" in found.text
        and "pip install it, or accept" in found.remedy
    )
    by_name = run_at("tcp://127.0.0.1:1", tmp_path, "--learner.weight-sync.transport", "gloo")
    assert transport(by_name, theirs).verdict == "ok"
    assert (
        transport(run_at("tcp://127.0.0.1:1", tmp_path), msgspec.structs.replace(theirs, devices=["cpu"])).verdict
        == "ok"
    )


@pytest.mark.parametrize(("theirs", "remedy"), [("a/2", "pip install it"), ("a/1", "without expandable_segments")])
def test_the_remedy_is_of_the_transport_that_fits_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, remedy: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr("learner.doctor.doctor.offered_transports", lambda: ["gloo", "tcp"])
    monkeypatch.setattr("learner.doctor.doctor.own_device_name", lambda device: "a/1")
    monkeypatch.setattr("protocol.transports.nccl.why_not_installed", lambda: "cupy is missing; pip install it")
    server_info = msgspec.structs.replace(
        healthy(Probe(probe_id="p")), transports=["gloo", "tcp", "ipc", "nccl"], devices=[theirs]
    )
    found = transport(run_at("tcp://127.0.0.1:1", tmp_path), server_info)
    assert found.verdict == "problem" and remedy in found.remedy


def test_a_link_too_slow_for_a_bucket() -> None:
    push, mib = WeightSyncConfig(bucket_mib=256, timeout_s=60), 1 << 20
    line = str(doctor.fast_enough(4 * mib, None, push))
    assert (
        "too slow to send a bucket before a weight sync times out; lower learner.weight_sync.bucket_mib (256) or raise"
        in line
    )
    assert doctor.fast_enough(5 * mib, None, push).verdict == "ok"
    assert doctor.fast_enough(4 * mib, 100 * mib, push).verdict == "ok"  # all weights are less than a bucket


def test_a_server_that_says_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "ANSWER_TIMEOUT_S", 0.3)
    with answering(lambda message: None) as endpoint:
        assert "did not answer within 0.3 s: it is loading its model" in the_problem(run_at(endpoint, tmp_path))


def test_what_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "HANDSHAKE_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        line = the_problem(run_at(f"tcp://127.0.0.1:{mute.getsockname()[1]}", tmp_path))
    assert "does not respond like an inference server; correct `endpoint`" in line


def test_too_little_memory_and_disk_are_reported_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: 1 << 20)
    found = list(doctor.resources(run_at("tcp://127.0.0.1:1", tmp_path)))
    assert [finding.verdict for finding in found] == ["problem", "ok"]
    assert "0.0 GiB are free" in found[0].text and "learner.micro_batch_tokens" in found[0].remedy
    full = disk_finding(tmp_path / "not" / "yet", "run_dir", 1 << 60)
    assert full.verdict == "problem" and f"in {tmp_path}" in full.text


def test_memory_is_reckoned_for_passes_as_long_as_they_are_on_this_device(tmp_path: Path) -> None:
    def needed(*flags: str) -> str:
        return next(doctor.resources(run_at("tcp://127.0.0.1:1", tmp_path, *flags))).text.partition(",")[0]

    num_tokens = load_config(LearnerRun, [RECIPE], "test").learner.tokens_per_pass(
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    assert needed() == needed("--learner.micro-batch-tokens", str(num_tokens))
    assert needed() != needed("--learner.micro-batch-tokens", str(4 * num_tokens))


def test_the_command_exits_1_with_a_problem_and_tells_it_as_json_too(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--endpoint", f"tcp://127.0.0.1:{free_port()}"]
    done = run_learner("doctor", RECIPE, *flags)
    assert done.returncode == 1 and "1 problem found" in done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()][1] == ["problem", "port"]
    done = run_learner("doctor", RECIPE, "--json", *flags)
    assert done.returncode == 1
    assert [found["verdict"] for found in json.loads(done.stdout) if found["subject"] == "port"] == ["problem"]
    assert not (tmp_path / "run").exists()


def test_the_server_that_evaluations_will_ask_is_looked_for_where_the_run_has_any(tmp_path: Path) -> None:
    every = ("--learner.evaluation.every-steps", "2", "--learner.evaluation.url")
    with ServerThread(ScriptedEngine(), model=TINY) as server, openai_server() as openai:
        endpoint = server.endpoint
        found = [
            one.text for one in examine(run_at(endpoint, tmp_path, *every, openai.url)) if one.subject == "evaluation"
        ]
        assert found == [f"{openai.url} serves a model"]
        assert not [one for one in examine(run_at(endpoint, tmp_path)) if one.subject == "evaluation"]
        nobody = f"http://127.0.0.1:{free_port()}/v1"
        assert "start the server, correct learner.evaluation.url" in the_problem(
            run_at(endpoint, tmp_path, *every, nobody)
        )
        openai.failures = [401]
        (refused,) = [
            one for one in examine(run_at(endpoint, tmp_path, *every, openai.url)) if one.verdict == "problem"
        ]
        assert refused.subject == "evaluation" and "OPENAI_API_KEY" in str(refused)


def test_a_config_that_cannot_be_read_costs_the_estimate_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_config: object) -> None:
        raise RuntimeError("ambiguous")

    monkeypatch.setattr(doctor, "shape_of", fail)
    (finding,) = doctor.resources(run_at("tcp://127.0.0.1:1", tmp_path))
    assert "cannot estimate the needs of" in finding.text and "(ambiguous)" in finding.text
