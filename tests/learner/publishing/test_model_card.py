"""The card of a run: what it tells, in the form that the hub reads, and what it never tells."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from huggingface_hub import ModelCard

from learner.config import LearnerRun
from learner.publishing.model_card import CardInputs, make_card
from learner.publishing.public_config import PUBLIC, hub_name
from protocol.config import load_config
from protocol.config_keys import keys_of
from tests.learner.publishing.finished_run import evaluate, start

SECRET = "s3cret"


def card_of(run: LearnerRun, tmp_path: Path, **changes: Any) -> ModelCard:
    """Return the card after step 20 of 30, as the hub's library reads it from a file."""
    inputs = CardInputs(
        name="run", place="me/model", run=run, run_dir=Path(run.run_dir), step=20, reason="newest of 2", form="model",
        dtype="bfloat16", base="org/base",
    )  # fmt: skip
    made = make_card(msgspec.structs.replace(inputs, **changes))
    (tmp_path / "README.md").write_text(str(made))
    return ModelCard.load(tmp_path / "README.md")


def rows_of(text: str, title: str) -> list[list[str]]:
    """Return the rows of the first table of a section, without its titles."""
    lines = [line for line in text.split(f"## {title}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_a_card_has_the_metadata_that_the_hub_shows(tmp_path: Path) -> None:
    run = start(tmp_path, data={"dataset": "openai/gsm8k", "dataset_config": "main", "split": "train[:90%]"})
    evaluate(run, 20, 0.75)
    evaluate(run, 20, 0.5, "hard", versions=(20, 22))
    data = card_of(run, tmp_path).data
    assert (data.base_model, data.datasets, data.library_name) == ("org/base", ["openai/gsm8k"], "transformers")
    assert data.pipeline_tag == "text-generation" and "slipstream" in data.tags
    values = {(one.dataset_config, one.metric_type): (one.metric_value, one.metric_name) for one in data.eval_results}
    assert values[None, "reward"] == (
        0.75, "reward (2 prompts, 4 samples at temperature 0.7, policy version 20)",
    )  # fmt: skip
    assert values[None, "pass@4 exact_match"][0] == 0.25
    assert values["hard", "reward"] == (
        0.5, "reward (2 prompts, 4 samples at temperature 0.7, policy versions 20 to 22)",
    )  # fmt: skip


def test_only_what_was_known_at_the_step_is_reported(tmp_path: Path) -> None:
    run = start(tmp_path)
    for step, reward in ((10, 0.125), (20, 0.5), (30, 1.0)):
        evaluate(run, step, reward)
    card = card_of(run, tmp_path)
    assert [one.metric_value for one in card.data.eval_results if one.metric_type == "reward"] == [0.5]
    assert [row[1:3] + row[4:] for row in rows_of(card.text, "Evaluation")] == [
        ["10", "2", "0.125  [0.025, 0.225]".replace("  ", " ")], ["20", "2", "0.5 [0.4, 0.6]"],
    ]  # fmt: skip
    curve = rows_of(card.text, "Training")
    assert (curve[0][0], curve[-1][0], len(curve)) == ("1", "20", 12)
    assert float(curve[-1][1]) > float(curve[0][1]) + 0.3, "the reward of the synthetic run rises"


def test_a_card_without_steps_or_evaluations_leaves_them_out(tmp_path: Path) -> None:
    run = start(tmp_path)
    (Path(run.run_dir) / "metrics.jsonl").write_text("")
    card = card_of(run, tmp_path, base=None, form="adapter")
    assert card.data.eval_results is None and card.data.base_model is None and card.data.library_name == "peft"
    assert "## Training" not in card.text and "## Evaluation" not in card.text and "AutoPeftModel" in card.text


def test_the_config_of_a_card_starts_the_same_run_again(tmp_path: Path) -> None:
    run = start(
        tmp_path,
        loss={"objective": "gspo", "clip_high": 5e-4},
        evaluation={"every_steps": 5, "sets": {"hard": {"task": "sort", "num_prompts": 4}}},
        data={"task": "reverse", "num_prompts": 8, "system_prompt": "/no_think Be brief.\nReally."},
    )
    text = str(card_of(run, tmp_path))
    config = tmp_path / "again.toml"
    config.write_text('run_dir = "runs/again"\n' + text.split("```toml\n")[1].split("```")[0])
    again = load_config(LearnerRun, [str(config)], "slipstream train")
    for key in ("data", "loss", "reward", "sampling", "optimizer", "steps", "groups_per_step"):
        assert getattr(again.learner, key) == getattr(run.learner, key), key
    assert again.learner.evaluation.sets == run.learner.evaluation.sets
    assert (again.model, again.dtype, again.seed) == (run.model, run.dtype, run.seed)
    assert "`gspo`" in text and "| `share_right` | 1 |" in text and "| torch | 2." in text


def test_no_secret_address_or_directory_reaches_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"hf_{SECRET}")
    run = start(
        tmp_path,
        data={"path": f"/home/{SECRET}/prompts.jsonl"},
        reward={
            "functions": [f"/home/{SECRET}/rewards.py:f", "judge"],
            "judge": {"url": f"https://me:{SECRET}@10.1.2.3/v1?key={SECRET}", "prompt": f"{{completion}} {SECRET}"},
        },
        environment={"command": f"agent --key {SECRET}", "gateway_host": "10.1.2.3"},
        evaluation={"every_steps": 5, "url": f"https://me:{SECRET}@10.1.2.3/v1", "path": f"~/{SECRET}/test.jsonl"},
        checkpoint={"dir": str(tmp_path / SECRET)},
        report={"project": SECRET, "trackers": []},
    )
    run = msgspec.structs.replace(
        run, keys=f"/etc/{SECRET}", endpoint="tcp://10.1.2.3:5757", server={"api_key": SECRET}, deploy={"x": SECRET},
        model=f"/home/{SECRET}/base",
    )  # fmt: skip
    evaluate(run, 20, 0.5, data=f"/home/{SECRET}/test.jsonl", model=f"/home/{SECRET}/run", versions=None)
    evaluate(run, 20, 0.5, "hard", data=f"dataset '/data/{SECRET}/gsm8k'")
    text = str(card_of(run, tmp_path, base=None))
    assert SECRET not in text and "10.1.2.3" not in text
    assert "prompts.jsonl" in text and "rewards.py:f" in text and "test.jsonl" in text and "`base`" in text


def test_every_public_name_is_a_key_or_a_section() -> None:
    keys = keys_of(LearnerRun)
    assert [name for name in PUBLIC if not any(key == name or key.startswith(f"{name}.") for key in keys)] == []


def test_a_model_is_on_the_hub_if_its_name_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert hub_name("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B" and hub_name("gpt2") == "gpt2"
    for place in ("tiny:digits", "/models/mine", "~/mine", "./mine", "models/mine", "runs/1/checkpoints/model"):
        assert hub_name(place) is None, place
