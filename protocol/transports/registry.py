"""Registry of the transports: the values of `learner.weight_sync.transport` besides "auto".

Invariant: importing it does not load torch, because the config reads it.
"""

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """Facts about a transport that are known before its file is imported."""

    path: str
    """Subclass of `Collective` (collective.py) as "module:class"."""
    is_automatic: bool = False
    """Whether "auto" may choose it."""
    uses_one_port: bool = False
    """Whether one open port, the learner's, is enough."""


TRANSPORTS = {
    "ipc": Entry("protocol.transports.cuda_ipc:IpcCollective", is_automatic=True),
    "nccl": Entry("protocol.transports.nccl:NcclCollective", is_automatic=True),
    "tcp": Entry("protocol.transports.tcp:TcpCollective", is_automatic=True, uses_one_port=True),
}
"""Transports by name. "auto" chooses the first that is possible."""
