"""Servers and learner on a Ray cluster: `slipstream ray run.toml [switches] [--key value ...]`.

    switches: --resume, --dry-run, --quiet, --json-logs
    [deploy.ray] ─▶ a bundle for each server and rank ─▶ an agent in each ─▶ Supervisor, as for colocate

    driver (this process) ◀─ lines, exit codes ─ agents on the nodes (ray_cluster.py) ─▶ servers and ranks

Output, signals, exit codes and restarts are those of colocate. Ray moves the bundles of a lost node to others.
Invariant: servers and ranks end with the driver.
"""

import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from deploy.arguments import read_arguments
from deploy.ray_placement import (
    BundleLocation,
    Commands,
    RankRendezvous,
    RemoteCommand,
    ServerList,
    bundles,
    check_launch,
    keys_of,
    names,
)  # fmt: skip
from deploy.supervisor import Process, Supervisor
from protocol import console

PROGRAM = "slipstream ray"
PURPOSE = """Run servers and learner on a Ray cluster until the learner is done, placed by [deploy.ray].

Keys of [server] and [learner] are flags too: `slipstream serve --help` and `slipstream train --help` list them.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all processes until the learner is done, then exit with its code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console.pop_switches(arguments)  # they stay in the arguments, because all processes get them
    console.start_logging()
    with console.exit_on_user_error(lambda: "ray"):
        try:
            sys.exit(run_on_ray(arguments))
        except KeyboardInterrupt:  # before any process was started
            sys.exit(130)


def run_on_ray(arguments: list[str], server_module: str = "inference_server") -> int:
    """Run all processes; return the learner's exit code, or 1 if a server exited first.

    Raises:
        ConfigError: The config or a flag is invalid, or there is no cluster.
        DeadlineExceeded: The cluster has no room.
    """
    launch = read_arguments(arguments, PROGRAM, PURPOSE)
    if launch is None:
        return 0
    check_launch(launch)
    from deploy import ray_cluster  # needs Ray

    config = launch.config.ray
    logs = launch.make_logs().absolute()
    commands = Commands(
        launch=launch, servers=ServerList(logs.parent), directory=os.getcwd(), keys=keys_of(launch),
        api_key=os.environ.get("VLLM_API_KEY") or secrets.token_hex(24), server_module=server_module,
    )  # fmt: skip
    address = ray_cluster.connect()
    agents = ray_cluster.start_agents(bundles(config, launch.server_run, address), config.start_timeout_s)
    agents_of_ranks = dict(zip(names("learner", config.ranks), agents, strict=False))
    agents_of_servers = dict(zip(names("server", config.servers), agents[config.ranks :], strict=True))

    def start(name: str, agent: Any, prepare: Any) -> Process:
        return ray_cluster.RemoteProcess(name, agent, prepare, logs / f"{name}.log", config.start_timeout_s)

    def start_learner(*, again: bool) -> list[Process]:
        rendezvous = RankRendezvous(config.ranks, commands.servers)

        def prepare(rank: int, host: BundleLocation) -> RemoteCommand:
            hosts = rendezvous.join(rank, host, config.start_timeout_s)
            return commands.rank(rank, hosts, rendezvous.first_server(config.start_timeout_s), again=again)

        return [
            start(name, agent, partial(prepare, rank)) for rank, (name, agent) in enumerate(agents_of_ranks.items())
        ]

    servers = {
        name: partial(start, name, agent, partial(commands.server, name)) for name, agent in agents_of_servers.items()
    }
    return Supervisor(servers, start_learner, launch.config).run()


if __name__ == "__main__":
    main()
