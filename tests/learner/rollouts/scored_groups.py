"""Groups of two completions, as a server sends them, with given rewards."""

import numpy as np

from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.rollouts.group_requests import GroupRequest
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import ScoredGroup
from learner.rollouts.rollout_group import keep, scored_group
from protocol.messages import Completion, Group

RewardsByFunction = dict[str, list[float]]
SIGNAL: RewardsByFunction = {"exact_match": [0.0, 1.0]}
NO_SIGNAL: RewardsByFunction = {"exact_match": [1.0, 1.0]}


def receive_and_score(
    ledger: Ledger, request: GroupRequest, version: int, rewards: RewardsByFunction = SIGNAL
) -> ScoredGroup:
    """Return a group sampled by this version. The ledger has the group, but no rewards."""
    one = np.ones(1, np.int32)
    completion = Completion(
        token_ids=one, behavior_logprobs=np.zeros(1, np.float32), versions=[(version, 1)], finish_reason="stop"
    )
    group = Group(group_id=request.group_id, entered_version=version, completions=[completion] * 2)
    keep(ledger, [group])
    return score(request, group, rewards)


def score(request: GroupRequest, group: Group, rewards: RewardsByFunction) -> ScoredGroup:
    totals = [sum(values) for values in zip(*rewards.values(), strict=True)]
    functions = [FunctionRewards(name=name, rewards=[*values]) for name, values in rewards.items()]
    scored = GroupRewards(rewards=[*totals], functions=functions)
    return ScoredGroup(scored_group(request.slot, request.prompt, group, scored), request.prompt.prompt_id, scored)
