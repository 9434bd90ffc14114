"""Print the logprobs of plain vLLM as JSON: `python -m tests.zoo.plain_vllm MODEL TOKENS [ADAPTER]`."""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def logprobs(model: str, token_ids: list[int], adapter: str | None = None) -> list[float]:
    llm = LLM(
        model, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, block_size=32, max_num_seqs=4,
        max_model_len=128, enable_lora=adapter is not None, max_lora_rank=8,
    )  # fmt: skip
    prompt = {"prompt_token_ids": token_ids}
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=lora)
    return [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]


if __name__ == "__main__":
    model, tokens, *adapter = sys.argv[1:]
    print(json.dumps(logprobs(model, json.loads(tokens), *adapter)), flush=True)
    os._exit(0)  # there is nothing to save, and vLLM unloads slowly
