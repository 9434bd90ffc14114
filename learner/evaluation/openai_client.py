"""Completions of an OpenAI server: what an evaluation asks and what it gets. Works against Slipstream's server and `vllm serve`.

    prompts ─▶ POST URL/completions, so many at once ─▶ Answered: texts, tokens, why each ended, the versions that sampled it
                  └▶ turn after turn of its episodes (episodes.py) ─▶ Answered: what was played

Invariant: every prompt is answered, or the first error that waiting does not mend ends the evaluation. Beside a run none is answered by
other weights than the run's: of another run, of a server that was started again between two pushes, or of `vllm serve`. An OpenAI server
takes four stops; of more it gets the first ones, and the answer is cut here where the run's own servers would have ended it.
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

from learner.evaluation.eval_sets import Questions
from learner.prompts.prompts import Prompt
from protocol.answer_headers import END, NO_VERSION, RUN, START
from protocol.console import PROGRESS_EVERY_S, manner
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)
AGAIN_AFTER_S = 1.0
GONE = {500, 502, 503, 504}
"""What a server answers whose engine dies under the request (500), that starts, drains, or is not behind its proxy."""


class EvaluationError(SlipstreamError):
    """The server does not answer, or not what was asked."""


class Answered(msgspec.Struct, frozen=True):
    """The completions of one prompt, or the episodes that it began."""

    texts_K: list[str]
    """Of completions."""
    token_ids_K: list[list[int]] | None
    """None: the server does not tell them, or episodes were played."""
    num_tokens: int
    """Of all together, which the policy has sampled."""
    is_finished_K: list[bool]
    """Whether it ended by itself, not at a limit."""
    versions: tuple[int, int] | None
    """Of its oldest and its newest token, from a server that tells; -1: the model as it was started with."""
    played: bytes | None = None
    """A PlayedGroup; None: completions are all there is."""


async def ask_all(
    questions: Questions,
    places: Sequence[int],
    answer_to: "AnswerTo",
    when_answered: Callable[[int, Answered], None],
    *,
    of_run: str | None,
) -> tuple[str, dict[int, Answered]]:
    """Ask the prompts at these places; return the model's name, and the answers by place. Raises EvaluationError.

    `answer_to` gives that of one prompt, `when_answered` hears of each as it comes.
    """
    config, prompts = questions.config, questions.prompts
    room = asyncio.Semaphore(config.max_concurrent)
    answers: dict[int, Answered] = {}
    async with door_to(questions.url, config.timeout_s, of_run=of_run) as door:
        served = await door.model_served()
        bar = tqdm(
            total=len(places),
            desc=f"asking {questions.set_name or ''}".strip(),
            unit="prompt",
            mininterval=PROGRESS_EVERY_S,
            leave=False,
            disable=of_run is not None or not manner().has_bars,
        )

        async def ask(place: int) -> None:
            async with room:
                answers[place] = await answer_to(questions, door, served, prompts[place])
            when_answered(place, answers[place])
            bar.update()

        try:
            async with asyncio.TaskGroup() as group:
                for place in places:
                    group.create_task(ask(place))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one has cancelled the others
        finally:
            bar.close()
    return served.name, answers


async def completions_of(questions: Questions, door: "Door", served: "Served", prompt: Prompt) -> Answered:
    """All samples of it at once. Raises EvaluationError."""
    return await answer_of(questions, door, request_of(questions, served.name, prompt))


async def answer_of(questions: Questions, door: "Door", request: dict[str, Any]) -> Answered:
    """With any number of stops. Raises EvaluationError."""
    stops = request["stop"]
    if len(stops) <= NUM_TOLD:
        return answered(*await door.say("POST", "completions", request), request["n"])
    cut = partial(
        cut_choice, stops=stops, tokenizer=questions.tokenizer, skip_special_tokens=request["skip_special_tokens"]
    )
    return answered(*await door.say("POST", "completions", request | {"stop": stops[:NUM_TOLD]}), request["n"], cut)


@asynccontextmanager
async def door_to(url: str, patience_s: float, *, of_run: str | None = None) -> AsyncIterator["Door"]:
    """Of the server there. `of_run`: what other weights than that run's answer is asked again, until its learner has pushed."""
    key = (
        os.environ.get("EVALUATION_API_KEY") or os.environ.get("OPENAI_API_KEY", "")
    ).strip()  # of a file it has the line's end
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=patience_s), headers=headers) as session:
        yield Door(session, url.rstrip("/"), patience_s, of_run)


def request_of(questions: Questions, model: str, prompt: Prompt) -> dict[str, Any]:
    """Everything is said that a server would otherwise take from the model's generation_config.json."""
    config, run = questions.config, questions.run
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
        "seed": prompt.prompt_id,
        "stop": list(run.learner.sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": run.learner.reward.skip_special_tokens,
        "return_token_ids": True,
    }


class Served(msgspec.Struct, frozen=True):
    """A model, as the server lists it."""

    name: str
    max_model_len: int | None
    """vLLM tells it."""


