"""Config of the reward functions, and their limits."""

import math
import sys
from typing import Literal

from learner.config.section import (
    AtLeastOne,
    Fraction,
    NotNegativeFinite,
    PositiveFinite,
    Section,
    Timeout,
    TimeoutOrZero,
    require,
)
from protocol.config_keys import MayChange

OVERLONG = "overlong"
"""Name of the overlong penalty (rewards/scoring.py) among the names of the functions."""
OF_ENVIRONMENT = "environment_reward"
"""Built-in function that returns the environment's own reward, in which the rewards of turns are included."""
MAX_TURNS = 8
"""Number of turns of an episode whose mean rewards are metrics of their own."""
ROUNDING = 1e-6
"""How far rewards that are weighted sums may be outside their range, also in float32."""
OF_THE_RUN = frozenset({"mean", "std", "turn_mean", *(f"turn_{number}" for number in range(1, MAX_TURNS + 1))})
"""Names in reward/<name> of metrics over all functions."""
JUDGE, PASSES_TESTS = "judge", "passes_tests"
"""Built-in functions with keys of their own."""
JUDGED = """Rate the answer to the task below.

Task:
{prompt}

Reference answer, if there is one:
{answer}

Answer to rate:
{completion}

Say in a few sentences what is right and wrong about it. End with a line that holds nothing but a number \
from 0 (useless) to 10 (perfect)."""


class JudgeConfig(Section):
    """Endpoint and prompt of the built-in function `judge`."""

    url: MayChange[str | None] = None
    """OpenAI endpoint of the judge, such as `http://judge:8000/v1`. Its key, if it requires one, is read from
    JUDGE_API_KEY. learner.reward.timeout_s must cover all verdicts of a group, with max_concurrent_calls
    groups in flight."""
    model: MayChange[str | None] = None
    """Name of the model at the endpoint. Unset: the first that the endpoint lists."""
    prompt: str = JUDGED
    """Prompt of the judge. {prompt}, {completion} (without its reasoning) and {answer} (the column) are
    filled in. The last number in the verdict is the score."""
    best_score: PositiveFinite[float] = 10.0
    """Score that corresponds to a reward of 1."""
    temperature: NotNegativeFinite[float] = 0.0
    """Sampling temperature of the judge. 0: greedy."""
    max_tokens: MayChange[AtLeastOne[int]] = 1024
    """Maximum number of tokens of a verdict."""

    @property
    def address(self) -> str:
        return (self.url or "").rstrip("/")

    def check(self) -> None:
        require(
            self.url is None or self.url.startswith(("http://", "https://")),
            f"url = {self.url!r} is not a URL; use one such as http://judge:8000/v1",
        )
        require(
            "{completion}" in self.prompt, f"prompt = {self.prompt!r} must contain {{completion}}, the text to rate"
        )


