"""A whole run at an IPv6 address, with keys: messages, and pushes over gloo."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from learner.rollouts.ledger import Ledger
from protocol.channel.keys import make_keys
from tests.learner.forked_learner import ROOT, end_of, start_learner

NUM_STEPS, GROUPS_PER_STEP = 3, 2
SMALL = [
    "--learner.steps", str(NUM_STEPS), "--learner.groups-per-step", str(GROUPS_PER_STEP),
    "--learner.sampling.group-size", "4", "--learner.sampling.max-tokens", "5", "--learner.data.num-digits", "4",
    "--learner.data.num-prompts", "16", "--learner.report.dashboard-port", "0", "--learner.report.trackers",
    "--learner.cpu-cores", "None",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_with_keys_at_an_ipv6_address_is_complete(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
        endpoint = f"tcp://[::1]:{probe.getsockname()[1]}"
    log, run_dir = tmp_path / "learner.log", tmp_path / "run"
    shared = ["--endpoint", endpoint, "--keys", str(tmp_path / "keys"), "--run-dir", str(run_dir)]
    with (tmp_path / "server.log").open("w") as server_log:
        command = [sys.executable, "-m", "tests.model_server", endpoint, str(tmp_path / "keys")]
        server = subprocess.Popen(command, cwd=ROOT, stdout=server_log, stderr=server_log)
    try:
        learner = start_learner(("train", "deploy/recipes/reverse.toml", *shared, *SMALL), log, log)
        assert end_of(learner, log) == 0, f"{log.read_text()}\nserver:\n{(tmp_path / 'server.log').read_text()}"
    finally:
        server.kill()
        server.wait()
    counts = Ledger(run_dir / "ledger.db", read_only=True).counts()
    assert (counts.lost, counts.duplicated, counts.consumed) == (0, 0, NUM_STEPS * GROUPS_PER_STEP)
    assert (run_dir / "metrics.jsonl").read_text().count("weight_sync/bytes") == NUM_STEPS
