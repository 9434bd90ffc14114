"""Seeds on a CPU: vLLM's engine would die of a seeded request whose prompt it reads in pieces.

Each piece samples a token that is thrown away, and the request's generator is then turned back, which only a GPU's can be
(vLLM 0.32: "CPU Generator does not use offset"). Here such a request has no generator for as long as the step samples, so that its
first token is sampled with the first number of its seed, however its prompt was cut.
"""

from functools import wraps
from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def keep_seeds_of_pieces() -> None:
    """Change vLLM's runner, in this process."""
    sample_tokens = CPUModelRunner.sample_tokens

    @wraps(sample_tokens)
    def sample_with_seeds_of_whole_prompts(runner: Any, *args: Any) -> Any:
        generators = runner.input_batch.generators
        in_pieces = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0].tolist()
        aside = {row: generators.pop(row) for row in in_pieces if row in generators}
        try:
            return sample_tokens(runner, *args)
        finally:
            generators.update(aside)

    CPUModelRunner.sample_tokens = sample_with_seeds_of_whole_prompts
