"""Client of an OpenAI-compatible server for evaluations: Slipstream's server or `vllm serve`.

    prompts ─▶ POST URL/completions, max_concurrent at once ─▶ PromptAnswers: texts, tokens, ends, versions
                  └▶ turn after turn of its episodes (episodes.py) ─▶ PromptAnswers: the played episodes

OpenAI servers accept four stop strings. If there are more, the server gets the first four. The answer is then
cut here, where the run's own servers would have ended it.
Invariant: every prompt is answered, or the first error that waiting cannot fix ends the evaluation. During
training only the run's own weights may answer. Weights of another run, of a server restarted between two
syncs, or of `vllm serve` may not.
"""

import asyncio
import logging
import os
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import aiohttp
import msgspec
from tqdm import tqdm

from learner.evaluation.eval_sets import EvalSet
from learner.prompts.prompts import Prompt
from protocol.console import PROGRESS_EVERY_S, counted, output_mode
from protocol.endpoint import END, NO_VERSION, RUN, START
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)
KEY_VARIABLES = ("EVALUATION_API_KEY", "OPENAI_API_KEY")
"""Environment variables with the server's key. The first one that is set counts."""
AGAIN_AFTER_S = 1.0
RETRIED_STATUSES = {429, 500, 502, 503, 504}
"""Statuses of a server that has too much work (429), whose engine died (500), or that starts, drains, or is missing
behind its proxy."""


class EvaluationError(SlipstreamError):
    """Missing or unexpected answer of a server."""


class PromptAnswers(msgspec.Struct, frozen=True):
    """Completions or episodes of one prompt."""

    texts_K: list[str]
    """Texts of the completions."""
    token_ids_K: list[list[int]] | None
    """Token ids of the completions. None: the server does not return them, or episodes were played."""
    num_tokens: int
    """Number of tokens that the policy sampled, in total."""
    is_finished_K: list[bool]
    """Whether each completion ended on its own, not at a limit."""
    versions: tuple[int, int] | None
    """Versions of the oldest and newest token, if the server reports them. -1: the model before any sync."""
    played: bytes | None = None
    """Packed EpisodeGroup. None: there are only completions."""


async def ask_all(
    eval_set: EvalSet,
    indices: Sequence[int],
    answer_to: "AnswerTo",
    when_answered: Callable[[int, PromptAnswers], None],
    *,
    of_run: str | None,
) -> tuple[str, dict[int, PromptAnswers]]:
    """Request answers to these prompts; return the model's name and the answers.

    Args:
        answer_to: Answers one prompt.
        when_answered: Called with the index and the answer as soon as it arrives.

    Raises:
        EvaluationError: The server does not answer, or not as requested.
    """
    config, prompts = eval_set.config, eval_set.prompts
    room = asyncio.Semaphore(config.max_concurrent)
    answers: dict[int, PromptAnswers] = {}
    async with open_client(eval_set.url, config.timeout_s, of_run=of_run) as client:
        served = await client.model_served()
        bar = tqdm(
            total=len(indices),
            desc=f"evaluating {eval_set.set_name or ''}".strip(),
            unit="prompt",
            mininterval=PROGRESS_EVERY_S,
            leave=False,
            disable=of_run is not None or not output_mode().has_bars,
        )

        async def ask(index: int) -> None:
            async with room:
                answers[index] = await answer_to(eval_set, client, served, prompts[index])
            when_answered(index, answers[index])
            bar.update()

        try:
            async with asyncio.TaskGroup() as group:
                for index in indices:
                    group.create_task(ask(index))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first error has canceled the other tasks
        finally:
            bar.close()
    return served.name, answers


async def completions_of(
    eval_set: EvalSet, client: "OpenAIClient", served: "ListedModel", prompt: Prompt
) -> PromptAnswers:
    """Request all samples of a prompt at once. Raises EvaluationError."""
    return await answer_of(eval_set, client, request_of(eval_set, served.name, prompt))


async def answer_of(eval_set: EvalSet, client: "OpenAIClient", request: dict[str, Any]) -> PromptAnswers:
    """Request completions with any number of stop strings. Raises EvaluationError."""
    stops = request["stop"]
    if len(stops) <= MAX_STOPS:
        return answered(*await client.send("POST", "completions", request), request["n"])
    cut = partial(
        cut_choice, stops=stops, tokenizer=eval_set.tokenizer, skip_special_tokens=request["skip_special_tokens"]
    )
    return answered(*await client.send("POST", "completions", request | {"stop": stops[:MAX_STOPS]}), request["n"], cut)


