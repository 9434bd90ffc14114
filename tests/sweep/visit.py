"""One family of the sweep: compare the learner's forward pass with eager attention, one row at a time.

tiny model ─▶ checkpoint ─▶ load_policy ─▶ choose_attention ─▶ token_logprobs ─▶ difference from the plain pass
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from learner.forward.attention import is_packed
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Group, pack
from learner.forward.packing_check import choose_attention
from learner.forward.probed_model import listening, loud
from learner.policy.model import compute_in, load_policy
from learner.run_inputs import RunInputs
from protocol.errors import ConfigError
from tests.learner.training.fixed_groups import make_run
from tests.sweep.families import VOCAB_SIZE, CannotBuild, tiny_config, tiny_model

CPU, FLOAT, BFLOAT = torch.device("cpu"), torch.float32, torch.bfloat16


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a family. Differences of logprobs are in nats: the largest of any token, unless called a mean."""

    family: str
    way: str
    """packed, padded (sdpa), padded (eager), refused, not built or failed. If they differ: one each for float32,
    bfloat16 and a base in bfloat16."""
    reason: str = ""
    """Why the family is not packed."""
    float32: float | None = None
    """Difference from the plain pass, with the model's own attention scores."""
    float32_loud: float | None = None
    """Difference from the plain pass, with scores scaled up to 100."""
    with_mates: float | None = None
    """Difference of the same rows, computed alone and together with a long group."""
    bfloat16: float | None = None
    """Mean difference from the plain pass of the same rounded weights in float32."""
    bfloat16_base: float | None = None
    """The same as `bfloat16`, for a model loaded in bfloat16."""
    rounding: float | None = None
    """Mean difference of the plain pass between bfloat16 and float32."""

    @property
    def ways(self) -> list[str]:
        """The ways in float32, in bfloat16 and with a base in bfloat16."""
        ways = self.way.split(", ")
        return ways * 3 if len(ways) == 1 else ways


def make_groups() -> tuple[list[Group], list[Group]]:
    """Return a few short rows, and rows that exceed every window, chunk, selection and state of the sweep."""
    rng = np.random.default_rng(7)

    def rows(prompt: int, *lengths: int) -> Group:
        return rng.integers(3, VOCAB_SIZE, prompt), [rng.integers(3, VOCAB_SIZE, length) for length in lengths]

    return [rows(11, 7, 20), rows(30, 12)], [rows(90, 70, 5), rows(1, 40)]


def visit_in_process(family: str) -> Visit:
    """Check a family in a process of a pool that shares the cores."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        try:
            return visit(family, Path(directory))
        except Exception as error:  # a failure of one family must not end the sweep
            return Visit(family=family, way="failed", reason=f"{type(error).__name__}: {error}")


def visit(family: str, directory: Path) -> Visit:
    try:
        tiny_model(tiny_config(family)).save_pretrained(directory)
    except CannotBuild as error:
        refusal = refusal_of(family, directory)
        return Visit(family=family, way="refused" if refusal else "not built", reason=refusal or str(error))
    RunInputs(msgspec.structs.replace(make_run(), model=str(directory))).shape  # noqa: B018  # as a run's start does
    policies: list[Any | None] = []
    ways: list[str] = []
    with _warnings() as reasons:
        # float32; bfloat16 with float32 master weights; bfloat16 base, as with an adapter.
        for loaded, computed in ((FLOAT, FLOAT), (FLOAT, BFLOAT), (BFLOAT, BFLOAT)):
            try:
                policies.append(load(directory, loaded, computed))
                ways.append(way_of(policies[-1]))
            except ConfigError as error:
                policies.append(None)
                ways.append("refused")
                reasons.append(str(error).replace(str(directory), family))
    in_float32, *in_bfloat16 = policies
    found = _measure(directory, in_float32) if in_float32 else {}
    if any(in_bfloat16):
        found |= _measure_rounding(directory, dict(zip(("bfloat16", "bfloat16_base"), in_bfloat16, strict=True)))
    way = ways[0] if len(set(ways)) == 1 else ", ".join(ways)
    return Visit(family=family, way=way, reason="; ".join(dict.fromkeys(reasons)), **found)


def refusal_of(family: str, directory: Path) -> str | None:
    """Return the error of loading a family from its config alone, before there are weights; or None."""
    try:
        CONFIG_MAPPING[family]().save_pretrained(directory)
        load_policy(directory, gradient_checkpointing=False)
    except ConfigError as error:
        return str(error).replace(str(directory), family)
    except Exception:  # the weights are missing, or the config needs arguments
        return None
    return None


def load(directory: Path, loaded: torch.dtype, computed: torch.dtype) -> Any:
    policy = load_policy(directory, gradient_checkpointing=False, dtype=loaded)
    choose_attention(policy, CPU, computed)
    compute_in(computed, policy)
    return policy


def way_of(policy: Any) -> str:
    return "packed" if is_packed(policy) else f"padded ({policy.config._attn_implementation})"


def plain_model(directory: Path, dtype: torch.dtype, *, rounded_to: torch.dtype | None = None) -> Any:
    """Load a model with transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    if rounded_to is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(rounded_to).to(dtype)
    return model


@torch.no_grad()
def _measure(directory: Path, policy: Any) -> dict[str, float]:
    short, long = make_groups()
    plain = plain_model(directory, FLOAT)
    with listening() as largest:
        right_M = plain_logprobs(plain, [*short, *long])
    found_M = policy_logprobs(policy, [*short, *long])
    alone_M = torch.cat([policy_logprobs(policy, [group]) for group in short])
    names = {module: name for name, module in plain.named_modules()}
    with loud(largest | {policy.get_submodule(names[module]): score for module, score in largest.items()}):
        loud_M = policy_logprobs(policy, [*short, *long]) - plain_logprobs(plain, [*short, *long])
    return {
        "float32": float((found_M - right_M).abs().max()),
        "float32_loud": float(loud_M.abs().max()),
        "with_mates": float((found_M[: len(alone_M)] - alone_M).abs().max()),
    }


@torch.no_grad()
def _measure_rounding(directory: Path, policies: dict[str, Any | None]) -> dict[str, float]:
    groups = [group for groups in make_groups() for group in groups]
    exact_M = plain_logprobs(plain_model(directory, FLOAT, rounded_to=BFLOAT), groups)
    found = {name: policy_logprobs(policy, groups) for name, policy in policies.items() if policy}
    found["rounding"] = plain_logprobs(plain_model(directory, BFLOAT, rounded_to=BFLOAT), groups)
    return {name: float((found_M - exact_M).abs().mean()) for name, found_M in found.items()}


def policy_logprobs(policy: Any, groups: Sequence[Group]) -> torch.Tensor:
    batch = pack(groups, CPU)
    return token_logprobs(policy, batch, 1.0)[0][batch.is_token_BT]


def plain_logprobs(model: Any, groups: Sequence[Group]) -> torch.Tensor:
    """Return the logprobs of each row computed alone, without padding, from all logits."""
    found = []
    for prompt, completion in ((prompt, completion) for prompt, completions in groups for completion in completions):
        ids_1S = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        logits_SV = model(input_ids=ids_1S, use_cache=False).logits[0]
        logprobs_TV = logits_SV[len(prompt) - 1 : -1].float().log_softmax(-1)
        found.append(logprobs_TV.gather(1, torch.from_numpy(completion)[:, None])[:, 0])
    return torch.cat(found)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings about families that cannot be packed."""
    messages: list[str] = []
    log = logging.getLogger("learner.forward.packing_check")

    def collect(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return True

    log.addFilter(collect)
    try:
        yield messages
    finally:
        log.removeFilter(collect)
