"""Rules for every request of an agent, whatever its dialect: what the run decides is refused or ignored.

    body ─▶ read_body ─▶ a dialect's struct, whose tool choice and format its module checks with the same rules

Invariant: an agent never changes how the run samples, because the learner trains with the logprobs of that
distribution. Values that differ are refused, or dropped with learner.environment.override_sampling. Equal or
missing values are accepted. Keys that change no token are ignored.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from learner.config import SamplingConfig
from learner.gateway.messages import RefusedRequest
from protocol.messages import MAX_STOP_LENGTH, MAX_STOPS

OF_RUN = ("temperature", "top_p", "top_k")
"""Keys that learner.sampling sets."""
FIXED: dict[str, Any] = {
    "n": 1, "best_of": 1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
    "logit_bias": {},
    "echo": False, "suffix": "", "top_logprobs": 0, "min_tokens": 0, "ignore_eos": False, "use_beam_search": False,
    "length_penalty": 1,
    "stop_token_ids": [], "bad_words": [], "allowed_token_ids": [], "logits_processors": [],
    "repetition_detection": None,
    "structured_outputs": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None,
}  # fmt: skip
"""Keys with the only value that the run accepts."""
OMIT = "omit it, or set learner.environment.override_sampling = true to ignore it"
OVERRIDDEN = {*OF_RUN, *FIXED, "seed"}
"""Keys that learner.environment.override_sampling drops, with forced tools and formats."""
IN_TEMPLATE = "set the template's own argument in learner.data.chat_template_kwargs"
Fixed = Mapping[str, tuple[Any, str]]
"""Keys that change the prompt: the value without effect, and the remedy."""
OF_PROMPT: Fixed = {
    "chat_template": (None, "omit it: episodes use the tokenizer's chat template"),
    "documents": ([], "put them into the messages"),
    "continue_final_message": (False, "end the messages with a user or tool message"),
    "add_generation_prompt": (True, "omit it: the policy always answers"),
    "truncate_prompt_tokens": (None, "send fewer messages"),
    "verbosity": ("medium", "ask for it in the messages"),
}
"""Such keys of several dialects and of vLLM."""

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)


class RequestRules(msgspec.Struct, frozen=True):
    """Rules of one run."""

    sampling: SamplingConfig
    overrides: bool
    """Value of learner.environment.override_sampling."""

    def read_body(self, kind: type[AnyBody], content: bytes, api: str, fixed: Fixed) -> AnyBody:
        """Parse a body and check its sampling.

        `api`: its name in errors. `fixed`: more keys that change the prompt.

        Raises:
            RefusedRequest: The body is malformed or requests what the run does not support.
        """
        try:
            raw = msgspec.json.decode(content, type=dict[str, Any])
            refuse_values(raw, {**OF_PROMPT, **fixed})
            if self.overrides:
                raw = {key: value for key, value in raw.items() if key not in OVERRIDDEN}
            self._refuse_other_sampling(raw)
            return msgspec.convert(raw, kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RefusedRequest(f"the body is not a valid request for {api}: {error}") from error

    def max_tokens(self, parameter: str, wanted: int | None) -> int:
        """Return the token limit of one turn. Raises RefusedRequest if the agent's is below 1."""
        if wanted is not None and wanted < 1:
            raise RefusedRequest(f"{parameter} = {wanted} must be at least 1", parameter=parameter)
        return min(self.sampling.max_tokens, math.inf if wanted is None else wanted)  # type: ignore[return-value]

    def stops(self, parameter: str, wanted: str | list[str] | None) -> tuple[str, ...]:
        """Return the stop texts of the turn that the run does not have.

        Raises:
            RefusedRequest: There are too many, or one is empty or too long.
        """
        texts = [wanted] if isinstance(wanted, str) else wanted or []
        more = tuple(dict.fromkeys(text for text in texts if text not in self.sampling.stop))
        num_known = len(self.sampling.stop)
        if len(more) + num_known > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in more):
            raise RefusedRequest(
                f"{parameter} = {texts} is not supported; with the {num_known} of the run (learner.sampling.stop), "
                f"send at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
                parameter=parameter,
            )
        return more

    def refuse_forced_tool(self, choice: Any, expected: str) -> None:
        """Refuse a tool choice that forces a call. A grammar would exclude tokens that the learner counts as possible.

        Raises:
            RefusedRequest: Unless the run overrides it.
        """
        if not self.overrides:
            raise RefusedRequest(
                f"tool_choice = {choice!r} is not supported, expected {expected}: the policy learns to "
                f"call tools and is not forced to; {OMIT}",
                parameter="tool_choice",
            )

    def refuse_forced_format(self, parameter: str, form: Any) -> None:
        """Refuse a format of the answer other than text. Raises RefusedRequest unless the run overrides it."""
        kind = form.get("type", "text") if isinstance(form, dict) else form
        if kind not in (None, "text") and not self.overrides:
            raise RefusedRequest(
                f"{parameter} of type {kind!r} is not supported, expected 'text': the policy learns formats and is "
                f"not forced into one; {OMIT}",
                parameter=parameter,
            )

    def _refuse_other_sampling(self, raw: dict[str, Any]) -> None:
        of_run = {name: getattr(self.sampling, name) for name in OF_RUN}
        for name, expected in (of_run | FIXED).items():
            value = raw.get(name)
            if value is None or value == expected or (name == "top_k" and expected == 0 and value == -1):
                continue
            remedy = f"set learner.sampling.{name}, or {OMIT}" if name in of_run else OMIT
            raise RefusedRequest(
                f"{name} = {value!r} is not supported, expected {expected!r}: the learner trains on the distribution "
                f"from which the run samples; {remedy}",
                code="fixed_by_the_run",
                parameter=name,
            )
        if raw.get("seed") is not None:
            raise RefusedRequest(
                f"seed = {raw['seed']!r} is not supported, because all episodes of a group would be the same; omit it, "
                "or set learner.sampling.seeded for reproducible runs",
                code="fixed_by_the_run",
                parameter="seed",
            )


def refuse_values(raw: Mapping[str, Any], fixed: Fixed, inside: str = "") -> None:
    """Refuse values that change the prompt. `inside`: prefix of the keys' names, for an object within the body.

    Raises:
        RefusedRequest: One differs from its value without effect.
    """
    for name, (expected, remedy) in fixed.items():
        if (value := raw.get(name)) is not None and value != expected:
            raise RefusedRequest(
                f"{inside}{name} = {str(value)[:200]} is not supported, expected {expected!r}; {remedy}",
                parameter=f"{inside}{name}",
            )