@asynccontextmanager
async def open_client(url: str, timeout_s: float, *, of_run: str | None = None) -> AsyncIterator["OpenAIClient"]:
    """Open a client of the server at this URL.

    With `of_run`, a request that other weights answered is repeated until that run's learner has synced.
    """
    variable = _key_variable()
    key = os.environ[variable].strip() if variable else ""  # a key from a file ends with a newline
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0)  # max_concurrent limits the requests; 100 by default
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield OpenAIClient(session, url.rstrip("/"), timeout_s, of_run)


def request_of(eval_set: EvalSet, model: str, prompt: Prompt) -> dict[str, Any]:
    """Return a request that overrides every key of generation_config.json."""
    config, run = eval_set.config, eval_set.run
    return {
        "model": model,
        "prompt": prompt.token_ids,
        "n": config.num_samples,
        "max_tokens": config.max_tokens or run.learner.sampling.max_tokens,
        "temperature": config.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": prompt.prompt_id * config.num_samples % 2**31,  # vLLM's sample i has seed + i
        "stop": list(run.learner.sampling.stop),
        "include_stop_str_in_output": True,
        # A server searches for stop strings in the text that it returns, and a special token may be one of them.
        "skip_special_tokens": run.learner.reward.skip_special_tokens and not run.learner.sampling.stop,
        "return_token_ids": True,
    }


class ListedModel(msgspec.Struct, frozen=True):
    """Model that the server lists."""

    name: str
    max_model_len: int | None
    """Maximum sequence length, as reported by vLLM. None: not reported."""


