"""Choose how a newly loaded policy runs: packed, or padded with the fastest correct attention.

    candidates: packed, the family's default (sdpa), eager     or only the one that the config names
        each in float32 on the model's device, then in the run's dtype on the training device
            ─▶ only its own sequence influences a token, exactly
            ─▶ its logprobs match those of eager attention, one row at a time
            ─▶ the first candidate without a problem, or ConfigError

Invariant: no attention is trusted by its name. Each candidate is compared with transformers' eager pass of
the same weights, on rows longer than windows and with scores beyond every cap. A log line or an error names
the problem.
"""

import logging
from typing import Any

import msgspec
import torch
from torch import nn

from learner.forward.attention import NAME, Ticket
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack
from learner.forward.probe import eager_logprobs, find_excess, find_influence, find_leak, probe_of
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
from protocol.errors import ConfigError

log = logging.getLogger(__name__)
PACKED = "packed"
"""Value of learner.attn_implementation for packing."""
EAGER = "eager"
ON_ANY_DEVICE = {NAME, EAGER, "sdpa"}
"""Attentions for any device and dtype, which are also tried in float32 on the model's device.

Others, such as flash_attention_2, are only tried as they will train.
"""
TOLERANCE = 1e-3
"""Maximum mean difference of two attentions in float32.

Rounding is far below this bound; a token that sees too much or too little is far above it.
"""
FEW_ULP = 1e-6
"""Maximum mean difference between passes of the same shapes."""
TIMES_ROUNDING = 8.0
"""Allowed multiple of rounding. Rounding can exceed TOLERANCE when routers choose other experts."""
LARGEST_BOUND = 1e-2
"""Largest bound. A missing soft cap moves logprobs by little more, so beyond it only eager is trusted."""
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Errors that prove nothing about an attention. Another rank may have had enough memory."""
STATES = ("conv", "linear", "mamba", "recurrent", "ssm")
"""Parts of the names of layer types that pass state between tokens by other means than attention."""


class ExpectedLogprobs(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Float32 logprobs of eager attention, one row at a time.

    The quiet ones have the model's own scores, the loud ones have larger scores.
    """

    quiet_M: torch.Tensor
    loud_M: torch.Tensor
    largest: Largest
    as_it_trains: float
    """Mean difference of the quiet logprobs in the mode in which the model was loaded."""
    rounding_M: torch.Tensor
    """Change of the quiet logprobs by rounding alone."""

    @property
    def rounding(self) -> float:
        """Mean difference that rounding may still explain."""
        return TIMES_ROUNDING * _mean(self.rounding_M)

    @property
    def bound(self) -> float:
        """Maximum mean difference of a pass from the quiet or the loud logprobs."""
        return max(TOLERANCE, self.rounding)

    @property
    def scores(self) -> list[tuple[str, torch.Tensor, Largest]]:
        return [("", self.quiet_M, {}), ("where its attention scores are large ", self.loud_M, self.largest)]


def choose_attention(model: Any, device: torch.device, dtype: torch.dtype, wanted: str = PACKED) -> None:
    """Set a newly loaded model to the attention with which it will train.

    `device` and `dtype` are those of training.

    Raises:
        ConfigError: The passes fail, are random or not causal, or `wanted` is wrong for the model.
    """
    loaded_with = model.config._attn_implementation
    candidates = [NAME, loaded_with, EAGER] if wanted == PACKED else [loaded_with]
    tried = _try(model, list(dict.fromkeys(candidates)), device, dtype)
    *failed, (name, problem) = tried
    model.set_attn_implementation(loaded_with if problem else name)
    if problem is not None and wanted != PACKED:
        raise ConfigError(
            f'learner.attn_implementation = "{wanted}" is wrong for {type(model).__name__}: {problem}. Set it to '
            f'"{PACKED}" or "{EAGER}"'
        )
    if problem is not None:
        raise _refusal(model, problem)
    if failed:
        (_, reason), *others = failed
        reasons = "; ".join([str(reason), *(f"with {other} attention {found}" for other, found in others)])
        log.warning(
            'learner.attn_implementation = "%s": cannot pack %s (%s). Padding its sequences instead, each completion '
            "with its prompt, with %s attention",
            PACKED, type(model).__name__, reasons, name,
        )  # fmt: skip


def _try(model: Any, candidates: list[str], device: torch.device, dtype: torch.dtype) -> list[tuple[str, str | None]]:
    """Try candidates until one has no problem; return each with its problem."""
    tried: list[tuple[str, str | None]] = []
    generators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=generators), few_layers(model), short_windows(model):
        with computing_in(model, torch.float32, model.device):
            expected = _expect_or_refuse(model, probe_of(model))
        if expected is None:  # weights are NaN or inf; training/optimizer.py refuses them
            return [(candidates[-1], None)]
        for name in candidates:
            tried.append((name, _problem(model, expected, name, device, dtype)))
            if tried[-1][1] is None:
                break
    return tried


