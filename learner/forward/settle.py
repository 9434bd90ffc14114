"""Which way a policy goes over a pack, decided once, when it is loaded: packed; where its family cannot, padded, with the fastest
attention that is right; where none is right, not at all.

    candidates: packed, the family's default (sdpa), eager     or the one that the config names
        each ─▶ its own sequence alone counts, exactly     ─▶ the numbers of eager attention, one row at a time     ─▶ the first without a problem

Invariant: no pass is trusted for its name. Whatever will train was compared with transformers' eager pass of the same weights, with
rows longer than windows and scores past every cap; else a line says what is wrong with it.
"""

import logging
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import nn

from learner.forward.interface import NAME, Ticket
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack
from learner.forward.parts import plan_of
from learner.forward.probe import eager_logprobs, find_excess, find_leak, probe, probe_of
from learner.forward.probed_model import (
    Largest,
    computing_in,
    configs_of,
    few_layers,
    listening,
    loud,
    rounded,
    sampling,
    short_windows,
)
from learner.forward.tree_attention import Tree, TreeAttention
from learner.forward.varlen_attention import key_layout, varlen_attention
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

PACKED = "packed"
"""What the key learner.attn_implementation calls it."""
EAGER = "eager"
ON_ANY_DEVICE = {NAME, EAGER, "sdpa"}
"""In any dtype, too; others, such as flash_attention_2, are tried out where the policy will train."""
TOLERANCE = 1e-3
"""Of the mean difference between two ways in float32: rounding is far below, a token that sees too much or too little far above."""
TIMES_ROUNDING = 8.0
"""Where rounding itself moves logprobs by more, since routers then choose other experts, so much more than that is allowed."""
KERNEL_TOLERANCE = 0.05
"""Of its greatest number, in bfloat16."""
STATES = ("conv", "linear", "mamba", "recurrent", "ssm")
"""In the names of layer types that hand something from token to token by other means than attention."""


