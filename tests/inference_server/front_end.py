"""vLLM's own front end without an engine: what its engine would send comes from the test."""

from copy import copy

import numpy as np
from vllm.outputs import CompletionOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists


def output_of(index: int, token: int, finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    """What an engine makes of one token of a completion."""
    logprobs = LogprobsLists(np.array([[token]], np.int32), np.array([[-float(token)]], np.float32), np.array([token]))
    return EngineCoreOutput(f"{index}_r", [token], logprobs, finish_reason=finish_reason)


class FrontEnd:
    """With one group in it, "r", whose completions are requests "0_r", "1_r" and so on to the engine."""

    def __init__(self, params: SamplingParams) -> None:
        self._processor = OutputProcessor(tokenizer=None, log_stats=False)
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=[1], mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, external_req_id="r",
        )  # fmt: skip
        self.queue = RequestOutputCollector(params.output_kind, "r")
        parent = ParentRequest(request)
        self.requests: list[EngineCoreRequest] = []
        """What the engine gets."""
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.requests.append(child)
            self._processor.add_request(child, None, parent, index, self.queue)

    def take(self, outputs: list[EngineCoreOutput], version: str = "3") -> list[CompletionOutput]:
        """Take what the engine has sent; return what comes out."""
        self._processor.process_outputs(outputs, weight_version=version)
        out = self.queue.get_nowait()
        return out.outputs if out is not None else []

    def sample(self, index: int, token: int, finish_reason: FinishReason | None = None) -> list[CompletionOutput]:
        """Let the engine sample one token of a completion; return what comes out."""
        return self.take([output_of(index, token, finish_reason)])
