"""The baseline of the server benchmark: `vllm.LLM.generate` in a separate process, on the server's cores.

    benchmark ── Order (pipe) ──▶ vllm.LLM.generate ── Generated (pipe) ──▶ benchmark

Nothing slows vLLM's defaults down: the engine runs in the calling process, step statistics are not sent, requests have
no priorities, and outputs are returned once, at the end.
"""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from inference_server.config import ServerRun
from protocol.hardware import bind_cores
from protocol.messages import Sampling

START_TIMEOUT_S = 240.0
GENERATE_TIMEOUT_S = 1200.0


class Order(NamedTuple):
    """Groups to generate: one prompt each, and the sampling options."""

    prompts: list[list[int]]
    samplings: list[Sampling]


class Generated(NamedTuple):
    """The result of an order."""

    seconds: float
    cpu_seconds: float
    """CPU time of all generating processes, which is comparable even on a busy machine."""
    token_ids: list[list[list[int]]]
    """Tokens by group and completion."""


class BareVllm:
    """The process of bare vLLM."""

    def __init__(self, run: ServerRun, eos_token_id: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, run, eos_token_id), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(START_TIMEOUT_S)

    def generate(self, order: Order) -> Generated:
        self._pipe.send(order)
        return self._answer(GENERATE_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"bare vLLM did not answer within {timeout_s:g} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def serve(pipe: Connection, run: ServerRun, eos_token_id: int) -> None:
    """Run the process."""
    bind_cores(run.server.cpu_cores)
    # The first two place vLLM's threads and processes as the server's; the rest are vLLM's defaults.
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    server = run.server
    llm = LLM(
        model=run.model, dtype=run.dtype, seed=run.seed, max_model_len=server.max_model_len,
        max_num_seqs=server.max_concurrent_sequences, kv_cache_memory_bytes=(server.kv_cache_memory_mib or 0) << 20,
        block_size=server.block_size, enforce_eager=server.enforce_eager, enable_prefix_caching=True,
        logprobs_mode="processed_logprobs", generation_config="vllm", distributed_executor_backend="uni",
        use_tqdm_on_load=False,
    )  # fmt: skip
    pipe.send("ready")
    while True:
        order: Order = pipe.recv()
        prompts = [{"prompt_token_ids": prompt} for prompt in order.prompts]
        params = [
            SamplingParams(
                n=sampling.num_completions, seed=sampling.seed, temperature=sampling.temperature,
                max_tokens=sampling.max_tokens, stop_token_ids=[eos_token_id], logprobs=0, flat_logprobs=True,
                detokenize=False, skip_special_tokens=False,
            )
            for sampling in order.samplings
        ]  # fmt: skip
        began_at, cpu_began_at = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - began_at, time.process_time() - cpu_began_at
        # A repeated prompt would hit the prefix cache, which every push clears on the other side.
        llm.reset_prefix_cache()
        token_ids = [[list(completion.token_ids) for completion in one.outputs] for one in outputs]
        pipe.send(Generated(seconds, cpu_seconds, token_ids))
