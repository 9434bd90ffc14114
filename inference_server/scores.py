"""The answer to one Score: logprobs that the engine gives to tokens, or why there are none."""

import asyncio

import numpy as np

from inference_server.engine.interface import Engine, EngineFailed
from inference_server.groups import why_not_tokens
from protocol.messages import Score, Scores


async def scores_of(request: Score, engine: Engine, *, has_weights: bool) -> Scores:
    """Raises EngineDead."""
    limits = engine.limits
    if not has_weights:
        return no_scores(request.request_id, "the server has no weights of this run yet; push before scoring")
    if request.replica >= limits.num_replicas:
        has = f"the server has {limits.num_replicas} (server.data_parallel_size)"
        return no_scores(request.request_id, f"replica {request.replica} was asked, counted from 0, and {has}")
    if problem := why_not_tokens(request.token_ids, limits):
        return no_scores(request.request_id, problem)
    # vLLM scores a prompt on the way to a first token, which needs a place of its own.
    if not 2 <= len(request.token_ids) < limits.max_model_len:
        expected = f"2 to {limits.max_model_len - 1} (server.max_model_len - 1)"
        return no_scores(request.request_id, f"{len(request.token_ids)} tokens came to score; expected {expected}")
    try:
        async with asyncio.timeout(request.deadline_s):
            logprobs, version = await engine.score(request.token_ids, request.replica)
    except TimeoutError:
        return no_scores(request.request_id, f"not scored within the request's deadline of {request.deadline_s:g} s")
    except EngineFailed as error:
        return no_scores(request.request_id, str(error))
    return Scores(request_id=request.request_id, logprobs=logprobs, policy_version=version)


def no_scores(request_id: str, error: str) -> Scores:
    """Say why there are none."""
    return Scores(request_id=request_id, logprobs=np.zeros(0, dtype=np.float32), policy_version=None, error=error)
