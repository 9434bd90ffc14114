"""A reference on a server, as the learner knows it: its version, its next refresh, and the copy that refills it.

    refresh ─▶ ReferenceCopy.write ─▶ <checkpoints>/reference.safetensors ─▶ weight sync to the reference's server
                                             │ hard link                      also after a restart of that server
                                             └─▶ step-000050/reference/  ─ resume ─▶ reference.safetensors

The learner's memory holds no weights of it. A frozen reference is the server's own model and has no file.
Invariant: the file is the copy of the policy at `version`, and a checkpoint has the file of its own version. A
resume therefore continues with the same reference.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from learner.config import ReferenceConfig
from learner.policy.reference import ReferenceState, decide, first_state
from learner.policy.shards import Tensors
from protocol.durable import sync
from protocol.errors import ConfigError
from protocol.messages import AdapterSpec
from protocol.weights.buckets import NamedTensors, dtype_on_wire

FILE = "reference.safetensors"
ORDER = "order"
"""Key of the file's metadata with the order of the tensors, layer by layer. The format sorts them by name."""


class ServerReference:
    """Version and refreshes of a reference on a server. Every rank has one, and all decide alike."""

    def __init__(self, config: ReferenceConfig, directory: Path, *, is_main: bool) -> None:
        """Begin at version 0. `directory` is that of the checkpoints, in which rank 0 keeps the copy."""
        self._config, self._is_main = config, is_main
        self._version, self._refresh = 0, first_state(config)
        self.file = directory / FILE
        self.model_digest = ""
        """Digest of the frozen server's model files, on rank 0. Empty before the first connection."""

    @property
    def version(self) -> int:
        """Policy version of the copy. 0 for a frozen server, whose own model is the reference."""
        return self._version

    @property
    def state(self) -> ReferenceState:
        return ReferenceState(
            kind=self._config.kind, versions=(self._version,), refresh=self._refresh, on_server=True,
            model_digest=self.model_digest,
        )  # fmt: skip

    def after_step(self, policy: nn.Module, version: int, metrics: dict[str, float]) -> bool:
        """Return whether a refresh is due after the step that led to `version`; rank 0 then makes it."""
        is_due, self._refresh = decide(self._config, self._refresh, version - self._version, metrics)
        if is_due:
            self._version = version
        return is_due

    def save(self, directory: Path) -> None:
        """Put the copy into a checkpoint's directory, which must not exist yet.

        Raises:
            OSError: The file cannot be linked or copied.
        """
        if self._is_main and self._config.is_synced:
            directory.mkdir()
            _link(self.file, directory / FILE)

    def load(self, directory: Path, policy: nn.Module, state: ReferenceState) -> None:
        """Restore the version, and rank 0's copy.

        Raises:
            OSError: The file cannot be linked or copied.
        """
        (self._version,), self._refresh = state.versions, state.refresh
        self.model_digest = state.model_digest or ""
        if self._is_main and self._config.is_synced:
            aside = self.file.with_suffix(".tmp")
            aside.unlink(missing_ok=True)
            _link(directory / FILE, aside)
            aside.replace(self.file)
            aside.unlink(missing_ok=True)  # a rename between two links of one file does nothing

    def require_same_model(self, endpoint: str, digest: str) -> None:
        """Record the frozen server's model, or compare it with the one that the run started with.

        Raises:
            ConfigError: The server has another model now.
        """
        if digest != (self.model_digest or digest):
            raise ConfigError(
                f'learner.reference.endpoint = "{endpoint}": the server\'s model files have the digest {digest}, but '
                f"the run's reference had {self.model_digest}. Serve the model that the run started with, or start a "
                "new run in another run_dir"
            )
        self.model_digest = digest


class ReferenceCopy:
    """Copy of the policy in a file, as the source of the weight syncs to the reference's server (sync_source.py)."""

    copy_device: torch.device | None = None
    adapter: AdapterSpec | None = None
    why_merged: str | None = None

    def __init__(self, file: Path, wire_dtype: torch.dtype, device: torch.device) -> None:
        self.file, self.wire_dtype, self.device = file, wire_dtype, device

    def write(self, tensors: NamedTensors) -> None:
        """Replace the file by these tensors in the wire's dtype. The host holds all of them meanwhile.

        Raises:
            OSError, SafetensorError: The file cannot be written.
        """
        copied: Tensors = {
            name: tensor.detach().to("cpu", dtype_on_wire(tensor, self.wire_dtype), copy=True).contiguous()
            for name, tensor in tensors
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        aside = self.file.with_suffix(".tmp")
        aside.unlink(missing_ok=True)  # it may be a link of a checkpoint's file, which must keep its content
        save_file(copied, aside, metadata={ORDER: json.dumps(list(copied))})
        sync(aside)
        aside.replace(self.file)
        sync(self.file.parent)

    def tensors(self) -> NamedTensors:
        """Yield the tensors in the order in which they were written, one in memory at a time."""
        with safe_open(self.file, "pt") as stored:
            for name in json.loads(stored.metadata()[ORDER]):
                yield name, nn.Buffer(stored.get_tensor(name).to(self.device))  # in the wire's dtype already

    def frozen_tensors(self) -> NamedTensors:
        """Yield the same: a copy has no adapter."""
        return self.tensors()

    def adapter_tensors(self) -> NamedTensors:
        """Yield nothing: a copy has no adapter."""
        return ()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no links
        shutil.copyfile(source, target)
