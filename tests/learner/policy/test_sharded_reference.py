"""The reference of a policy that two ranks share is the reference of the whole policy, and so is its checkpoint."""

from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.learner.checkpoints import whole_tensors
from tests.learner.policy.sharded_reference import follow, follow_sharded, load, move, note, odd_policy, save
from tests.learner.policy.test_reference import KINDS
from tests.learner.ranks import on_two_ranks


def test_two_ranks_have_the_reference_of_one_and_read_each_others_checkpoints(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    expected: dict[str, torch.Tensor] = {}
    policies = {kind: odd_policy() for kind in KINDS}
    for kind, policy in policies.items():
        reference = follow(kind, policy, accelerator, expected)
        save(reference, policy, tmp_path / "one" / kind, is_writer=True)
        move(policy, step=99)
        note(f"{kind}-of-one", reference, policy, expected)
        note(f"{kind}-of-two", reference, policy, expected)

    on_two_ranks(follow_sharded, tmp_path)
    found = load_file(tmp_path / "found.safetensors")
    assert found.keys() == expected.keys() and len(found) == 2 * 8 * len(KINDS)
    for name, logprobs_BT in expected.items():
        torch.testing.assert_close(found[name], logprobs_BT, atol=1e-5, rtol=0)
    for kind, policy in policies.items():
        whole, of_two = (whole_tensors(tmp_path / ranks / kind) for ranks in ("one", "two"))
        assert whole.keys() == of_two.keys() and not any(".h.0." in name for name in whole)
        for name, tensor in whole.items():
            torch.testing.assert_close(of_two[name], tensor, atol=1e-6, rtol=0)
        note(kind, load(kind, policy, accelerator, tmp_path / "two" / kind), policy, again := {})
        for i, logprobs_BT in enumerate(again.values()):
            torch.testing.assert_close(logprobs_BT, expected[f"{kind}-of-two-{i}"], atol=1e-5, rtol=0)
