"""The reward section of the learner's config: which functions score the completions, and what they may cost."""

import math
import sys
from typing import Literal

from learner.config.section import Section, require
from protocol.config import MayChange

OVERLONG = "overlong"
"""Name, among the functions' names, of the reward that overlong.py gives."""


JUDGE, PASSES_TESTS = "judge", "passes_tests"
"""The built-in functions that have keys of their own."""
JUDGED = """Rate the answer to the task below.

Task:
{prompt}

Reference answer, if there is one:
{answer}

Answer to rate:
{completion}

Say in a few sentences what is right and wrong about it. End with a line that holds nothing but a number from 0 (useless) to 10 (perfect)."""


class JudgeConfig(Section):
    """Whom the built-in function `judge` asks, and what."""

    url: MayChange[str | None] = None
    """An OpenAI endpoint, such as `http://judge:8000/v1`. Its key, if it wants one, in the variable JUDGE_API_KEY.
    learner.reward.timeout_s must be long enough for what it says of a group, max_concurrent_calls of which are asked at once."""
    model: MayChange[str | None] = None
    """By the name that the endpoint has for it. Unset: the first that it names."""
    prompt: str = JUDGED
    """What it is asked: {prompt}, {completion} (what follows its reasoning) and {answer} (the column) stand for what is rated. The last number
    that it says counts."""
    best_score: float = 10.0
    """The number that is a reward of 1."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: MayChange[int] = 1024
    """Of what it says."""

    @property
    def address(self) -> str:
        return (self.url or "").rstrip("/")

    def check(self) -> None:
        require(
            self.url is None or self.url.startswith(("http://", "https://")),
            f"url = {self.url!r}: expected such as http://judge:8000/v1",
        )
        require(
            "{completion}" in self.prompt, f"prompt = {self.prompt!r} must hold {{completion}}, what is to be rated"
        )
        require(0 < self.best_score < math.inf, f"best_score = {self.best_score} must be above 0 and finite")
        require(0 <= self.temperature < math.inf, f"temperature = {self.temperature} must be at least 0 and finite")
        require(self.max_tokens >= 1, f"max_tokens = {self.max_tokens} must be at least 1")


class RewardConfig(Section):
    """What scores the completions."""

    functions: tuple[str, ...]
    """Each `module:function`, `path/to/file.py:function` or a built-in: exact_match, last_number, multiple_choice, math_equivalence,
    json_schema, passes_tests, judge, share_right, think_format, environment_reward."""
    weights: tuple[float, ...] | None = None
    """One per function, by which its rewards are multiplied before they are added; 0 only watches. Unset: all 1."""
    on_none: Literal["unscorable", "skip"] = "unscorable"
    """What a completion gets for which a function of weight other than 0 returns None. "unscorable": no reward, and it is left out of the
    baseline; "skip": the sum of the other functions (TRL's rule), for functions that each rate prompts of their own kind. After a call
    that failed or timed out it is unscorable either way."""
    skip_special_tokens: bool = True
    """Leave special tokens (ends, channels, tool tags) out of the text that functions see. false: they see all of it, the end of
    the sequence too; completion_ids have every token either way."""
    timeout_s: MayChange[float] = 10.0
    """Deadline of one call of one function on one group; a function that exceeds it is killed, an asynchronous one cancelled. Built-in
    functions then rate the completions one by one, and those that they are still too slow for get 0."""
    unreachable_s: MayChange[float] = 600.0
    """How long a function is called again that cannot reach a service it asks: a connection is refused or breaks, or the status is 429,
    502, 503 or 504. The run waits meanwhile; after that the call has failed. 0: it fails at once."""
    num_workers: MayChange[int] = 1
    """Processes that call synchronous functions, each one function on one group at a time."""
    max_concurrent_calls: MayChange[int] = 64
    """Calls of asynchronous functions (`async def`) in flight at once, in one event loop of one process; each is one function
    on one group, with its own deadline."""
    max_memory_mib: MayChange[int | None] = None
    """A process that holds more memory, with all that it has started, is killed, and the call has failed. What its module imports counts.
    Linux only. Unset: no limit."""
    calls_per_worker: MayChange[int | None] = None
    """A process is replaced by a new one after so many calls, for functions that leak. Unset: never."""
    max_failed_share: MayChange[float] = 0.2
    """The run stops, with examples, when a larger share of the last 100 calls of a function (at first: of 10) timed out or
    failed; up to it the prompt of such a call is asked again, if the function has a weight. 0: any stops it."""
    overlong_buffer_tokens: int | None = None
    """Soft overlong penalty (DAPO): over the last so many tokens before sampling.max_tokens the reward falls linearly to
    -overlong_penalty, which a truncated completion gets whole. It is one more reward, named overlong. Unset: none."""
    overlong_penalty: float = 1.0
    """With overlong_buffer_tokens: the whole penalty."""
    unconfined_programs: MayChange[bool] = False
    """Let passes_tests run programs where a kernel or container does not allow them namespaces of their own: they may then do whatever you
    can."""
    judge: JudgeConfig = JudgeConfig()

    def lacking(self) -> dict[str, str]:
        lacking = {} if self.overlong_buffer_tokens else {"overlong_penalty": "overlong_buffer_tokens"}
        if JUDGE not in self.functions:
            lacking |= dict.fromkeys(
                (f"judge.{key}" for key in JudgeConfig.__struct_fields__), f'functions with "{JUDGE}"'
            )
        if PASSES_TESTS not in self.functions:
            lacking["unconfined_programs"] = f'functions with "{PASSES_TESTS}"'
        return lacking

    def check(self) -> None:
        require(
            bool(self.functions) and len(set(self.functions)) == len(self.functions),
            f"functions = {self.functions} must name at least one function, none twice",
        )
        weights = self.function_weights
        require(
            len(weights) == len(self.functions) and all(map(math.isfinite, weights)) and any(weights),
            f"weights = {self.weights} must be {len(self.functions)} finite numbers, one for each of functions = "
            f"{self.functions}, not all 0",
        )
        require(0 < self.timeout_s < math.inf, f"timeout_s = {self.timeout_s} must be above 0 and finite")
        require(
            0 <= self.unreachable_s < math.inf, f"unreachable_s = {self.unreachable_s} must be at least 0 and finite"
        )
        for key in ("num_workers", "max_concurrent_calls", "max_memory_mib", "calls_per_worker"):
            value = getattr(self, key)
            require(value is None or value >= 1, f"{key} = {value} must be at least 1")
        require(
            self.max_memory_mib is None or sys.platform == "linux",
            f"max_memory_mib = {self.max_memory_mib} needs Linux, this is {sys.platform}; unset it",
        )
        require(
            0 <= self.max_failed_share < 1,
            f"max_failed_share = {self.max_failed_share} must be at least 0 and below 1",
        )
        require(
            JUDGE not in self.functions or self.judge.url is not None,
            f"judge.url is not set, and functions = {self.functions} asks a judge; name its endpoint, such as http://judge:8000/v1",
        )
        self._check_overlong()

    def _check_overlong(self) -> None:
        if self.overlong_buffer_tokens is None:
            return
        require(
            self.overlong_buffer_tokens >= 1,
            f"overlong_buffer_tokens = {self.overlong_buffer_tokens} must be at least 1",
        )
        require(
            0 < self.overlong_penalty < math.inf,
            f"overlong_penalty = {self.overlong_penalty} must be above 0 and finite",
        )
        require(
            OVERLONG not in self.names,
            f"functions = {self.functions} holds a function named {OVERLONG!r}, which is also the name of the reward of "
            "overlong_buffer_tokens; rename the function",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names in metrics: without the module, unless two would be called the same."""
        short = [spec.rpartition(":")[2] for spec in self.functions]
        return tuple(s if short.count(s) == 1 else spec for s, spec in zip(short, self.functions, strict=True))

    @property
    def own_metrics(self) -> frozenset[str]:
        """Which reward/<name> are taken, so that no function may log them."""
        return frozenset({"mean", "std", *self.weight_by_name})

    @property
    def function_weights(self) -> tuple[float, ...]:
        """One per function."""
        return self.weights if self.weights is not None else (1.0,) * len(self.functions)

    @property
    def weight_by_name(self) -> dict[str, float]:
        """The weight of every reward of a group: the functions', and the overlong penalty's where there is one."""
        weights = dict(zip(self.names, self.function_weights, strict=True))
        return weights if self.overlong_buffer_tokens is None else weights | {OVERLONG: 1.0}
