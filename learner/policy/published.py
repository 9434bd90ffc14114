"""Provide the policy's weights for weight sync and export, and its logprobs for the parity check.

    rank 0         led: waits, syncs, measures ── order ─▶ one tensor gathered, or one pass ─▶ … ── release ─▶
    other ranks    led: ◀─ order ── the same collective, result dropped ─▶ … ─▶ released

Only rank 0 uses the results. If the policy is sharded, the other ranks help to compute them. In any case,
rank 0, which may wait for hours, sends them an order every few seconds to show that it is alive. Each rank
holds one gathered tensor, or now and then those of a layer (hf_weights.py), besides what rank 0 is sending to
the server.

Invariant: on every rank's main thread, an order and its collective run without a collective of the training
in between. A weight sync may therefore fail between two tensors and start again at the first.
"""

import inspect
import json
import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from huggingface_hub import save_torch_state_dict
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from learner.config import LearnerRun
from learner.forward.logprobs import sequences_logprobs
from learner.policy.hf_weights import CheckpointNames, tied_names
from learner.policy.lora import ADAPTER_NAME, Weight, has_adapter, synced_tensors, weights, why_merged
from learner.policy.sharding import is_sharded
from learner.policy.shards import Tensors
from learner.policy.snapshot import reshard, trainable, whole
from protocol.errors import RankFailed, SlipstreamError
from protocol.messages import AdapterSpec
from protocol.model_files import text_files, weight_files
from protocol.weights.buckets import NamedTensors, dtype_on_wire

PASS, RELEASE, STOP, WAIT = -1, -2, -3, -4
"""Special orders. Any other order is the index of the tensor to gather."""
STILL_WAITING_S = 5.0
"""Seconds between two orders to wait."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter, by peft's names."""


class PublishedPolicy:
    """Weights and logprobs of the policy, on every rank.

    If every rank holds the whole policy, the other ranks only wait.
    """

    def __init__(self, accelerator: Accelerator, policy: nn.Module, wire_dtype: torch.dtype) -> None:
        """Wrap a policy that accelerate has prepared."""
        self.model = accelerator.unwrap_model(policy)
        self.wire_dtype, self.num_ranks = wire_dtype, accelerator.num_processes
        # With its index: one rank's accelerator says "cuda", which no tensor's "cuda:0" equals (weights/dense.py).
        self.device = torch.empty(0, device=accelerator.device).device
        # One rank's device may be too small for all the weights of a sharded policy.
        self.copy_device = torch.device("cpu") if is_sharded(self.model) else None
        self._accelerator, self._is_sharded = accelerator, is_sharded(self.model)
        self._leading_thread: int | None = None
        """Thread of rank 0 while other ranks follow it."""
        self._notified_at = time.monotonic()
        reshard(self.model)
        of_model = weights(self.model)
        of_adapter = trainable(self.model) if has_adapter(self.model) else {}
        self._weights = [*of_model.items(), *((name, Weight(tensor)) for name, tensor in of_adapter.items())]
        self._num_pushed = len(of_model)
        self._names = CheckpointNames(self.model, {name: weight.tensor for name, weight in of_model.items()})
        self.adapter: AdapterSpec | None = None
        """Adapter of the policy, as in a manifest."""
        self.why_merged: str | None = None
        """Reason why no server can apply the adapter separately, if there is one."""
        if of_adapter:
            self.adapter = AdapterSpec(rank=self.model.peft_config[ADAPTER_NAME].r, num_tensors=len(of_adapter))
            self.why_merged = why_merged(self.model, self._names)
            self._synced = synced_tensors(self.model, self._names)

    @contextmanager
    def led(self) -> Iterator[None]:
        """Let rank 0 run a block while the other ranks follow its orders.

        The other ranks enter the block when rank 0 has left it.

        Raises:
            RankFailed: Rank 0 left with an error, or a rank no longer responds.
        """
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
                with suppress(RankFailed):  # raise the error of this rank, not that of another
                    self._broadcast(STOP)
                raise
            finally:
                self._leading_thread = None
            self._broadcast(RELEASE)

    def still_waiting(self) -> None:
        """Show the ranks that follow that rank 0 is alive, at most every few seconds.

        A caller that waits long calls this repeatedly.
        """
        if self._leading_thread == threading.get_ident() and time.monotonic() - self._notified_at > STILL_WAITING_S:
            self._broadcast(WAIT)

    def tensors(self) -> NamedTensors:
        """Yield the weights by their checkpoint names.

        Each is gathered and merged with its adapter on demand.
        """
        return self._names.convert(self._made(range(self._num_pushed)))

    def frozen_tensors(self) -> NamedTensors:
        """Yield the weights by their checkpoint names, without the adapter."""
        return self._names.convert(self._made(range(self._num_pushed), is_merged=False))

    def adapter_tensors(self) -> NamedTensors:
        """Yield the adapter's tensors by their names in a weight sync. B contains the scale."""
        for name, tensor in self.trained_tensors():
            yield self._synced[name].name, tensor.detach() * self._synced[name].factor

    def trained_tensors(self) -> NamedTensors:
        """Yield the trained tensors of an adapted policy by their names in memory.

        They are gathered one by one.
        """
        return self._made(range(self._num_pushed, len(self._weights)))

    @torch.no_grad()
    def _made(self, indices: range, *, is_merged: bool = True) -> NamedTensors:
        for index in indices:
            if self._is_sharded:
                self._broadcast(index)
            name, weight = self._weights[index]
            tensor, *low_rank = self._gathered(index)
            yield name, weight.made_from(tensor, *low_rank) if is_merged else tensor

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the policy's logprobs of each sequence's tokens after its first.

        The result is on the CPU, one sequence after the other.
        """
        if self._is_sharded:
            self._broadcast(PASS)
        return sequences_logprobs(self.model, sequences, self.device)

    def _follow(self) -> None:
        while (order := self._broadcast(RELEASE)) != RELEASE:
            if order == STOP:
                raise RankFailed("rank 0 of this learner has stopped with an error; see its log")
            if order == WAIT:
                continue
            if order == PASS:
                sequences_logprobs(self.model, [[0, 0]], self.device)
            else:
                self._gathered(order)

    def _broadcast(self, order: int) -> int:
        """Return rank 0's order. Raises RankFailed if a rank no longer responds."""
        try:
            order = int(broadcast(torch.tensor([order], device=self.device)))
        except RuntimeError as error:  # a collective lost its connection or timed out
            reason = str(error).splitlines()[0]
            who = "another rank" if self._accelerator.is_main_process else "rank 0"
            raise RankFailed(
                f"{who} of this learner has stopped or hangs; see its log. If it was only slow, raise "
                f"learner.collective_timeout_s ({reason})"
            ) from error
        self._notified_at = time.monotonic()
        return order

    @torch.no_grad()
    def _gathered(self, index: int) -> list[torch.Tensor]:
        """Return the gathered parts of a weight.

        A weight that is sent unchanged is cast first. In bfloat16, this halves the bytes and gives the same
        bits.
        """
        _, weight = self._weights[index]
        if self._is_sharded and weight.layer is None and index < self._num_pushed:
            return [whole(weight.tensor.to(dtype_on_wire(weight.tensor, self.wire_dtype)))]
        return [whole(part) for part in (weight.tensor, *weight.low_rank)]


