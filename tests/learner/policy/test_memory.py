"""The arithmetic of memory against known models and against the tensors of tiny ones."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config

from learner.config import LearnerRun
from learner.material import Material
from learner.policy.lora import add_adapter
from learner.policy.memory import (
    GIB,
    activation_bytes,
    kv_bytes_per_token,
    learner_memory,
    num_trained,
    server_memory,
    shape_of,
    told,
)
from learner.policy.snapshot import trainable
from learner.training.trainee import make_trainee
from protocol.model_files import resolve_model
from tests.learner.training.fixed_groups import make_run

PAGE = Path(__file__).parents[3] / "learner/policy/README.md"
QWEN_7B = Qwen2Config(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip
QWEN_HALF_B = Qwen2Config(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=False,
)  # fmt: skip
TINY: dict[str, PretrainedConfig] = {
    kind.model_type: kind(
        hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=100
    )
    for kind in (Qwen2Config, LlamaConfig, MistralConfig)
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [(QWEN_7B, 7_615_616_512), (QWEN_HALF_B, 494_032_768), (LLAMA_8B, 8_030_261_248)],
    ids=["Qwen2.5-7B", "Qwen2.5-0.5B", "Llama-3.1-8B"],
)
def test_the_number_of_parameters_is_the_published_one(config: PretrainedConfig, num_parameters: int) -> None:
    assert shape_of(config).num_parameters == num_parameters


def test_keys_and_values_of_a_token_are_those_that_vllm_reports() -> None:
    run = run_of({}, dtype="bfloat16")
    assert kv_bytes_per_token(shape_of(LLAMA_8B), run) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(shape_of(LLAMA_8B), run, num_workers=4) == 2 * 32 * 2 * 128 * 2


def run_of(learner: dict[str, Any], dtype: str = "float32") -> LearnerRun:
    return msgspec.structs.replace(make_run(**learner), dtype=dtype)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_what_a_pass_keeps(name: str, dtype: str) -> None:
    model, num_tokens = AutoModelForCausalLM.from_config(TINY[name]).train(), 256
    run = run_of({"micro_batch_tokens": num_tokens}, dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    casts = 2 * sum(p.numel() for p in model.model.layers.parameters()) if dtype == "bfloat16" else 0
    ids = torch.randint(0, 100, (1, num_tokens))
    with (
        saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        model.model(input_ids=ids, use_cache=False)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - casts
    assert activation_bytes(shape_of(TINY[name]), run) == pytest.approx(found, rel=0.25)


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "learner",
    [{}, {"lora": {"rank": 4}}, {"reference": {"kind": "mixture", "every_steps": 2, "num_snapshots": 2}, "kl": {"coef": 0.1}}],
    ids=["whole", "adapter", "two references"],
)  # fmt: skip
def test_weights_gradients_moments_and_references_are_the_bytes_of_the_tensors(
    accelerator: Accelerator, learner: dict[str, Any]
) -> None:
    run = run_of(learner)
    trainee = make_trainee(Material(run), accelerator, is_new=True)
    parameters = trainable(trainee.policy).values()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trainee.optimizer.step()
    state = trainee.optimizer.state_dict()["state"].values()
    snapshots = [] if trainee.reference is None else trainee.reference._snapshots
    memory = learner_memory(shape_of(AutoConfig.from_pretrained(resolve_model("tiny:digits"))), run).device

    def size(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    assert memory["weights"] == size(trainee.policy.parameters())
    assert memory["gradients"] == size(parameter.grad for parameter in parameters)
    assert memory["optimizer"] == size(m for moments in state for m in moments.values() if m.numel() > 1)
    if snapshots:
        full = len(snapshots) + 1 if len(snapshots) < (run.learner.reference.num_snapshots or 1) else len(snapshots)
        assert memory["reference"] == full * size(snapshots[0].values())


def test_an_adapter_on_named_layers_has_the_parameters_that_peft_gives_it() -> None:
    model = AutoModelForCausalLM.from_config(TINY["qwen2"])
    run = run_of({"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}})
    add_adapter(model, run.learner.lora, 0)
    assert num_trained(shape_of(TINY["qwen2"]), run.learner) == sum(p.numel() for p in trainable(model).values())


def seven_b() -> list[str]:
    """The rows of the table in the page."""
    run = run_of(
        {"micro_batch_tokens": 16384, "gradient_checkpointing": True, "reference": {"kind": "fixed"}, "kl": {"coef": 0.1}},
        "bfloat16",
    )  # fmt: skip
    shape, rows = shape_of(QWEN_7B), []
    for num in (1, 4, 8):
        learner = learner_memory(shape, run, num_ranks=num, is_sharded=num > 1)
        server = server_memory(shape, run, num_workers=num)
        kv_kib = kv_bytes_per_token(shape, run, num_workers=num) / 1024
        parts = [learner.device[name] / GIB for name in ("weights", "gradients", "optimizer", "reference")]
        rest = learner.device_gib - sum(parts)
        rows.append(
            f"| {num} | {' + '.join(f'{part:.1f}' for part in parts)} + {rest:.1f} = **{learner.device_gib:.0f}** | "
            f"{learner.host_gib:.0f} | **{server.device_gib:.1f}** + {kv_kib:.0f} KiB per token | {server.host_gib:.0f} |"
        )
    return rows


def test_the_table_of_the_page_is_what_the_functions_give() -> None:
    text = PAGE.read_text()
    assert [row for row in seven_b() if row not in text] == []


def test_smaller_micro_batches_are_the_remedy_that_the_page_names() -> None:
    settings = {"gradient_checkpointing": True, "reference": {"kind": "fixed"}, "kl": {"coef": 0.1}}
    run = run_of(settings | {"micro_batch_tokens": 4096}, "bfloat16")
    memory = learner_memory(shape_of(QWEN_7B), run, num_ranks=8, is_sharded=True)
    assert f"eight GPUs need {memory.device_gib:.0f} GiB each" in " ".join(PAGE.read_text().split())
    assert f"{memory.device_gib:.1f} GiB per GPU (weights 3.5, gradients 3.5," in told(memory)


def test_every_part_is_explained_in_the_page() -> None:
    memory, text = learner_memory(shape_of(TINY["llama"]), run_of({})), PAGE.read_text()
    assert [part for part in (*memory.device, *memory.host) if f"| {part} |" not in text] == []


if __name__ == "__main__":
    print("\n".join(seven_b()))
