"""A resume goes on from one checkpoint on all ranks, and only with the model that its frozen weights are of."""

import json
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from learner.run_inputs import WINDOW_BYTES, RunInputs, digest_model
from learner.storage.checkpoint import load_checkpoint
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from protocol.config import to_toml
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.checkpoints import save
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import on_two_ranks, places_of
from tests.learner.runs import make_run, seeded
from tests.learner.storage.seen_checkpoints import choose, enter_with_an_old_view
from tests.learner.training.fixed_groups import a_run


def test_ranks_go_on_from_the_checkpoint_of_rank_0_once_they_see_it_or_say_what_they_lack(tmp_path: Path) -> None:
    on_two_ranks(choose, tmp_path)


def test_a_rank_that_lists_an_older_checkpoint_goes_on_from_the_newest_too(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    with tiny_server() as server:
        for steps, switches in ((2, ()), (3, ("--resume",))):
            run = make_run(tmp_path, server.endpoint, **seeded(), steps=steps, checkpoint={"every_steps": 1})
            config.write_text(to_toml(run))
            logs = [tmp_path / f"{steps}-{rank}.log" for rank in range(2)]
            ranks = [
                start_learner(("train", str(config), *switches), log, log, partial(enter_with_an_old_view, place))
                for place, log in zip(places_of(2), logs, strict=True)
            ]
            assert [end_of(rank, log) for rank, log in zip(ranks, logs, strict=True)] == [0, 0]
    resumed = [re.findall(r"resumed from \S+/(step-\d+)", log.read_text()) for log in logs]
    assert resumed == [["step-000002"], ["step-000002"]]


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


def test_an_adapter_is_not_resumed_on_another_base(accelerator: Accelerator, tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    checkpoint = save(a_trainer(accelerator, model, **LORA), tmp_path, 1)
    load_checkpoint(a_trainer(accelerator, model, **LORA), checkpoint)
    rewrite(model, of_another_training)
    with pytest.raises(ConfigError, match=r"model: .* has changed since the run started.*frozen tensors.*Restore"):
        load_checkpoint(a_trainer(accelerator, model, **LORA), checkpoint)


def test_a_whole_policy_is_resumed_wherever_its_run_started(accelerator: Accelerator, tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    first = a_trainer(accelerator, model)
    checkpoint = save(first, tmp_path, 1)
    rewrite(model, of_another_training)
    second = a_trainer(accelerator, model)
    load_checkpoint(second, checkpoint)
    pairs = zip(first.policy.parameters(), second.policy.parameters(), strict=True)
    assert all(torch.equal(parameter, again) for parameter, again in pairs)


def test_an_adapter_of_an_earlier_version_is_resumed_with_a_warning(
    accelerator: Accelerator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model(tmp_path / "model")
    checkpoint = save(a_trainer(accelerator, model, **LORA), tmp_path, 1)
    state = json.loads((checkpoint / "state.json").read_text())
    del state["model_digest"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    with caplog.at_level(logging.WARNING, "learner.storage.checkpoint"):
        load_checkpoint(a_trainer(accelerator, model, **LORA), checkpoint)
    assert sum("does not record the model" in line for line in caplog.messages) == 1


def test_a_digest_is_of_every_tensor_and_of_the_config_but_not_of_how_they_are_written(tmp_path: Path) -> None:
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


def test_a_digest_reads_little(tmp_path: Path) -> None:
    """Known limit: a changed value between the windows is not seen."""
    model = a_model(tmp_path / "model")
    digest = digest_model(model)
    name = "transformer.h.0.mlp.c_fc.weight"
    beyond = 3 * WINDOW_BYTES

    def change_one(of: str, tensor: torch.Tensor) -> torch.Tensor:
        if of == name:
            assert tensor.nbytes > 4 * beyond
            tensor.view(-1)[0] += 1
        return tensor

    rewrite(model, change_one)
    assert digest_model(model) == digest
