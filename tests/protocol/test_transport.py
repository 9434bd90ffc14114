"""Which transport a push gets, from where both sides compute and what both have."""

import logging

import pytest
import torch

from protocol.errors import ConfigError
from protocol.transports.transport import choose_transport, offered_transports, own_device_name

ALL = ["tcp", "ipc", "nccl"]
NO_CUPY = ["tcp", "ipc"]
NO_IPC = ["tcp", "nccl"]
TORCH_213 = ["tcp", "ipc", "nccl 2.29.7"]
TORCH_214 = ["tcp", "ipc", "nccl 2.30.7"]


@pytest.mark.parametrize(
    ("wanted", "learner", "workers", "learner_has", "server_has", "chosen"),
    [
        ("auto", "cpu", ["cpu"], ["tcp"], ["tcp"], "tcp"),
        ("auto", "cpu", ["a/1"], ["tcp"], ALL, "tcp"),
        ("auto", "a/1", ["a/1"], ALL, ALL, "ipc"),
        ("auto", "a/1", ["a/2"], ALL, ALL, "nccl"),
        ("auto", "a/1", ["b/2", "b/3"], ALL, ALL, "nccl"),
        ("auto", "a/1", ["a/2"], NO_CUPY, ALL, "tcp"),
        ("auto", "a/1", ["a/2"], TORCH_214, TORCH_214, "nccl"),
        ("auto", "a/1", ["a/2"], TORCH_214, TORCH_213, "tcp"),
        ("auto", "a/1", ["a/1"], NO_IPC, ALL, "tcp"),  # expandable segments on one GPU
        ("auto", "a/1", ["a/1", "a/2"], ALL, ALL, "tcp"),  # neither all on one GPU nor each on its own
        ("auto", "a/1", ["a/2", "a/2"], ALL, ALL, "tcp"),
        ("auto", "a/1", ["b/1"], ALL, ALL, "tcp"),  # one GPU, two containers
        ("tcp", "a/1", ["a/1"], ALL, ALL, "tcp"),
    ],
)
def test_the_choice(wanted, learner, workers, learner_has, server_has, chosen) -> None:
    offers = {"learner_transports": learner_has, "server_transports": server_has}
    assert choose_transport(wanted, learner, workers, **offers) == chosen


@pytest.mark.parametrize(
    ("wanted", "learner", "workers", "learner_has", "server_has", "reason"),
    [
        ("ipc", "a/1", ["cpu"], ALL, ALL, "over ipc: it works only between GPUs"),
        ("ipc", "a/1", ["a/2"], ALL, ALL, "over ipc: .* on the same GPU"),
        ("ipc", "a/1", ["b/1"], ALL, ALL, "over ipc: .* of one host"),
        ("ipc", "a/1", ["a/1"], NO_IPC, ALL, "the learner does not offer ipc, .* without expandable_segments"),
        ("nccl", "a/1", ["a/2"], NO_CUPY, ALL, r"the learner does not offer nccl, .*pip install .*\[nccl\]"),
        ("nccl", "a/1", ["a/2"], ALL, NO_CUPY, r"the server does not offer nccl, .*pip install .*\[nccl\]"),
        ("nccl", "a/1", ["a/1"], ALL, ALL, "share a GPU, which needs NCCL 2.30.3 .* NCCL_MULTI_RANK_GPU_ENABLE=1"),
        ("nccl", "a/1", ["a/2"], TORCH_214, TORCH_213,
            r"the learner has nccl 2\.30\.7 and the server has nccl 2\.29\.7: .* install the same torch on both sides"),
        ("tcp", "cpu", ["cpu"], ALL, ["ipc"], "the server does not offer tcp, which needs slipstream-rl on both"),
    ],
)  # fmt: skip
def test_what_is_impossible_is_refused(wanted, learner, workers, learner_has, server_has, reason) -> None:
    offers = {"learner_transports": learner_has, "server_transports": server_has}
    where = f"The learner computes on {learner}, the server's workers on {workers[0]}; set learner.weight_sync.tran"
    with pytest.raises(ConfigError, match=rf"{reason}.*{where}"):
        choose_transport(wanted, learner, workers, **offers)


def test_auto_that_finds_no_transport_does_not_advise_itself() -> None:
    with pytest.raises(ConfigError, match=r"over tcp: the server does not offer tcp.* Install the same") as refused:
        choose_transport("auto", "cpu", ["cpu"], learner_transports=ALL, server_transports=["nccl"])
    assert "auto" not in str(refused.value)


@pytest.mark.parametrize(("wanted", "chosen"), [("nccl", "nccl"), ("auto", "tcp")])
def test_ranks_share_a_gpu_over_nccl_only_if_asked_for_by_name(wanted, chosen, monkeypatch) -> None:
    monkeypatch.setattr("protocol.transports.nccl.ranks_may_share_a_gpu", lambda: True)
    offers = {"learner_transports": ALL, "server_transports": ALL}
    assert choose_transport(wanted, "a/1", ["a/1", "a/2"], **offers) == chosen


def test_gpus_that_are_joined_over_their_cpus_are_reported_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_transport("auto", "a/1", ["cpu"], learner_transports=ALL, server_transports=["tcp"])
        assert not caplog.messages
        choose_transport("auto", "a/1", ["a/2"], learner_transports=ALL, server_transports=["tcp"])
        choose_transport("auto", "a/1", ["a/2"], learner_transports=TORCH_214, server_transports=TORCH_213)
    message, of_versions = caplog.messages
    assert "ipc is not possible because the server does not offer ipc" in message
    assert "nccl is not possible because the server does not offer nccl" in message
    assert "because the learner has nccl 2.30.7 and the server has nccl 2.29.7: only equal" in of_versions


def test_a_cpu_offers_tcp_and_has_no_host_in_its_name() -> None:
    assert own_device_name(torch.device("cpu")) == "cpu"
    if not torch.cuda.is_available():
        assert [name for name in offered_transports() if name in ALL] == ["tcp"]
