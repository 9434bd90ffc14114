"""Print the logprobs of plain vLLM as JSON: `python -m tests.zoo.plain_vllm MODEL TOKENS`."""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from vllm import LLM, SamplingParams


def logprobs(model: str, token_ids: list[int]) -> list[float]:
    llm = LLM(
        model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, block_size=32, max_num_seqs=4,
        max_model_len=128,
    )  # fmt: skip
    prompt = {"prompt_token_ids": token_ids}
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]


if __name__ == "__main__":
    model, tokens = sys.argv[1:]
    print(json.dumps(logprobs(model, json.loads(tokens))), flush=True)
    os._exit(0)  # there is nothing to save, and vLLM unloads slowly
