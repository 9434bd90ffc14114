"""A resume uses one checkpoint on all ranks, and only with the model of its frozen weights."""

import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from learner.run_inputs import RunInputs
from learner.storage.checkpoint import checkpoint_of, load_checkpoint, shared_checkpoint
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from protocol.errors import ConfigError, RanksDisagree
from protocol.model_digest import digest_model
from protocol.model_files import resolve_model
from tests.learner.checkpoints import save
from tests.learner.ranks import on_two_ranks
from tests.learner.training.fixed_groups import a_run

FILES = ("state.json", "trained/index.json", "reference/index.json")
LATE_S = 0.5
WORDS = {
    "older": ['files.state.json is "', '"No such file or directory" on rank 1', "step-000007",
              "a file system that all ranks share"],
    "other": ["files.trained/index.json is "],
    "late": [],
    "newer": [],
}  # fmt: skip
"""What rank 1 sees, and the parts of its error."""


def write(directory: Path, step: int) -> Path:
    """Write the files that identify a checkpoint."""
    path = checkpoint_of(directory, step)
    for file in FILES:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(str(step))
    return path


def choose(accelerator: Accelerator, directory: Path) -> None:
    """Choose a checkpoint when rank 0 sees steps 6 and 7, and rank 1 differs in each case."""
    rank, timeout_s = accelerator.process_index, 4 * LATE_S
    assert shared_checkpoint(accelerator, directory / f"none-{rank}", timeout_s, resume=True) is None
    for case, words in WORDS.items():
        mine = directory / f"{case}-{rank}"
        write(mine, 6)
        if rank == 0 or case != "older":
            path = write(mine, 7)
        if rank == 1 and case == "other":
            (path / "trained/index.json").write_text("of another run")
        if rank == 1 and case == "newer":
            write(mine, 8)
        if rank == 1 and case == "late":
            path.rename(path.with_suffix(".hidden"))
            threading.Timer(LATE_S, path.with_suffix(".hidden").rename, [path]).start()
        if words:
            with pytest.raises(RanksDisagree) as caught:
                shared_checkpoint(accelerator, mine, timeout_s, resume=True)
            assert all(word in str(caught.value) for word in words), caught.value
        else:
            # Only rank 0 decides whether this is a resume.
            found = shared_checkpoint(accelerator, mine, 100 * timeout_s, resume=rank == 0)
            assert found == mine / "step-000007"
            assert shared_checkpoint(accelerator, mine, timeout_s, resume=rank == 1) is None


def test_ranks_resume_from_the_checkpoint_of_rank_0_or_report_what_is_missing(tmp_path: Path) -> None:
    on_two_ranks(choose, tmp_path)


def a_model(path: Path) -> Path:
    shutil.copytree(resolve_model("tiny:digits"), path)
    return path


def rewrite(model: Path, change: Any) -> None:
    """Change the values of some tensors in place."""
    file = model / "model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def of_another_training(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0.01 * torch.randn_like(tensor)


def a_trainer(accelerator: Accelerator, model: Path, **learner: Any) -> PolicyTrainer:
    return make_trainer(RunInputs(a_run(model, **learner)), accelerator, is_new=True)


LORA: dict[str, Any] = {"lora": {"rank": 4}}


def test_an_adapter_is_not_resumed_on_another_base(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model(tmp_path / "model")
    checkpoint = save(a_trainer(accelerator, model, **LORA), tmp_path, 1)
    load_checkpoint(a_trainer(accelerator, model, **LORA), checkpoint)
    rewrite(model, of_another_training)
    trainer = a_trainer(accelerator, model, **LORA)
    with pytest.raises(ConfigError, match=r"model: .* has changed since the run started.*frozen tensors.*Restore"):
        load_checkpoint(trainer, checkpoint)
    # A checkpoint of an earlier version does not record its base model.
    state = json.loads((checkpoint / "state.json").read_text())
    del state["model_digest"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with caplog.at_level(logging.WARNING, "learner.storage.checkpoint"):
        load_checkpoint(trainer, checkpoint)
    assert sum("does not record the model" in line for line in caplog.messages) == 1


def test_a_full_policy_and_the_generators_are_resumed_from_any_directory(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model = a_model(tmp_path / "model")
    first = a_trainer(accelerator, model)
    checkpoint = save(first, tmp_path, 1)
    drawn = torch.rand(3)
    rewrite(model, of_another_training)
    second = a_trainer(accelerator, model)
    load_checkpoint(second, checkpoint)
    assert torch.equal(torch.rand(3), drawn)
    pairs = zip(first.policy.parameters(), second.policy.parameters(), strict=True)
    assert all(torch.equal(parameter, again) for parameter, again in pairs)


def test_a_digest_covers_every_tensor_and_the_config_but_not_the_file_format(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    digest, tensors = digest_model(model), load_file(model / "model.safetensors")
    for changed in tensors:
        rewrite(model, lambda name, tensor, changed=changed: tensor + (name == changed))
        assert digest_model(model) != digest, changed
        rewrite(model, lambda name, tensor: tensors[name])
    assert digest_model(model) == digest
    config = json.loads((model / "config.json").read_text())
    for key, value, is_same in (("transformers_version", "4.0.0", True), ("layer_norm_epsilon", 1e-6, False)):
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        assert (digest_model(model) == digest) is is_same
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, model / f"model-{i}.safetensors", {"of": "two"})
    assert digest_model(model) == digest
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "model.safetensors", {"of": "earlier"})
    assert digest_model(model) == digest
