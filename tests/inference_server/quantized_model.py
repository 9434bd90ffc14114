"""Write the tensors and logprobs of a quantized model:

    python -m tests.inference_server.quantized_model OUT METHOD DTYPE KV_CACHE_DTYPE MODEL…

vLLM loads the first model in this process. The weights of each further one are loaded into it as a weight sync loads them.
On a GPU, decoding steps are CUDA graphs.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config

import inference_server.engine.int8_linear  # noqa: F401  registers its method at vLLM
from inference_server.engine.weight_loader import Reload

TOKENS = [2 + index * 7 % 30 for index in range(60)]
TENSORS_PER_BUCKET = 3


def write(out: Path, method: str, dtype: str, kv_cache_dtype: str, models: Sequence[Path]) -> None:
    has_graphs = torch.cuda.is_available()
    llm = LLM(
        str(models[0]), dtype=dtype, quantization=method, kv_cache_dtype=kv_cache_dtype, enforce_eager=not has_graphs,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if has_graphs else None,
        kv_cache_memory_bytes=64 << 20, block_size=32, max_num_seqs=4,
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    for path in models[1:]:
        tensors = sorted(load_file(path / "model.safetensors").items())
        with set_current_vllm_config(worker.vllm_config):
            reload = Reload(model, worker.vllm_config.model_config, worker.device)
            for start in range(0, len(tensors), TENSORS_PER_BUCKET):
                reload.load(tensors[start : start + TENSORS_PER_BUCKET])
            reload.finish()
    state = model.state_dict()
    assert addresses == {name: tensor.data_ptr() for name, tensor in state.items()}, (
        "CUDA graphs would read old tensors"
    )
    params = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": TOKENS}], params, use_tqdm=False)
    (sampled,) = output.outputs
    of_prompt = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], TOKENS[1:], strict=True)]
    of_sampled = [at[token].logprob for at, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
    torch.save(({name: tensor.cpu() for name, tensor in state.items()}, of_prompt + of_sampled), out)


if __name__ == "__main__":
    out, method, dtype, kv_cache_dtype, *models = sys.argv[1:]
    write(Path(out), method, dtype, kv_cache_dtype, [Path(model) for model in models])
    os._exit(0)  # vLLM unloads slowly
