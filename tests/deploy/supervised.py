"""Fake parts under a Supervisor, in a process that can receive signals: `python -m tests.deploy.supervised
SPEC.json`."""

import sys
from functools import partial
from pathlib import Path

import msgspec

import deploy.supervisor
from deploy.placement import DeployConfig
from deploy.supervisor import SupervisedProcess, Supervisor

PART = Path(__file__).parent / "part.py"
RANKS_END_S = 3.0


class Spec(msgspec.Struct):
    """Behaviors of each part (part.py), one per start."""

    directory: str
    servers: dict[str, list[str]]
    ranks: dict[str, list[str]]
    deploy: DeployConfig = DeployConfig()


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    deploy.supervisor.RANKS_END_S = RANKS_END_S

    def start(name: str, behaviors: list[str], verb: str = "started") -> SupervisedProcess:
        command = [sys.executable, "-S", str(PART), name, spec.directory, verb, *behaviors]
        return SupervisedProcess(name, command, {}, Path(spec.directory, f"{name}.log"))

    def start_learner(*, again: bool) -> list[SupervisedProcess]:
        verb = "resumed" if again else "started"
        return [start(name, behaviors, verb) for name, behaviors in spec.ranks.items()]

    servers = {name: partial(start, name, behaviors) for name, behaviors in spec.servers.items()}
    sys.exit(Supervisor(servers, start_learner, spec.deploy).run())


if __name__ == "__main__":
    main()
