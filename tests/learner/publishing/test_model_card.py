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
PRIVATE = (
    "run_dir", "endpoint", "endpoints", "endpoints_from", "keys", "insecure", "deploy",
    *(f"learner.{key}" for key in (
        "attn_implementation", "collective_timeout_s", "compile", "connect_timeout_s", "cpu_cores", "drain_timeout_s",
        "gradient_checkpointing", "group_idle_timeout_s", "max_group_attempts", "micro_batch_tokens", "sharding",
        "checkpoint", "parity", "report", "reward.judge", "weight_sync",
        "environment.command", "environment.episode_deadline_s", "environment.gateway_host",
        "environment.gateway_port", "environment.max_concurrent", "environment.max_memory_mib", "environment.python",
        "environment.timeout_s",
        "evaluation.at_start", "evaluation.every_steps", "evaluation.max_concurrent", "evaluation.pin_policy",
        "evaluation.timeout_s", "evaluation.url",
        "reference.device", "reference.endpoint", "reference.timeout_s",
        "reward.calls_per_worker", "reward.max_concurrent_calls", "reward.max_failed_share", "reward.max_memory_mib",
        "reward.num_workers", "reward.timeout_s", "reward.unconfined_programs", "reward.unreachable_s",
    )),
)  # fmt: skip
"""Keys, and sections with all their keys, that no card shows. A new key needs a place here or in PUBLIC_KEYS."""


def card_of(run: LearnerRun, tmp_path: Path, **changes: Any) -> ModelCard:
    """Return the card after step 20 of 30, as the hub's library reads it from a file."""
    inputs = CardInputs(
        name="run", run=run, run_dir=Path(run.run_dir), step=20, reason="newest of 2", form="model",
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
        kl={"coef": 0.1},
        reference={"kind": "fixed", "endpoint": "tcp://10.1.2.3:5767"},
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


def test_each_key_of_the_config_is_public_or_private_on_purpose() -> None:
    keys = keys_of(LearnerRun)
    hidden = {key for key in keys if any(key == name or key.startswith(f"{name}.") for name in PRIVATE)}
    assert sorted(keys.keys() - hidden) == sorted({"server" if key.startswith("server.") else key for key in PUBLIC})


def test_a_card_says_what_a_model_with_a_teacher_has_learned_from(tmp_path: Path) -> None:
    teacher = {"kind": "fixed", "endpoint": "tcp://10.1.2.3:5767"}
    run = start(
        tmp_path, kl={"coef": 1.0, "place": "advantage"}, reference=teacher, routing_replay=True,
        reward={"functions": ["tests.learner.rewards:share_right"], "only_logged": True},
    )  # fmt: skip
    text = str(card_of(run, tmp_path))
    assert "Rewards were logged, not learned from." in text and "only_logged = true" in text
    assert "was a model on another server" in text and "routing_replay = true" in text
    copied = {"kind": "every", "every_steps": 5, "endpoint": "tcp://10.1.2.3:5767"}
    for name, reference in (("own", {"kind": "fixed"}), ("copied", copied)):
        plain = str(card_of(start(tmp_path / name, reference=reference, kl={"coef": 0.1}), tmp_path))
        assert "logged" not in plain and "another server" not in plain


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"reward": {"functions": ["judge"], "judge": {"url": "http://judge/v1"}}}, "[learner.reward.judge]"),
        ({"environment": {"command": "python agent.py"}}, "learner.environment.command"),
    ],
)
def test_a_card_says_which_parts_of_the_run_its_config_leaves_out(
    tmp_path: Path, settings: dict[str, Any], key: str
) -> None:
    assert f"set `{key}`" in str(card_of(start(tmp_path / "with", **settings), tmp_path))
    assert f"set `{key}`" not in str(card_of(start(tmp_path / "without"), tmp_path))


def test_a_card_shows_how_the_server_computed(tmp_path: Path) -> None:
    run = msgspec.structs.replace(
        start(tmp_path), server={"quantization": "fp8_per_block", "max_model_len": 512, "http_port": 8123}
    )
    text = str(card_of(run, tmp_path))
    assert '[server]\nmax_model_len = 512\nquantization = "fp8_per_block"\n' in text and "8123" not in text


def test_the_card_of_an_adapter_serves_it_with_a_rank_that_vllm_takes(tmp_path: Path) -> None:
    for rank, max_rank in ((1, 8), (8, 8), (24, 32), (256, 256), (257, 512)):
        run = start(tmp_path / str(rank), lora={"rank": rank})
        assert f"--max-lora-rank {max_rank} --lora-modules" in str(card_of(run, tmp_path, form="adapter"))


def test_a_model_is_on_the_hub_if_its_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "project" / "runs" / "mine"
    for directory in (run_dir, tmp_path / "project" / "models" / "mine", tmp_path / "here" / "models" / "other"):
        directory.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("Qwen/Qwen2.5-0.5B", "gpt2"):
        assert hub_name(name, run_dir) == name
    paths = (
        "tiny:digits",
        "/models/mine",
        "~/mine",
        "./mine",
        "models/mine",
        "models/other",
        "runs/1/checkpoints/model",
    )
    for path in paths:
        assert hub_name(path, run_dir) is None, path
