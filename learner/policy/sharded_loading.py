"""Load a sharded policy without ever holding all of it: on each rank its share, and one tensor.

    load_policy(on_meta=True) ─▶ policy without memory ─▶ shard ─▶ allocate: this rank's shares ─▶ fill ◀─ files
                             └─▶ the same again, on rank 0: the few layers that packing_check.py runs

A tensor that the model holds as its file does is read in part. Tensors that transformers joins, such as the
experts of a layer, are read whole and joined on every rank, one group at a time.

Invariant: every tensor has the bits that load_policy gives it without sharding.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from learner.policy.hf_weights import CheckpointNames, differing_tied_weights, held, tied_names
from protocol.model_files import weight_files

log = logging.getLogger(__name__)
Slices = Mapping[str, Any]
"""Tensors in the files of a checkpoint, by name, which are read when they are indexed."""


@contextmanager
def opened(path: Path) -> Iterator[Slices]:
    """Open the weights of a model's directory."""
    with ExitStack() as files:
        slices: dict[str, Any] = {}
        for file in weight_files(path):
            reader = files.enter_context(safe_open(file, framework="pt"))
            slices |= {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  # not a mapping
        yield slices


class CheckpointReader:
    """Reader of the tensors of a policy, under their names in memory."""

    def __init__(self, skeleton: PreTrainedModel, slices: Slices) -> None:
        """Plan the reading of a policy, of which `skeleton` is a copy on the meta device.

        Raises:
            ConfigError: The tensors cannot be converted in parts, or tied ones differ.
            KeyError: A tensor has another name in the files than a checkpoint that transformers writes now.
        """
        self._skeleton, self._slices = skeleton, slices
        self._parts = CheckpointNames(skeleton, held(skeleton)).parts()
        for _, in_files, _ in self._parts:
            for name in in_files:
                slices[name]
        for name, source in tied_names(skeleton).items():
            if name in slices and source in slices and not torch.equal(slices[name][...], slices[source][...]):
                raise differing_tied_weights(name, source)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read these tensors in place, of a DTensor its local part."""
        for in_memory, in_files, are_alike in self._parts:
            if not any(name in tensors for name in in_memory):
                continue
            found = {in_memory[0]: self._slices[in_files[0]]} if are_alike else self._joined(in_memory, in_files)
            for name, source in found.items():
                if name in tensors:
                    _copy(source, tensors[name])

    def _joined(self, in_memory: Collection[str], in_files: Collection[str]) -> dict[str, torch.Tensor]:
        """Let transformers join a group of tensors, as it does when it loads the whole model."""
        skeleton = self._skeleton
        mapping: Any = get_model_conversion_mapping(skeleton)
        settings = LoadStateDictConfig(device_map={"": "cpu"}, weight_mapping=mapping, dtype=skeleton.dtype)
        before = {name: _owner(skeleton, name) for name in in_memory}
        conversions = skeleton._weight_conversions
        convert_and_load_state_dict_in_model(skeleton, {name: self._slices[name] for name in in_files}, settings)
        skeleton._weight_conversions = conversions
        joined = {}
        for name, (module, key, empty) in before.items():
            joined[name] = getattr(module, key).detach()
            setattr(module, key, empty)
        return joined


def make_reader(load_skeleton: Callable[[], PreTrainedModel], slices: Slices) -> CheckpointReader | None:
    """Return the reader of a policy, or None if it cannot be loaded in parts.

    Old checkpoints may have other names, and transformers computes with the tensors of few models as it loads them.
    Every rank then loads the whole policy before it is sharded.
    """
    try:
        return CheckpointReader(load_skeleton(), slices)
    except KeyError as error:
        reason = f"its files have no tensor {error}"
    except NotImplementedError as error:
        reason = str(error)
    log.warning("loading the whole policy on every rank before it is sharded: %s", reason)
    return None


def allocate(policy: nn.Module, device: torch.device) -> None:
    """Give this rank's part of each tensor on the meta device memory, which is not initialized."""
    attributes = [(parameter, dict(vars(parameter))) for parameter in policy.parameters()]
    policy._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for parameter, kept in attributes:  # torch replaces the parameter in its place, without its attributes
        vars(parameter).update(kept)


@contextmanager
def filled(model: nn.Module, reader: CheckpointReader) -> Iterator[None]:
    """Let a model on the meta device have its weights, in host memory."""
    with _replaced(model, lambda tensor: torch.empty_like(tensor, device="cpu")):
        reader.fill(model.state_dict(keep_vars=True))
        yield


@contextmanager
def in_name_only(model: nn.Module) -> Iterator[None]:
    """Let the tensors of a model on the meta device look as if they were in host memory.

    peft moves an adapter to the device of its layer, and with the meta device would lose its values.
    """
    with _replaced(model, lambda tensor: torch.empty((), dtype=tensor.dtype).expand(tensor.shape)):
        yield


@contextmanager
def _replaced(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace the tensors on the meta device, tied ones by one, and put them back."""
    slots = [
        (module, key, tensor)
        for module in model.modules()
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_meta
    ]
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    for module, key, tensor in slots:
        if tensor not in stand_ins:
            made = make(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            stand_ins[tensor] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        setattr(module, key, stand_ins[tensor])
    try:
        yield
    finally:
        for module, key, tensor in slots:
            setattr(module, key, tensor.requires_grad_(stand_ins[tensor].requires_grad))


def _copy(source: Any, target: torch.Tensor) -> None:
    """Copy a tensor, or a slice of a file, into a tensor, or into the local part of a DTensor."""
    if not isinstance(target, DTensor):
        target.copy_(source[...])
        return
    shape, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if all(shape):
        box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, shape, strict=True))
        target.to_local().copy_(source[box])


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str, torch.Tensor]:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    return module, key, getattr(module, key)
