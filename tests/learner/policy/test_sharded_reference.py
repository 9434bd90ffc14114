"""The reference of a policy that two ranks share is the reference of the whole policy, and so is its checkpoint."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.learner.checkpoints import whole_tensors
from tests.learner.policy.sharded_reference import Found, follow, follow_sharded, keep, odd_policy, save
from tests.learner.policy.tiny_policy import KINDS
from tests.learner.ranks import on_two_ranks


@pytest.mark.system
def test_two_ranks_have_the_reference_of_one_and_write_and_read_its_checkpoint(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    expected: Found = {}
    for kind in KINDS:
        policy = odd_policy()
        reference = follow(kind, policy, accelerator, expected)
        save(reference, policy, tmp_path / "one" / kind, is_sharded=False)
        for ranks in ("one", "two"):
            keep(f"{kind}-of-{ranks}", reference, policy, expected)

    on_two_ranks(follow_sharded, tmp_path)
    found = load_file(tmp_path / "found.safetensors")
    assert found.keys() == expected.keys() and len(found) == 2 * 8 * len(KINDS)
    for name, logprobs_BT in expected.items():
        torch.testing.assert_close(found[name], logprobs_BT, atol=1e-5, rtol=0)
    for kind in KINDS:
        of_one, of_two = (whole_tensors(tmp_path / ranks / kind) for ranks in ("one", "two"))
        assert of_one.keys() == of_two.keys() and not any(".h.0." in name for name in of_one)
        for name, tensor in of_one.items():
            torch.testing.assert_close(of_two[name], tensor, atol=1e-6, rtol=0)