class RewardConfig(Section):
    """Reward functions of a run, and their limits."""

    functions: tuple[str, ...] = ()
    """Reward functions, each `module:function`, `path/to/file.py:function` or a built-in: exact_match,
    last_number, multiple_choice, math_equivalence, json_schema, passes_tests, judge, share_right,
    think_format, environment_reward. None are needed with learner.kl.place = "advantage" (distillation)."""
    weights: tuple[float, ...] | None = None
    """Weight of each function's rewards in their sum. 0: the function is only logged. Unset: all 1."""
    only_logged: bool = False
    """Whether rewards are logged and evaluated but not learned from, with learner.kl.place = "advantage"."""
    on_none: Literal["unscorable", "skip"] = "unscorable"
    """Reward of a completion for which a function of nonzero weight returns None. "unscorable": no reward,
    and it is left out of the baseline; "skip": the sum of the other functions (TRL's rule), for functions
    that each score their own kind of prompts. After a failed or timed-out call it is unscorable in either
    case."""
    skip_special_tokens: bool = True
    """Whether to remove special tokens (ends, channels, tool tags) from the text that your functions see.
    false: the text has all of them, including the end of the sequence. Built-in functions never see them.
    completion_ids always have every token."""
    timeout_s: MayChange[Timeout] = 10.0
    """Deadline of one call of one function on one group. A synchronous function that exceeds it is killed, an
    asynchronous one canceled. Built-in functions then score the completions one by one; those still too slow
    get 0."""
    unreachable_s: MayChange[TimeoutOrZero] = 600.0
    """Maximum time to retry a function that cannot reach a service: a connection is refused or breaks, or the
    status is 429, 502, 503 or 504. The run waits meanwhile. After that, the call counts as failed. 0: it
    fails at once."""
    num_workers: MayChange[AtLeastOne[int]] = 1
    """Number of processes that call synchronous functions, each one function on one group at a time."""
    max_concurrent_calls: MayChange[AtLeastOne[int]] = 64
    """Maximum number of concurrent calls of asynchronous functions (`async def`), in one event loop of one
    process. Each call is one function on one group, with its own deadline."""
    max_memory_mib: MayChange[AtLeastOne[int] | None] = None
    """Maximum memory of a process and all that it has started, including what its module imports. A process
    above it is killed, and the call fails. Linux only. Unset: no limit."""
    calls_per_worker: MayChange[AtLeastOne[int] | None] = None
    """Number of calls after which a new process replaces the old one, for functions that leak. Unset:
    never."""
    max_failed_share: MayChange[Fraction[float]] = 0.2
    """Maximum share of failed or timed-out calls among the last 100 calls of a function (at first: 10). Above
    it, the run stops and shows examples. Up to it, the prompt of such a call is requested again, if the
    function has a weight and only_logged is false. 0: any failure stops the run."""
    overlong_buffer_tokens: AtLeastOne[int] | None = None
    """Length of the soft overlong penalty (DAPO), in tokens. Over this many tokens before
    sampling.max_tokens, the penalty grows linearly to overlong_penalty; a truncated completion gets all of
    it. It is a separate reward named overlong. Unset: no penalty."""
    overlong_penalty: PositiveFinite[float] = 1.0
    """Full overlong penalty, with overlong_buffer_tokens."""
    unconfined_programs: MayChange[bool] = False
    """Whether passes_tests may run programs where a kernel or container allows no namespaces. Such programs
    have all of your permissions."""
    judge: JudgeConfig = JudgeConfig()

    def unmet_needs(self) -> dict[str, str]:
        unmet_needs = {} if self.overlong_buffer_tokens else {"overlong_penalty": "overlong_buffer_tokens"}
        if JUDGE not in self.functions:
            unmet_needs |= dict.fromkeys(
                (f"judge.{key}" for key in JudgeConfig.__struct_fields__), f'functions with "{JUDGE}"'
            )
        if PASSES_TESTS not in self.functions:
            unmet_needs["unconfined_programs"] = f'functions with "{PASSES_TESTS}"'
        return unmet_needs

    def check(self) -> None:
        require(
            len(set(self.functions)) == len(self.functions),
            f"functions = {self.functions} must name no function twice",
        )
        weights = self.function_weights
        require(
            len(weights) == len(self.functions)
            and all(map(math.isfinite, weights))
            and (any(weights) or not self.functions),
            f"weights = {self.weights} must be {len(self.functions)} finite numbers, one for each of functions = "
            f"{self.functions}, not all 0",
        )
        require(
            self.max_memory_mib is None or sys.platform == "linux",
            f"max_memory_mib = {self.max_memory_mib} needs Linux, but this system is {sys.platform}; unset it",
        )
        require(
            JUDGE not in self.functions or self.judge.url is not None,
            f"judge.url is not set, but functions = {self.functions} contains a judge; set judge.url to its endpoint, "
            "such as http://judge:8000/v1",
        )
        require(
            self.overlong_buffer_tokens is None or OVERLONG not in self.names,
            f"functions = {self.functions} contains a function named {OVERLONG!r}, which is the name of the reward of "
            "overlong_buffer_tokens; rename the function",
        )
        reserved = sorted(OF_THE_RUN.intersection(self.names))
        require(
            not reserved,
            f"functions = {self.functions} contains a function named {', '.join(map(repr, reserved))}, but "
            "reward/<name> is the run's own metric; rename the function",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Metric names of the functions, without the module unless two would be equal."""
        short = [spec.rpartition(":")[2] for spec in self.functions]
        return tuple(s if short.count(s) == 1 else spec for s, spec in zip(short, self.functions, strict=True))

    @property
    def is_learned_from(self) -> bool:
        """True if the advantages derive from rewards."""
        return bool(self.functions) and not self.only_logged

    @property
    def own_metrics(self) -> frozenset[str]:
        """Names in reward/<name> that are reserved, so that no function may log them."""
        return OF_THE_RUN.union(self.weight_by_name)

    @property
    def function_weights(self) -> tuple[float, ...]:
        """Weights of the functions, one each."""
        return self.weights if self.weights is not None else (1.0,) * len(self.functions)

    @property
    def weight_by_name(self) -> dict[str, float]:
        """Weight of every reward of a group, including any overlong penalty."""
        weights = dict(zip(self.names, self.function_weights, strict=True))
        return weights if self.overlong_buffer_tokens is None else weights | {OVERLONG: 1.0}
