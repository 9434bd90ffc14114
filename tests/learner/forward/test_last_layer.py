"""The last layer on the rows that predict only: how many go through its modules, and when all do. The numbers:
test_families.py."""

from typing import Any

import numpy as np
import pytest
import torch

from learner.forward.attention import PackingError
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack, pack
from learner.forward.packing_check import choose_attention
from learner.policy.model import checkpoint_layers
from tests.learner.forward.plain_pass import CPU, tiny

LAST_ROW, COMPLETIONS = 1, 4 + 6
"""Of a prompt, and of completions of 5 and 7 tokens, whose last predicts nothing."""


def a_group(num_prompt_tokens: int) -> Pack:
    return pack([(np.arange(num_prompt_tokens) % 15 + 1, [np.arange(1, 6), np.arange(2, 9)])], CPU)


def a_model() -> Any:
    model = tiny("Qwen2Config")
    choose_attention(model, CPU, torch.float32)
    return model


def rows_of_each_layer(model: Any, batch: Pack) -> list[dict[str, int]]:
    """How many rows went through each module of interest, by the modules' own hooks."""
    seen: list[dict[str, int]] = [{} for _ in model.model.layers]
    hooks = []
    for rows, layer in zip(seen, model.model.layers, strict=True):
        attention = layer.self_attn
        modules = {"q": attention.q_proj, "k": attention.k_proj, "o": attention.o_proj, "mlp": layer.mlp}
        for name, module in modules.items():

            def count(_module: Any, inputs: Any, name: str = name, rows: dict[str, int] = rows) -> None:
                rows[name] = rows.get(name, 0) + inputs[0].shape[1]

            hooks.append(module.register_forward_pre_hook(count))
    token_logprobs(model, batch, 1.0)[0].sum().backward()
    for hook in hooks:
        hook.remove()
    return seen


def test_a_prompt_goes_through_the_last_layer_for_its_keys_and_values_only() -> None:
    first, last = rows_of_each_layer(a_model(), a_group(40))
    assert set(first.values()) == {40 + COMPLETIONS}
    assert last == {"k": 40 + COMPLETIONS} | dict.fromkeys(("q", "o", "mlp"), LAST_ROW + COMPLETIONS)


def test_it_is_cut_again_where_the_backward_pass_computes_it_again() -> None:
    model = a_model()
    checkpoint_layers(model)
    first, last = rows_of_each_layer(model, a_group(40))
    assert set(first.values()) == {2 * (40 + COMPLETIONS)}
    assert last == {"k": 2 * (40 + COMPLETIONS)} | dict.fromkeys(("q", "o", "mlp"), 2 * (LAST_ROW + COMPLETIONS))
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_a_layer_stays_whole_where_nearly_all_rows_predict() -> None:
    assert all(set(rows.values()) == {3 + COMPLETIONS} for rows in rows_of_each_layer(a_model(), a_group(3)))


def test_after_a_pass_that_broke_off_the_model_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()

    def broken(*_: object) -> torch.Tensor:
        raise PackingError("no down projection today")

    monkeypatch.setattr(model.model.layers[-1].mlp.down_proj, "forward", broken)
    with pytest.raises(PackingError, match="today"):
        token_logprobs(model, a_group(40), 1.0)
    assert all(module._compiled_call_impl is None for module in model.modules())
