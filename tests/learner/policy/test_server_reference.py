"""A reference on a server: it costs the learner no memory, in truth and in the plan, and its copy survives as a file."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from learner.config import LearnerRun, ReferenceConfig
from learner.policy.memory import learner_memory
from learner.policy.model import load_tokenizer
from learner.policy.model_shape import shape_of
from learner.policy.server_reference import FILE, ReferenceCopy, ServerReference
from learner.run_inputs import RunInputs
from learner.training.policy_trainer import make_trainer
from protocol.model_files import resolve_model
from protocol.weights.buckets import make_manifest
from tests.learner.policy.shapes import QWEN_7B
from tests.learner.runs import make_run
from tests.peer import PROCESSES

MIB = 1 << 20
ON_SERVER = "tcp://127.0.0.1:1"


def run_with(tmp_path: Path, model: str, endpoint: str | None, **learner: Any) -> LearnerRun:
    reference = {"kind": "fixed"} | ({} if endpoint is None else {"endpoint": endpoint})
    run = make_run(tmp_path, "tcp://127.0.0.1:2", kl={"coef": 0.1}, reference=reference, **learner)
    return msgspec.structs.replace(run, model=model)


def measure(pipe: Any, run: LearnerRun) -> None:
    """Send the private memory that a trainer adds to this process, in bytes."""
    before = psutil.Process().memory_full_info().uss
    trainer = make_trainer(RunInputs(run), Accelerator(cpu=True), is_new=True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    pipe.send(psutil.Process().memory_full_info().uss - before)
    pipe.recv()
    del trainer


def memory_of(run: LearnerRun) -> int:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=measure, args=(theirs, run), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(120)
    measured: int = ours.recv()
    ours.send("done")
    process.join(60)
    return measured


@pytest.mark.system
def test_a_learner_whose_reference_is_on_a_server_has_less_memory_by_the_size_of_the_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, vocab_size=16)
    )
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(resolve_model("tiny:digits")).save_pretrained(tmp_path / "model")
    with_reference, without = (
        memory_of(run_with(tmp_path, str(tmp_path / "model"), endpoint)) for endpoint in (None, ON_SERVER)
    )
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert with_reference - without == pytest.approx(size, rel=0.1), (with_reference / MIB, without / MIB, size / MIB)


def test_the_plan_counts_no_reference_on_a_server(tmp_path: Path) -> None:
    planned = [
        learner_memory(shape_of(QWEN_7B), run_with(tmp_path, "tiny:digits", endpoint)) for endpoint in (None, ON_SERVER)
    ]
    assert planned[0].device["reference"] > 10 << 30
    assert planned[1].device["reference"] == planned[1].host["reference"] == 0


def test_a_copy_keeps_the_order_the_names_and_the_values_in_the_dtype_of_the_wire(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(4, 3)[:, :2] for i in (2, 10, 1)} | {"steps": torch.tensor([7])}
    tensors |= {"bias": nn.Buffer(torch.randn(4))}
    copy = ReferenceCopy(tmp_path / "new" / "reference.safetensors", torch.bfloat16, torch.device("cpu"))
    copy.write({name: tensor + 1 for name, tensor in tensors.items()}.items())
    copy.write(tensors.items())
    assert make_manifest(copy.tensors(), torch.bfloat16, 1) == make_manifest(tensors.items(), torch.bfloat16, 1)
    read = list(copy.tensors())
    assert [name for name, _ in read] == list(tensors)
    for name, tensor in read:
        wanted = tensors[name].bfloat16() if "weight" in name else tensors[name]
        assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype
    assert [path.name for path in copy.file.parent.iterdir()] == ["reference.safetensors"]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_refresh_after_a_resume_leaves_the_copy_in_the_checkpoint_as_it_was(
    tmp_path: Path, is_interrupted: bool
) -> None:
    reference = ServerReference(
        ReferenceConfig(kind="every", every_steps=2, endpoint=ON_SERVER), tmp_path, is_main=True
    )
    copy = ReferenceCopy(reference.file, torch.float32, torch.device("cpu"))
    copy.write([("weight", torch.ones(4))])
    checkpoint = tmp_path / "step-000002"
    reference.save(checkpoint)
    before = (checkpoint / FILE).read_bytes()
    reference.load(checkpoint, torch.nn.Linear(1, 1), reference.state)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE, "step-000002"]
    if is_interrupted:  # a learner that died while it resumed
        reference.file.with_suffix(".tmp").hardlink_to(checkpoint / FILE)
    copy.write([("weight", torch.zeros(4))])
    assert (checkpoint / FILE).read_bytes() == before != reference.file.read_bytes()
