"""Fuse the operations between a policy's matrix products with torch.compile.

    loaded (packing_check.py) ─▶ prepared for its device ─▶ fuse: compiled, or unchanged ─▶ all later passes

Norms, gated layers and rotary embeddings read and write their activations a dozen times, but once or twice if
fused. On a GPU, launching the operations of a layer takes longer than computing them. There, packed layers
are compiled whole if possible, attention included, and so are the head's tiles. On a CPU, products dominate,
so whole layers gain nothing, and the head must not allocate a second tile (tile.py).

Ranks that share a policy gather its weights in hooks around the layers, so what is compiled is inside.

Invariant: a policy is fused only if, on its device, sequences stay separate and logprobs stay equal up to
rounding. Otherwise, a warning gives the reason. Every rank makes the same passes, whatever fails on one.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from learner.forward.attention import compiled_layers, is_packed, layers_of
from learner.forward.logprobs import tiles_of, token_logprobs
from learner.forward.pack import Pack
from learner.forward.probe import find_excess, find_leak, probe_of
from learner.forward.probed_model import rounded
from learner.forward.tile import fused_tiles, tiles_problem

log = logging.getLogger(__name__)
ROTARY = "apply_rotary_pos_emb"
"""Function that attentions in transformers call, in the Python module of each family."""
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
"""Inductor options. They round bfloat16 values wherever the uncompiled code does."""
NUM_KINDS = 32
"""Maximum number of variants of a pass through a layer that torch compiles.

Variants differ in their window, in recording a graph, and in having one row or one group. Beyond the maximum,
torch warns and does not compile. With fullgraph=True, it would end the run.
"""
FirstProblem = Callable[[str | None], str | None]
"""Function that returns, on every rank, the problem of the first rank that has one.

