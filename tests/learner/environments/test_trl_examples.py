"""What TRL's documentation shows of environments and tools, from a user's file and unchanged, through whole runs of a tiny model."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import LearnerRun
from learner.environments.episode import EpisodeGroup
from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.codec import unpack
from protocol.model_files import fingerprint
from tests.fakes import ServerThread
from tests.learner.environments.chat_model import takes_for_calls, write_model
from tests.learner.environments.chat_tokenizer import CHARACTERS, KEEPING
from tests.learner.ledgers import consumed_groups
from tests.learner.model_engine import TINY_LIMITS, ModelEngine
from tests.learner.runs import make_run, metrics_of, rows_of

EXAMPLES = Path(__file__).parent / "trl_examples.py"
FIRST_HALF = "[!-O]"
"""What begins with such a character is taken for a call, so that a random model makes some and some not."""
STEPS, NUM_GROUPS, NUM_EPISODES, MAX_TURNS = 3, 3, 4, 3


def run_to_the_end(tmp_path: Path, response_template: dict[str, Any], **learner: Any) -> LearnerRun:
    """A run whose random model makes the calls of this response template."""
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    write_model(model, KEEPING, response_template)
    questions = [[{"role": "user", "content": f"Increment the counter by {number}."}] for number in range(16)]
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    limits = msgspec.structs.replace(TINY_LIMITS, vocab_size=len(CHARACTERS) + 2, max_model_len=512)
    with ServerThread(ModelEngine(model, limits), model=fingerprint(model)) as server:
        settings = {
            "steps": STEPS, "data": {"path": str(data)},
            "sampling": {"group_size": NUM_EPISODES, "max_tokens": 32, "stop": list("abcdefghijklmnop")},
        }  # fmt: skip
        run = make_run(tmp_path, server.endpoint, **settings | learner)
        run = msgspec.structs.replace(run, model=str(model))
        train(run, resume=False)
    assert [line["step"] for line in metrics_of(run)] == list(range(1, STEPS + 1))
    assert len(rows_of(run, "slot", "state = 'consumed'")) == STEPS * NUM_GROUPS
    return run


@pytest.fixture(autouse=True)
def payloads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)


@pytest.fixture(autouse=True)
def everything_is_read_as_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.run_inputs.check_calls", lambda template: None)


def test_the_environment_and_its_reward_function_run_unchanged(tmp_path: Path) -> None:
    run = run_to_the_end(
        tmp_path,
        takes_for_calls("increment", {"step": 2}, FIRST_HALF),
        environment={"factory": f"{EXAMPLES}:IncrementEnv", "max_turns": MAX_TURNS, "max_concurrent": 4},
        reward={"functions": [f"{EXAMPLES}:reward_func"]},
    )
    counters = []
    for row, payload in consumed_groups(run):
        episodes = unpack(payload, EpisodeGroup).episodes
        held = [episode.attributes for episode in episodes]
        assert held == [{"counter": 2 * episode.course.num_calls} for episode in episodes]
        assert json.loads(row.rewards or "")["rewards"] == [2.0 * episode.course.num_calls for episode in episodes]
        counters += [one["counter"] for one in held if one]
    assert {0, 2} < set(counters) <= {0, 2, 4, 6}
    assert sum(line["episode/tool_calls"] for line in metrics_of(run)) == sum(counters) / 2


@pytest.mark.parametrize(
    ("name", "arguments", "answer"), [("multiply", {"a": 6, "b": 7}, "42"), ("async_add", {"a": 3, "b": 4}, "7")]
)
def test_tools_run_unchanged(tmp_path: Path, name: str, arguments: dict[str, int], answer: str) -> None:
    run = run_to_the_end(
        tmp_path,
        takes_for_calls(name, arguments, FIRST_HALF),
        environment={"tools": [f"{EXAMPLES}:multiply", f"{EXAMPLES}:async_add"], "max_turns": MAX_TURNS, "max_concurrent": 4},
        reward={"functions": [f"{EXAMPLES}:used_a_tool"]},
    )  # fmt: skip
    episodes = [one for _, payload in consumed_groups(run) for one in unpack(payload, EpisodeGroup).episodes]
    said = [message for episode in episodes for message in episode.messages if message["role"] == "tool"]
    assert said and {(message["name"], message["content"]) for message in said} == {(name, answer)}
    assert all(episode.attributes is None for episode in episodes), "nobody has asked"
    rewards = [line["reward/used_a_tool"] for line in metrics_of(run)]
    assert max(rewards) > 0
