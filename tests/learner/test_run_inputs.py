"""The digest of a model's files, and what has none."""

from pathlib import Path

import pytest

from learner.run_inputs import digest_model
from protocol.errors import ConfigError


def test_a_checkpoint_that_was_cloned_without_git_lfs_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(ConfigError, match=r"model.safetensors is not a safetensors file .*git lfs pull"):
        digest_model(tmp_path)
