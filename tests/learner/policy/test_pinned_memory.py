"""Pinned host memory: its size, and when it is pinned and unpinned."""

from types import SimpleNamespace

import pytest
import torch

from learner.policy.host_adamw import empty_on_host
from learner.policy.snapshot import own_copy


def test_pinned_tensors_take_no_more_than_their_bytes_and_are_unpinned_before_they_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: pinned.update({address: size}), cudaHostUnregister=pinned.pop
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    weight = torch.arange(15.0).view(3, 5)
    moment, copy = empty_on_host(weight), own_copy(weight, torch.device("cpu"), torch.bfloat16)
    view = copy[1:]
    assert pinned == {moment.data_ptr(): 15 * 4, copy.data_ptr(): 15 * 2}
    assert moment.shape == weight.shape and torch.equal(copy, weight.to(torch.bfloat16))
    del moment, copy
    assert pinned == {view.data_ptr() - 5 * 2: 15 * 2} and torch.equal(view, weight[1:].to(torch.bfloat16))
    del view
    assert pinned == {}
    assert empty_on_host(torch.empty(0, 5)).shape == (0, 5), "the part of a rank may be empty"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_copies_to_and_from_pinned_tensors() -> None:
    weight = torch.arange(15.0, device="cuda").view(3, 5)
    moment = empty_on_host(weight).zero_()
    moment.copy_(weight, non_blocking=True)
    torch.cuda.synchronize()
    assert moment.is_pinned() and torch.equal(moment.to("cuda", non_blocking=True, copy=True), weight)
