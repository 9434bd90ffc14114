"""The real protocol server with an engine that samples in Python: a substitute for vLLM that starts quickly.

The engine loads a push bucket by bucket, as vLLM does. An interrupted push leaves a mix of old and new layers, so
tokens show it when the server samples from torn weights.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import numpy as np
import torch

from inference_server.config import ServerRun
from inference_server.engine.interface import Sampled
from inference_server.server import Server
from inference_server.shutdown import until_ended
from protocol.channel.sockets import ServerChannel
from protocol.config import load_config
from protocol.messages import Completion, Sampling
from protocol.model_files import fingerprint, resolve_model
from tests.chaos.fake_http import serve_http
from tests.chaos.server_process import set_traps
from tests.fakes import ScriptedEngine
from tests.learner.model_engine import ModelEngine, sample_group


def run(chaos_dir: Path, arguments: list[str]) -> None:
    """Serve until killed or shut down."""
    set_traps(chaos_dir, calls=("pause", "load_push"))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    asyncio.run(_serve(load_config(ServerRun, arguments, "fake server")))


async def _serve(config: ServerRun) -> None:
    path = resolve_model(config.model)
    engine, channel = InPlaceModelEngine(path), ServerChannel(config.endpoint)
    server = Server(channel, engine, fingerprint(path), config.server)
    work = [server.serve()]
    if config.server.http_port:
        work.append(serve_http(engine, server.status, config.server.http_port))
    try:
        await until_ended(work, server.drain.run)
    finally:
        channel.close()
        engine.close()


GENERATE_S = 0.1
"""Time that a group takes, so that every push finds groups in flight."""


class InPlaceModelEngine(ModelEngine):
    """`ModelEngine` that loads a push in place."""

    def __init__(self, model_path: Path) -> None:
        super().__init__(model_path)
        self._parameters = dict(self.model.named_parameters())
        self._num_groups = 0

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        """Report every other group as started, so that a draining server has started and waiting groups."""
        self._num_groups += 1
        if self._num_groups % 2 and self.version is not None:
            yield Sampled(entered_version=self.version, salt=salt, completions={})
        async for sampled in super().generate(prompt_token_ids, sampling, salt, experts_from):
            yield sampled

    async def sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> tuple[list[Completion], int]:
        await asyncio.sleep(GENERATE_S)
        return await super().sample(prompt_token_ids, sampling)

    def _completions(self, prompt: list[int], sampling: Sampling) -> list[Completion]:
        """Sample a group in one batch: sampling dominates a campaign's cost. A run's requests have no seed."""
        seeds = range(self._num_unseeded, self._num_unseeded + sampling.num_completions)
        self._num_unseeded = seeds.stop
        stops = self._stops_of(sampling)
        group = sample_group(self.model, prompt, seeds, sampling.max_tokens, stops)
        return [self._completion_of(tokens, logprobs, stops) for tokens, logprobs in group]

    def _take(self, views: Iterable[tuple[str, torch.Tensor]], weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in views:
                self._parameters[name].copy_(tensor)

    async def set_version(self, version: int) -> None:
        await ScriptedEngine.set_version(self, version)