class Door:
    """One server; whoever asks waits while it is gone."""

    def __init__(self, session: aiohttp.ClientSession, url: str, patience_s: float, of_run: str | None) -> None:
        self._session, self._url, self._patience_s, self._of_run = session, url, patience_s, of_run
        self._is_waited_for = False

    async def model_served(self) -> Served:
        """Raises EvaluationError."""
        models, _ = await self.say("GET", "models", None)
        return _served(models, self._url)

    async def say(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[Any, Mapping[str, str]]:
        """Return the answer and its headers, whose names may be in any case. Raises EvaluationError."""
        give_up_at = time.monotonic() + self._patience_s
        while True:
            stranger = None
            try:
                async with self._session.request(method, f"{self._url}/{path}", json=body) as response:
                    if response.status != 200:
                        trouble = f"answered {response.status}: {(await response.text())[:500]}"
                        if response.status not in GONE:
                            raise EvaluationError(f"{self._url}/{path} {trouble}; {_remedy(response.status)}")
                    elif body is not None and (stranger := self._stranger(response.headers)) is not None:
                        trouble = f"answered with {stranger}"
                    else:
                        self._is_waited_for = False
                        return await response.json(), response.headers
            except TimeoutError:
                trouble = f"had not answered after {self._patience_s:g} s"
            except (aiohttp.ClientError, OSError) as error:
                trouble = f"could not be asked ({type(error).__name__}: {error})"
            if time.monotonic() + AGAIN_AFTER_S >= give_up_at:
                raise EvaluationError(
                    f"{self._url}/{path} {trouble}; start the server, correct learner.evaluation.url, or raise learner.evaluation.timeout_s"
                )
            if not self._is_waited_for:  # told once, however many ask
                log.warning("%s/%s %s; asking again for %g s at most", self._url, path, trouble, self._patience_s)
                self._is_waited_for = True
            await asyncio.sleep(AGAIN_AFTER_S)
            while stranger is not None and time.monotonic() < give_up_at and not await self._serves_the_run():
                await asyncio.sleep(AGAIN_AFTER_S)

    async def _serves_the_run(self) -> bool:
        """What the list of models says, which costs the server less than an answer."""
        models, _ = await self.say("GET", "models", None)
        return not isinstance(models, dict) or (models.get("data") or [{}])[0].get("run", self._of_run) == self._of_run

    def _stranger(self, headers: Mapping[str, str]) -> str | None:
        """Whose weights have answered, if not the run's. Raises EvaluationError for a server that does not tell."""
        if self._of_run is None:
            return None
        if START not in headers:
            raise EvaluationError(
                f"{self._url} does not say whose weights answer ({START}): it is no server of Slipstream. Set learner.evaluation.url to "
                f"that of run {self._of_run}, or leave it out"
            )
        if headers[START] == str(NO_VERSION):
            return "the model's own weights, which no run has replaced"
        runs = unquote(headers.get(RUN, "nobody"))
        return None if runs == self._of_run else f"weights of {runs}, and this run is {self._of_run}"


def _remedy(status: int) -> str:
    match status:
        case 401 | 403:
            return "put the server's key into the variable OPENAI_API_KEY"
        case 404:
            return 'learner.evaluation.url ends with the version of the API, such as "http://127.0.0.1:8000/v1"'
    return "correct what it names in [learner.evaluation] or [learner.sampling]"


def _served(models: Any, url: str) -> Served:
    try:
        model = models["data"][0]
        return Served(str(model["id"]), model.get("max_model_len"))
    except (AttributeError, KeyError, IndexError, TypeError):
        raise EvaluationError(
            f"{url}/models answered {str(models)[:200]}, which names no model; expected an OpenAI server at learner.evaluation.url"
        ) from None


def answered(
    answer: Any, headers: Mapping[str, str], num_samples: int, cut: Callable[[Any], Any] = lambda choice: choice
) -> Answered:
    """What an answer says, each choice cut. Raises EvaluationError."""
    try:
        whole = sorted(answer["choices"], key=lambda choice: choice["index"])
        choices = [cut(choice) for choice in whole]
        num_cut = sum(len(choice.get("token_ids") or ()) for choice in whole) - sum(
            len(choice.get("token_ids") or ()) for choice in choices
        )
        said = Answered(
            texts_K=[choice["text"] for choice in choices],
            token_ids_K=[choice["token_ids"] for choice in choices] if choices[0].get("token_ids") else None,
            num_tokens=int(answer["usage"]["completion_tokens"]) - num_cut,
            is_finished_K=[choice["finish_reason"] != "length" for choice in choices],
            versions=(int(headers[START]), int(headers[END])) if START in headers and END in headers else None,
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EvaluationError(
            f"an answer of the server lacks what OpenAI's completions have ({type(error).__name__}: {error}): {str(answer)[:300]}; expected an "
            "OpenAI server at learner.evaluation.url"
        ) from error
    if len(choices) != num_samples:
        raise EvaluationError(
            f"the server gave {len(choices)} completions where learner.evaluation.num_samples = {num_samples} were asked for; "
            "ask for fewer"
        )
    return said


AnswerTo = Callable[[Questions, Door, Served, Prompt], Awaitable[Answered]]


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_TOLD = 4


def end_of(text: str, stops: Sequence[str]) -> int | None:
    """Behind the stop that ends first; None: there is none."""
    return min((place + len(stop) for stop in stops if (place := text.find(stop)) >= 0), default=None)


def cut_choice(
    choice: dict[str, Any], stops: Sequence[str], tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool
) -> dict[str, Any]:
    """A choice of an answer, with its `token_ids` if it has any, as if all stops had been told."""
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
