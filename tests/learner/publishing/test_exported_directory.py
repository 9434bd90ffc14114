"""Exported directories: transformers and peft load what the run has trained."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from learner.config import LearnerRun
from learner.publishing.publish import Exported, ExportRequest, export_run
from protocol.errors import ConfigError, SlipstreamError
from protocol.model_files import resolve_model
from tests.learner.checkpoints import save
from tests.learner.policy.plain import plain_logits
from tests.learner.publishing.finished_run import reduce_to_model, start, train

IDS = torch.arange(3, 15)[None]
LORA = {"lora": {"rank": 4}}


def export(run: LearnerRun, **arguments: Any) -> Exported:
    return export_run(ExportRequest(run_dir=Path(run.run_dir), **arguments))


def logits_of(directory: str | Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto")(IDS).logits


def test_a_whole_model_is_exported_with_all_that_transformers_and_vllm_read(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    run = start(tmp_path)
    trainer = train(run, accelerator, 10, 20)
    made = export(run)
    assert (made.step, made.form, made.directory) == (20, "model", f"{run.run_dir}/exports/step-000020")
    assert torch.equal(logits_of(made.directory), plain_logits(trainer.policy, IDS))
    names = {path.name for path in Path(made.directory).iterdir()}
    assert names >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert AutoTokenizer.from_pretrained(made.directory).decode(IDS[0]) == "23456789>+=,"
    assert GenerationConfig.from_pretrained(made.directory).eos_token_id == 0
    first = export(run, checkpoint="10", directory=tmp_path / "first")
    assert not torch.equal(logits_of(first.directory), logits_of(made.directory))


@pytest.mark.parametrize("has_model", [True, False], ids=["from model/", "from trained/"])
@pytest.mark.parametrize("run_dtype", ["float32", "bfloat16"])
def test_each_weight_is_rounded_once_from_the_value_that_was_trained(
    accelerator: Accelerator, tmp_path: Path, run_dtype: str, has_model: bool
) -> None:
    run = start(tmp_path, dtype=run_dtype, checkpoint={"export_model": has_model})
    trainer = train(run, accelerator, 1)
    for dtype in ("float32", "bfloat16", "float16"):
        made = export(run, dtype=dtype)
        assert json.loads(Path(made.directory, "config.json").read_text())["dtype"] == dtype
        for name, tensor in load_file(Path(made.directory, "model.safetensors")).items():
            assert torch.equal(tensor, trainer.policy.get_parameter(name).to(getattr(torch, dtype))), (dtype, name)


@pytest.mark.parametrize("has_model", [True, False], ids=["from adapter/", "from trained/"])
def test_an_adapter_alone_and_merged_is_what_peft_computes(
    accelerator: Accelerator, tmp_path: Path, has_model: bool
) -> None:
    run = start(tmp_path, checkpoint={"export_model": has_model}, **LORA)
    trainer = train(run, accelerator, 1)
    adapter, merged = export(run), export(run, merge=True)
    assert (adapter.form, merged.form) == ("adapter", "model") and adapter.directory != merged.directory
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"))
    before = base(IDS).logits
    adapted = PeftModel.from_pretrained(base, adapter.directory)
    assert torch.equal(adapted(IDS).logits, plain_logits(trainer.policy, IDS))
    assert (adapted(IDS).logits - before).abs().max() > 0.1, "the adapter must have an effect"
    by_peft = adapted.merge_and_unload().state_dict()
    for name, tensor in load_file(Path(merged.directory, "model.safetensors")).items():
        torch.testing.assert_close(tensor, by_peft[name], atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(logits_of(merged.directory), plain_logits(trainer.policy, IDS), atol=1e-5, rtol=1e-5)


def test_an_adapter_of_a_bfloat16_run_keeps_float32_unless_asked(accelerator: Accelerator, tmp_path: Path) -> None:
    run = start(tmp_path, dtype="bfloat16", **LORA)
    trainer = train(run, accelerator, 1)
    trained = {name for name, parameter in trainer.policy.named_parameters() if parameter.requires_grad}
    plain, cast = export(run), export(run, dtype="bfloat16")
    exact, rounded = (load_file(Path(made.directory, "adapter_model.safetensors")) for made in (plain, cast))
    assert len(exact) == len(trained) and {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in exact.items())
    # Merged from the exact adapter and the base as trained, in bfloat16, and only then rounded.
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"), dtype=torch.bfloat16).float()
    by_peft = PeftModel.from_pretrained(base, plain.directory).merge_and_unload().state_dict()
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2**-8)):
        merged = load_file(Path(export(run, merge=True, dtype=dtype).directory, "model.safetensors"))
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor.float(), by_peft[name], atol=1e-7, rtol=tolerance)


def test_the_base_of_an_adapter_is_named_for_those_who_load_it(accelerator: Accelerator, tmp_path: Path) -> None:
    local = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits")).save_pretrained(local)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(local)
    run = start(tmp_path, **LORA)
    train(run, accelerator, 1)
    config = Path(export(run, base="org/digits").directory, "adapter_config.json")
    assert json.loads(config.read_text())["base_model_name_or_path"] == "org/digits"
    made = export(run, base=str(local), directory=tmp_path / "local")
    assert AutoPeftModelForCausalLM.from_pretrained(made.directory).get_base_model().config.vocab_size == 16
    with pytest.raises(ConfigError, match=r"model = 'tiny:digits' is not on the hub.*--base ORG/NAME, or use --merge"):
        export(run, push="me/adapter")


def test_one_of_the_best_is_exported_in_its_dtype_or_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    run = start(tmp_path, dtype="bfloat16")
    trainer = train(run, accelerator, 1)
    expected = plain_logits(trainer.policy, IDS)
    train(run, accelerator, 2)
    reduce_to_model(run, 1, 0.9)
    made = export(run, checkpoint="1")
    torch.testing.assert_close(logits_of(made.directory).float(), expected.float(), atol=0.1, rtol=0.1)
    with pytest.raises(ConfigError, match=r"--dtype float32: .*step-000001 is one of the best .* in bfloat16; omit"):
        export(run, checkpoint="1", dtype="float32")
    assert [one.name for one in Path(run.run_dir, "exports").iterdir()] == ["step-000001"], "what was refused is gone"


def test_the_same_export_is_not_written_again_and_nothing_else_is_overwritten(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    run = start(tmp_path)
    train(run, accelerator, 1)
    out = tmp_path / "out"
    out.mkdir()
    made = export(run, directory=out)
    card = Path(made.directory, "README.md")
    card.write_text("mine")
    assert export(run, directory=out) == made and card.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"has another export \(step 1 of .*, model, float32\); remove it, or choose"):
        export(run, directory=out, dtype="bfloat16")
    with pytest.raises(ConfigError, match="exists and is not an export; choose another directory"):
        export(run, directory=tmp_path)


def test_an_export_changes_nothing_beside_it_and_is_read_by_others(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)
    train(run, accelerator, 1)
    work = tmp_path / "work"
    (work / "out.tmp").mkdir(parents=True)
    (work / "out.tmp" / "notes").write_text("mine")
    monkeypatch.chdir(work)
    made = Path(export(run, directory=Path("out")).directory)
    assert {path.name for path in work.iterdir()} == {"out", "out.tmp"}
    assert (work / "out.tmp" / "notes").read_text() == "mine"
    assert made == work / "out" and made.stat().st_mode == (work / "out.tmp").stat().st_mode
    (work / "empty").mkdir()
    monkeypatch.chdir(work / "empty")
    with pytest.raises(ConfigError, match="empty is the current directory; choose another one"):
        export(run, directory=Path("."))
    monkeypatch.chdir(made)
    assert export(run, directory=Path(".")).directory == str(made), "it is this export already"


def test_a_checkpoint_of_another_base_or_with_damage_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    local = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"))
    model.save_pretrained(local)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(local)
    run = msgspec.structs.replace(start(tmp_path, checkpoint={"export_model": False}, **LORA), model=str(local))
    (Path(run.run_dir) / "config.toml").write_text(
        (Path(run.run_dir) / "config.toml").read_text().replace("tiny:digits", str(local))
    )
    train(run, accelerator, 1)
    weights = local / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(ConfigError, match="has changed since the run started: its digest was"):
        export(run, merge=True)
    model.save_pretrained(local)
    assert export(run, merge=True).step == 1
    (shard,) = (run.checkpoint_dir / "step-000001" / "trained").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(SlipstreamError, match="step-000001 cannot be read"):
        export(run, merge=True, dtype="bfloat16")


def test_weights_beyond_the_range_of_float16_are_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    run = start(tmp_path)
    trainer = train(run, accelerator)
    with torch.no_grad():
        next(trainer.policy.parameters())[0, 0] = 1e5
    save(trainer, run.checkpoint_dir, 3)
    with pytest.raises(ConfigError, match=r"--dtype float16: .* has values beyond the range of float16; use bfloat16"):
        export(run, dtype="float16")


def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    for arguments, expected in (
        ({"merge": True}, "--merge: the run in .* has trained the whole model"),
        ({"public": True}, "--public needs --push"),
        ({"best_by": "evaluation", "checkpoint": "7"}, "--best-by evaluation with --checkpoint 7: keep one"),
    ):
        with pytest.raises(ConfigError, match=expected):
            export(run, **arguments)
    with pytest.raises(ConfigError, match=r"is not a run directory: config\.toml is missing"):
        export_run(ExportRequest(run_dir=tmp_path / "nowhere"))
