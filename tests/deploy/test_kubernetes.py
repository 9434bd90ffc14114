"""The manifests: valid, with consistent names and ports, and valid commands."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_server.config import ServerConfig, ServerRun
from inference_server.http_access import OPEN_PATHS
from learner.config import LearnerRun
from protocol.endpoint import split_endpoint
from tests.deploy.commands import DEPLOY, check, tool

BASE, MONITORED = DEPLOY / "kubernetes/base", DEPLOY / "kubernetes/monitored"
MANIFESTS = sorted(path for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml")
NAME = "app.kubernetes.io/name"
END_S = 15.0
"""Time from the end of the drain to the end of vLLM's processes, with slack."""


def objects(*paths: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the manifests by kind and name."""
    found = [one for path in paths for one in yaml.safe_load_all(path.read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


ALL = objects(*MANIFESTS)
SERVER, LEARNER = ALL["StatefulSet", "slipstream-server"]["spec"], ALL["Job", "slipstream-learner"]["spec"]
PODS = {"server": SERVER["template"], "learner": LEARNER["template"]}
each_pod = pytest.mark.parametrize("pod", PODS.values(), ids=PODS)


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def run_of(pod: dict[str, Any]) -> ServerRun | LearnerRun | None:
    return check([*container(pod)["command"], *container(pod)["args"]])


def test_every_manifest_is_valid() -> None:
    command = [tool("kubernetes-validate"), "--strict", *map(str, MANIFESTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("folder", [BASE, MONITORED], ids=lambda folder: folder.name)
def test_a_kustomization_names_all_files_of_its_folder(folder: Path) -> None:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = set(kustomization["resources"])
    named |= {file for made in kustomization.get("configMapGenerator", []) for file in made["files"]}
    assert named - {"../base"} == {path.name for path in folder.iterdir()} - {"kustomization.yaml"}


def test_both_sides_run_the_recipe_and_can_connect() -> None:
    assert (BASE / "run.toml").read_bytes() == (DEPLOY / "recipes/gsm8k.toml").read_bytes()
    server, learner = run_of(PODS["server"]), run_of(PODS["learner"])
    assert isinstance(server, ServerRun) and isinstance(learner, LearnerRun)
    host, port = split_endpoint(learner.endpoint)
    service = ALL["Service", "slipstream-server"]["spec"]
    assert host == "slipstream-server-0.slipstream-server" == f"{SERVER['serviceName']}-0.{SERVER['serviceName']}"
    assert port == split_endpoint(server.endpoint)[1] == str(service["ports"][0]["port"])
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True

    # Evaluations use the servers' key, and the dashboard is reachable.
    assert learner.evaluation_url == f"http://slipstream-http:{server.server.http_port}/v1"
    assert ALL["Service", "slipstream-http"]["spec"]["ports"][0]["port"] == server.server.http_port
    (key,) = container(PODS["learner"])["env"]
    secret = {"name": "slipstream-server-keys", "key": Path(server.server.api_key_file or "").name}
    assert (key["name"], key["valueFrom"]["secretKeyRef"]) == ("EVALUATION_API_KEY", secret)
    report = learner.learner.report
    assert report.dashboard_host == "0.0.0.0"
    assert container(PODS["learner"])["ports"] == [{"name": "dashboard", "containerPort": report.dashboard_port}]


@each_pod
def test_selectors_match_pods_and_port_names_match_ports(pod: dict[str, Any]) -> None:
    labels, ports = pod["metadata"]["labels"], {port["name"] for port in container(pod).get("ports", [])}
    selecting = [one for one in ALL.values() if one["kind"] == "Service" and one["spec"]["selector"] == labels]
    assert {port["targetPort"] for service in selecting for port in service["spec"]["ports"]} == ports
    policies = [one["spec"] for one in ALL.values() if one["kind"] == "NetworkPolicy"]
    (policy,) = (one for one in policies if one["podSelector"]["matchLabels"] == labels)
    named = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
    assert named <= ports


def test_each_side_can_connect_to_the_other_on_all_ports() -> None:
    def peers(name: str) -> set[str]:
        """Return the pods that may connect to the pods of this name."""
        (rule, *_) = ALL["NetworkPolicy", name]["spec"]["ingress"]
        assert "ports" not in rule
        selectors = [peer["podSelector"] for peer in rule["from"]]
        listed = {name for one in selectors for it in one.get("matchExpressions", []) for name in it["values"]}
        return listed | {one["matchLabels"][NAME] for one in selectors if "matchLabels" in one}

    assert "slipstream-learner" in peers("slipstream-server") and peers("slipstream-learner") == {"slipstream-server"}


@each_pod
def test_every_mount_has_a_volume_and_keys_are_private_files_of_the_pod(pod: dict[str, Any]) -> None:
    claims = {claim["metadata"]["name"] for claim in SERVER["volumeClaimTemplates"]}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]} | claims
    (copying,) = pod["spec"]["initContainers"]
    for one in (copying, container(pod)):
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
    copied = " ".join(copying["args"])
    assert "install -m 600" in copied
    side = run_of(pod)
    files = ["learner.key", "server.pub"] if isinstance(side, LearnerRun) else ["server.key", "learner.pub", "api.key"]
    assert all(f"/secret/{file}" in copied for file in files)
    if isinstance(side, ServerRun):
        assert side.server.api_key_file == f"{side.keys}/api.key"


def test_a_server_has_probes_without_a_key_and_enough_time_to_start_and_drain() -> None:
    server, run = container(PODS["server"]), run_of(PODS["server"])
    paths = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert set(paths.values()) <= OPEN_PATHS
    # Torn weights must not cause a restart.
    assert paths["readinessProbe"] == "/health" and paths["livenessProbe"] == "/status"
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > ServerConfig().start_timeout_s
    assert isinstance(run, ServerRun)
    before_s = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before_s + run.server.drain_timeout_s + END_S <= PODS["server"]["spec"]["terminationGracePeriodSeconds"]


def test_an_interrupted_learner_restarts_and_a_failed_learner_does_not() -> None:
    rules = LEARNER["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {75: "Ignore", 2: "FailJob"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {"learner"}
    assert PODS["learner"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy requires it


@pytest.mark.parametrize(("name", "service"), [("server", "http"), ("learner", "dashboard")])
def test_the_monitors_find_their_services_and_ports(name: str, service: str) -> None:
    monitor = objects(MONITORED / "service-monitor.yaml")["ServiceMonitor", f"slipstream-{name}"]
    found = ALL["Service", f"slipstream-{service}"]
    assert monitor["spec"]["selector"]["matchLabels"] == found["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in found["spec"]["ports"]} and endpoint["path"] in OPEN_PATHS
