"""What a policy does between its matrix products, fused by torch.compile: norms, gated layers, rotary embedding.

    loaded, packed or padded (settle.py) ─▶ prepared for its device ─▶ here: as it is, or fused ─▶ every later pass

One operation after the other goes over its activations a dozen times in these pieces; fused it is once or twice. Invariant: a policy
goes fused only if that gave the numbers that it gave before, on its device; else a line says why not.
"""

import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from learner.forward.logprobs import token_logprobs
from learner.forward.settle import TOLERANCE, probe

log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"
"""The function that attentions of transformers call, in the Python module of each family."""
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""In bfloat16 every value is rounded where it would be without."""


def fuse(policy: nn.Module, dtype: torch.dtype) -> None:
    """Let every later pass of a policy that computes in `dtype` go fused, if it can. All ranks call it together."""
    model: Any = policy.module if isinstance(policy, DistributedDataParallel) else policy
    before_BT = _probed(model)
    pieces, plain = list(_pieces(model)), _rotary_functions(model)
    log.info("compiling the policy's norms, gated layers and rotary embedding: a minute, or seconds from torch's cache")
    started = time.monotonic()
    for piece in pieces:
        piece.compile(dynamic=True, options=OPTIONS)
    for home, rotary in plain.items():
        setattr(sys.modules[home], ROTARY, torch.compile(rotary, dynamic=True, options=OPTIONS))
    problem = _problem(model, before_BT, TOLERANCE[dtype])
    if problem is None:
        log.info("compiled in %.0f s", time.monotonic() - started)
        return
    for piece in pieces:
        piece._compiled_call_impl = None
    for home, rotary in plain.items():
        setattr(sys.modules[home], ROTARY, rotary)
    log.warning("learner.compile = true: %s cannot (%s). It goes on without", type(model).__name__, problem)


def _pieces(model: nn.Module) -> Iterator[nn.Module]:
    """Norms and gated layers, by the names that transformers gives their classes."""
    return (module for module in model.modules() if type(module).__name__.endswith(("RMSNorm", "MLP")))


def _rotary_functions(model: nn.Module) -> dict[str, Any]:
    """By the Python module that has it: no method, so all models of a family in this process get the same."""
    homes = {type(module).__module__ for module in model.modules()}
    return {home: getattr(sys.modules[home], ROTARY) for home in sorted(homes) if hasattr(sys.modules[home], ROTARY)}


def _problem(model: Any, before_BT: torch.Tensor, tolerance: float) -> str | None:
    try:
        fused_BT = _probed(model)
    except Exception as error:  # no compiler, or one of the many ways in which torch does not know what to do
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    difference = float((fused_BT - before_BT).abs().mean())
    return None if difference <= tolerance else f"its logprobs differ by {difference:.2g} from those without"


def _probed(model: Any) -> torch.Tensor:
    """With a graph, since that is what training compiles."""
    vocab_size = model.get_input_embeddings().num_embeddings
    return token_logprobs(model, probe(vocab_size, model.device), 1.0)[0].detach()
