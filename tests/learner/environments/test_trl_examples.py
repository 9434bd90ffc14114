"""What TRL's documentation shows of an environment and its reward, from a user's file and unchanged, through a run of a tiny model."""

import json
from pathlib import Path

import msgspec
import pytest

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
from tests.learner.runs import make_run, metrics_of

EXAMPLES = Path(__file__).parent / "trl_examples.py"
INCREMENTS = takes_for_calls("increment", {"step": 2}, "[!-O]")
"""What begins with such a character is taken for a call, so that a random model makes some and some not."""


def test_the_environment_and_its_reward_function_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)
    monkeypatch.setattr("learner.run_inputs.check_calls", lambda template: None)  # everything is read as calls
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    write_model(model, KEEPING, INCREMENTS)
    questions = [[{"role": "user", "content": f"Increment the counter by {number}."}] for number in range(16)]
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    limits = msgspec.structs.replace(TINY_LIMITS, vocab_size=len(CHARACTERS) + 2, max_model_len=512)
    with ServerThread(ModelEngine(model, limits), model=fingerprint(model)) as server:
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=3,
            data={"path": str(data)},
            sampling={"group_size": 4, "max_tokens": 32, "stop": list("abcdefghijklmnop")},
            environment={"factory": f"{EXAMPLES}:IncrementEnv", "max_turns": 3, "max_concurrent": 4},
            reward={"functions": [f"{EXAMPLES}:reward_func"]},
        )
        run = msgspec.structs.replace(run, model=str(model))
        train(run, resume=False)
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]
    groups, counters = consumed_groups(run), []
    assert len(groups) == 3 * 3
    for row, payload in groups:
        episodes = unpack(payload, EpisodeGroup).episodes
        held = [episode.attributes for episode in episodes]
        assert held == [{"counter": 2 * episode.course.num_calls} for episode in episodes]
        assert json.loads(row.rewards or "")["rewards"] == [2.0 * episode.course.num_calls for episode in episodes]
        counters += [one["counter"] for one in held if one]
    assert {0, 2} < set(counters) <= {0, 2, 4, 6}
    assert sum(line["episode/tool_calls"] for line in metrics_of(run)) == sum(counters) / 2
