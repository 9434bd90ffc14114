"""The nodes of one server: they start an engine together, end it together, and say what does not fit; without vLLM."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.interface import EngineDead
from inference_server.engine.node_link import NodeLink, ServerNodes, join_node_0
from protocol.config import load_config
from protocol.errors import ConfigError
from protocol.messages import ModelFingerprint
from tests.ports import free_port
from tests.waiting import until

MODEL = ModelFingerprint(architecture="Tiny", size="2 layers of width 8", vocab_size=16, tokenizer_hash="0" * 16)
TIMEOUT_S = 60


def node(rank: int, port: int, *, timeout_s: int = TIMEOUT_S, **server: object) -> ServerRun:
    config = {
        "nnodes": 3, "tensor_parallel_size": 3, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port,
        "start_timeout_s": timeout_s, "kv_cache_memory_mib": 64,
    }  # fmt: skip
    return ServerRun(model="tiny:digits", run_dir="runs/x", server=msgspec.convert(config | server, ServerConfig))


def with_learner(run: ServerRun, **learner: object) -> ServerRun:
    return msgspec.structs.replace(run, learner=learner)


@contextmanager
def node_0(port: int, **server: object) -> Iterator[ServerNodes]:
    nodes = ServerNodes(node(0, port, **server), MODEL)  # type: ignore[arg-type]
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def linked(pool: ThreadPoolExecutor, nodes: ServerNodes, port: int, *ranks: int) -> list[NodeLink]:
    """Let these nodes start an engine with node 0."""
    joining = [pool.submit(join_node_0, node(rank, port), MODEL) for rank in ranks]
    engine_port = nodes.gather()
    links = [link for link in (one.result(TIMEOUT_S) for one in joining) if link is not None]
    assert [link.start.master_port for link in links] == [engine_port] * len(ranks) and nodes.lost() is None
    return links


def test_all_nodes_start_each_engine_together_and_learn_how_it_ends(pool: ThreadPoolExecutor) -> None:
    port = free_port()
    with node_0(port) as nodes:
        # A process that is no node of a server holds nothing up.
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            first, second = linked(pool, nodes, port, 1, 2)
        nodes.release()
        assert not first.server_has_ended and not second.server_has_ended
        first.close(), second.close()

        first, second = linked(pool, nodes, port, 2, 1)
        first.close()  # node 2 has lost a worker
        until(lambda: nodes.lost() is not None)
        assert "node 2 of this server has ended its part of the engine" in (nodes.lost() or "")
        nodes.release()
        assert not second.server_has_ended
        second.close()

        links = linked(pool, nodes, port, 1, 2)
    for link in links:
        assert link.server_has_ended
        link.close()


def test_a_start_is_stopped_when_a_node_is_lost(pool: ThreadPoolExecutor) -> None:
    port, is_stopped = free_port(), threading.Event()
    with node_0(port) as nodes:
        first, second = linked(pool, nodes, port, 1, 2)
        with nodes.watched(is_stopped.set):
            second.close()
            assert is_stopped.wait(TIMEOUT_S)
        first.close()


def test_a_node_that_does_not_fit_is_refused_with_the_key(pool: ThreadPoolExecutor) -> None:
    port = free_port()
    with node_0(port) as nodes:
        gathering = pool.submit(nodes.gather)
        for server, problem in {
            (
                "max_model_len",
                64,
            ): r"server.max_model_len is 64 on node 1 and None on node 0; start all nodes with the same",
            ("node_rank", 3): r"server.node_rank = 3 is taken, or not below server.nnodes",
        }.items():
            with pytest.raises(ConfigError, match=rf"node 0 at 127.0.0.1:{port} refused this node: {problem}"):
                join_node_0(node(1, port, **dict([server])), MODEL)  # type: ignore[arg-type]
        other = msgspec.structs.replace(MODEL, vocab_size=17)
        with pytest.raises(ConfigError, match=r"model.vocab_size is 17 on node 1 and 16 on node 0"):
            join_node_0(node(1, port), other)
        # The learner's section decides about adapters and experts, and a node may have another file.
        with pytest.raises(ConfigError, match=r"learner.lora.rank is 16 on node 1 and 0 on node 0"):
            join_node_0(with_learner(node(1, port), lora={"rank": 16}), MODEL)
        with pytest.raises(ConfigError, match=r"learner.routing_replay is True on node 1 and False on node 0"):
            join_node_0(with_learner(node(1, port), routing_replay=True), MODEL)
        # What may differ: its cores.
        links = [pool.submit(join_node_0, node(rank, port, cpu_cores=[rank]), MODEL) for rank in (1, 2)]
        assert gathering.result(TIMEOUT_S) > 0
        for link in links:
            found = link.result(TIMEOUT_S)
            assert found is not None
            found.close()


def test_whoever_waits_in_vain_says_for_whom_and_how_long(pool: ThreadPoolExecutor) -> None:
    port = free_port()
    with pytest.raises(
        ConfigError, match=rf"node 0 at 127.0.0.1:{port} did not start an engine within 1 s \(server.start_"
    ):
        join_node_0(node(2, port, timeout_s=1), MODEL)
    with node_0(port, timeout_s=1) as nodes:
        joining = pool.submit(join_node_0, node(1, port, timeout_s=1), MODEL)
        with pytest.raises(
            ConfigError, match=r"server.nnodes = 3: node . did not connect .* within 1 s .*--server.node-rank"
        ):
            nodes.gather()
        with pytest.raises(ConfigError, match="did not start an engine within 1 s"):
            joining.result(TIMEOUT_S)
        with pytest.raises(ConfigError, match=r"server.master_addr = '127.0.0.1': node 0 cannot listen at .* in use"):
            ServerNodes(node(0, port), MODEL)
    with node_0(port) as nodes:
        gathering = pool.submit(nodes.gather)
        nodes.end()
        with pytest.raises(EngineDead, match="the server ended before all of its nodes had connected"):
            gathering.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("master_addr", "problem"),
    [  # these stand for a name that is loopback on node 0 only, and for any address beyond loopback
        ("127.1", r"'127.1' is 127.0.0.1 on node 0 \(see /etc/hosts\), .* set it to the IP address of node 0"),
        (
            "00.0.0.0",
            r"server.nnodes = 3 with endpoint = 'tcp://127.0.0.1:5757': .* set `endpoint` to the address of node",
        ),
    ],
)
def test_node_0_does_not_wait_at_an_address_that_only_itself_reaches(master_addr: str, problem: str) -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=problem):
        ServerNodes(node(0, port, master_addr=master_addr), MODEL)
    socket.create_server((master_addr, port)).close()  # it no longer listens


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"node_rank": 1}, r"server.node_rank = 1 is not below server.nnodes = 1"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2},
            r"server.nnodes = 2 with server.master_addr = '127.0.0.1'.* set it to",
        ),
        ({"nnodes": 2, "master_addr": "0.0.0.0"}, r"server.master_addr = '0.0.0.0', which other nodes cannot reach"),
        ({"nnodes": 2, "master_addr": "node-0:29600"}, r"'node-0:29600' is neither a host name nor an IP address"),
        (
            {"nnodes": 2, "tensor_parallel_size": 3, "master_addr": "a"},
            r"tensor_parallel_size = 3 is not a multiple of",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2, "master_addr": "a"},
            "Start several servers",
        ),
    ],
)
def test_nodes_that_contradict_the_rest_of_the_config_are_refused(
    tmp_path: Path, server: dict[str, object], problem: str
) -> None:
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in server.items())
    (tmp_path / "run.toml").write_text(f'model = "tiny:digits"\nrun_dir = "x"\n[server]\n{keys}\n')
    with pytest.raises(ConfigError, match=problem):
        load_config(ServerRun, [str(tmp_path / "run.toml")], "slipstream serve")
