"""Save and load named tensors of a checkpoint with torch.distributed.checkpoint (DCP).

    __<rank>_0.distcp    what one rank wrote, tensor after tensor
    index.json           which part of which tensor is where; written last

Every rank writes its part in the background, and any number of ranks reads them, sharded or not. index.json
replaces DCP's own index, a pickle, which would turn data into code.
"""

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from learner.policy.host_adamw import MOMENTS, empty_on_host, keeps_on_host
from learner.policy.snapshot import trainable
from protocol.errors import ConfigError

INDEX_FILE = "index.json"
POLICY, OPTIMIZER = "policy/", "optimizer/"
"""Prefixes of the names of a parameter and of its optimizer state: `optimizer/<parameter>/<what>`."""

Tensors = dict[str, torch.Tensor]

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # issued in every single-process run


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """A box of a tensor, `sizes` from `offsets` on, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int

    @property
    def transform_descriptors(self) -> tuple[str, ...]:
        """Empty, since nothing is compressed. DCP's reader reads this attribute."""
        return ()


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the index."""

    dtype: str
    size: tuple[int, ...]
    parts: tuple[ShardPart, ...]

    def empty(self, like: torch.Tensor | None) -> torch.Tensor:
        """Return an uninitialized tensor to load into.

        If `like` has the same shape, the tensor has its device and sharding.
        """
        dtype = getattr(torch, self.dtype)
        if like is not None and like.shape == self.size:
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(self.size, dtype=dtype)


Index = dict[str, StoredTensor]


class ShardWriter(dcp.FileSystemWriter):
    """DCP's writer, with an index in JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        locations = {written.index: written.storage_data for of_rank in results for written in of_rank}
        index = Index()
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
            parts = [(chunk, locations[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks]
            index[name] = StoredTensor(
                dtype=str(tensor.properties.dtype).removeprefix("torch."),
                size=tuple(tensor.size),
                parts=tuple(
                    ShardPart(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        relative_path=location.relative_path,
                        offset=location.offset,
                        length=location.length,
                    )
                    for chunk, location in parts
                ),
            )
        Path(self.path, INDEX_FILE).write_bytes(msgspec.json.encode(index))


class ShardReader(dcp.FileSystemReader):
    """DCP's reader, for an index in JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=getattr(torch, kept.dtype)),
                    size=torch.Size(kept.size),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.sizes))
                        for part in kept.parts
                    ],
                )
                for name, kept in index.items()
            },
            storage_data={
                MetadataIndex(name, part.offsets): part for name, kept in index.items() for part in kept.parts
            },
        )


def read_index(directory: Path) -> Index:
    """Read the index. Raises OSError, or RuntimeError if it is damaged."""
    path = directory / INDEX_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except msgspec.DecodeError as error:
        raise RuntimeError(f"{path} is damaged: {error}") from error


def begin_writing(
    tensors: Tensors, directory: Path, group: dist.ProcessGroup | None, *, is_sharded: bool
) -> Future[Any]:
    """Copy the tensors to host memory, then write them in the background.

    `written` waits for the end. Every rank that shares sharded tensors calls this, on a `group` that nothing
    else uses meanwhile. If they are not sharded, one rank calls this alone.
    """
    saving = dcp.async_save(
        dict(tensors), storage_writer=ShardWriter(directory), process_group=group, no_dist=not is_sharded
    )
    assert isinstance(saving, Future)
    return saving


def written(saving: Future[Any]) -> None:
    """Wait until all ranks have written. Raises the error of the first that failed."""
    try:
        saving.result()
    except CheckpointException as failed:  # a BaseException, not an Exception
        error, _ = next(iter(failed.failures.values()))
        raise error from None


def read_into(tensors: Tensors, directory: Path) -> None:
    """Fill the tensors in place, each rank its shards.

    Raises:
        OSError, RuntimeError: The directory is damaged.
    """
    try:
        dcp.load(dict(tensors), storage_reader=ShardReader(directory), no_dist=True)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def trained(policy: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the parameters and their optimizer state, without copying them.

    Numbers in the state become tensors.
    """
    tensors = {}
    for name, parameter in trainable(policy).items():
        tensors[f"{POLICY}{name}"] = parameter.detach()
        for what, kept in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER}{name}/{what}"] = torch.as_tensor(kept)
    return tensors


def read_policy(policy: nn.Module, directory: Path) -> None:
    """Restore the parameters in place, without an optimizer.

    Raises:
        ConfigError: The checkpoint belongs to another model.
        OSError, RuntimeError: The checkpoint is damaged.
    """
    read_into(_of_policy(trainable(policy), read_index(directory), directory), directory)


def read_trained(policy: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> None:
    """Restore the parameters and their optimizer state in place.

    The settings of the optimizer remain those of the config.

    Raises:
        ConfigError: The checkpoint belongs to another model.
        OSError, RuntimeError: The checkpoint is damaged.
    """
    parameters, index = trainable(policy), read_index(directory)
    tensors = _of_policy(parameters, index, directory)
    states: dict[str, dict[str, Any]] = {}
    for name, kept in index.items():
        if name.startswith(OPTIMIZER):
            of, _, what = name.removeprefix(OPTIMIZER).rpartition("/")
            is_on_host = what in MOMENTS and keeps_on_host(optimizer)
            tensor = empty_on_host(parameters[of]) if is_on_host else kept.empty(parameters[of].detach())
            tensors[name] = states.setdefault(of, {})[what] = tensor
    read_into(tensors, directory)
    for kept_of in states.values():
        for what, tensor in kept_of.items():
            if tensor.dtype == torch.int64 and tensor.dim() == 0:  # AdamW8bit counts its steps in an int
                kept_of[what] = tensor.item()
    settings = optimizer.state_dict()["param_groups"]
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    order = [name_of[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: states[name] for i, name in enumerate(order) if name in states}
    optimizer.load_state_dict({"state": state, "param_groups": settings})


def _of_policy(parameters: dict[str, nn.Parameter], index: Index, directory: Path) -> Tensors:
    """Return the parameters by their names in a checkpoint. Raises ConfigError if it has others."""
    tensors: Tensors = {f"{POLICY}{name}": parameter.detach() for name, parameter in parameters.items()}
    require_same(tensors, {name: kept for name, kept in index.items() if name.startswith(POLICY)}, directory)
    return tensors


def require_same(tensors: Tensors, index: Index, directory: Path) -> None:
    """Raise ConfigError unless the directory holds these tensors in these shapes."""
    differing = sorted(tensors.keys() ^ index.keys()) or [
        name for name, tensor in tensors.items() if tensor.shape != index[name].size
    ]
    if differing:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ConfigError(
            f"{directory} contains another policy: it differs in {differing[0].partition('/')[2]}{more}; resume with "
            "the model and the learner.lora that wrote it"
        )
