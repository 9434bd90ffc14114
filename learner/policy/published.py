"""The policy as others see it: which weights leave the house, under which names, and the logprobs it gives.

A push and an export read `tensors`, parity asks for `logprobs`; both are rank 0's alone. An adapter is merged into the weights
it belongs to. The other ranks follow: if the policy is sharded, they have a part in both, and in any case they hear every few
seconds that rank 0, which may wait for hours, is there.

    rank 0       led: waits, pushes, measures ── order ─▶ one tensor gathered, or one pass ─▶ … ── release ─▶
    the others   led: ◀─ order ── the same collective, its result dropped ─▶ … ─▶ released

Between the trained policy and the server. Invariant: an order and the collective it is for are one on every rank's main thread.
So a push may fail between two tensors and begin again at the first, and no collective of the training comes between.
Memory: on every rank one gathered tensor at a time (hf_weights.py: now and then those of a layer), beside what rank 0 has under way to the server.

`Export` is the policy in Hugging Face's format, copied while training waits and written while it goes on: model/ with the weights that a
push of the same version brings, and with LoRA adapter/ as peft writes it. Every other file of model/ is that of the model the run
began with, so the tokenizer's hash, and with it the fingerprint, stay the same.
"""

import inspect
import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from huggingface_hub import save_torch_state_dict
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from learner.config import LearnerRun
from learner.forward.logprobs import sequences_logprobs
from learner.policy.hf_weights import CheckpointNames
from learner.policy.lora import ADAPTER_NAME, Weight, has_adapter, weights
from learner.policy.shards import Tensors
from learner.policy.snapshot import reshard, trainable, whole
from protocol.errors import RankFailed, SlipstreamError
from protocol.model_files import text_files, weight_files
from protocol.weights.buckets import NamedTensors, dtype_on_wire

PASS, RELEASE, STOP, WAIT = -1, -2, -3, -4
"""Orders; any other is the index of the tensor to gather."""
STILL_WAITING_S = 5.0
"""Between two orders to wait on."""


class PublishedPolicy:
    """Every rank has one; of a policy that is whole on every rank the others only wait."""

    def __init__(self, accelerator: Accelerator, policy: nn.Module, wire_dtype: torch.dtype) -> None:
        """`policy` as prepared by accelerate."""
        self.model = accelerator.unwrap_model(policy)
        self.wire_dtype, self.device, self.num_ranks = wire_dtype, accelerator.device, accelerator.num_processes
        # The device of a rank may be too small for all the weights that several share.
        self.copy_device = torch.device("cpu") if accelerator.is_fsdp2 else None
        self._accelerator, self._is_sharded = accelerator, accelerator.is_fsdp2
        self._leading_thread: int | None = None
        """Of rank 0, while others follow it."""
        self._heard_at = time.monotonic()
        reshard(self.model)
        of_model = weights(self.model)
        of_adapter = trainable(self.model) if has_adapter(self.model) else {}
        self._weights = [*of_model.items(), *((name, Weight(tensor)) for name, tensor in of_adapter.items())]
        self._num_pushed = len(of_model)
        self._names = CheckpointNames(self.model, {name: weight.tensor for name, weight in of_model.items()})

    @contextmanager
    def led(self) -> Iterator[None]:
        """Around what rank 0 does alone: it enters at once, the others when it has left. Raises RankFailed if that was an error."""
        if self._accelerator.num_processes == 1:
            yield
        elif not self._accelerator.is_main_process:
            self._follow()
            yield
        else:
            self._leading_thread = threading.get_ident()
            try:
                yield
            except SlipstreamError:
                with suppress(RankFailed):  # what stops this rank is told, not who else has stopped
                    self._broadcast(STOP)
                raise
            finally:
                self._leading_thread = None
            self._broadcast(RELEASE)

    def still_waiting(self) -> None:
        """Called again and again by whoever waits long: lets the ranks that follow know, now and then, that it is for good reason."""
        if self._leading_thread == threading.get_ident() and time.monotonic() - self._heard_at > STILL_WAITING_S:
            self._broadcast(WAIT)

    def tensors(self) -> NamedTensors:
        """Yield the weights by their checkpoint names, each made when it is asked for: gathered, and merged with its adapter."""
        return self._names.convert(self._made(range(self._num_pushed)))

    def adapter(self) -> NamedTensors:
        """Yield what is trained of an adapted policy, by its names in memory, gathered one by one."""
        return self._made(range(self._num_pushed, len(self._weights)))

    @torch.no_grad()
    def _made(self, indices: range) -> NamedTensors:
        for index in indices:
            if self._is_sharded:
                self._broadcast(index)
            name, weight = self._weights[index]
            yield name, weight.made_from(*self._gathered(index))

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the policy's logprobs of each sequence's tokens after its first, one sequence after the other, on the CPU."""
        if self._is_sharded:
            self._broadcast(PASS)
        return sequences_logprobs(self.model, sequences, self.device)

    def _follow(self) -> None:
        while (order := self._broadcast(RELEASE)) != RELEASE:
            if order == STOP:
                raise RankFailed("rank 0 of this learner has stopped with an error; its log says which")
            if order == WAIT:
                continue
            if order == PASS:
                sequences_logprobs(self.model, [[0, 0]], self.device)
            else:
                self._gathered(order)

    def _broadcast(self, order: int) -> int:
        """Return rank 0's order. Raises RankFailed if it, or a rank that it is for, is not heard of any more."""
        try:
            order = int(broadcast(torch.tensor([order], device=self.device)))
        except RuntimeError as error:  # of torch's collectives: a connection that broke, or the deadline
            reason = str(error).splitlines()[0]
            who = "another rank" if self._accelerator.is_main_process else "rank 0"
            raise RankFailed(
                f"{who} of this learner has ended or hangs; its log says more. If it was only slow, raise learner.rank_timeout_s "
                f"({reason})"
            ) from error
        self._heard_at = time.monotonic()
        return order

    @torch.no_grad()
    def _gathered(self, index: int) -> list[torch.Tensor]:
        """The parts of a weight. One that is pushed as it is, is cast before: half the bytes in bfloat16, and the same bits."""
        _, weight = self._weights[index]
        if self._is_sharded and weight.layer is None and index < self._num_pushed:
            return [whole(weight.tensor.to(dtype_on_wire(weight.tensor, self.wire_dtype)))]
        return [whole(part) for part in (weight.tensor, *weight.low_rank)]


