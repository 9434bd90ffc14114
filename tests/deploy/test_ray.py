"""What `slipstream ray` reserves on a cluster and starts there, before any Ray."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.arguments import Launch, read_arguments
from deploy.placement import RayConfig
from deploy.ray import main
from deploy.ray_placement import (
    BundleLocation,
    Commands,
    RankRendezvous,
    ServerList,
    bundles,
    check_launch,
    keys_of,
    names,
    rank_environment,
)
from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.servers.membership import EndpointSource
from protocol.channel.keys import learner_keys, server_keys
from protocol.config import load_config
from protocol.errors import ConfigError, DeadlineExceeded
from tests.deploy.node import SHARED, a_server

NODE_A = [BundleLocation(node="a", address="10.0.0.5", ports=(20001, 20002), gpus=(gpu,)) for gpu in "37"]
NODE_B = BundleLocation(node="b", address="fd00::6", ports=(20003, 20004), gpus=("0",))
LEARNER = {"steps": 1, "data": {"task": "reverse"}, "reward": {"functions": ["exact_match"]}}


def launch_of(directory: Path, *flags: str, **config: Any) -> Launch:
    file = directory / "run.toml"
    file.write_bytes(msgspec.toml.encode(SHARED | {"run_dir": str(directory / "run"), "learner": LEARNER} | config))
    launch = read_arguments([str(file), *flags], "slipstream ray", "")
    assert launch is not None
    return launch


def commands_of(launch: Launch) -> Commands:
    return Commands(
        launch=launch,
        servers=ServerList(launch.make_logs().parent),
        directory="/home/me",
        keys=keys_of(launch),
        api_key="secret",
    )


def test_each_rank_reserves_a_gpu_and_each_server_one_per_worker_unless_there_are_none() -> None:
    config = RayConfig(servers=2, ranks=3, cpus_per_process=4)
    server = a_server(tensor_parallel_size=2, data_parallel_size=2)
    assert bundles(config, server, "10.0.0.5") == [{"CPU": 4, "GPU": 1}] * 3 + [{"CPU": 4, "GPU": 4}] * 2
    on_cpus = msgspec.structs.replace(config, use_gpus=False)
    assert bundles(on_cpus, server, "10.0.0.5") == [{"CPU": 4}] * 5
    with_driver = msgspec.structs.replace(on_cpus, rank_0_with_driver=True)
    assert bundles(with_driver, server, "10.0.0.5") == [{"CPU": 4, "node:10.0.0.5": 0.001}, *[{"CPU": 4}] * 4]
    assert names("server", 2) == ["server0", "server1"] and names("learner", 1) == ["learner"]


def test_ranks_get_what_torchrun_sets_node_by_node_and_the_gpus_of_all_ranks_of_their_node() -> None:
    hosts = [NODE_A[0], NODE_B, NODE_A[1]]
    first, second, third = (rank_environment(rank, hosts) for rank in range(3))
    assert first == {
        "CUDA_VISIBLE_DEVICES": "3,7", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "20001",
    }  # fmt: skip
    assert third == first | {"RANK": "1", "LOCAL_RANK": "1"}
    assert second == first | {"RANK": "2", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert rank_environment(0, [NODE_B]) == {}
    without = [host._replace(gpus=()) for host in hosts]
    assert rank_environment(0, without)["ACCELERATE_USE_CPU"] == "true"


def test_both_sides_accept_their_commands_share_keys_and_meet_through_the_list(tmp_path: Path) -> None:
    launch = launch_of(tmp_path, "--seed", "3", "--server.block-size", "32", "--learner.steps", "2")
    commands = commands_of(launch)
    server = commands.server("server1", NODE_B)
    rank = commands.rank(0, [NODE_A[0], NODE_B], NODE_B, again=False)
    on_server = load_config(ServerRun, server.arguments, "slipstream serve")
    assert (on_server.endpoint, on_server.server.http_port) == ("tcp://[fd00::6]:20003", 20004)
    assert (on_server.seed, on_server.server.block_size, on_server.server.http_host) == (3, 32, "127.0.0.1")
    assert rank.arguments[0] == "train" and "--resume" not in rank.arguments
    on_learner = load_config(LearnerRun, rank.arguments[1:], "slipstream train")
    assert on_learner.learner.steps == 2 and on_learner.endpoints_from is not None
    assert on_learner.keys is not None and on_learner.keys == on_server.keys
    assert learner_keys(on_learner.keys).public in server_keys(on_learner.keys).allowed()
    (needed, start), *_ = rank.needed_files.items()
    assert Path(needed).read_text().startswith(start)
    assert commands.rank(1, [NODE_A[0], NODE_B], NODE_B, again=False).needed_files == {}, (
        "only rank 0 has the run directory"
    )
    assert EndpointSource(on_learner.endpoints_from, has_keys=True, insecure=False).endpoints == (
        "tcp://[fd00::6]:20003",
    )
    commands.server("server1", NODE_A[0])
    moved = EndpointSource(on_learner.endpoints_from, has_keys=True, insecure=False).endpoints
    assert moved == ("tcp://10.0.0.5:20001",), "a server that was started again elsewhere replaces its entry"
    assert keys_of(launch) == on_server.keys, "a resume uses the keys that are there"


def test_a_server_needs_the_keys_that_the_driver_created_but_not_those_of_the_config(tmp_path: Path) -> None:
    commands = commands_of(launch_of(tmp_path))
    public = tmp_path / "run" / "keys" / "server.pub"
    assert commands.server("server", NODE_B).needed_files == {str(public): public.read_text()}
    for config in ({"keys": str(public.parent)}, {"insecure": True}):
        launch = launch_of(tmp_path, **config)
        without = msgspec.structs.replace(commands, launch=launch, keys=keys_of(launch))
        assert without.server("server", NODE_B).needed_files == {}


def test_only_a_learner_that_has_left_a_run_is_resumed(tmp_path: Path) -> None:
    commands = commands_of(launch_of(tmp_path))
    commands.server("server", NODE_A[0])
    assert "--resume" not in commands.rank(0, NODE_A, NODE_B, again=True).arguments
    (tmp_path / "run" / "config.toml").touch()
    assert "--resume" in commands.rank(0, NODE_A, NODE_B, again=True).arguments
    assert "--resume" not in commands.rank(0, NODE_A, NODE_B, again=False).arguments
    asked = msgspec.structs.replace(commands, launch=launch_of(tmp_path, "--resume"))
    assert "--resume" in asked.rank(0, NODE_A, NODE_B, again=False).arguments


def test_evaluations_go_to_the_first_server_with_a_key_that_both_sides_have(tmp_path: Path) -> None:
    commands = commands_of(launch_of(tmp_path, "--learner.evaluation.every-steps", "5"))
    server, rank = commands.server("server", NODE_B), commands.rank(0, [NODE_A[0]], NODE_B, again=False)
    assert server.arguments[server.arguments.index("--server.http-host") + 1] == "fd00::6"
    assert rank.arguments[rank.arguments.index("--learner.evaluation.url") + 1] == "http://[fd00::6]:20004/v1"
    assert server.environment["VLLM_API_KEY"] == rank.environment["EVALUATION_API_KEY"] == "secret"
    load_config(LearnerRun, rank.arguments[1:], "slipstream train")
    alone = msgspec.structs.replace(commands, launch=launch_of(tmp_path))
    of_rank = alone.rank(0, [NODE_B], NODE_B, again=False)
    assert alone.server("server", NODE_B).environment == of_rank.environment == alone.launch.environment


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"endpoints": ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]}, r"endpoints = \[.*Ray chooses the nodes"),
        ({"endpoint": "tcp://127.0.0.1:9"}, "endpoint = 'tcp://127.0.0.1:9', but Ray chooses the nodes"),
        ({"deploy": {"ray": {"servers": 0}}}, "deploy.ray.servers = 0"),
        ({"deploy": {"ray": {"nodes": 2}}}, "unknown key deploy.ray.nodes"),
        ({"deploy": {"reference_model": "big"}}, "reference_model = 'big', but only colocate starts"),
        (
            {"server": {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "node-a"}},
            r"server\.nnodes = 2, but under Ray all workers of a server are on one node; remove it",
        ),
    ],
)
def test_a_config_that_contradicts_ray_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_launch(launch_of(tmp_path, **config))


def test_an_insecure_run_gets_no_keys_and_one_with_keys_its_own(tmp_path: Path) -> None:
    assert keys_of(launch_of(tmp_path, insecure=True)) is None
    assert keys_of(launch_of(tmp_path, keys="/somewhere/keys")) == "/somewhere/keys"
    assert not (tmp_path / "run").exists()


def test_a_second_driver_does_not_touch_the_servers_of_the_first(tmp_path: Path) -> None:
    launch = launch_of(tmp_path)
    first = commands_of(launch)
    first.server("server", NODE_B)
    with pytest.raises(ConfigError, match="run is in use by another `slipstream ray`; stop it"):
        commands_of(launch)
    assert "tcp://[fd00::6]:20003" in first.servers.path.read_text()


def test_waits_for_nodes_name_the_key_that_ends_them(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    servers = ServerList(tmp_path)
    with pytest.raises(DeadlineExceeded, match=r"no server has a node after 0.01 s \(deploy.ray.start_timeout_s\)"):
        servers.first(0.01)
    with pytest.raises(DeadlineExceeded, match=r"another rank has no node after 0.01 s"):
        RankRendezvous(2, servers).join(0, NODE_B, 0.01)


def test_all_ranks_of_a_start_get_the_same_server_though_the_list_changes_between_them(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    servers = ServerList(tmp_path)
    servers.put("server1", NODE_B)
    rendezvous = RankRendezvous(2, servers)
    assert rendezvous.first_server(1.0) == NODE_B
    servers.put("server0", NODE_A[0])
    servers.put("server1", NODE_A[1])
    assert rendezvous.first_server(1.0) == NODE_B
    assert RankRendezvous(2, servers).first_server(1.0) == NODE_A[0], "another start takes the list as it is"


def test_without_ray_the_command_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_of(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "deploy.ray_cluster", raising=False)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run.toml")])
    assert ended.value.code == 2 and "[ray]" in capsys.readouterr().err