class Expected(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What eager attention gives one row at a time, in float32: quiet with the model's own scores, loud with larger ones."""

    quiet_M: torch.Tensor
    loud_M: torch.Tensor
    largest: Largest
    as_it_trains: float
    """Mean difference of the quiet ones in the mode in which the model was loaded."""
    bound: float
    """Of the mean difference of a pass from either."""


def settle_attention(model: Any, device: torch.device, dtype: torch.dtype, wanted: str = PACKED) -> None:
    """Set a model that was just loaded to the attention that it will train with on `device` in `dtype`.

    Raises ConfigError if its passes are random or not causal, or if the attention that is `wanted` instead of packing is wrong for it.
    """
    loaded_with = model.config._attn_implementation
    candidates = [NAME, loaded_with, EAGER] if wanted == PACKED else [loaded_with]
    tried = _try(model, list(dict.fromkeys(candidates)), device, dtype)
    *failed, (name, problem) = tried
    model.set_attn_implementation(loaded_with if problem else name)
    if problem is not None and wanted != PACKED:
        raise ConfigError(
            f'learner.attn_implementation = "{wanted}" is wrong for {type(model).__name__}: {problem}. Set it to "{PACKED}" or "{EAGER}"'
        )
    if problem is not None:
        raise _refusal(model, problem)
    if failed:
        (_, reason), *others = failed
        log.warning(
            'learner.attn_implementation = "%s": %s cannot (%s). Its sequences are padded instead, each completion with its prompt, '
            "with %s attention", PACKED, type(model).__name__, "; ".join([str(reason), *(f"with {n} attention {p}" for n, p in others)]), name,
        )  # fmt: skip


def _try(model: Any, candidates: list[str], device: torch.device, dtype: torch.dtype) -> list[tuple[str, str | None]]:
    """Return those that were tried, each with its problem, up to the first that has none."""
    place = model.device if set(candidates) <= ON_ANY_DEVICE else device
    batch = probe_of(model, place)
    tried: list[tuple[str, str | None]] = []
    generators = [] if place.type == "cpu" else [place]
    with torch.random.fork_rng(devices=generators), few_layers(model), short_windows(model):
        with computing_in(model, torch.float32, place):
            expected = _expect_or_refuse(model, batch)
        if expected is None:  # nothing can be told of weights that are no numbers; training/finite.py refuses them
            return [(candidates[-1], None)]
        for name in candidates:
            tried.append((name, _problem(model, batch, expected, name, device, dtype)))
            if tried[-1][1] is None:
                break
    return tried


def _expect_or_refuse(model: Any, batch: Pack) -> Expected | None:
    try:
        expected = _expect(model, batch)
    except Exception as error:  # of a family whose plain pass wants more than tokens, or other tokens
        raise _refusal(model, f"its plain pass fails ({type(error).__name__}: {error})") from error
    if expected.as_it_trains <= TOLERANCE:
        return expected
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        return None
    raise ConfigError(
        f"model: as it trains {type(model).__name__} gives logprobs that differ by {expected.as_it_trains:.2g} nats from those that it "
        "samples by; expected the same. It has dropout, jitter or a routing of its own for training, or something else in it is random: "
        "take another model"
    )


def _expect(model: Any, batch: Pack) -> Expected:
    model.set_attn_implementation(EAGER)
    with sampling(model):
        with listening() as largest:
            quiet_M = eager_logprobs(model, batch)
        with loud(largest):
            loud_M = eager_logprobs(model, batch)
        with rounded(model):
            rounding = _mean(eager_logprobs(model, batch) - quiet_M)
    return Expected(
        quiet_M=quiet_M,
        loud_M=loud_M,
        largest=largest,
        as_it_trains=_mean(eager_logprobs(model, batch) - quiet_M),
        bound=max(TOLERANCE, TIMES_ROUNDING * rounding),
    )


def _problem(
    model: Any, batch: Pack, expected: Expected, name: str, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why a model must not train with this attention; None: it may."""
    try:
        if name == NAME and (problem := _state_problem(model) or _kernel_problem(model, device, dtype)):
            return problem
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            return "transformers lets it have no attention but its own"
        if name in ON_ANY_DEVICE:
            with computing_in(model, torch.float32, batch.token_ids_N.device):
                problem = find_leak(model, batch) or _wide_problem(model, batch, expected)
            if problem or dtype == torch.float32:
                return problem
        with computing_in(model, dtype, batch.token_ids_N.device):
            return find_leak(model, batch) or _narrow_problem(model, batch, expected, name, dtype)
    except Exception as error:  # a family may break in any way over what stands in the place of its mask
        reads_mask = "its layers read their mask themselves: " if Ticket.__name__ in str(error) else ""
        return f"{reads_mask}{type(error).__name__}: {error}"


def _wide_problem(model: Any, batch: Pack, expected: Expected) -> str | None:
    """In float32, where rounding is small."""
    found = _mean(_logprobs(model, batch) - expected.quiet_M)
    if not found <= expected.bound:
        return f"its logprobs differ by {found:.2g} from those of eager attention"
    with loud(expected.largest):
        found = _mean(_logprobs(model, batch) - expected.loud_M)
    if not found <= expected.bound:
        return f"where its attention scores are large its logprobs differ by {found:.2g} from those of eager attention, as without a soft cap that its config names"
    return None


def _narrow_problem(model: Any, batch: Pack, expected: Expected, name: str, dtype: torch.dtype) -> str | None:
    """In the run's dtype, where a pass may be off by what eager attention is off there; loud if it could not be in float32."""
    is_loud = name not in ON_ANY_DEVICE
    right_M = expected.loud_M if is_loud else expected.quiet_M
    with loud(expected.largest) if is_loud else nullcontext():
        found_M = _logprobs(model, batch)
        model.set_attn_implementation(EAGER)
        eager_M = eager_logprobs(model, batch)
        model.set_attn_implementation(name)
    excess = find_excess(found_M, eager_M, right_M, batch)
    if excess is None:
        return None
    return "in {} its logprobs are off by {:.2g}, those of eager attention by {:.2g}".format(dtype, *excess)


def _state_problem(model: Any) -> str | None:
    """Layers whose state goes on from one sequence of a pack to the next, whatever attention there is beside them."""
    kinds = {
        kind
        for config in configs_of(model.config)
        for key in ("layer_types", "layers_block_type", "block_types")
        for kind in vars(config).get(key) or ()
    }
    found = sorted(kind for kind in kinds if any(state in kind for state in STATES))
    found += sorted({type(module).__name__ for module in model.modules() if isinstance(module, nn.Conv1d)})
    if not found:
        return None
    return f"it has layers of the kind {', '.join(found)}, whose state goes on from sequence to sequence"


@torch.no_grad()
def _logprobs(model: Any, batch: Pack) -> torch.Tensor:
    logprobs_BT, _ = token_logprobs(model, batch, 1.0)
    return logprobs_BT[batch.is_token_BT]


def _mean(difference_M: torch.Tensor) -> float:
    return float(difference_M.abs().mean())


def _refusal(model: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"model: {type(model).__name__} cannot be trained: {problem}. Take another model; those that can are listed in "
        "learner/README.md#which-models-run"
    )


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
