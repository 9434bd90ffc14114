"""The arithmetic of memory against known models and against the tensors of tiny ones."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from learner.config import LearnerRun
from learner.forward.lm_head import TILE_LOGITS, HeadLogprobs, LogprobSettings
from learner.forward.tile import LogitMap
from learner.policy.lora import add_adapter
from learner.policy.memory import (
    activation_bytes,
    describe,
    head_bytes,
    kv_bytes_per_token,
    learner_memory,
    num_trained,
    server_memory,
)
from learner.policy.model import compute_in
from learner.policy.model_shape import shape_of
from learner.policy.published import copy_for_export
from learner.policy.shards import trained
from learner.policy.snapshot import trainable
from learner.run_inputs import RunInputs
from learner.training.policy_trainer import make_trainer
from protocol.model_files import resolve_model
from tests.bench.live_memory import LiveBytes
from tests.learner.policy.planned_sizes import PAGE, adapted_rows, planned_rows
from tests.learner.policy.shapes import LLAMA_8B, MOE_30B, QWEN_7B, QWEN_HALF_B
from tests.learner.training.fixed_groups import make_run
from tests.sweep.families import tiny_config, tiny_model

TINY: dict[str, PretrainedConfig] = {
    kind.model_type: kind(
        hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100
    )
    for kind in (Qwen2Config, LlamaConfig)
} | {
    "qwen3": Qwen3Config(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
                         head_dim=64, vocab_size=100),
    "qwen3_moe": Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4,
                                vocab_size=100,
                                experts_implementation="grouped_mm"),
}  # fmt: skip


MIXTRAL_8X7B = MixtralConfig()
DEEPSEEK_V2_LITE = DeepseekV2Config(
    hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16,
    num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
    kv_lora_rank=512,
    q_lora_rank=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "active_billions", "rounding"),
    [
        (QWEN_HALF_B, 0.494032768, 0.494032768, 0),
        (QWEN_7B, 7.615616512, 7.615616512, 0),
        (LLAMA_8B, 8.030261248, 8.030261248, 0),
        (MOE_30B, 30.5, 3.3, 0.02),
        (MIXTRAL_8X7B, 46.7, 12.9, 0.02),
        (DEEPSEEK_V2_LITE, 15.7, 2.7, 0.02),
    ],
    ids=["Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B", "Qwen3-30B-A3B", "Mixtral-8x7B", "DeepSeek-V2-Lite"],
)
def test_the_numbers_of_parameters_are_the_published_ones(
    config: PretrainedConfig, billions: float, active_billions: float, rounding: float
) -> None:
    shape = shape_of(config)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, rel=rounding)
    assert shape.num_active / 1e9 == pytest.approx(active_billions, rel=rounding)


def test_keys_and_values_of_a_token_are_those_that_vllm_reports() -> None:
    run = run_of({}, dtype="bfloat16")
    assert kv_bytes_per_token(shape_of(LLAMA_8B), run) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(shape_of(LLAMA_8B), run, num_workers=4) == 2 * 32 * 2 * 128 * 2


def test_the_memory_of_a_server_is_in_its_own_dtypes() -> None:
    shape, run = shape_of(LLAMA_8B), run_of({}, dtype="float32")
    assert shape.num_embedding == shape.vocab_size * shape.hidden_size == 128256 * 4096
    num_linear = shape.num_parameters - 2 * shape.num_embedding
    for server, num_bytes, of_token in (
        ({}, 4 * shape.num_parameters, 4),
        ({"dtype": "bfloat16"}, 2 * shape.num_parameters, 2),
        ({"dtype": "bfloat16", "quantization": "fp8_per_tensor"}, num_linear + 4 * shape.num_embedding, 2),
        ({"kv_cache_dtype": "fp8", "overlap_weight_loading": True}, 4 * shape.num_parameters, 1),
    ):
        of_server = msgspec.structs.replace(run, server=server)
        memory = server_memory(shape, of_server)
        assert memory.device["weights"] == num_bytes
        assert memory.host["weight sync"] == ("overlap_weight_loading" in server) * 4 * shape.num_parameters
        assert kv_bytes_per_token(shape, of_server) == 2 * 32 * 8 * 128 * of_token


def run_of(learner: dict[str, Any], dtype: str = "float32") -> LearnerRun:
    return msgspec.structs.replace(make_run(**learner), dtype=dtype)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_a_pass_keeps(name: str, dtype: str, checkpointing: bool) -> None:
    model, num_tokens = AutoModelForCausalLM.from_config(TINY[name]).train(), 256
    if checkpointing:
        model.gradient_checkpointing_enable()
    run = run_of({"micro_batch_tokens": num_tokens, "gradient_checkpointing": checkpointing}, dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, 100, (1, num_tokens))
    compute_in(getattr(torch, dtype), model)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=ids, use_cache=False)
    shape = shape_of(TINY[name])
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    if checkpointing:  # of the layer that is computed again nothing is kept yet
        whole = run_of({"micro_batch_tokens": num_tokens}, dtype)
        found += activation_bytes(msgspec.structs.replace(shape, num_layers=1), whole)
    elif dtype == "bfloat16":
        found -= 2 * sum(parameter.numel() for parameter in model.model.layers.parameters())
    assert activation_bytes(shape, run) == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize(
    ("dtype", "vocab_size"), [(torch.float32, 16_000), (torch.float32, 48_000), (torch.bfloat16, 16_000)]
)
def test_the_head_takes_a_tile_and_its_gradient_whatever_the_vocabulary(dtype: torch.dtype, vocab_size: int) -> None:
    shape = msgspec.structs.replace(shape_of(TINY["llama"]), vocab_size=vocab_size)
    weight_VE = torch.randn(vocab_size, shape.hidden_size, requires_grad=True)
    weight_VE.grad = torch.zeros_like(weight_VE)
    hidden_ME = torch.randn(1000, shape.hidden_size, dtype=dtype, requires_grad=True)
    targets_M = torch.randint(0, vocab_size, (1000,))
    cast_VE = weight_VE.to(dtype)
    with LiveBytes() as live:
        settings = LogprobSettings(LogitMap(), 0.7, "value")
        HeadLogprobs.apply(hidden_ME, cast_VE, None, targets_M, settings)[0].sum().backward()
    run = run_of({}, str(dtype).removeprefix("torch."))
    assert live.peak == pytest.approx(head_bytes(shape, run, tile_logits=TILE_LOGITS["cpu"]), rel=0.15)


MIXTURE = {"reference": {"kind": "mixture", "every_steps": 2, "num_snapshots": 2}, "kl": {"coef": 0.1}}
EMA = {"reference": {"kind": "ema", "every_steps": 2, "alpha": 0.1}, "kl": {"coef": 0.1}}


@pytest.mark.parametrize(
    ("learner", "dtype"),
    [({}, "float32"), ({"lora": {"rank": 4}}, "bfloat16"), (MIXTURE, "bfloat16"), (EMA, "bfloat16")],
    ids=["whole", "adapter", "two references", "a moving reference"],
)
def test_weights_gradients_moments_and_references_are_the_bytes_of_the_tensors(
    accelerator: Accelerator, learner: dict[str, Any], dtype: str
) -> None:
    run = run_of(learner, dtype)
    trainer = make_trainer(RunInputs(run), accelerator, is_new=True)
    parameters = trainable(trainer.policy).values()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    state = trainer.optimizer.state_dict()["state"].values()
    snapshots = [] if trainer.reference is None else trainer.reference._snapshots
    whole = learner_memory(shape_of(AutoConfig.from_pretrained(resolve_model("tiny:digits"))), run)
    memory = whole.device

    def size(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    assert memory["weights"] == size(trainer.policy.parameters())
    assert memory["gradients"] == size(parameter.grad for parameter in parameters)
    assert memory["optimizer"] == size(m for moments in state for m in moments.values() if m.numel() > 1)
    if snapshots:
        full = len(snapshots) + 1 if len(snapshots) < (run.learner.reference.num_snapshots or 1) else len(snapshots)
        assert memory["reference"] == full * size(snapshots[0].values())
    export = copy_for_export(trainer.published, run, trainer.model_path)
    copied = [*trained(trainer.policy, trainer.optimizer).values(), *export.model.values()]
    assert whole.host["checkpoint"] == memory["reference"] + size(tensor for tensor in copied if tensor.numel() > 1)


def test_an_adapter_on_named_layers_has_the_parameters_that_peft_gives_it() -> None:
    model = AutoModelForCausalLM.from_config(TINY["qwen2"])
    run = run_of({"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}})
    add_adapter(model, run.learner.lora, 0)
    assert num_trained(shape_of(TINY["qwen2"]), run.learner) == sum(p.numel() for p in trainable(model).values())


def test_the_page_has_the_numbers_that_the_functions_give_and_explains_each() -> None:
    text = PAGE.read_text() + PAGE.with_name("memory-formulas.md").read_text()
    memory = learner_memory(shape_of(TINY["llama"]), run_of({}))
    rows = [*planned_rows(), *adapted_rows(), *(f"| {part} |" for part in (*memory.device, *memory.host))]
    assert [row for row in rows if row not in text] == [], "python -m tests.learner.policy.planned_sizes writes them"


def test_parts_below_a_tenth_of_a_gib_are_left_out() -> None:
    run = run_of({"reference": {"kind": "fixed"}, "kl": {"coef": 0.1}}, "bfloat16")
    memory = learner_memory(shape_of(QWEN_7B), run, num_ranks=8, num_shards=8)
    assert f"{memory.device_gib:.1f} GiB per GPU (weights 3.5, gradients 3.5," in describe(memory)
    assert "reference 1.8" in describe(memory) and "reference" not in describe(
        learner_memory(shape_of(TINY["llama"]), run)
    )


def test_the_casts_of_a_pass_are_those_of_what_is_trained() -> None:
    shape = shape_of(TINY["llama"])
    of_a_layer, head = 2 * 128 * (128 + 64) + 3 * 128 * 384 + 2 * 128, 100 * 128
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, shape.num_parameters),
        ({"gradient_checkpointing": True}, head + of_a_layer + 128 // 3),  # the last norm as if it were the layers'
        ({"lora": {"rank": 4}}, num_trained(shape, run_of({"lora": {"rank": 4}}).learner)),
    ]
    for learner, num_cast in cases:
        assert learner_memory(shape, run_of(learner, "bfloat16")).device["weights in bfloat16"] == 2 * num_cast
        assert learner_memory(shape, run_of(learner)).device["weights in bfloat16"] == 0


def test_all_servers_share_one_baseline_of_deltas_and_the_buffers_on_the_gpu() -> None:
    shape, run = shape_of(TINY["llama"]), run_of({"weight_sync": {"compression": "delta", "bucket_mib": 256}})
    for num_servers in (1, 3):
        of_servers = msgspec.structs.replace(run, endpoints=tuple(f"tcp://a:{port + 1}" for port in range(num_servers)))
        memory = learner_memory(shape, of_servers)
        assert memory.host["weight sync"] == 4 * shape.num_parameters
        assert memory.device["weight sync"] == 5 * 64 << 20
    small = run_of({"weight_sync": {"bucket_mib": 8}})
    assert learner_memory(shape, small).device["weight sync"] == 5 * 8 << 20


@pytest.mark.parametrize(
    ("lora", "max_lora_rank", "has_baseline"),
    [("adapter", None, False), ("adapter", 8, False), ("adapter", 0, True), ("merged", None, True)],
)
def test_an_adapter_that_is_sent_alone_needs_no_baseline_of_deltas(
    lora: str, max_lora_rank: int | None, has_baseline: bool
) -> None:
    shape = shape_of(TINY["llama"])
    run = run_of({"lora": {"rank": 8}, "weight_sync": {"compression": "delta", "lora": lora}})
    run = msgspec.structs.replace(run, server={} if max_lora_rank is None else {"max_lora_rank": max_lora_rank})
    for memory in (learner_memory(shape, run), server_memory(shape, run)):
        assert (memory.host["weight sync"] > 0) is has_baseline


def test_a_server_holds_a_copy_of_the_weights_for_deltas_and_one_for_a_sync_during_generation() -> None:
    shape = shape_of(TINY["llama"])
    for compression, is_overlapping, num_copies in (("none", False, 0), ("none", True, 1), ("delta", True, 2)):
        run = run_of({"weight_sync": {"compression": compression}})
        run = msgspec.structs.replace(run, server={"overlap_weight_loading": is_overlapping})
        assert server_memory(shape, run).host["weight sync"] == num_copies * 4 * shape.num_parameters


def test_layers_of_two_head_sizes_are_estimated_by_their_mean(tmp_path: Path) -> None:
    config = tiny_config("gemma4_text")  # two layers with heads of 16, two with heads of 32, two heads of keys each
    tiny_model(config).save_pretrained(tmp_path)
    shape = RunInputs(msgspec.structs.replace(make_run(), model=str(tmp_path))).shape
    assert shape is not None and shape.kv_size == 2 * (16 + 32) / 2


def test_a_config_that_cannot_be_read_costs_the_estimate_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(config: PretrainedConfig) -> None:
        raise RuntimeError("ambiguous")

    tiny_model(tiny_config("qwen2")).save_pretrained(tmp_path)
    monkeypatch.setattr("learner.run_inputs.shape_of", fail)
    assert RunInputs(msgspec.structs.replace(make_run(), model=str(tmp_path))).shape is None
    assert "cannot estimate the memory needs of" in caplog.text and "(RuntimeError: ambiguous)" in caplog.text