def _expect_or_refuse(model: Any, batch: Pack) -> ExpectedLogprobs | None:
    try:
        expected = _expect(model, batch)
    except OUT_OF_MEMORY as error:
        raise _no_memory(error) from error
    except Exception as error:  # a family may need other inputs than these tokens
        raise _refusal(model, f"its plain pass fails ({type(error).__name__}: {error})") from error
    if expected.as_it_trains <= TOLERANCE:
        return expected
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        return None
    raise ConfigError(
        f"model: the logprobs of {type(model).__name__} in training differ by {expected.as_it_trains:.2g} nats from "
        "those in sampling; expected equal logprobs. It has dropout, jitter, another routing for training or another "
        "source of randomness. Use another model"
    )


def _expect(model: Any, batch: Pack) -> ExpectedLogprobs:
    model.set_attn_implementation(EAGER)
    with sampling(model):
        with listening() as largest:
            quiet_M = eager_logprobs(model, batch)
        with loud(largest):
            loud_M = eager_logprobs(model, batch)
        with rounded(model):
            rounding_M = eager_logprobs(model, batch) - quiet_M
    return ExpectedLogprobs(
        quiet_M=quiet_M,
        loud_M=loud_M,
        largest=largest,
        as_it_trains=_mean(eager_logprobs(model, batch) - quiet_M),
        rounding_M=rounding_M,
    )


def _problem(model: Any, expected: ExpectedLogprobs, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model must not train with this attention, or None."""
    try:
        if name == NAME and (problem := _state_problem(model)):
            return problem
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            return "transformers supports only its own attention"
        if name != EAGER and expected.bound > LARGEST_BOUND:
            moved = _mean(expected.rounding_M)
            return f"rounding alone changes its logprobs by {moved:.2g}, which would hide a wrong attention"
        if name in ON_ANY_DEVICE:
            with computing_in(model, torch.float32, model.device):
                problem = _wide_problem(model, probe_of(model), expected)
            if problem or (dtype, device.type) == (torch.float32, model.device.type):
                return problem
        is_other_kernel = name not in ON_ANY_DEVICE or device.type != model.device.type
        with computing_in(model, dtype, device):
            return _narrow_problem(model, probe_of(model), expected, name, is_other_kernel=is_other_kernel)
    except OUT_OF_MEMORY as error:
        raise _no_memory(error) from error
    except Exception as error:  # a family may fail in any way without a real mask
        reads_mask = "its layers read their mask themselves: " if Ticket.__name__ in str(error) else ""
        return f"{reads_mask}{type(error).__name__}: {error}"


def _wide_problem(model: Any, batch: Pack, expected: ExpectedLogprobs) -> str | None:
    """Return a problem in float32, where rounding is small."""
    if leak := find_leak(model, batch) or find_influence(model, batch, max(FEW_ULP, expected.rounding)):
        return leak
    for where, right_M, largest in expected.scores:
        with loud(largest):
            found_M = _logprobs(model, batch)
        found = _mean(found_M - right_M)
        if not found <= expected.bound or find_excess(found_M, right_M + expected.rounding_M, right_M, batch):
            hint = ", as if the soft cap of its config were missing" if where else ""
            return f"{where}its logprobs differ by {found:.2g} from those of eager attention{hint}"
    return None


def _narrow_problem(
    model: Any, batch: Pack, expected: ExpectedLogprobs, name: str, *, is_other_kernel: bool
) -> str | None:
    """Return a problem in the dtype and on the device of training.

    The error of eager attention there is allowed. Loud scores are tried too if the kernel is another one
    there.
    """
    if leak := find_leak(model, batch):
        return leak
    for where, right_M, largest in expected.scores if is_other_kernel else expected.scores[:1]:
        with loud(largest):
            found_M = _logprobs(model, batch)
            model.set_attn_implementation(EAGER)
            eager_M = eager_logprobs(model, batch)
            model.set_attn_implementation(name)
        excess = find_excess(found_M, eager_M, right_M.to(model.device), batch)
        if excess is not None:
            way = f"{where}in {model.dtype} on {model.device.type} its logprobs are off by"
            return "{} {:.2g}, those of eager attention by {:.2g}".format(way, *excess)
    return None


def _state_problem(model: Any) -> str | None:
    """Return which layers carry state from one sequence of a pack to the next.

    No attention implementation prevents this.
    """
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
    return f"it has layers of the kind {', '.join(found)}, which carry state from sequence to sequence"


@torch.no_grad()
def _logprobs(model: Any, batch: Pack) -> torch.Tensor:
    logprobs_BT, _ = token_logprobs(model, batch, 1.0)
    return logprobs_BT[batch.is_token_BT]


def _mean(difference_M: torch.Tensor) -> float:
    return float(difference_M.abs().mean())


def _no_memory(error: BaseException) -> ConfigError:
    return ConfigError(
        f"out of memory while comparing the model's passes before the first step ({type(error).__name__}: {error}); "
        "the passes need less than a training step. Free memory on the device and on the host, or give the learner "
        "another device"
    )


def _refusal(model: Any, problem: str) -> ConfigError:
    return ConfigError(
        f"model: {type(model).__name__} cannot be trained: {problem}. Use another model, such as those listed in "
        "docs/models.md#which-models-run"
    )
