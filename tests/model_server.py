"""`python -m tests.model_server ENDPOINT [KEYS]`: the real server with a transformers model in vLLM's place, for seconds per run.

A signal drains and ends it, as it does `inference-server`.
"""

import asyncio
import logging
import sys

import torch

from inference_server.config import ServerConfig
from inference_server.server import Server
from inference_server.shutdown import until_ended
from protocol.channel.keys import server_keys
from protocol.channel.sockets import ServerChannel
from protocol.model_files import fingerprint, resolve_model
from tests.learner.model_engine import ModelEngine


async def serve(endpoint: str, keys: str | None = None) -> None:
    path = resolve_model("tiny:digits")
    engine, channel = ModelEngine(path), ServerChannel(endpoint, server_keys(keys) if keys is not None else None)
    server = Server(channel, engine, fingerprint(path), ServerConfig())
    logging.info("ready")
    try:
        await until_ended([server.serve()], server.drain.run)
    finally:
        channel.close()
        engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stdout)
    asyncio.run(serve(*sys.argv[1:]))
