"""A policy that changes a little with every version, and can reproduce each version, to compare vLLM with transformers.

vLLM fuses layers of its models: q, k and v are three tensors, gate and up are two, the head is tied or not. All weights
rotate between two random models, so that the difference of two versions grows with their distance.
"""

import math
from typing import Literal

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from protocol.messages import AdapterSpec, Completion
from tests.inference_server import tiny_gpt2

TURN_RAD = 0.05
"""Change per version, relative to the norm of the weights."""
SPREAD = 0.2
MAX_LEN = 128


def tiny_model(kind: Literal["qwen2", "llama"]) -> PreTrainedModel:
    """Return a Qwen2 (biases, tied head) or a Llama (no biases, untied head) with fewer key heads than query heads."""
    shape = {
        "vocab_size": len(tiny_gpt2.TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1 if kind == "qwen2" else 2,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": tiny_gpt2.EOS, "eos_token_id": tiny_gpt2.EOS, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).eval()
    return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()


class DriftingPolicy:
    """All versions of one model's weights."""

    adapter: AdapterSpec | None = None
    """What `sent` ends with."""

    def __init__(self, kind: Literal["qwen2", "llama"]) -> None:
        torch.manual_seed(0)
        self.skeleton = tiny_model(kind)
        """The model with the weights of the last call of `model`."""
        self._parts = [
            # Norms stay near one: a rotation would pass through zero, where all versions are equal.
            (name, torch.ones_like(one) if "norm" in name else torch.zeros_like(one),
             torch.randn_like(one) * SPREAD, torch.randn_like(one) * SPREAD)
            for name, one in self.skeleton.named_parameters()
        ]  # fmt: skip

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Return the version's weights by checkpoint name, layer by layer, without a tied head."""
        cos, sin = math.cos(TURN_RAD * version), math.sin(TURN_RAD * version)
        return [(name, center + cos * one + sin * other) for name, center, one, other in self._parts]

    def sent(self, version: int, *, again: bool) -> list[tuple[str, torch.Tensor]]:
        """Return what a push of the version sends, in a new session or `again` in the one there is."""
        return self.tensors(version)

    def model(self, version: int) -> PreTrainedModel:
        return with_weights(self.skeleton, self.tensors(version))

    def logprobs(self, version: int, sequences: list[list[int]]) -> list[np.ndarray]:
        """Return the logprobs of each sequence's tokens after the first, from one forward pass."""
        return batch_logprobs(self.model(version), sequences)

    def logprobs_with_old_keys(self, prompt: list[int], completion: Completion) -> np.ndarray:
        """Return the logprobs of the completion's tokens if each version keeps the KV cache of the previous one."""
        tokens = torch.tensor([prompt + completion.token_ids.tolist()])
        cache, logits, start, end = DynamicCache(), [], 0, len(prompt) - 1
        for version, num_tokens in completion.versions:
            end += num_tokens
            with torch.no_grad():
                logits.append(self.model(version)(tokens[:, start:end], past_key_values=cache).logits[0])
            start = end
        logprobs_TV = torch.cat(logits).log_softmax(-1)
        return logprobs_TV.gather(1, tokens[0, 1:, None])[len(prompt) - 1 :, 0].numpy()


class DriftingAdapter(DriftingPolicy):
    """The same model where only an adapter drifts: weights of version 0, and A and B of all linear layers."""

    def __init__(self, kind: Literal["qwen2", "llama"], rank: int = 3, targets: str = "_proj.weight") -> None:
        super().__init__(kind)
        self.frozen = dict(super().tensors(0))
        layers = [name for name in self.frozen if name.endswith(targets)]
        self._pairs = {
            name: [torch.randn(shape) * SPREAD for shape in ((rank, num_inputs), (num_outputs, rank)) for _ in "12"]
            for name in layers
            for num_outputs, num_inputs in [self.frozen[name].shape]
        }
        self.adapter = AdapterSpec(rank=rank, num_tensors=2 * len(layers))

    def adapter_tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Return A and B of each layer. B is zero at version 0, as at the start of a training."""
        turn = TURN_RAD * version
        tensors = []
        for name, (a, other_a, b, other_b) in self._pairs.items():
            stem = name.removesuffix(".weight")
            tensors.append((f"{stem}.lora_A.weight", math.cos(turn) * a + math.sin(turn) * other_a))
            tensors.append((f"{stem}.lora_B.weight", math.sin(turn) * b + (1 - math.cos(turn)) * other_b))
        return tensors

    def sent(self, version: int, *, again: bool) -> list[tuple[str, torch.Tensor]]:
        return ([] if again else list(self.frozen.items())) + self.adapter_tensors(version)

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Return the merged weights, which the adapter's must equal."""
        adapter = dict(self.adapter_tensors(version))
        merged = dict(self.frozen)
        for name in self._pairs:
            stem = name.removesuffix(".weight")
            merged[name] = merged[name] + adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
        return list(merged.items())


def with_weights(model: PreTrainedModel, tensors: list[tuple[str, torch.Tensor]]) -> PreTrainedModel:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            parameters[name].copy_(tensor)
    return model


def batch_logprobs(model: PreTrainedModel, sequences: list[list[int]]) -> list[np.ndarray]:
    """Return the logprobs of each sequence's tokens after the first. Padding follows them and has no effect."""
    longest = max(len(sequence) for sequence in sequences)
    tokens_BT = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    with torch.no_grad():
        logprobs_BTV = model(tokens_BT).logits[:, :-1].log_softmax(-1)
    logprobs_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None])[..., 0].numpy()
    return [row[: len(sequence) - 1] for row, sequence in zip(logprobs_BT, sequences, strict=True)]
