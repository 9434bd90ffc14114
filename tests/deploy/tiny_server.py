"""A server of the tiny model as `slipstream serve` starts one, without vLLM: `python -m tests.deploy.tiny_server
run.toml [--key value ...]`."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

import numpy as np

from inference_server.config import ServerRun
from inference_server.engine.interface import Sampled
from inference_server.server import Server
from inference_server.shutdown import until_ended
from protocol.channel.keys import server_keys
from protocol.channel.sockets import ServerChannel
from protocol.config import load_config
from protocol.messages import Sampling
from protocol.model_files import fingerprint, resolve_model
from tests.learner.model_engine import ModelEngine

GENERATE_S = 0.2
"""What a group takes, so that a run lasts until it has been struck."""


class SlowModelEngine(ModelEngine):
    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        await asyncio.sleep(GENERATE_S)
        async for sampled in super().generate(prompt_token_ids, sampling, salt, experts_from):
            yield sampled


async def serve(run: ServerRun) -> None:
    path = resolve_model(run.model)
    assert run.keys is not None, "beyond loopback there are always keys"
    engine, channel = SlowModelEngine(path), ServerChannel(run.endpoint, server_keys(run.keys))
    server = Server(channel, engine, fingerprint(path), run.server)
    try:
        await until_ended([server.serve()], server.drain.run)
    finally:
        channel.close()
        engine.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(load_config(ServerRun, sys.argv[1:], "tiny server")))
