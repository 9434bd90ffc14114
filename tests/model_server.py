"""`python -m tests.model_server ENDPOINT KEYS`: the real server with a transformers model in vLLM's place, for seconds per run."""

import asyncio
import logging
import sys

import torch

from protocol.channel.keys import server_keys
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import serving
from tests.learner.model_engine import ModelEngine


async def serve(endpoint: str, keys: str) -> None:
    path = resolve_model("tiny:digits")
    async with serving(
        ModelEngine(path), model=fingerprint(path), endpoint=endpoint, keys=server_keys(keys)
    ) as running:
        logging.info("ready")
        await running.task


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    asyncio.run(serve(*sys.argv[1:]))
