"""Servers that come, die and are drained under a run of two ranks; test_coming_and_going_vllm.py: with real vLLM."""

from pathlib import Path

import pytest

from tests.coming_and_going import (
    assert_every_prompt_was_consumed_once,
    assert_the_story_is_told,
    run_while_servers_change,
)
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of

NUM_STEPS = 32


def test_two_ranks_end_complete_while_one_server_joins_one_dies_and_one_is_drained(tmp_path: Path) -> None:
    with tiny_server() as first, tiny_server() as second, tiny_server() as third:
        endpoints = [first.endpoint, second.endpoint, third.endpoint]
        run = make_run(tmp_path, *endpoints, steps=NUM_STEPS, checkpoint={"every_steps": NUM_STEPS})
        log = run_while_servers_change(tmp_path, run, endpoints, first.die)
        assert all(server.engine.prompts for server in (first, second, third))
    assert_every_prompt_was_consumed_once(run)
    assert_the_story_is_told(run, endpoints)
    for endpoint in endpoints:
        assert f"parity of the server at {endpoint}: mean |Δ logprob| = " in log
    last = metrics_of(run)[-1]
    assert last["step"] == NUM_STEPS and last["servers/ready"] == 1
    parity = [line["parity/abs_logprob"] for line in metrics_of(run) if "parity/abs_logprob" in line]
    assert parity and parity[-1] == pytest.approx(0, abs=1e-3)
