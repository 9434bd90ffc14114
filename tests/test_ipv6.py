"""A whole run at an IPv6 address, with keys: messages, and weight syncs over TCP."""

from pathlib import Path

import msgspec

from learner.train import train
from protocol.channel.keys import make_keys, server_keys
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import ModelEngine
from tests.learner.runs import GROUPS_PER_STEP, make_run, metrics_of, rows_of

NUM_STEPS = 3


def test_a_run_with_keys_at_an_ipv6_address_is_complete(tmp_path: Path) -> None:
    keys, model = str(tmp_path / "keys"), resolve_model("tiny:digits")
    make_keys(tmp_path / "keys")
    options = {"model": fingerprint(model), "endpoint": "tcp://[::1]:*", "keys": server_keys(keys)}
    with ServerThread(ModelEngine(model), **options) as server:
        assert server.endpoint.startswith("tcp://[::1]:")
        run = msgspec.structs.replace(make_run(tmp_path, server.endpoint, steps=NUM_STEPS), keys=keys)
        train(run, resume=False)
    assert rows_of(run, "DISTINCT state") == [("consumed",)]
    assert len(rows_of(run, "slot")) == NUM_STEPS * GROUPS_PER_STEP
    assert all(line["weight_sync/bytes"] > 0 for line in metrics_of(run))
