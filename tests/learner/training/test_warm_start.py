"""The supervised warm start: its numbers against a plain loop, and where it stands in a run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.forward.packing_check import choose_attention
from learner.policy.model import load_policy, load_tokenizer
from learner.prompts.prompts import Prompt, Prompts
from learner.rewards.builtin.text import exact_match
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import find_checkpoint
from learner.train import train
from learner.training.warm_start import answer_rows, warm_start
from protocol.errors import DataError, RewardError
from protocol.model_files import resolve_model
from tests.learner.environments.chat_tokenizer import chat_tokenizer
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.policy.plain import plain_logits
from tests.learner.runs import make_run, metrics_of

WARM = {"steps": 5, "learning_rate": 3e-3, "rows_per_step": 6}


def warmed(run: LearnerRun) -> tuple[torch.nn.Module, float]:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    choose_attention(policy, torch.device("cpu"), torch.float32)
    return policy, warm_start(RunInputs(run), run.learner, Accelerator(cpu=True), policy)


def plain_loop(run: LearnerRun) -> tuple[torch.nn.Module, float]:
    """Next-token cross-entropy on answer and end, one row after the other."""
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    prompts = Prompts(run.learner.data, tokenizer, run.seed)
    for step in range(5):
        losses = []
        for slot in range(6 * step, 6 * step + 6):
            prompt = prompts.prompt_at(slot)
            ids = tokenizer(prompt.prompt + prompt.columns["answer"] + "<eos>", return_tensors="pt")["input_ids"]
            logits = model(ids).logits[0, len(prompt.prompt) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt.prompt) :], reduction="none"))
        loss = torch.cat(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, loss.item()


def test_it_is_cross_entropy_on_answer_and_end_whatever_the_micro_batches(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}>", "answer": str(i) * (1 + i % 4)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl")}
    run = make_run(tmp_path, "tcp://x:1", data=data, warm_start=WARM, micro_batch_tokens=20)
    policy, loss = warmed(run)
    expected, expected_loss = plain_loop(run)
    assert loss == pytest.approx(expected_loss, abs=1e-5) and loss < 0.9 * 2.8
    ids = torch.arange(1, 13)[None]
    torch.testing.assert_close(plain_logits(policy, ids), expected(ids).logits, atol=1e-3, rtol=1e-3)


class Recording(ModelEngine):
    """Keeps the weights of the first push."""

    first_weights: dict[str, torch.Tensor]

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        if not hasattr(self, "first_weights"):
            self.first_weights = {name: tensor.clone() for name, tensor in self.weights.items()}


def test_a_run_starts_from_the_warm_weights_and_resumes_from_them_if_it_ended_before_its_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rewards.py").write_text(
        "from pathlib import Path\n"
        "def picky(completions, **columns):\n"
        "    assert Path(__file__).with_name('mended').exists()\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    first, second = Recording(resolve_model("tiny:digits")), Recording(resolve_model("tiny:digits"))
    learner: dict[str, Any] = {
        "warm_start": WARM,
        "steps": 2,
        "reward": {"functions": [f"{tmp_path}/rewards.py:picky"]},
        "reference": {"kind": "fixed"},
        "kl": {"coef": 0.1},
    }
    with tiny_server(first) as server, pytest.raises(RewardError):
        train(make_run(tmp_path, server.endpoint, **learner), resume=False)
    checkpoint = find_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == "step-000000"
    (tmp_path / "mended").touch()
    with tiny_server(second) as server, caplog.at_level(logging.INFO):
        run = make_run(tmp_path, server.endpoint, **learner)
        train(run, resume=True)
    assert f"resumed from {checkpoint}" in caplog.text and "warm start" not in caplog.text
    expected = warmed(run)[0].state_dict()
    for engine in (first, second):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.first_weights.items())
    metrics = metrics_of(run)
    assert len(metrics) == 2 and abs(metrics[0]["reference/kl"]) < 1e-6 < metrics[-1]["reference/kl"]


def test_data_without_answers_is_refused_with_the_columns_it_has(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12>", "solution": "21", "level": 1}\n')
    data = {"path": str(tmp_path / "rows.jsonl")}
    keys: dict[str, Any] = {"data": data, "reward": {"functions": ["think_format"]}}
    with pytest.raises(DataError, match=r"row 0 .* none in column 'answer'.*: solution, level\. Set .*answer_column"):
        warmed(make_run(tmp_path, "tcp://x:1", warm_start=WARM, **keys))
    named = make_run(tmp_path, "tcp://x:1", warm_start=WARM | {"answer_column": "solution"}, **keys)
    assert warmed(named)[1] > 0


def test_all_answers_are_checked_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{i}>", "answer": "1" if i < 29 else None} for i in range(30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl"), "shuffle": False}
    monkeypatch.setattr("learner.training.warm_start.my_batches", lambda *_: pytest.fail("a step started"))
    with pytest.raises(DataError, match="row 29 of the data has none"):
        warmed(make_run(tmp_path, "tcp://x:1", data=data, warm_start=WARM))


def test_the_first_of_several_answers_is_learned(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://x:1", warm_start=WARM)
    tokenizer = RunInputs(run).tokenizer
    prompts = [
        Prompt(prompt_id=0, prompt="1>", token_ids=[1], columns={"answer": one}) for one in ("21", ["21", "7"], 21.0)
    ]
    rows = answer_rows(prompts, tokenizer, run.learner, end=0)
    text, *others = [row.branch.token_ids.tolist() for row in rows]
    assert others == [text, text] == [[*tokenizer.encode("21", add_special_tokens=False), 0]] * 2


@pytest.mark.parametrize("answer", ["42", "six times seven</think>42"])
def test_an_answer_is_learned_after_the_reasoning_that_the_prompt_has_opened(tmp_path: Path, answer: str) -> None:
    run, tokenizer = make_run(tmp_path, "tcp://x:1", warm_start=WARM, sampling={"max_tokens": 99}), chat_tokenizer()
    opened = Prompt(prompt_id=0, prompt="6*7", token_ids=[1], columns={"answer": answer}, opens_reasoning=True)
    (row,) = answer_rows([opened], tokenizer, run.learner, end=0)
    text = tokenizer.decode(row.branch.token_ids, skip_special_tokens=True)
    assert exact_match([text], ["42"], opens_reasoning=True) == [1.0]
    assert text.count("</think>") == 1


def test_an_answer_longer_than_a_completion_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://x:1", warm_start=WARM, sampling={"group_size": 2, "max_tokens": 4})
    with pytest.raises(DataError, match=r"has 4 tokens plus an end token.*max_tokens = 4"):
        warmed(run)
