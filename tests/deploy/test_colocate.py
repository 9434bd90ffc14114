"""How colocate shares flags and cores between the two processes, and the demo."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from deploy import colocate
from deploy.arguments import Launch, flags_by_section, read_arguments
from deploy.colocate import one_sided_note, servers_on_learner_gpu, shared_gpu_note, with_cores, with_gpus
from deploy.placement import DeployConfig, rank_specs, reference_spec, server_specs
from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.config.shared_gpu import ServersOnGpu
from protocol.config import load_config
from protocol.errors import ConfigError
from protocol.hardware import has_gpu
from tests.deploy.node import a_learner, a_server
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
RECIPE = "deploy/recipes/reverse.toml"
TIMEOUT_S = 240


def test_private_flags_go_to_their_side_and_shared_ones_to_all() -> None:
    flags = ["--learner.steps", "3", "--seed", "1", "--server.cpu-cores", "0", "1", "--model", "m"]
    flags += ["--deploy.restart", "on-failure", "--deploy.sharded", "true"]  # the last is a key of the learner today
    assert flags_by_section(flags) == {
        "learner": ["--learner.steps", "3", "--seed", "1", "--model", "m", "--deploy.sharded", "true"],
        "server": ["--seed", "1", "--server.cpu-cores", "0", "1", "--model", "m"],
        "deploy": ["--seed", "1", "--model", "m", "--deploy.restart", "on-failure"],
    }


def test_cores_are_halved_unless_the_config_names_any() -> None:
    num_cores = len(os.sched_getaffinity(0))
    config = with_cores(DeployConfig(), a_server(), a_learner())
    if num_cores >= 2 and not has_gpu():
        assert sorted([*config.server_cores[0], *config.learner_cores[0]]) == list(range(num_cores))
    assert with_cores(DeployConfig(), a_server(cpu_cores=[0]), a_learner()) == DeployConfig()
    for named in (DeployConfig(learner_cores=((0,),)), DeployConfig(reference_model="big", reference_cores=(1,))):
        assert with_cores(named, a_server(), a_learner()) == named


def test_server_and_learner_get_gpus_of_their_own_if_there_are_enough() -> None:
    apart = DeployConfig(server_gpus=((2,),), learner_gpus=(3,))
    assert with_gpus(DeployConfig(), a_server(), a_learner(), (2, 3, 5)) == apart
    two_workers = a_server(tensor_parallel_size=2)
    assert with_gpus(DeployConfig(), two_workers, a_learner(), (0, 1, 2)).server_gpus == ((0, 1),)
    for config, server, gpus in (
        (DeployConfig(), two_workers, (0, 1)),
        (DeployConfig(), a_server(), (0,)),
        (DeployConfig(), a_server(), ()),
        (DeployConfig(learner_gpus=(1,)), a_server(), (0, 1)),
        (DeployConfig(learner_cores=((0,), (1,))), a_server(), (0, 1, 2)),
    ):
        assert with_gpus(config, server, a_learner(), gpus) == config
    over_ipc = a_learner(weight_sync={"transport": "ipc"})
    assert with_gpus(DeployConfig(), a_server(), over_ipc, (0, 1)) == DeployConfig()


@pytest.mark.parametrize(
    ("gpus", "of_reference", "transport", "expected"),
    [
        ((0, 1, 2), (), "auto", ("0", "1", "2")),
        ((0, 1), (), "auto", (None, None, None)),
        ((0, 1, 2), (0,), "auto", ("1", "2", "0")),
        ((0, 1, 2), (0,), "ipc", ("1", "1", "0")),
        ((0, 1), (0,), "auto", ("1", "1", "0")),
        ((0, 1), (1,), "auto", ("0", "0", "1")),
        ((0,), (0,), "auto", (None, None, "0")),
    ],
)
def test_no_process_beside_the_server_of_a_reference_is_left_without_a_gpu(
    gpus: tuple[int, ...], of_reference: tuple[int, ...], transport: str, expected: tuple[str | None, ...]
) -> None:
    """None: the process sees all GPUs, and uses the first."""
    learner = a_learner(
        reference={"kind": "fixed", "endpoint": "tcp://127.0.0.1:5767"}, kl={"coef": 1.0, "place": "advantage"},
        weight_sync={"transport": transport},
    )  # fmt: skip
    config = with_gpus(DeployConfig(reference_model="big", reference_gpus=of_reference), a_server(), learner, gpus)
    (server,), (rank,) = server_specs(config, a_server()), rank_specs(config, learner, port=1)
    reference = reference_spec(config, a_server(), learner)
    assert reference is not None
    seen = [spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in (server, rank, reference)]
    assert tuple(seen) == expected


@pytest.mark.parametrize(
    ("deploy", "num_servers", "num_shards"),
    [
        ({}, 1, 2),
        ({"server_gpus": ((0, 1),), "learner_gpus": (2,)}, 0, 0),
        ({"server_gpus": ((0, 1),), "learner_gpus": (1,)}, 1, 2),
        ({"server_gpus": ((0,), (1,)), "learner_gpus": (1, 2)}, 1, 1),
        ({"server_gpus": ((0,), (1,), (2,)), "learner_gpus": (0, 1, 2)}, 1, 1),
        ({"server_gpus": ((0, 1),)}, 0, 0),  # the learner sees no GPU
        ({"reference_model": "teacher"}, 2, 2),
        ({"reference_model": "teacher", "reference_gpus": (1,)}, 1, 2),
        ({"reference_model": "teacher", "reference_gpus": (2,), "server_gpus": ((0,),), "learner_gpus": (2,)}, 1, 1),
        ({"reference_model": "teacher", "server_gpus": ((0,), (1,)), "learner_gpus": (0, 1)}, 1, 1),
    ],
)
def test_a_learner_gets_the_servers_that_use_its_gpu(
    monkeypatch: pytest.MonkeyPatch, deploy: dict, num_servers: int, num_shards: int
) -> None:
    config, run = DeployConfig(**deploy), a_server(kv_cache_memory_mib=1024, tensor_parallel_size=2)
    monkeypatch.setattr(colocate, "has_gpu", lambda: True)
    found = servers_on_learner_gpu(config, run)
    assert (found and (found.num_servers, found.num_shards)) == ((num_servers, num_shards) if num_servers else None)
    if found is not None:
        for name, value in found.environment().items():
            monkeypatch.setenv(name, value)
        assert ServersOnGpu.of_environment() == found and found.kv_cache_memory_mib == 1024
    monkeypatch.setattr(colocate, "has_gpu", lambda: False)
    assert servers_on_learner_gpu(config, run) is None


def test_a_server_that_would_measure_the_gpu_it_shares_with_the_learner_is_warned_of() -> None:
    note = shared_gpu_note(ServersOnGpu())
    assert note and "takes 90%" in note and "server.kv_cache_memory_mib" in note and "deploy.server_gpus" in note
    assert shared_gpu_note(ServersOnGpu(kv_cache_memory_mib=1024)) is None
    assert shared_gpu_note(None) is None


def test_a_side_that_sees_no_gpu_because_only_the_other_has_some_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    of_server, of_learner = DeployConfig(server_gpus=((0,),)), DeployConfig(learner_gpus=(0,))
    monkeypatch.setattr(colocate, "has_gpu", lambda: True)
    for config, side, missing in ((of_server, "learner", "learner_gpus"), (of_learner, "server", "server_gpus")):
        note = one_sided_note(config)
        assert note and f"the {side} sees no GPU and computes on the CPU; set deploy.{missing}, or remove" in note
    for config in (DeployConfig(), DeployConfig(server_gpus=((0,),), learner_gpus=(1,))):
        assert one_sided_note(config) is None
    monkeypatch.setattr(colocate, "has_gpu", lambda: False)
    assert one_sided_note(of_server) is None


LORA = ("--learner.lora.rank", "8")


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), {"lora_rank": 4, "returns_experts": False, "evaluation_url": "http://127.0.0.1:8001/v1"}),
        (("--server.http-host", "192.168.1.5", "--server.http-port=9000", "--server.api-key-file", "key"),
         {"evaluation_url": "http://192.168.1.5:9000/v1"}),
        (("--learner.evaluation.url", "http://a/v1", "--server.http-port", "0"), {"evaluation_url": "http://a/v1"}),
        (("--server.max-model-len", "64", "--server.kv-cache-dtype", "None"),
         {"server": {"http_port": 8001, "kv_cache_dtype": None, "max_model_len": 64}}),
        (LORA, {"lora_rank": 8}),
        ((*LORA, "--learner.push.lora", "merged"), {"lora_rank": 0}),
        ((*LORA, "--server.max-lora-rank", "16"), {"lora_rank": 16}),
        (("--learner.routing-replay",), {"returns_experts": True}),
        (("--learner.routing-replay", "--server.return-routed-experts", "false"), {"returns_experts": False}),
    ],
    ids=lambda value: " ".join(value),
)  # fmt: skip
def test_each_side_reads_the_flags_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], found: dict[str, Any]
) -> None:
    found = dict(found)
    file = {"model": "m", "run_dir": "r", "server": {"http_port": 8001, "kv_cache_dtype": "fp8"}}
    learner: dict[str, Any] = {
        "steps": 1,
        "data": {"task": "sort"},
        "reward": {"functions": ["exact_match"]},
        "lora": {"rank": 4},
    }
    learner["evaluation"] = {"every_steps": 1}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(file | {"learner": learner}))
    launch = read_arguments([str(tmp_path / "run.toml"), *flags, "--quiet"], "colocate", "")
    assert launch is not None
    for name, value in launch.environment.items():
        monkeypatch.setenv(name, value)
    of_server = load_config(ServerRun, [word for word in launch.server if word != "--quiet"], "serve")
    of_learner = load_config(LearnerRun, [word for word in launch.learner[1:] if word != "--quiet"], "train")
    for run, launched in ((of_server, launch.server_run), (of_learner, launch.learner_run)):
        for key in [key for key, value in found.items() if isinstance(getattr(run, key, None), type(value))]:
            assert getattr(run, key) == getattr(launched, key) == found.pop(key)
    assert not found


def test_a_printed_config_of_several_servers_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoints = ["tcp://127.0.0.1:6001", "tcp://127.0.0.1:6002"]
    flags = ("--endpoints", *endpoints, "--learner.lora.rank", "8", "--dry-run")
    assert read_arguments([str(ROOT / RECIPE), *flags], "colocate", "") is None
    printed = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(printed)
    assert read_arguments([str(tmp_path / "again.toml"), "--dry-run"], "colocate", "") is None
    assert capsys.readouterr().out == printed and endpoints[1] in printed and "rank = 8" in printed


def test_a_flag_that_disables_the_http_of_evaluations_is_refused() -> None:
    flags = ("--learner.evaluation.every-steps", "2", "--server.http-port", "0")
    with pytest.raises(ConfigError, match=r"with server.http_port = 0: an evaluation sends its requests"):
        read_arguments([str(ROOT / RECIPE), *flags], "colocate", "")


def test_a_flag_of_the_server_enables_the_http_that_the_files_evaluations_need(tmp_path: Path) -> None:
    file = tomllib.loads((ROOT / RECIPE).read_text())
    file["learner"]["evaluation"] = file["learner"].get("evaluation", {}) | {"every_steps": 1}
    file["server"] = file.get("server", {}) | {"http_port": 0}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(file))
    launch = read_arguments([str(tmp_path / "run.toml"), "--server.http-port", "8001"], "colocate", "")
    assert launch is not None and launch.learner_run.evaluation_url == "http://127.0.0.1:8001/v1"


def test_a_run_that_lies_in_run_dir_is_refused_before_any_start_so_that_no_restart_resumes_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = [str(ROOT / RECIPE), "--run-dir", str(run_dir)]
    assert read_arguments(arguments, "colocate", "") is not None
    run_dir.mkdir()
    (run_dir / "config.toml").touch()
    with pytest.raises(ConfigError, match="already contains a run; continue it with --resume"):
        read_arguments(arguments, "colocate", "")
    assert read_arguments([*arguments, "--dry-run"], "colocate", "") is None
    assert read_arguments([*arguments, "--resume"], "colocate", "") is not None


def test_several_ranks_know_each_other_and_only_a_learner_that_was_started_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(colocate, "SupervisedProcess", lambda *arguments: started.append(arguments))
    config = DeployConfig(learner_cores=((0,), (1,)))
    run = msgspec.structs.replace(a_learner(), run_dir=str(tmp_path))
    launch = Launch(
        config=config, server_run=a_server(), learner_run=run, server=(), learner=(), environment={"B": "2"},
        resume=False,
    )  # fmt: skip
    node = colocate.Node(
        config=config, launch=launch, logs=tmp_path, server=("server",), learner=("learner",),
        learner_environment={"A": "1"},
    )  # fmt: skip
    node.start_learner(again=False)
    node.start_learner(again=True)
    (tmp_path / "config.toml").touch()
    node.start_learner(again=True)
    commands = [command for _, command, _, _ in started]
    assert commands[0] == ("learner", "--learner.cpu-cores", "0")
    assert [("--resume" in command) for command in commands] == [False] * 4 + [True] * 2
    ports = [environment["MASTER_PORT"] for _, _, environment, _ in started]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert [(name, environment["A"] + environment["B"]) for name, _, environment, _ in started[:2]] == [
        ("learner0", "12"),
        ("learner1", "12"),
    ]
    assert started[0][3] == tmp_path / "learner0.log"


@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_demo_starts_both_sides_and_ends_both(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "colocate", RECIPE, "--run-dir", str(tmp_path / "run")]
    command += ["--endpoint", f"tcp://127.0.0.1:{free_port()}", "--server.http-port", str(free_port())]
    command += ["--learner.steps", "3", "--learner.report.dashboard-port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learner | Step 3/3" in done.stdout and " server | " in done.stdout
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "logs" / "server.log").read_text().count("ready after") == 1