A policy compiled on some ranks only would round in two ways.
"""


class BeforeCompile(NamedTuple):
    """Logprobs of a pack before fusing, with original and with rounded embeddings."""

    pack: Pack
    logprobs_M: torch.Tensor
    rounded_M: torch.Tensor


def fuse(policy: nn.Module, dtype: torch.dtype, of_ranks: FirstProblem = lambda mine: mine) -> None:
    """Compile a policy that computes in `dtype`, as far as all ranks can.

    All ranks call this together. All later passes of the policy are compiled.
    """
    model: Any = policy.module if isinstance(policy, DistributedDataParallel) else policy
    before = _record_logprobs(model, dtype)
    log.info("compiling the operations between the policy's matrix products (a minute, or seconds with torch's cache)")
    started = time.monotonic()
    torch._dynamo.config.recompile_limit = NUM_KINDS
    layers = _whole_layers(model)
    problem = _try_compiling(model, layers, before, dtype, of_ranks)
    if problem is not None and layers:
        log.info("cannot compile whole layers (%s); compiling parts of them", problem)
        problem = _try_compiling(model, [], before, dtype, of_ranks)
    if problem is None:
        log.info("compiled the policy in %.0f s", time.monotonic() - started)
        return
    log.warning(
        "learner.compile: cannot compile %s (%s); continuing without compilation", type(model).__name__, problem
    )


def describe_fused(model: Any) -> str:
    """Return how much of a policy is compiled."""
    num_layers = sum(module in compiled_layers for module in model.modules())
    num_pieces = sum(module._compiled_call_impl is not None for module in model.modules())
    return f"{num_layers} layers, {num_pieces} pieces, {int(model in tiles_of)} heads"


def _try_compiling(
    model: Any, layers: list[nn.Module], before: list[BeforeCompile], dtype: torch.dtype, of_ranks: FirstProblem
) -> str | None:
    """Compile `layers` whole and the pieces of other layers.

    If there is a problem, undo this and return the problem.
    """
    inside = {module for layer in layers for module in layer.modules()}
    pieces, plain = [piece for piece in _pieces(model) if piece not in inside], _rotary_functions(model)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, options=OPTIONS)
        compiled_layers.add(layer)
    for piece in pieces:
        piece.compile(dynamic=True, options=OPTIONS)
    for home, rotary in plain.items():
        setattr(sys.modules[home], ROTARY, torch.compile(rotary, dynamic=True, options=OPTIONS))
    if model.device.type == "cuda":
        tiles_of[model] = fused_tiles()
    breaks = Counter(counters["graph_break"])
    problem = _problem(model, before, dtype)
    if layers and problem is None and (new := Counter(counters["graph_break"]) - breaks):
        problem = f"graph break in torch: {_first_line(next(iter(new)))}"
    problem = of_ranks(problem)
    if problem is None:
        return None
    for layer in layers:
        del layer.forward
        compiled_layers.discard(layer)
    for piece in pieces:
        piece._compiled_call_impl = None
    for home, rotary in plain.items():
        setattr(sys.modules[home], ROTARY, rotary)
    tiles_of.pop(model, None)
    torch._dynamo.reset()  # it would skip, without a word, what it could not compile before
    return problem


def _whole_layers(model: Any) -> list[nn.Module]:
    """Return the layers to compile whole, for packed models on GPUs.

    The last layer is left out, because the pass may cut it (logprobs.py).
    """
    return layers_of(model)[:-1] if model.device.type == "cuda" and is_packed(model) else []


def _pieces(model: nn.Module) -> Iterator[nn.Module]:
    """Return norms and gated layers, by their class names in transformers."""
    return (module for module in model.modules() if type(module).__name__.endswith(("RMSNorm", "MLP")))


def _rotary_functions(model: nn.Module) -> dict[str, Any]:
    """Return the rotary function of each Python module that has one.

    It is not a method, so compiling it affects all models of a family in this process.
    """
    homes = {type(module).__module__ for module in model.modules()}
    return {home: getattr(sys.modules[home], ROTARY) for home in sorted(homes) if hasattr(sys.modules[home], ROTARY)}


def _problem(model: Any, before: list[BeforeCompile], dtype: torch.dtype) -> str | None:
    """Return the first problem of the compiled model, after all passes that find one."""
    problems: list[str | None] = []
    try:
        with _compile_errors() as errors:
            problems += [tiles_problem(tiles_of[model], model.device, dtype)] if model in tiles_of else []
            found = [_logprobs(model, pack) for pack, _, _ in before]
            problems += [_changed(*both) for both in zip(found, before, strict=True)]
            problems.append(find_leak(model, before[0].pack))
    except Exception as error:  # any failure in torch
        if isinstance(model, FSDPModule):
            raise  # its hooks are in the middle of a pass, and other ranks may wait for this one
        return _described(error)
    return next(filter(None, [*errors, *problems]), None)


def _changed(found_M: torch.Tensor, before: BeforeCompile) -> str | None:
    """Return by how much compiling has changed logprobs, if by more than rounding."""
    excess = find_excess(found_M, before.rounded_M, before.logprobs_M, before.pack)
    if excess is None:
        return None
    difference, rounding = excess
    return (
        f"its logprobs differ by {difference:.2g} from those without compilation, rounding changes them by "
        f"{rounding:.2g}"
    )


@contextmanager
def _compile_errors() -> Iterator[list[str]]:
    """Let torch run what it cannot compile, and record why it cannot. There may be no compiler.

    An error on one rank, in the middle of a pass, would leave the others waiting for it.
    """
    errors: list[str] = []

    def record_only(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not record.exc_info or record.exc_info[1] is None:
            return True
        errors.append(_described(record.exc_info[1]))
        return False

    # Torch logs what it suppresses, each with a trace.
    logger = logging.getLogger(torch._dynamo.convert_frame.__name__)
    logger.addFilter(record_only)
    try:
        with torch._dynamo.config.patch(suppress_errors=True):
            yield errors
    finally:
        logger.removeFilter(record_only)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(str(error))}"


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _record_logprobs(model: Any, dtype: torch.dtype) -> list[BeforeCompile]:
    """Record the logprobs of packs of two lengths.

    Two lengths make torch compile for any length before the first step.
    """
    packs = [probe_of(model, longer=longer) for longer in (0, 3)]
    logprobs = [_logprobs(model, pack) for pack in packs]
    with rounded(model, torch.finfo(dtype).eps):
        return [
            BeforeCompile(pack, right_M, _logprobs(model, pack)) for pack, right_M in zip(packs, logprobs, strict=True)
        ]


def _logprobs(model: Any, pack: Pack) -> torch.Tensor:
    """Return logprobs computed with a graph, since training compiles with one."""
    return token_logprobs(model, pack, 1.0)[0].detach()[pack.is_token_BT]