# save_torch_state_dict logs one line per file. Its logger is named after the path of its module.
logging.getLogger(inspect.getfile(save_torch_state_dict)).setLevel(logging.WARNING)


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Copy of the policy in host memory, to be written in Hugging Face's format.

    Training waits for the copy, but not for the writing. model/ holds the weights that a weight sync of this
    version sends, and adapter/ the LoRA adapter as peft writes it. All other files of model/ are those of the
    initial model. The hash of the tokenizer, and with it the fingerprint, therefore stays the same.
    """

    model_path: Path
    """Path of the initial model."""
    dtype: str
    model: Tensors
    keeps_towers: bool
    """Whether the checkpoint has more than the trained text tower. The rest stays unchanged."""
    tied: Collection[str]
    """Names of trained tensors that `model` has under another name. The initial files may have both."""
    adapter: Tensors | None
    adapter_config: PeftConfig | None

    def write(self, directory: Path) -> None:
        """Write model/, and adapter/ if there is one.

        Raises:
            OSError, SafetensorError, RuntimeError: The export cannot be written.
        """
        self.write_model(directory / "model")
        if self.adapter is not None:
            self.write_adapter(directory / "adapter")

    def write_model(self, directory: Path) -> None:
        """Write the merged model as transformers does, into a new directory."""
        directory.mkdir()
        tensors = self.model | self._of_towers()
        save_torch_state_dict(tensors, directory, max_shard_size="50GB")  # as in save_pretrained
        _restore_files(self.model_path, self.dtype, directory)

    def write_adapter(self, directory: Path) -> None:
        """Write the adapter as peft does, into a new directory."""
        assert self.adapter is not None and self.adapter_config is not None
        directory.mkdir()
        self.adapter_config.save_pretrained(str(directory))
        save_file(self.adapter, directory / ADAPTER_WEIGHTS)

    def _of_towers(self) -> Tensors:
        if not self.keeps_towers:
            return {}
        tensors: Tensors = {}
        for file in weight_files(self.model_path):
            tensors |= load_file(file)
        return {name: tensor for name, tensor in tensors.items() if name not in {*self.model, *self.tied}}


def copy_for_export(published: PublishedPolicy, run: LearnerRun, model_path: Path) -> Export:
    """Gather, merge and cast one tensor at a time. Only rank 0 calls this."""
    dtype, policy = getattr(torch, run.dtype), published.model
    initial_type = json.loads((model_path / "config.json").read_text("utf-8"))["model_type"]
    return Export(
        model_path=model_path,
        dtype=run.dtype,
        model={
            name: tensor.detach().to("cpu", dtype_on_wire(tensor, dtype), copy=True)
            for name, tensor in published.tensors()
        },
        keeps_towers=initial_type != policy.config.model_type,
        tied=tied_names(policy).keys(),
        adapter=_adapter(published) if has_adapter(policy) else None,
        adapter_config=replace(policy.peft_config[ADAPTER_NAME], base_model_name_or_path=run.model)
        if has_adapter(policy)
        else None,
    )


def _adapter(published: PublishedPolicy) -> Tensors:
    state = get_peft_model_state_dict(published.model, dict(published.trained_tensors()), ADAPTER_NAME)
    return {
        f"base_model.model.{name}": tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def _restore_files(model_path: Path, dtype: str, directory: Path) -> None:
    # The policy's own config would not do: it has float32 and no dropout.
    for file in text_files(model_path):
        copy = directory / file.relative_to(model_path)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text("utf-8"))
    config.pop("torch_dtype", None)  # the key's name before transformers 5
    config_file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
