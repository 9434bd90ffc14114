"""Which way a policy goes over a pack: packed, or where its family cannot, padded. Decided once, when it is loaded.

Invariant: a policy goes packed only if that gave the numbers of the padded pass, on this device's kernels; else a line says why not.
"""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from learner.forward.interface import NAME
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack, pack
from learner.forward.parts import plan_of
from learner.forward.tree_attention import Tree, TreeAttention
from learner.forward.varlen_attention import key_layout, varlen_attention

log = logging.getLogger(__name__)

PACKED = "packed"
"""What the key learner.attn_implementation calls it."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the mean difference between both ways: rounding is far below, a token that sees too much or too little far above."""
KERNEL_TOLERANCE = 0.05
"""Of its greatest number, in bfloat16."""


def settle_attention(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Let a model that was just loaded go packed if it can; `device` and `dtype` are those of its training."""
    before = model.config._attn_implementation
    problem = _kernel_problem(model, device, dtype) or _model_problem(model)
    if problem is not None:
        model.set_attn_implementation(before)
        log.warning(
            'learner.attn_implementation = "%s": %s cannot (%s). Its sequences are padded instead, each completion with its prompt',
            PACKED, type(model).__name__, problem,
        )  # fmt: skip


@torch.no_grad()
def _model_problem(model: Any) -> str | None:
    """Where it lies now, both ways."""
    groups = probe(model.get_input_embeddings().num_embeddings, model.device)
    padded_BT, _ = token_logprobs(model, groups, 1.0)
    try:
        model.set_attn_implementation(NAME)
        packed_BT, _ = token_logprobs(model, groups, 1.0)
    except Exception as error:  # a family may break in any way over what stands in the place of its mask
        return f"{type(error).__name__}: {error}"
    difference = float((packed_BT - padded_BT).abs().sum() / groups.is_token_BT.sum())
    tolerance = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    return None if difference <= tolerance else f"its logprobs differ by {difference:.2g} from those of the padded pass"


def _kernel_problem(model: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """The kernel for GPUs against the one for CPUs, forward and backward, with the model's heads."""
    if device.type == "cpu":
        return None
    text = model.config.get_text_config()
    num_heads = text.num_attention_heads
    num_keys = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    generator = torch.Generator().manual_seed(0)
    here, there = probe(64, torch.device("cpu")), probe(64, device)
    heads = (num_heads, num_keys, num_keys)
    inputs = [torch.randn(here.num_tokens, heads, head_dim, generator=generator).to(dtype).float() for heads in heads]
    leaves = [x.requires_grad_() for x in inputs]
    copies = [x.detach().to(device, dtype).requires_grad_() for x in inputs]
    scale = head_dim**-0.5
    right = TreeAttention.apply(*leaves, None, Tree(plan_of(here, None), scale))
    try:
        q_NHD, k_NKD, v_NKD = copies
        found = varlen_attention(q_NHD, k_NKD, v_NKD, key_layout(there), None, scale)
        pairs = [(found.detach(), right.detach()), *zip(_grads(found, copies), _grads(right, leaves), strict=True)]
    except RuntimeError as error:
        return f"the kernel for {device.type}: {error}"
    worst = max(float((f.float().cpu() - r).abs().max() / r.abs().max()) for f, r in pairs)
    return None if worst <= KERNEL_TOLERANCE else f"the kernel for {device.type} is off by {worst:.2g}"


def _grads(out_NHD: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out_NHD.float().square().sum(), leaves)


def probe(vocab_size: int, device: torch.device, *, longer: int = 0) -> Pack:
    """Groups of several shapes, all tokens different as far as the vocabulary goes. `longer`: the same with longer prompts."""
    ids = itertools.cycle(np.random.default_rng(0).permutation(vocab_size).tolist())
    shapes = [(5, (1, 4, 3)), (2, (2, 2)), (9, (6,))]
    return pack(
        [(_take(ids, prompt + longer), [_take(ids, length) for length in lengths]) for prompt, lengths in shapes],
        device,
    )


def _take(ids: Iterator[int], count: int) -> np.ndarray:
    return np.array(list(itertools.islice(ids, count)))
