"""`learner doctor` on one host, the server on another, keys in use: it names what lies between them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.channel.keys import make_keys
from tests.two_hosts import TwoHosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORT = 5757
TIMEOUT_S = 120.0
DOCTOR = """
import json, sys
from learner.config import LearnerRun
from learner.doctor.doctor import examine
from protocol.config import load_config
run_dir, timeout_s, *words = sys.argv[1:]
for endpoint, keys in zip(words[::2], words[1::2]):
    flags = ["--run-dir", run_dir, "--endpoint", endpoint, "--keys", keys, "--learner.weight-sync.timeout-s", timeout_s]
    run = load_config(LearnerRun, ["deploy/recipes/reverse.toml", *flags], "test")
    print(json.dumps({found.subject: found.text for found in examine(run) if found.verdict == "problem"}))
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as hosts:
        yield hosts


@pytest.mark.slow
def test_the_doctor_names_what_lies_between_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    make_keys(keys := tmp_path / "keys")
    make_keys(others := tmp_path / "others")
    (others / "server.pub").write_bytes((keys / "server.pub").read_bytes())
    endpoint, log = f"tcp://{hosts.addresses[0]}:{PORT}", tmp_path / "server.log"
    hosts.start(0, ["-m", "tests.model_server", endpoint, str(keys)], log)
    deadline = time.monotonic() + TIMEOUT_S
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)

    def problems(*visits: tuple[str, Path], timeout_s: float) -> list[dict[str, str]]:
        """Of each endpoint with these keys, by subject: one process for all, which costs its imports once."""
        out = tmp_path / "out"
        out.unlink(missing_ok=True)
        words = [str(word) for visit in visits for word in visit]
        doctor = hosts.start(1, ["-c", DOCTOR, str(tmp_path / "run"), str(timeout_s), *words], out)
        assert doctor.wait(TIMEOUT_S) == 0, out.read_text()
        return [json.loads(line) for line in out.read_text().splitlines()]

    elsewhere = "tcp://10.99.0.1:5757"
    closed_port = endpoint.replace(str(PORT), str(PORT + 1))
    well, closed, stray, unknown = problems(
        (endpoint, keys), (closed_port, keys), (elsewhere, keys), (endpoint, others), timeout_s=30
    )
    assert well == {}
    assert closed == {"port": f"nothing listens at {hosts.addresses[0]}:{PORT + 1}"}
    assert "cannot be reached (Network is unreachable)" in stray["port"]
    assert "does not know this learner's key" in unknown["keys"]
    hosts.wire(only_ports=[PORT])
    (walled,) = problems((endpoint, keys), timeout_s=5)
    assert walled["bandwidth"].startswith("weights cannot be sent: cannot reach the learner's rendezvous 10.77.0.2:")
    hosts.wire(only_ports=None, cut=True)
    (cut,) = problems((endpoint, keys), timeout_s=5)
    assert "did not answer within 5 s" in cut["port"]
