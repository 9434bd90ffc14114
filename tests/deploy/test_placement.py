"""Which flags and which environment each process of a node gets, from what the config says."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.placement import DeployConfig, DeployRun, rank_specs, reference_spec, server_specs
from inference_server.config import ServerRun
from protocol.config import load_config, to_toml
from protocol.errors import ConfigError
from tests.deploy.node import SHARED, a_learner, a_server

TWO = ["tcp://127.0.0.1:5757", "tcp://[::1]:7000"]
EIGHT_GPUS = DeployConfig(server_gpus=((0, 1), (2, 3)), learner_gpus=(4, 5, 6, 7))


def test_each_server_has_its_gpus_its_workers_and_its_ports() -> None:
    first, second = server_specs(EIGHT_GPUS, a_server(*TWO, http_port=8000))
    assert (first.name, second.name) == ("server0", "server1")
    assert [spec.environment for spec in (first, second)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]  # fmt: skip
    assert second.flags == (
        "--endpoint", "tcp://[::1]:7000", "--server.http-port", "8001", "--server.tensor-parallel-size", "2",
    )  # fmt: skip


def test_each_rank_gets_what_torchrun_sets_and_sees_the_gpus_of_all() -> None:
    specs = rank_specs(EIGHT_GPUS, a_learner(), port=29500)
    assert [spec.name for spec in specs] == [f"learner{rank}" for rank in range(4)]
    assert [spec.environment["LOCAL_RANK"] for spec in specs] == ["0", "1", "2", "3"]
    (environment,) = {
        tuple(sorted((key, value) for key, value in spec.environment.items() if not key.endswith("RANK")))
        for spec in specs
    }
    assert dict(environment) == {
        "CUDA_VISIBLE_DEVICES": "4,5,6,7", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }  # fmt: skip


def test_cores_become_flags_and_ranks_without_gpus_are_notified() -> None:
    config = DeployConfig(server_cores=((0, 1),), learner_cores=((2,), (3,)))
    (server,) = server_specs(config, a_server())
    assert (server.name, server.flags, server.environment) == ("server", ("--server.cpu-cores", "0", "1"), {})
    first, second = rank_specs(config, a_learner(), port=1)
    assert second.flags == ("--learner.cpu-cores", "3")
    assert first.environment["ACCELERATE_USE_CPU"] == "true" and "CUDA_VISIBLE_DEVICES" not in first.environment


def test_the_server_of_a_reference_gets_its_model_its_endpoint_and_its_part_of_the_node(tmp_path: Path) -> None:
    config_file = tmp_path / "run.toml"
    teacher = {"kind": "fixed", "endpoint": "tcp://127.0.0.1:5767"}
    distilled = a_learner(reference=teacher, kl={"coef": 1.0, "place": "advantage"})
    assert reference_spec(DeployConfig(), a_server(), distilled) is None
    config = msgspec.structs.replace(EIGHT_GPUS, learner_gpus=(4, 5), reference_model="big", reference_gpus=(6, 7))
    spec = reference_spec(config, a_server(*TWO), distilled)
    assert spec is not None and (spec.name, spec.environment) == ("reference", {"CUDA_VISIBLE_DEVICES": "6,7"})
    assert spec.flags == (
        "--model", "big", "--endpoint", "tcp://127.0.0.1:5767", "--server.http-port", "0",
        "--server.return-routed-experts", "false", "--server.max-lora-rank", "0", "--server.tensor-parallel-size", "2",
    )  # fmt: skip
    of_policy = a_server(max_lora_rank=8, return_routed_experts=True)
    config_file.write_text(to_toml(msgspec.structs.replace(of_policy, learner={"routing_replay": True})))
    teacher_run = load_config(ServerRun, [str(config_file), *spec.flags], "serve")
    assert (teacher_run.lora_rank, teacher_run.returns_experts) == (0, False)
    copied = a_learner(reference=teacher | {"kind": "every", "every_steps": 4}, kl={"coef": 1.0, "place": "advantage"})
    config_file.write_text(to_toml(a_server(quantization="fp8_per_tensor", kv_cache_dtype="fp8")))
    for learner, is_quantized in ((distilled, True), (copied, False)):
        spec = reference_spec(config, a_server(*TWO), learner)
        assert spec is not None
        server = load_config(ServerRun, [str(config_file), *spec.flags], "serve").server
        assert (server.quantization is not None, server.kv_cache_dtype is not None) == (is_quantized, is_quantized)
    on_cores = reference_spec(DeployConfig(reference_model="big", reference_cores=(1,)), a_server(), distilled)
    assert on_cores is not None and on_cores.flags[-2:] == ("--server.cpu-cores", "1")
    blind = DeployConfig(server_gpus=((0,),), reference_model="big")
    with pytest.raises(ConfigError, match=r"would see no GPU; set deploy\.reference_gpus"):
        reference_spec(blind, a_server(), distilled)
    with pytest.raises(ConfigError, match=r"reference_model = 'big', but learner\.reference\.endpoint is not set"):
        reference_spec(DeployConfig(reference_model="big"), a_server(), a_learner())


def test_without_a_section_no_side_gets_a_flag_and_one_without_gpus_beside_one_with_some_sees_none() -> None:
    (server,), (learner,) = server_specs(DeployConfig(), a_server()), rank_specs(DeployConfig(), a_learner(), 1)
    assert (server.name, server.flags, server.environment) == ("server", (), {})
    assert (learner.name, learner.flags, learner.environment) == ("learner", (), {})
    (server,) = server_specs(DeployConfig(learner_gpus=(0,)), a_server())
    assert server.environment == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"server_gpus": [[0, 1], [1]]}, "deploy.server_gpus: 1 is assigned twice"),
        ({"learner_gpus": [2, 2]}, "deploy.learner_gpus: 2 is assigned twice"),
        ({"server_cores": [[0]], "learner_cores": [[1], [0]]}, "reference_cores: 0 is assigned twice"),
        ({"server_cores": [[]]}, "an empty list gives a process nothing"),
        ({"server_gpus": [[-1]]}, "deploy.server_gpus: -1 is not an index; expected 0 or more. Count from 0"),
        ({"server_gpus": [[0]], "server_cores": [[0], [1]]}, "server_gpus has 1 entries, but server_cores has 2"),
        ({"max_restarts": 0}, "max_restarts = 0 must be at least 1"),
        ({"restart": "always"}, "deploy.restart = 'always'"),
        ({"gpus": [1]}, "unknown key deploy.gpus"),
    ],
)
def test_a_section_that_cannot_be_is_refused_by_name(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    config = tmp_path / "run.toml"
    config.write_bytes(msgspec.toml.encode(SHARED | {"deploy": section}))
    with pytest.raises(ConfigError) as refused:
        load_config(DeployRun, [str(config)], "deploy")
    assert message in str(refused.value)


TWO_GPUS, THREE_GPUS = DeployConfig(server_gpus=((0, 1),)), DeployConfig(server_gpus=((0, 1, 2),))


@pytest.mark.parametrize(
    ("config", "server", "message"),
    [
        (TWO_GPUS, {"tensor_parallel_size": 4}, r"gives a server 2 GPU\(s\); make them equal"),
        (TWO_GPUS, {"tensor_parallel_size": 2, "data_parallel_size": 2}, r"2 times server\.data_parallel_size = 2"),
        (THREE_GPUS, {"data_parallel_size": 2}, "data_parallel_size = 2, but.* gives a server 3"),
        (DeployConfig(server_cores=((0,),)), {"cpu_cores": [1]}, "both set the servers' cores"),
        (DeployConfig(), {"nnodes": 2}, r"server.nnodes = 2, but colocate starts the processes of one node"),
        (DeployConfig(server_cores=((0,), (1,))), {}, r"places 2 server\(s\), but the run has 1 endpoint"),
    ],
)
def test_what_contradicts_the_section_of_a_side_is_refused(
    config: DeployConfig, server: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        server_specs(config, a_server(**server))
    with pytest.raises(ConfigError, match="both set the learner's cores"):
        rank_specs(DeployConfig(learner_cores=((0,),)), a_learner(cpu_cores=[0]), port=1)


def test_replicas_divide_the_gpus_of_their_server() -> None:
    for server, flags in (
        ({"data_parallel_size": 4}, ()),
        ({"data_parallel_size": 2}, ("--server.tensor-parallel-size", "2")),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2}, ()),
    ):
        (spec,) = server_specs(DeployConfig(server_gpus=((0, 1, 2, 3),)), a_server(**server))
        assert spec.flags == flags and spec.environment == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
