"""Play the episodes of an evaluation with the players used in training and a server's OpenAI API.

    prompt ─▶ environment or agent ─▶ turn ─▶ POST URL/completions ─▶ … ─▶ EpisodeGroup ─▶ PromptAnswers ─▶ rated

Used between openai_client.py and the players (gateway/players.py).
Invariant: every episode counts with its end state. As in training, an episode that reveals nothing about the
policy has no reward.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from learner.config import LearnerRun
from learner.environments.episode import REWARDED, EndState, EpisodeGroup, num_sampled
from learner.environments.player import TurnPrompt, TurnResult
from learner.evaluation.eval_sets import EvalSet
from learner.evaluation.openai_client import (
    EvaluationError,
    ListedModel,
    OpenAIClient,
    PromptAnswers,
    answer_of,
    request_of,
)
from learner.gateway.players import open_agents, open_player
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.scoring import Scorer
from learner.rewards.workers import FunctionRewards, GroupRewards, RewardWorkers
from learner.servers.loop_thread import LoopThread
from protocol.codec import pack, unpack
from protocol.messages import Completion, Group

T = TypeVar("T")

AT_A_LIMIT = ("length", "max_turns")
SILENT = "silent"
"""End state of an episode without tokens: no turn was requested, or none was answered."""


def open_players(sets: Sequence[EvalSet], workers: RewardWorkers, loop: LoopThread, cleanup: ExitStack) -> None:
    """Open the player of each set, if the run has one. Raises ConfigError."""
    for eval_set in sets:
        run = as_evaluated(eval_set)
        eval_set.player = open_player(
            run, eval_set.source, cleanup, asks_attributes=bool(workers.with_environments)
        ) or open_agents(run, eval_set.source, loop, cleanup)


def as_evaluated(eval_set: EvalSet) -> LearnerRun:
    """Return the run with the sampling of the evaluation.

    The gateway gets any free port, because the gateway of the training occupies the configured one. Evaluations have no
    overlong penalty, whose buffer may be larger than their completions.
    """
    learner = eval_set.run.learner
    changed = msgspec.structs.replace(
        learner,
        sampling=msgspec.structs.replace(learner.sampling, max_tokens=max_tokens_of(eval_set)),
        environment=msgspec.structs.replace(learner.environment, gateway_port=0),
        reward=msgspec.structs.replace(learner.reward, overlong_buffer_tokens=None),
    )
    return msgspec.structs.replace(eval_set.run, learner=changed)


def max_tokens_of(eval_set: EvalSet) -> int:
    """Return the maximum number of tokens of a turn."""
    return eval_set.config.max_tokens or eval_set.run.learner.sampling.max_tokens


async def episodes_of(eval_set: EvalSet, client: OpenAIClient, served: ListedModel, prompt: Prompt) -> PromptAnswers:
    """Play all episodes of one prompt. Raises EvaluationError."""
    assert eval_set.player is not None
    most = eval_set.run.learner.environment.max_episode_tokens or served.max_model_len
    if most is None:
        raise EvaluationError(
            f"{eval_set.url}/models does not report the maximum sequence length (max_model_len, as vLLM does); set "
            "learner.environment.max_episode_tokens"
        )
    turns = EpisodeTurns(eval_set, client, served, prompt)
    num_samples = eval_set.config.num_samples
    group = await eval_set.player.play(
        f"of prompt {prompt.prompt_id}", prompt, turns.ask, num_episodes=num_samples, max_tokens=most
    )
    if turns.failure is not None:
        raise turns.failure
    return PromptAnswers(
        texts_K=[],
        token_ids_K=None,
        num_tokens=num_sampled(group),
        is_finished_K=filled([one.stats.state not in AT_A_LIMIT for one in group.episodes], num_samples, True),
        versions=turns.versions,
        played=pack(group),
    )


class EpisodeTurns:
    """Turns of one prompt's episodes, sampled through a server's OpenAI API."""

    def __init__(self, eval_set: EvalSet, client: OpenAIClient, served: ListedModel, prompt: Prompt) -> None:
        self._eval_set, self._client, self._served, self._prompt = eval_set, client, served, prompt
        self.versions: tuple[int, int] | None = None
        self.failure: EvaluationError | None = None
        """Reason why the evaluation cannot continue, raised after the episodes have ended."""

    async def ask(self, turn: TurnPrompt) -> TurnResult | None:
        if self.failure is not None:
            return None
        try:
            answer = await answer_of(self._eval_set, self._client, self._request(turn))
            if answer.token_ids_K is None:
                raise EvaluationError(
                    f"the server at {self._eval_set.url} does not return the token ids of its answers "
                    "(return_token_ids), which episodes need; set learner.evaluation.url to a Slipstream or vLLM "
                    "server"
                )
        except EvaluationError as error:
            self.failure = error
            return None
        if answer.versions is not None:
            low, high = self.versions or answer.versions
            self.versions = (min(low, answer.versions[0]), max(high, answer.versions[1]))
        (token_ids,), (is_finished,) = answer.token_ids_K, answer.is_finished_K
        return self._sampled(token_ids, is_finished=is_finished) if token_ids else None

    def _request(self, turn: TurnPrompt) -> dict[str, Any]:
        config, environment = self._eval_set.config, self._eval_set.run.learner.environment
        prompt = msgspec.structs.replace(self._prompt, token_ids=turn.token_ids.tolist())
        request = request_of(self._eval_set, self._served.name, prompt)
        episode = self._prompt.prompt_id * config.num_samples + turn.episode
        return request | {
            "n": 1,
            "max_tokens": turn.max_tokens,
            "seed": (episode * environment.max_turns + turn.number) % 2**31,
            "stop": [*request["stop"], *turn.stop],
            "skip_special_tokens": False,
        }

    def _sampled(self, token_ids: list[int], *, is_finished: bool) -> TurnResult:
        """Return the turn with placeholder logprobs and version, as nothing trains on it."""
        completion = Completion(
            token_ids=np.array(token_ids, np.int32),
            behavior_logprobs=np.zeros(len(token_ids), np.float32),
            versions=[(0, len(token_ids))],
            finish_reason="stop" if is_finished else "length",
        )
        return TurnResult(Group(group_id="evaluated", entered_version=0, completions=[completion]), self._eval_set.url)


async def rate_played(
    eval_set: EvalSet, workers: RewardWorkers, prompt: Prompt, played: bytes, state: TrainerState
) -> GroupRewards:
    """Rate all samples as in training."""
    episodes = unpack(played, EpisodeGroup).episodes
    num_samples, names = eval_set.config.num_samples, eval_set.run.learner.reward.names
    if not any(episode.stats.state in REWARDED for episode in episodes):
        nothing: list[float | None] = [None] * num_samples
        return GroupRewards(rewards=nothing, functions=[FunctionRewards(name=name, rewards=nothing) for name in names])
    scorer = Scorer(eval_set.run.learner, eval_set.tokenizer, workers)
    rewards = await scorer.rate(prompt, episodes, state)
    return GroupRewards(
        rewards=filled(rewards.rewards, num_samples, None),
        functions=[
            msgspec.structs.replace(one, rewards=filled(one.rewards, num_samples, None)) for one in rewards.functions
        ],
    )


def ends_of(answers: Sequence[PromptAnswers]) -> tuple[dict[str, int], float]:
    """Return the number of episodes by end state, also 0, and the mean number of turns.

    All answers must be played.
    """
    ends: Counter[str] = Counter()
    num_turns = 0
    for answer in answers:
        assert answer.played is not None
        stats = [episode.stats for episode in unpack(answer.played, EpisodeGroup).episodes]
        ends.update(one.state for one in stats)
        ends[SILENT] += len(answer.is_finished_K) - len(stats)
        num_turns += sum(one.num_turns for one in stats)
    return {state: ends[state] for state in (*get_args(EndState), SILENT)}, num_turns / ends.total()


def filled(values: Sequence[T], count: int, rest: T) -> list[T]:
    """Pad values with `rest`, for episodes without tokens, which the group omits."""
    return [*values, *[rest] * (count - len(values))]
