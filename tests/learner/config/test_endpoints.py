"""The endpoints of one or several servers, and the addresses on which the learner sends weights."""

from pathlib import Path

import pytest
from msgspec import ValidationError, convert

from inference_server.config import ServerRun
from learner.config import LearnerRun, WeightSyncConfig
from protocol.config import load_config
from protocol.errors import ConfigError

ONE, OTHER = "tcp://127.0.0.1:6001", "tcp://127.0.0.1:6002"
LEARNER = '[learner]\nsteps = 1\ndata.task = "reverse"\nreward.functions = ["exact_match"]\n'


def file(tmp_path: Path, endpoints: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(f'model = "tiny:digits"\nrun_dir = "run"\n{endpoints}\n{LEARNER}')
    return str(path)


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [("", ("tcp://127.0.0.1:5757",)), (f'endpoint = "{ONE}"', (ONE,)),
        (f'endpoints = ["{ONE}", "{OTHER}"]', (ONE, OTHER))],
)  # fmt: skip
def test_the_learner_connects_to_all_endpoints_or_to_the_one(
    tmp_path: Path, endpoints: str, expected: tuple[str, ...]
) -> None:
    assert load_config(LearnerRun, [file(tmp_path, endpoints)], "learner train").servers == expected


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        (f'endpoint = "{ONE}"\nendpoints = ["{OTHER}"]', "each defines the servers of the run; keep one of them"),
        (f'endpoints = ["{ONE}"]\nendpoints_from = "file:x"', "each defines the servers of the run; keep one of them"),
        (f'endpoints = ["{ONE}", "{ONE}"]', "contains a server twice"),
        ('endpoints = ["127.0.0.1:6001"]', "expected tcp://HOST:PORT"),
        ('endpoint = "tcp://*:6001"', "is a listen address"),
        (f'endpoints = ["{ONE}", "tcp://*:6001"]', "endpoints = .* is a listen address"),
    ],
)
def test_ambiguous_endpoints_are_rejected(tmp_path: Path, endpoints: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(LearnerRun, [file(tmp_path, endpoints)], "learner train")


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://10.0.0.9:5757", "is open to other machines, and without keys"),
        ("10.0.0.9:5757", "expected tcp://HOST:PORT"),
    ],
)
def test_the_endpoint_of_a_reference_is_checked_before_the_run(tmp_path: Path, endpoint: str, expected: str) -> None:
    flags = ["--learner.kl.coef", "0.1", "--learner.reference.kind", "fixed", "--learner.reference.endpoint", endpoint]
    with pytest.raises(ConfigError, match=f"learner.reference.endpoint: .*{expected}"):
        load_config(LearnerRun, [file(tmp_path, ""), *flags], "learner train")
    if endpoint.startswith("tcp"):
        load_config(LearnerRun, [file(tmp_path, "insecure = true"), *flags], "learner train")


def test_one_of_several_servers_needs_its_own_endpoint(tmp_path: Path) -> None:
    path = file(tmp_path, f'endpoints = ["{ONE}", "{OTHER}"]')
    assert load_config(ServerRun, [path, "--endpoint", OTHER], "inference-server").endpoint == OTHER
    with pytest.raises(ConfigError, match=f"does not identify this server; .* with --endpoint {ONE}"):
        load_config(ServerRun, [path], "inference-server")


def config(**keys: str) -> WeightSyncConfig:
    return convert({"transport": "tcp"} | keys, WeightSyncConfig)


def test_a_port_a_range_and_an_address_are_parsed() -> None:
    assert list(config().port_range()) == [0]
    assert list(config(ports="65535").port_range()) == [65535]
    assert list(config(ports="29500-29502").port_range()) == [29500, 29501, 29502]
    for address in ("learner.example", "10.0.0.7", "fd00::7"):
        assert config(advertise=address).advertise == address


@pytest.mark.parametrize(
    ("key", "values", "problem"),
    [
        ("ports", ["", "0", "5-4", "1-65536", "29500-", "29500, 29501"],
            "is not a port or a range of ports from 1 to 65535"),
        ("advertise", ["", "tcp://10.0.0.7", "[fd00::7]", "a..b", "10.0.0.7:29500"],
            "is not a host name or an address alone"),
    ],
)  # fmt: skip
def test_invalid_ports_and_addresses_are_rejected(key: str, values: list[str], problem: str) -> None:
    for value in values:
        with pytest.raises(ValidationError, match=problem):
            config(**{key: value})
