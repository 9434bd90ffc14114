"""Other weights in the policy for one pass, after which its own weights are restored bit for bit."""

import pytest
import torch

from learner.forward.logprobs import token_logprobs
from learner.policy.snapshot import own_copy, seated, trainable
from tests.learner.policy.tiny_policy import a_batch, move, tiny_policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_accumulated_gradients_survive_a_pass_and_one_that_fails(dtype: torch.dtype) -> None:
    policy = tiny_policy(dtype)
    token_logprobs(policy, a_batch(), 1.0)[0].sum().backward()
    snapshot = {name: own_copy(parameter, None, dtype) for name, parameter in trainable(policy).items()}
    move(policy, seed=1)
    parameters = dict(policy.named_parameters())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items()}

    def assert_own() -> None:
        for name, parameter in policy.named_parameters(remove_duplicate=False):
            assert parameter is parameters.get(name, policy.transformer.wte.weight)
        for name, parameter in parameters.items():
            assert torch.equal(parameter, weights[name]) and torch.equal(parameter.grad, gradients[name])

    with seated(policy, snapshot):
        for name, parameter in policy.named_parameters():
            assert parameter.data_ptr() == snapshot[name].data_ptr() and not torch.equal(parameter, weights[name])
        assert policy.lm_head.weight is policy.transformer.wte.weight
    assert_own()
    with pytest.raises(RuntimeError, match="out of memory"), seated(policy, snapshot):
        raise RuntimeError("out of memory")
    del snapshot["transformer.ln_f.weight"]  # fails while the snapshot is loaded
    with pytest.raises(KeyError), seated(policy, snapshot):
        pass
    assert_own()
    token_logprobs(policy, a_batch(), 1.0)[0].sum().backward()  # accumulates gradients on top of them
    assert any(not torch.equal(parameter.grad, gradients[name]) for name, parameter in parameters.items())
