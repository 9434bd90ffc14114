"""The interface that has an address, against psutil, which asks the kernel in another way."""

import socket

import psutil
import pytest

from protocol.transports.interface import interface_of

ADDRESSES = [
    (address.address.partition("%")[0], name)
    for name, addresses in psutil.net_if_addrs().items()
    for family in (socket.AF_INET, socket.AF_INET6)
    for address in [address for address in addresses if address.family == family][:1]
]


@pytest.mark.parametrize(("address", "name"), ADDRESSES)
def test_an_address_of_this_machine_leads_to_its_interface(address: str, name: str) -> None:
    assert interface_of(address) == name


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_no_interface_leads_to_none(address: str) -> None:
    assert interface_of(address) is None
