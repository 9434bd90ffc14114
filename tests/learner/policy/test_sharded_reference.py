"""The reference of a policy that two ranks share in uneven parts is that of the whole policy, and so is its checkpoint."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.learner.checkpoints import whole_tensors
from tests.learner.policy.sharded_reference import FOLLOWED, NUM_STEPS, follow
from tests.learner.ranks import on_two_ranks


@pytest.mark.system
def test_two_ranks_have_the_reference_of_one_and_write_and_read_its_checkpoint(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        for kind in FOLLOWED:
            (directory / kind).mkdir(parents=True)
    follow(accelerator, one)
    on_two_ranks(follow, two)
    expected, found = load_file(one / "found.safetensors"), load_file(two / "found.safetensors")
    for kind in FOLLOWED:
        expected |= {f"{kind} on disk, {name}": tensor for name, tensor in whole_tensors(one / kind).items()}
        found |= {f"{kind} on disk, {name}": tensor for name, tensor in whole_tensors(two / kind).items()}
    assert found.keys() == expected.keys() and not any(".h.0." in name for name in found)
    assert len(found) > len(FOLLOWED) * (NUM_STEPS + 1)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=name)
    for kind in FOLLOWED:
        assert torch.equal(found[f"{kind}-{NUM_STEPS}"], found[f"{kind}-loaded"])