# One line per file it saves, by a logger that is named after its file.
logging.getLogger(inspect.getfile(save_torch_state_dict)).setLevel(logging.WARNING)


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the policy in the host's memory, which training does not touch."""

    model_path: Path
    """Of the model that the run began with."""
    dtype: str
    model: Tensors
    keeps_towers: bool
    """The checkpoint has more than the text tower that is trained: the rest stays as it was."""
    adapter: Tensors | None
    adapter_config: PeftConfig | None

    def write(self, directory: Path) -> None:
        """Raises OSError, SafetensorError or RuntimeError if it cannot be written."""
        tensors = self.model | self._of_towers()
        (directory / "model").mkdir()
        save_torch_state_dict(tensors, directory / "model", max_shard_size="50GB")  # as `save_pretrained` does
        _restore_files(self.model_path, self.dtype, directory / "model")
        if self.adapter is not None and self.adapter_config is not None:
            (directory / "adapter").mkdir()
            self.adapter_config.save_pretrained(str(directory / "adapter"))
            save_file(self.adapter, directory / "adapter" / "adapter_model.safetensors")

    def _of_towers(self) -> Tensors:
        if not self.keeps_towers:
            return {}
        tensors: Tensors = {}
        for file in weight_files(self.model_path):
            tensors |= load_file(file)
        return {name: tensor for name, tensor in tensors.items() if name not in self.model}


def copy_for_export(published: PublishedPolicy, run: LearnerRun, model_path: Path) -> Export:
    """Gather, merge and cast one tensor at a time. Rank 0's alone, as a push is."""
    dtype, policy = getattr(torch, run.dtype), published.model
    began_with = json.loads((model_path / "config.json").read_text())["model_type"]
    return Export(
        model_path=model_path,
        dtype=run.dtype,
        model={name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in published.tensors()},
        keeps_towers=began_with != policy.config.model_type,
        adapter=_adapter(published) if has_adapter(policy) else None,
        adapter_config=_adapter_config(policy, run.model) if has_adapter(policy) else None,
    )


def _adapter(published: PublishedPolicy) -> Tensors:
    state = get_peft_model_state_dict(published.model, dict(published.adapter()), ADAPTER_NAME)
    return {
        f"base_model.model.{name}": tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def _adapter_config(policy: PreTrainedModel, base: str) -> PeftConfig:
    return replace(cast(PeftConfig, policy.peft_config[ADAPTER_NAME]), base_model_name_or_path=base)


def _restore_files(model_path: Path, dtype: str, directory: Path) -> None:
    # Over the config of the policy, which is in float32 and without dropout.
    for file in text_files(model_path):
        shutil.copyfile(file, directory / file.name)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the name of the key before transformers 5
    config_file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
