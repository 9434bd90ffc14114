"""A policy of a given shape with random weights, ready to train, and rows for it.

For tests/bench/step.py. Every row has the advantage 1 and the objective is the plain policy gradient, so the step's
loss is a weighted sum of -log p, which the oracle computes in one line.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from learner.config import LearnerRun
from learner.environments.episode import TokenSequence
from learner.run_inputs import RunInputs
from learner.training.batch import BatchRow
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from protocol.model_files import resolve_model
from tests.bench.push_transport import QWEN2_HALF_B

SMALL = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""2.66 million parameters, as in tests/bench/against_trl.py."""
HALF_B = {**QWEN2_HALF_B, "num_hidden_layers": 24, "max_position_embeddings": 32_768, "rope_theta": 1e6}
ONE_AND_A_HALF_B = {
    **HALF_B, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
}  # fmt: skip
"""Qwen/Qwen2.5-1.5B, as published."""
VERSION = 0


def make_model(shape: dict[str, Any], path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a random Qwen2 as a checkpoint that the config key `model` accepts."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**shape, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # the fastest device for random numbers
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(path)
    _tokenizer(shape).save_pretrained(path)


def _tokenizer(shape: dict[str, Any]) -> PreTrainedTokenizerFast:
    """That of the digits, with a token for every other id, so that whatever is sampled can be decoded."""
    digits = AutoTokenizer.from_pretrained(resolve_model("tiny:digits"))
    spec = json.loads(digits.backend_tokenizer.to_str())
    spec["model"]["vocab"] |= {f"<{i}>": i for i in range(len(digits), shape["vocab_size"])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)), pad_token=digits.pad_token, eos_token=digits.eos_token,
        model_max_length=shape["max_position_embeddings"], clean_up_tokenization_spaces=False,
    )  # fmt: skip


def load_trainer(path: Path, *, dtype: str = "float32", on_cpu: bool = True, **learner: Any) -> PolicyTrainer:
    settings = {
        "steps": 1,
        "data": {"task": "reverse"},
        "reward": {"functions": ["exact_match"]},
        "loss": {"objective": "reinforce"},
    }
    run = {"model": str(path), "dtype": dtype, "run_dir": "unused", "learner": settings | learner}
    return make_trainer(
        RunInputs(msgspec.convert(run, LearnerRun)), Accelerator(cpu=on_cpu, mixed_precision="no"), is_new=True
    )


def make_rows(
    num_groups: int, group_size: int, num_prompt: int, num_completion: int, vocab_size: int, *, num_branches: int = 1,
    num_said: int = 0
) -> list[BatchRow]:  # fmt: skip
    """Return groups of one shape. Each branch has a prompt that is `num_said` tokens longer than the previous one."""
    rng = np.random.default_rng(0)
    episodes = itertools.count()
    num_tokens = num_groups * group_size * num_branches * num_completion

    def ids(count: int) -> np.ndarray:
        return rng.integers(1, vocab_size, count).astype(np.int32)

    def row(before: np.ndarray, group: int, episode: int) -> BatchRow:
        branch = TokenSequence(
            token_ids=ids(num_completion),
            behavior_logprobs=np.full(num_completion, -np.log(vocab_size), np.float32),
            versions=[(VERSION, num_completion)],
            finish_reason="stop",
        )
        return BatchRow(
            prompt_token_ids=before, branch=branch, group=group, episode=episode, advantage=1.0, weight=1 / num_tokens,
            entered_version=VERSION,
        )  # fmt: skip

    rows: list[BatchRow] = []
    for group in range(num_groups):
        prompt = ids(num_prompt)
        for _ in range(group_size):
            before, episode = prompt, next(episodes)
            for _ in range(num_branches):
                rows.append(row(before, group, episode))
                before = np.concatenate([before, ids(num_said)])
    return rows


def apart(rows: list[BatchRow]) -> list[BatchRow]:
    """Return the same rows without shared prefixes."""
    return [msgspec.structs.replace(row, group=number) for number, row in enumerate(rows)]
