"""Name of the network interface that has an address, in the form NCCL expects.

Linux only. For IPv4, only the first address of each interface is found.
"""

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
IFREQ = struct.Struct("16s4x4s232x")
"""Linux's struct ifreq, with an IPv4 address after family and port."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the interface, or None if none is known to have the address."""
    wanted = ipaddress.ip_address(address).packed
    if len(wanted) == 16:
        lines = IPV6_ADDRESSES.read_text().splitlines() if IPV6_ADDRESSES.exists() else []
        return next((line.split()[-1] for line in lines if bytes.fromhex(line.split()[0]) == wanted), None)
    return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == wanted), None)


def _ipv4_of(name: str) -> bytes | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, IFREQ.pack(name.encode(), bytes(4)))
        except OSError:  # the interface has no IPv4 address
            return None
    address: bytes = IFREQ.unpack(answer)[1]
    return address
