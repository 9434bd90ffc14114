"""An engine that samples from a real transformers model with pushed weights: a slow substitute for vLLM.

Every completion has its own seed, so samples depend only on weights, prompt and seed.

    python -m tests.learner.model_engine tcp://10.77.0.1:5757 KEYS     serves the tiny model until it is killed
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_server.engine.interface import EngineLimits
from protocol.channel.keys import server_keys
from protocol.messages import Completion, Sampling
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ScriptedEngine, ServerThread

TINY_LIMITS = EngineLimits(
    max_model_len=64, vocab_size=16, dtype="float32", num_workers=1, max_concurrent_sequences=256
)


def sample(
    model: Any, prompt: list[int], seed: int, max_tokens: int, stops: frozenset[int] = frozenset()
) -> tuple[list[int], list[float]]:
    """Sample a completion up to and including <eos> or a stop token. Return tokens and their logprobs."""
    (sampled,) = sample_group(model, prompt, [seed], max_tokens, stops)
    return sampled


@torch.no_grad()
def sample_group(
    model: Any, prompt: list[int], seeds: Sequence[int], max_tokens: int, stops: frozenset[int] = frozenset()
) -> list[tuple[list[int], list[float]]]:
    """Sample a completion for each seed, in one batch."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sampled: list[tuple[list[int], list[float]]] = [([], []) for _ in seeds]
    ends = stops | {model.config.eos_token_id}
    unfinished = list(range(len(seeds)))
    while unfinished and len(sampled[unfinished[0]][0]) < max_tokens:
        ids_BT = torch.tensor([prompt + sampled[index][0] for index in unfinished])
        logprobs_BV = model(ids_BT).logits[:, -1].log_softmax(-1)
        for index, logprobs_V in zip(unfinished, logprobs_BV, strict=True):
            tokens, logprobs = sampled[index]
            tokens.append(int(torch.multinomial(logprobs_V.exp(), 1, generator=generators[index])))
            logprobs.append(float(logprobs_V[tokens[-1]]))
        unfinished = [index for index in unfinished if sampled[index][0][-1] not in ends]
    return sampled


class ModelEngine(ScriptedEngine):
    """A scripted engine that samples from a model. Unseeded requests are numbered."""

    def __init__(self, model_path: Path, limits: EngineLimits = TINY_LIMITS) -> None:
        super().__init__(limits=limits)
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._token_of = AutoTokenizer.from_pretrained(model_path).get_vocab()
        self._num_unseeded = 0

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name])

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        if sampling.seed is None:
            self._num_unseeded += 1
        seed = self._num_unseeded if sampling.seed is None else sampling.seed + index
        stops = self._stops_of(sampling)
        return self._completion_of(*sample(self.model, prompt, seed, sampling.max_tokens, stops), stops)

    def _stops_of(self, sampling: Sampling) -> frozenset[int]:
        return frozenset(self._token_of[text] for text in sampling.stop)

    def _completion_of(self, tokens: list[int], logprobs: list[float], stops: frozenset[int]) -> Completion:
        assert self.version is not None
        return Completion(
            token_ids=np.array(tokens, np.int32),
            behavior_logprobs=np.array(logprobs, np.float32),
            versions=[(self.version, len(tokens))],
            finish_reason="stop" if tokens[-1] in stops | {self.model.config.eos_token_id} else "length",
        )

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        ids = torch.from_numpy(token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs_TV = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(1, ids[1:, None])[:, 0].numpy(), self.version


def tiny_server(engine: ScriptedEngine | None = None, endpoint: str = "tcp://127.0.0.1:*") -> ServerThread:
    """Return a server of the tiny model, on a free port by default."""
    path = resolve_model("tiny:digits")
    return ServerThread(engine or ModelEngine(path), model=fingerprint(path), endpoint=endpoint)


class VersionedEngine(ModelEngine):
    """An engine of the tiny model that records its versions and calls `on_version` for each."""

    def __init__(self, limits: EngineLimits = TINY_LIMITS) -> None:
        super().__init__(resolve_model("tiny:digits"), limits)
        self.on_version: dict[int, Any] = {}
        self.versions: list[int] = []

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        self.versions.append(version)
        if act := self.on_version.pop(version, None):
            act()


@contextmanager
def tiny_servers(*engines: ModelEngine) -> Iterator[list[ServerThread]]:
    with ExitStack() as cleanup:
        yield [cleanup.enter_context(tiny_server(engine)) for engine in engines]


if __name__ == "__main__":
    tiny_model = resolve_model("tiny:digits")
    of_tiny = {"model": fingerprint(tiny_model), "endpoint": sys.argv[1], "keys": server_keys(sys.argv[2])}
    with ServerThread(ModelEngine(tiny_model), **of_tiny):
        print("ready", flush=True)
        threading.Event().wait()
