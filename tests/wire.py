"""A wire between two network namespaces that can delay, drop and cut: `python -m tests.wire NAMESPACE NAMESPACE`.

    TUN device in one namespace ◀──▶ this process: delays, loses, cuts ◀──▶ TUN device in the other

Needs no netem in the kernel. Reads commands from stdin, one JSON object per line: {"cut": true}, {"delay_s": 0.1,
"loss": 0.01}, {"only_ports": [5757]}, {"translated": ["10.77.0.2", "10.78.0.2"], "translated_port": 29500}. Answers
each command with a line of packet counts, and ends with its stdin.
"""

import asyncio
import ctypes
import fcntl
import json
import os
import random
import socket
import struct
import sys

DEVICE = "slipstream"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # from linux/if_tun.h
CLONE_NEWNET = 0x40000000  # from linux/sched.h
MAX_PACKET_BYTES = 65536


class Wire:
    """Carries packets between two TUN devices; `delay_s` and `loss` hold for each direction."""

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends
        self._random = random.Random(0)
        self.delay_s, self.loss, self.cut = 0.0, 0.0, False
        self.only_ports: list[int] | None = None
        """TCP ports that the firewall lets pass in both directions. None: all."""
        self.translated: tuple[str, str] | None = None
        """Address translation: a host's own address, and the only address that reaches it at `translated_port`."""
        self.translated_port = 0
        self.num_carried = self.num_lost = 0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for source, target in (self._ends, reversed(self._ends)):
            loop.add_reader(source, self._carry, source, target)

    def _carry(self, source: int, target: int) -> None:
        packet = os.read(source, MAX_PACKET_BYTES)
        is_ipv4 = packet[0] >> 4 == 4  # IPv6 looks for routers before the other device is up
        if not is_ipv4 or self.cut or self._is_walled_off(packet) or self._random.random() < self.loss:
            self.num_lost += 1
            return
        self.num_carried += 1
        packet = self._translate(packet)
        asyncio.get_running_loop().call_later(self.delay_s, os.write, target, packet)

    def _is_walled_off(self, packet: bytes) -> bool:
        ports = struct.unpack_from("!HH", packet, 4 * (packet[0] & 0xF))
        return self.only_ports is not None and not set(self.only_ports) & set(ports)

    def _translate(self, packet: bytes) -> bytes:
        if self.translated is None:
            return packet
        own, public = (socket.inet_aton(address) for address in self.translated)
        source_port, target_port = struct.unpack_from("!HH", packet, 4 * (packet[0] & 0xF))
        if packet[12:16] == own and source_port == self.translated_port:
            return readdressed(packet, 12, public)
        if packet[16:20] == public and target_port == self.translated_port:
            return readdressed(packet, 16, own)
        return packet


def readdressed(packet: bytes, offset: int, address: bytes) -> bytes:
    """Replace an address of a TCP packet and update both checksums incrementally (RFC 1624)."""
    changed, tcp = bytearray(packet), 4 * (packet[0] & 0xF)
    difference = sum(struct.unpack("!2H", address)) + sum(
        0xFFFF ^ half for half in struct.unpack_from("!2H", packet, offset)
    )
    changed[offset : offset + 4] = address
    for place in (10, tcp + 16):
        total = (0xFFFF ^ struct.unpack_from("!H", packet, place)[0]) + difference
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        struct.pack_into("!H", changed, place, 0xFFFF ^ total)
    return bytes(changed)


def open_end(namespace: str) -> int:
    """Enter a namespace and create its device. This process stays in the namespace until the next call."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


async def serve(wire: Wire) -> None:
    wire.start()
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    print("ready", flush=True)
    while line := await commands.readline():
        for name, value in json.loads(line).items():
            setattr(wire, name, value)
        print(json.dumps({"carried": wire.num_carried, "lost": wire.num_lost}), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Wire([open_end(namespace) for namespace in sys.argv[1:]])))
