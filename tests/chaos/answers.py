"""The audit of evaluation answers: each is greedy under the weights that it names, and has the correct reward.

The learner's process keeps the weights of every version before it pushes them. A resume trains some versions again, so
an answer is correct if any weights of its version give it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from protocol.model_files import resolve_model
from tests.chaos.evaluations import Line
from tests.chaos.learner_process import WEIGHTS
from tests.chaos.versions import TOLERANCE


class AnswerAudit:
    """The check of one run's answers."""

    def __init__(self, directory: Path, config: LearnerRun) -> None:
        path = resolve_model(config.model)
        self._tokenizer = load_tokenizer(path)
        self._prompts = {
            name: Prompts(
                msgspec.structs.replace(config.learner.data, shuffle=False, num_prompts=each.num_prompts),
                self._tokenizer,
                config.seed,
            )
            for name, each in config.learner.evaluation.sets.items()
        }
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._weights = directory / WEIGHTS

    def problems(self, line: Line, answers: Sequence[Line]) -> list[str]:
        """Return a description of each problem. `answers`: in the order of the prompts."""
        prompts = [self._prompts[line["set_name"]].prompt_at(place).token_ids for place in range(len(answers))]
        tokens = [answer["token_ids_K"][0] for answer in answers]
        found = [
            f"has the reward {rated} for prompt {place}, whose answer is worth {worth}"
            for place, rated in enumerate(line["rewards_P"][: len(answers)])
            if rated != (worth := self._worth(prompts[place], tokens[place]))
        ]
        for low, high in {tuple(answer["versions"]) for answer in answers}:
            if low == high:  # a mixture does not say which token is from which version
                places = [place for place, answer in enumerate(answers) if answer["versions"] == [low, high]]
                found += self._unlike(low, {place: (prompts[place], tokens[place]) for place in places})
        return found

    def _worth(self, prompt: list[int], tokens: list[int]) -> float:
        """Return the share of correct characters, counting the end of the text as one."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        gold = self._tokenizer.decode(prompt, skip_special_tokens=True).removesuffix(">")[::-1]
        num_right = sum(char == gold_char for char, gold_char in zip(text, gold, strict=False)) + (
            len(text) == len(gold)
        )
        return num_right / (len(gold) + 1)

    @torch.no_grad()
    def _unlike(self, version: int, answers: Mapping[int, tuple[list[int], list[int]]]) -> list[str]:
        worst = dict.fromkeys(answers, float("inf"))
        for path in self._weights.glob(f"{version}-*.safetensors"):
            self._model.load_state_dict(load_file(path), strict=False)
            for place, (prompt, tokens) in answers.items():
                logits_TV = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                chosen_T = logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                worst[place] = min(worst[place], float((logits_TV.max(1).values - chosen_T).max()))
        return [
            f"has an answer to prompt {place} by version {version} whose weights prefer another token by {gap:.1e}"
            for place, gap in worst.items()
            if gap > TOLERANCE
        ]
