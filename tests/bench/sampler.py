"""Sample groups in the learner's process, from weights that are a fixed number of versions old.

Replaces the server and the rollouts of a run. Invariant: the behavior logprobs are those of the sampling weights at
temperature 1, and the groups of version v are sampled from the weights of version max(0, v - staleness).

Suffixes: P prompts, G completions of one, B rows (P · G), S prompt tokens, T completion tokens, V vocabulary.
"""

import copy
from collections import deque

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.environments.episode import TokenSequence
from learner.prompts.prompts import Prompt, Prompts
from learner.rewards.function import BUILT_IN
from learner.rollouts.rollout_group import RolloutGroup
from tests.learner.policy.plain import ordinary


class StaleSampler:
    """Keeps the weights of the last versions and samples from the oldest."""

    def __init__(
        self, policy: PreTrainedModel, prompts: Prompts, tokenizer: PreTrainedTokenizerBase, config: LearnerConfig,
        seed: int
    ) -> None:  # fmt: skip
        self._prompts, self._tokenizer, self._config = prompts, tokenizer, config
        self._generator = torch.Generator().manual_seed(seed)
        self._actor = copy.deepcopy(policy).eval().requires_grad_(False)
        self._weights: deque[list[torch.Tensor]] = deque(maxlen=config.max_staleness + 1)
        self._version = -1
        self.publish(policy)

    def publish(self, policy: PreTrainedModel) -> None:
        """Store the weights of the next version."""
        self._weights.append([parameter.detach().clone() for parameter in policy.parameters()])
        self._version += 1

    def groups(self) -> list[RolloutGroup]:
        """Sample and score the groups of the next step."""
        num_groups, num_completions = self._config.groups_per_step, self._config.sampling.group_size
        with torch.no_grad():
            for mine, old in zip(self._actor.parameters(), self._weights[0], strict=True):
                mine.copy_(old)
        first = self._version * num_groups
        prompts = [self._prompts.prompt_at(first + i) for i in range(num_groups)]
        completions = sample(
            self._actor, prompts, num_completions, self._config.sampling.max_tokens,
            version=max(0, self._version - self._config.max_staleness), generator=self._generator,
        )  # fmt: skip
        texts = decode(self._tokenizer, completions)
        return [
            self._scored(first + i, prompt, completions[i * num_completions :][:num_completions],
                         texts[i * num_completions :][:num_completions])
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip

    def _scored(self, slot: int, prompt: Prompt, completions: list[TokenSequence], texts_G: list[str]) -> RolloutGroup:
        reward = self._config.reward
        columns = {name: [value] * len(texts_G) for name, value in prompt.columns.items()}
        by_function = {name: BUILT_IN[name](completions=texts_G, **columns) for name in reward.functions}
        weights = reward.weights or (1.0,) * len(reward.functions)
        rewards_G = [
            sum(weight * value for weight, value in zip(weights, values, strict=True))
            for values in zip(*by_function.values(), strict=True)
        ]
        return RolloutGroup(
            group_id=str(slot),
            slot=slot,
            prompt_token_ids=np.array(prompt.token_ids, np.int32),
            completions=completions,
            rewards_G=rewards_G,
            rewards_by_function=by_function,
            entered_version=min(completions[0].sampled_versions),
        )


def exact_match(
    policy: PreTrainedModel, prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> float:
    """Return the share of prompts whose greedy completion is the answer."""
    texts = decode(tokenizer, sample(policy, prompts, 1, max_tokens, version=0, generator=None))
    return float(np.mean([text == prompt.columns["answer"] for text, prompt in zip(texts, prompts, strict=True)]))


def decode(tokenizer: PreTrainedTokenizerBase, completions: list[TokenSequence]) -> list[str]:
    ids = [completion.token_ids.tolist() for completion in completions]
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True))


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[Prompt],
    num_completions: int,
    max_tokens: int,
    *,
    version: int,
    generator: torch.Generator | None,
) -> list[TokenSequence]:
    """Return `num_completions` for each prompt, in order. Without a generator: greedy.

    All prompts must have the same length, so that nothing is padded.
    """
    cache = DynamicCache()
    mask_BS = torch.ones(len(prompts) * num_completions, len(prompts[0].token_ids) + max_tokens)
    input_ids_PS = torch.tensor([prompt.token_ids for prompt in prompts])
    logits_BV = next_logits(model, input_ids_PS, mask_BS, cache)
    cache.batch_repeat_interleave(num_completions)
    logits_BV = logits_BV.repeat_interleave(num_completions, dim=0)
    tokens, logprobs = [], []
    while True:
        logprobs_BV = logits_BV.float().log_softmax(-1)
        if generator is None:
            tokens_B1 = logprobs_BV.argmax(-1, keepdim=True)
        else:
            tokens_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        tokens.append(tokens_B1)
        logprobs.append(logprobs_BV.gather(-1, tokens_B1))
        if len(tokens) == max_tokens:
            break
        logits_BV = next_logits(model, tokens_B1, mask_BS, cache)
    return _cut_at_end(
        torch.cat(tokens, dim=1).numpy(), torch.cat(logprobs, dim=1).numpy(), model.config.eos_token_id, version
    )


def next_logits(
    model: PreTrainedModel, input_ids_BS: torch.Tensor, mask_BS: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Return the logits_BV of the next token. The mask only avoids a warning of transformers."""
    num_rows, num_seen = len(input_ids_BS), cache.get_seq_length() + input_ids_BS.shape[1]
    with ordinary(model):
        output = model(
            input_ids=input_ids_BS,
            attention_mask=mask_BS[:num_rows, :num_seen],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return output.logits[:, -1]


def _cut_at_end(tokens_BT: np.ndarray, logprobs_BT: np.ndarray, eos: int, version: int) -> list[TokenSequence]:
    is_end_BT = tokens_BT == eos
    ended_B = is_end_BT.any(axis=1)
    lengths_B = np.where(ended_B, is_end_BT.argmax(axis=1) + 1, tokens_BT.shape[1]).tolist()
    return [
        TokenSequence(
            token_ids=token_ids_T[:length].astype(np.int32),
            behavior_logprobs=logprobs_T[:length],
            versions=[(version, length)],
            finish_reason="stop" if ended else "length",
        )
        for token_ids_T, logprobs_T, length, ended in zip(tokens_BT, logprobs_BT, lengths_B, ended_B, strict=True)
    ]
