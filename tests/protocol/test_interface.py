"""The network interface of an address, compared with psutil, which queries the kernel differently."""

import socket

import psutil

from protocol.transports.interface import interface_of


def test_an_address_of_this_machine_has_an_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for address in [address.address for address in addresses if address.family == family][:1]:
                assert interface_of(address.partition("%")[0]) == name


def test_a_foreign_address_has_no_interface() -> None:
    assert interface_of("192.0.2.1") is interface_of("2001:db8::1") is None
