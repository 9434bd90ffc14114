"""Seeds on a CPU, where a seeded request with a chunked prefill would kill vLLM's engine.

Each chunk samples a token that vLLM discards. vLLM then rewinds the request's generator, which works only on
a GPU (vLLM 0.32: "CPU Generator does not use offset"). Here, such a request has no generator while the step
samples. Its first token always uses the first number of its seed, however its prompt is chunked.
"""

from functools import wraps
from typing import Any

import numpy as np
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def keep_seeds_of_chunked_prompts() -> None:
    """Patch vLLM's model runner in this process."""
    sample_tokens = CPUModelRunner.sample_tokens

    @wraps(sample_tokens)
    def sample_without_unfinished_generators(runner: Any, *args: Any) -> Any:
        generators = runner.input_batch.generators
        unfinished = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0].tolist()
        set_aside = {row: generators.pop(row) for row in unfinished if row in generators}
        try:
            return sample_tokens(runner, *args)
        finally:
            generators.update(set_aside)

    CPUModelRunner.sample_tokens = sample_without_unfinished_generators