class OpenAIClient:
    """Client of one server. Requests wait while the server is unavailable."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float, of_run: str | None) -> None:
        self._session, self._url, self._timeout_s, self._of_run = session, url, timeout_s, of_run
        self._has_warned = False

    async def model_served(self) -> ListedModel:
        """Return the model of the server. Raises EvaluationError."""
        models, _ = await self.send("GET", "models", None)
        return _served(models, self._url)

    async def send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[Any, Mapping[str, str]]:
        """Send a request and return the answer and its case-insensitive headers.

        Raises:
            EvaluationError: The server refused the request, or did not answer in time.
        """
        give_up_at = time.monotonic() + self._timeout_s
        while True:
            other_weights = None
            try:
                async with self._session.request(method, f"{self._url}/{path}", json=body) as response:
                    if response.status != 200:
                        problem = f"returned status {response.status}: {(await response.text())[:500]}"
                        if response.status not in RETRIED_STATUSES:
                            raise EvaluationError(f"{self._url}/{path} {problem}; {_remedy(response.status)}")
                    elif body is not None and (other_weights := self._other_weights(response.headers)) is not None:
                        problem = f"was answered by {other_weights}"
                    else:
                        self._has_warned = False
                        return await response.json(), response.headers
            except TimeoutError:
                problem = f"did not answer within {self._timeout_s:g} s"
            except (aiohttp.ClientError, OSError) as error:
                problem = f"could not be reached ({type(error).__name__}: {error})"
            if time.monotonic() + AGAIN_AFTER_S >= give_up_at:
                raise EvaluationError(
                    f"{self._url}/{path} {problem}; start the server, correct learner.evaluation.url, or raise "
                    "learner.evaluation.timeout_s"
                )
            if not self._has_warned:  # log once for all requests
                log.warning("%s/%s %s; retrying for up to %g s", self._url, path, problem, self._timeout_s)
                self._has_warned = True
            await asyncio.sleep(AGAIN_AFTER_S)
            while other_weights is not None and time.monotonic() < give_up_at and not await self._serves_the_run():
                await asyncio.sleep(AGAIN_AFTER_S)

    async def _serves_the_run(self) -> bool:
        """Return whether the server has the run's weights, by its list of models.

        The list costs the server less than an answer.
        """
        models, _ = await self.send("GET", "models", None)
        return not isinstance(models, dict) or (models.get("data") or [{}])[0].get("run", self._of_run) == self._of_run

    def _other_weights(self, headers: Mapping[str, str]) -> str | None:
        """Describe the weights that answered; None if they are the run's.

        Raises:
            EvaluationError: The server does not report its weights.
        """
        if self._of_run is None:
            return None
        if START not in headers:
            raise EvaluationError(
                f"{self._url} does not report which weights answered ({START}), so it is not a Slipstream server; set "
                f"learner.evaluation.url to the server of run {self._of_run}, or remove it"
            )
        if headers[START] == str(NO_VERSION):
            return "the model's original weights, which no run has updated"
        runs = unquote(headers.get(RUN, "an unknown run"))
        return None if runs == self._of_run else f"the weights of {runs} instead of {self._of_run}"


def _key_variable() -> str | None:
    return next((name for name in KEY_VARIABLES if os.environ.get(name)), None)


def _remedy(status: int) -> str:
    match status:
        case 401 | 403:
            variable = _key_variable()
            sent = f"the key in {variable} is not the server's" if variable else "no key was sent"
            return (
                f"{sent}. Set {variable or ' or '.join(KEY_VARIABLES)} to the server's key, which a Slipstream server "
                "reads from server.api_key_file or VLLM_API_KEY"
            )
        case 404:
            return 'end learner.evaluation.url with the API version, such as "http://127.0.0.1:8000/v1"'
    return "correct the setting that it names in [learner.evaluation] or [learner.sampling]"


def _served(models: Any, url: str) -> ListedModel:
    try:
        model = models["data"][0]
        return ListedModel(str(model["id"]), model.get("max_model_len"))
    except (AttributeError, KeyError, IndexError, TypeError):
        raise EvaluationError(
            f"{url}/models returned {str(models)[:200]}, which lists no model; set learner.evaluation.url to an "
            "OpenAI-compatible server"
        ) from None


def answered(
    answer: Any, headers: Mapping[str, str], num_samples: int, cut: Callable[[Any], Any] = lambda choice: choice
) -> PromptAnswers:
    """Parse an answer and cut each choice. Raises EvaluationError."""
    try:
        whole = sorted(answer["choices"], key=lambda choice: choice["index"])
        choices = [cut(choice) for choice in whole]
        num_cut = sum(len(choice.get("token_ids") or ()) for choice in whole) - sum(
            len(choice.get("token_ids") or ()) for choice in choices
        )
        found = PromptAnswers(
            texts_K=[choice["text"] for choice in choices],
            token_ids_K=[choice["token_ids"] for choice in choices] if choices[0].get("token_ids") else None,
            num_tokens=int(answer["usage"]["completion_tokens"]) - num_cut,
            is_finished_K=[choice["finish_reason"] != "length" for choice in choices],
            versions=(int(headers[START]), int(headers[END])) if START in headers and END in headers else None,
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EvaluationError(
            f"the server's answer is not an OpenAI completion ({type(error).__name__}: {error}): {str(answer)[:300]}; "
            "set learner.evaluation.url to an OpenAI-compatible server"
        ) from error
    if len(choices) != num_samples:
        raise EvaluationError(
            f"the server returned {counted(len(choices), 'completion')} instead of learner.evaluation.num_samples = "
            f"{num_samples}; lower it"
        )
    return found


AnswerTo = Callable[[EvalSet, OpenAIClient, ListedModel, Prompt], Awaitable[PromptAnswers]]


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_STOPS = 4


def end_of(text: str, stops: Sequence[str]) -> int | None:
    """Return the end of the stop string that ends first, or None."""
    return min((start + len(stop) for stop in stops if (start := text.find(stop)) >= 0), default=None)


def cut_choice(
    choice: dict[str, Any], stops: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool
) -> dict[str, Any]:
    """Cut a choice, and any `token_ids`, as if the server had received all stops."""
    end = end_of(choice["text"], stops)
    if end is None:
        return choice
    cut = {"text": choice["text"][:end], "finish_reason": "stop"}
    if token_ids := choice.get("token_ids"):

        def has_ended(count: int) -> bool:
            (text,) = tokenizer.batch_decode([token_ids[:count]], skip_special_tokens=skip_special_tokens)
            return end_of(text, stops) is not None

        cut["token_ids"] = token_ids[: bisect_left(range(len(token_ids) + 1), True, key=has_ended)]
    return choice | cut
